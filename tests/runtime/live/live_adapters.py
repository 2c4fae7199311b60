"""A live engine with several versions of an adapter at once: what begins under one ends under it.

In: nothing. Out: which version each sample says, and its log-probs beside those of every version on plain transformers.
"""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from rlplan.errors import RunError
from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.runtime.live.live_engine import Live, request
from tests.waiting import Patience

AHEAD = {
    "training.lora": {"rank": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "placement.placement": "disaggregated",
    "placement.sync_content": "adapter",
    "placement.max_staleness": 2,
    "workload.max_prompt_len": 56,
    "rollout.max_num_batched_tokens": 270,
}


class Versions:
    """An engine that is handed one version after the other while samples of those before are under way."""

    def __init__(self, rank: int = 0, address: tuple[str, int] | None = None, **more: Any) -> None:
        from rlplan.runtime.models.adapters import add_adapters

        self.live = Live(rank, address, **AHEAD, **more)
        add_adapters(self.live.model, self.live.job)
        self.trained = {n: p for n, p in self.live.model.named_parameters() if "lora_B" in n}
        self.values: dict[int, dict[str, Any]] = {}

    def arrive(self, version: int) -> None:
        """A version with values of its own, drawn the first time."""
        import torch

        if version not in self.values:
            torch.manual_seed(version)
            self.values[version] = {n: 0.1 * torch.randn_like(p) for n, p in self.trained.items()}
        self.compare_version(version)
        self.live.update(version)

    def compare_version(self, version: int) -> None:
        for name, parameter in self.trained.items():
            parameter.data.copy_(self.values[version][name])

    def begin(self, version: int) -> None:
        """Two samples of a prompt that is the same each time, three steps long; then the engine waits."""
        engine, patience = self.live.engine, Patience(60)
        engine.invoke("resume")
        engine.invoke("submit", [make_request(version)])
        steps = engine.num_steps
        while engine.num_steps < steps + 3 and patience.left_s() > 0:
            time.sleep(0.001)
        engine.invoke("pause")

    def differences(self, completion: Any) -> dict[int, float]:
        """The largest difference of a log-prob to each version's."""
        largest = {}
        for version in self.values:
            self.compare_version(version)
            largest[version] = max(self.live.difference(make_request(version).prompt, completion))
        return largest


def make_request(version: int) -> Any:
    """A prompt of several blocks, so that versions could find each other's keys and values."""
    prompt = tuple(6 + i % 9 for i in range(50))
    return dataclasses.replace(request(f"begun under {version}", 2, 200), prompt=prompt)


def versions() -> dict[str, Any]:
    """Samples of three versions at once, a version that finds no slot, and what is left afterwards."""
    from rlplan.memory.roles.cpu_engine import EngineForecast
    from tests.runtime.live.live_engine import _start_action

    both = Versions()
    live, engine = both.live, both.live.engine
    forecast = EngineForecast(live.job, live.job.load_model(), live.job.load_profile())
    started = engine.components()["policy", "sync_staging"]
    num_open, held_versions = [], []
    for version in (1, 2, 3):
        both.arrive(version)
        both.begin(version)
        num_open.append(engine.tracker.num_open)
        held_versions.append(engine.adapters.versions)
    kept = engine.adapters._held[3]
    both.compare_version(2)
    live.update(3)  # as all get it where another engine was restarted, when the trainer has other adapters already
    answer = {
        "num_open": num_open,
        "held": held_versions,
        "keeps": engine.adapters._held[3] is kept,
        "staging": [started, engine.components()["policy", "sync_staging"]],
        "forecast": [
            forecast.predict_resident(action, "start")["sync_staging"] for action in (_start_action(), _generates())
        ],
    }
    engine.invoke("resume")
    finished = {request.id: request for request in engine.invoke("collect", scale_seconds(60.0), 3)}
    ends = {version: finished[make_request(version).id].completions for version in (1, 2, 3)}
    answer |= {
        "spans": {v: [[(s.version, s.start, s.end) for s in c.spans] for c in done] for v, done in ends.items()},
        "differences": {v: [both.differences(c) for c in done] for v, done in ends.items()},
        "left": engine.adapters.versions,
        "files": [path.name for path in Path("/dev/shm").glob(f"rlplan-{os.getpid()}-adapter-*")],
    }
    engine.invoke("pause")
    answer["refused"] = _ask_fourth_version(both)
    return answer


def _ask_fourth_version(both: Versions) -> str:
    """The engine's error for a fourth version beside samples of three: no run asks for that."""
    engine = both.live.engine
    for version in (3, 4, 5):
        both.arrive(version)
        both.begin(version)
    try:
        both.arrive(6)
    except RunError as error:
        return str(error)
    finally:
        engine.invoke("abandon", [make_request(version).id for version in (3, 4, 5)])
        engine.invoke("resume")
        engine.invoke("stop")
    return ""


def versions_on_ranks(rank: int, num_ranks: int, port: int) -> dict[str, Any]:
    """The ranks of an engine that get a version at different moments, and a request in between."""
    from rlplan.memory.roles.cpu_engine import EngineForecast
    from tests.runtime.live.live_engine import _start_action

    both = Versions(rank, ("127.0.0.1", port), **{"rollout.tp": num_ranks})
    engine, job = both.live.engine, both.live.job
    forecast = EngineForecast(job, job.load_model(), job.load_profile())
    answer: dict[str, Any] = {
        "staging": engine.components()["policy", "sync_staging"],
        "forecast": forecast.predict_resident(_start_action(), "start")["sync_staging"],
    }
    both.arrive(1)
    if rank == 0:
        time.sleep(scale_seconds(2.0))  # a run waits for all ranks here
        both.begin(1)
        both.arrive(2)
        engine.invoke("submit", [make_request(0)])
        time.sleep(scale_seconds(2.0))
        engine.invoke("resume")
        engine.invoke("submit", [make_request(2)])
    else:
        time.sleep(scale_seconds(1.0))
        both.arrive(2)
    finished = {request.id: request.completions for request in engine.invoke("collect", scale_seconds(60.0), 3)}
    for name, version in (("before", 1), ("between", 0), ("after", 2)):
        completions = finished[make_request(version).id]
        answer[name] = [[span.version for c in completions for span in c.spans]]
        answer[name] += [both.differences(c) for c in completions] if rank == 0 else []
    answer["left"] = engine.adapters.versions
    engine.invoke("stop")
    return answer


def _generates() -> Any:
    from tests.factories import make_plan

    return next(action for action in make_plan().schedule.step if action.id == "generate")
