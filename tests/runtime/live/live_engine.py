"""A live RolloutEngine on this CPU, put through what a run asks of it.

`main` does all of it and says what came out as JSON; the tests read that. One process, one engine.
"""

import copy
import dataclasses
import gc
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rlplan.emit.ray import COMMON_ENVIRONMENT
from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.factories import EXAMPLES, make_job
from tests.runtime.live.live_forks import SERVING, VLLM_ENVIRONMENT, answer, read_answers, start
from tests.waiting import Patience

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 240
ENVIRONMENT = {**VLLM_ENVIRONMENT, **COMMON_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
SORTER = EXAMPLES / "models" / "sorter"


def ask(scenario: str, num_ranks: int = 1, *more: str) -> list[dict[str, Any]]:
    """The answers of a scenario's ranks, each run in its own process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target, threads = "tests.runtime.live.live_engine:main", {"OMP_NUM_THREADS": str(count_threads(num_ranks))}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{rank}.json" for rank in range(num_ranks)]
        ranks = [
            start(
                *(target, str(path), scenario, rank, num_ranks, port, *more),
                log=path.with_suffix(".log"),
                environment=threads,
                libraries=SERVING,
                is_alone=scenario != "alone",  # the others measure their memory
            )
            for rank, path in enumerate(paths)
        ]
        try:
            return read_answers(ranks, paths, DEADLINE_S)
        finally:
            for process in ranks:
                process.close()


def count_threads(num_ranks: int) -> int:
    """Threads of one rank: more in all than there are cores wait for each other in every loop."""
    return max(1, 2 // num_ranks)


class Live:
    """An engine with a small policy, and the same policy on plain transformers to compare with."""

    def __init__(self, rank: int = 0, address: tuple[str, int] | None = None, **overrides: Any) -> None:
        from transformers import AutoModelForCausalLM

        from rlplan.emit.vllm import engine_arguments
        from rlplan.runtime.workers.engine.rollout_engine import RolloutEngine

        self.job = make_job(**{"workload.ignores_eos": True, "workload.max_response_len": 200} | overrides)
        threads = count_threads(self.job.rollout.tp)
        self.engine = RolloutEngine(f"rollout_engine/{rank}", self.job, engine_arguments(self.job), threads)
        self.engine.invoke("import_libraries")
        if address and rank == 0:
            self.engine.invoke("open_rendezvous", *address)
        dtype = self.job.rollout.dtype.value
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).eval()
        self.start(rank, address)

    @property
    def folder(self) -> str:
        return str(SORTER)

    def start(self, rank: int = 0, address: tuple[str, int] | None = None) -> None:
        self.engine.invoke("start", self.folder, rank, address)

    def update(self, version: int) -> None:
        """Hand the comparison model's weights over, as a run does it."""
        from rlplan.runtime.models.adapters import AdapterWeights
        from rlplan.runtime.weight_sync.channel import Update
        from rlplan.runtime.weight_sync.source import WeightSource
        from rlplan.vocabulary import SyncContent

        sender = self._channel()
        update = Update(serial=1, version=version, is_full=True, timeout_s=60.0)
        is_adapter = self.job.placement.sync_content is SyncContent.ADAPTER
        source = AdapterWeights(self.model) if is_adapter else WeightSource(self.model)
        sending = threading.Thread(target=sender.send, args=(source, update))
        sending.start()
        self.engine.invoke("receive_weights", update)
        sending.join()
        sender.close()

    def break_off(self, question: Any) -> list[str]:
        """Begin an update that nobody sends; what the engine says of it, and of a question afterwards."""
        from rlplan.errors import RunError
        from rlplan.runtime.weight_sync.channel import Update

        sender, errors = self._channel(), list[str]()
        update = Update(serial=1, version=8, is_full=True, timeout_s=0.5)
        for method, argument in (("receive_weights", update), ("generate", [question])):
            try:
                self.engine.invoke(method, argument)
            except RunError as error:
                errors.append(str(error))
        sender.close()
        return errors

    def _channel(self) -> Any:
        """The trainer's end of a channel into the engine."""
        import torch

        from rlplan.memory.weight_sync.packets import plan_policy_packets
        from rlplan.runtime.weight_sync.channel import Endpoint
        from rlplan.runtime.weight_sync.sender import PolicySender

        dtype = getattr(torch, self.job.rollout.dtype.value)
        sender = PolicySender(plan_policy_packets(self.job, self.job.load_model()), dtype)
        endpoint = sender.offer(Endpoint(self.job.sync_transport, num_readers=1))
        opening = threading.Thread(target=sender.connect, args=(endpoint,))
        opening.start()
        self.engine.invoke("open_channel", endpoint, 0)
        opening.join()
        return sender

    def perturb(self) -> None:
        """Change every weight of the comparison model a little."""
        import torch

        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)

    def difference(self, prompt: tuple[int, ...], completion: Any, temperature: float = 1.0) -> list[float]:
        """|log-prob of the engine - of the comparison model|, token by token."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *completion.tokens]])).logits[0].float()
        logprobs = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        own = logprobs.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        return [abs(a - b) for a, b in zip(own.tolist(), completion.logprobs, strict=True)]


def request(name: str, num_samples: int, max_tokens: int, seed: int = 0) -> Any:
    """A request with a prompt that depends on its name."""
    from rlplan.runtime.rollout.experience import RolloutRequest

    prompt = tuple(5 + (ord(c) + i) % 20 for i, c in enumerate(name * 4))[:8]
    return RolloutRequest(name, prompt, num_samples, 1.0, seed, max_tokens)


def generation() -> dict[str, Any]:
    """Everything that one engine on one rank is asked for."""
    live = Live()
    engine = live.engine
    asked = [request("a", 3, 20), request("b", 2, 7)]
    first, again = engine.invoke("generate", asked), engine.invoke("generate", asked)
    answer: dict[str, Any] = {
        "ids": [finished.id for finished in first],
        "lengths": [[len(c.tokens) for c in finished.completions] for finished in first],
        "reasons": sorted({c.finish_reason for finished in first for c in finished.completions}),
        "repeats": first == again,
        "differ": len({c.tokens for c in first[0].completions}),
        "difference": max(max(live.difference(asked[i].prompt, c)) for i, f in enumerate(first) for c in f.completions),
    }
    answer |= _updates_in_flight(live) | {"broken_off": live.break_off(asked[0])}
    live.update(8)
    (sent_again,) = engine.invoke("generate", asked[:1])
    answer["mended_difference"] = max(max(live.difference(asked[0].prompt, c)) for c in sent_again.completions)
    answer |= _stopped_and_started(live)
    engine.invoke("stop")
    return answer


def _stopped_and_started(live: Live) -> dict[str, Any]:
    """Memory of an engine before and after it is destroyed, and whether it comes back the same."""
    from rlplan.runtime.measure.memory_meter import resident_bytes

    engine, asked = live.engine, [request("a", 2, 20)]
    held_bytes, before = sum(engine.components().values()), resident_bytes()
    engine.invoke("stop")
    freed, frozen = before - resident_bytes(), gc.get_freeze_count()
    engine.invoke("start", str(SORTER), 0, None, 9)
    once = engine.invoke("generate", asked)
    return {
        "held": held_bytes,
        "freed": freed,
        "frozen": frozen,
        "restarted_version": [s.version for s in once[0].completions[0].spans],
        "restarted_difference": _against_fresh(live, asked, once),
    }


def _against_fresh(live: Live, asked: list[Any], finished: list[Any]) -> float:
    """The largest difference to the model as it is on disk."""
    from transformers import AutoModelForCausalLM

    live.model = AutoModelForCausalLM.from_pretrained(SORTER, dtype=live.job.rollout.dtype.value).eval()
    return max(
        max(live.difference(request.prompt, c))
        for request, f in zip(asked, finished, strict=True)
        for c in f.completions
    )


def _updates_in_flight(live: Live) -> dict[str, Any]:
    """Requests that arrive one after the other, and an update while they run."""
    engine = live.engine
    early, late = request("early", 2, 190), request("late", 2, 60)
    open_requests = _paused_in_the_middle(live, early)
    engine.invoke("submit", [late])
    nothing = engine.invoke("collect", 0.2)
    before = copy.deepcopy(live.model)
    live.perturb()
    live.update(7)
    engine.invoke("resume")
    finished = {f.id: f for f in engine.invoke("collect", scale_seconds(60.0), 2)}
    spans = [[(s.version, s.start, s.end) for s in c.spans] for c in finished["early"].completions]
    by_version: dict[int, list[float]] = {0: [], 7: []}
    after = live.model
    for c in finished["early"].completions:
        for version, model in ((0, before), (7, after)):
            live.model = model
            errors = live.difference(early.prompt, c)
            for s in c.spans:
                if s.version == version:
                    by_version[version] += errors[s.start : s.end]
    live.model = after
    return {
        "open": open_requests,
        "while_paused": len(nothing),
        "spans": spans,
        "late_spans": [[(s.version, s.start, s.end) for s in c.spans] for c in finished["late"].completions],
        "late_difference": max(max(live.difference(late.prompt, c)) for c in finished["late"].completions),
        "old_difference": max(by_version[0]),
        "new_difference": max(by_version[7]),
    }


def _paused_in_the_middle(live: Live, request: Any) -> int:
    """Submit a request and pause while it is open: how many are. Again where this process slept until it was done."""
    engine, patience = live.engine, Patience(60)
    while patience.left_s() > 0:
        steps = engine.num_steps
        engine.invoke("submit", [request])
        while engine.num_steps <= steps + 2 and patience.left_s() > 0:
            time.sleep(0.002)
        num_open: int = engine.invoke("pause")
        if num_open and not engine.invoke("collect", 0.0):
            return num_open
        engine.invoke("resume")
        engine.invoke("collect", scale_seconds(60.0))
    raise AssertionError("no request was open when the engine was paused")


def ranks(rank: int, num_ranks: int, port: int, dtype: str = "float32") -> dict[str, Any]:
    """An engine of several ranks: rank 0 is asked, requests arrive while it works; and once more after a stop."""
    from rlplan.emit.vllm import engine_arguments
    from rlplan.memory.roles.cpu_engine import EngineForecast

    address = ("127.0.0.1", port)
    live = Live(rank, address, **{"rollout.tp": num_ranks, "rollout.dtype": dtype, "training.dtype": dtype})
    engine, asked = live.engine, [request("a", 3, 20), request("b", 2, 7)]
    assert engine_arguments(live.job)["tensor_parallel_size"] == num_ranks
    answer: dict[str, Any] = {"components": {kind: size for (_, kind), size in engine.components().items()}}
    finished = engine.invoke("generate", asked)
    profile = live.job.load_profile()
    forecast = EngineForecast(live.job, live.job.load_model(), profile)
    answer["forecast"] = {
        "loaded": forecast.predict_loaded(_start_action())["weights"],
        **{str(kind): size for kind, size in forecast.predict_resident(_start_action(), "start").items()},
    }
    answer["loaded"] = engine.packing.loaded_bytes
    late = [request("late", 2, 40)]
    if rank == 0:
        engine.invoke("submit", [request("early", 2, 90)])
        time.sleep(0.1)
        engine.invoke("submit", late)
        got = {f.id: f for f in engine.invoke("collect", scale_seconds(60.0), 2)}
        answer["difference"] = _against_fresh(live, asked + late, [*finished, got["late"]])
        answer["lengths"] = [[len(c.tokens) for c in f.completions] for f in finished]
    else:
        answer["nothing"] = finished
        assert {f.id for f in engine.invoke("collect", scale_seconds(60.0), 2)} == {"early", "late"}
    answer["shared_names"] = [path.name for path in Path("/dev/shm").glob(f"{port}-*")]
    engine.invoke("stop")
    return answer


def _start_action() -> Any:
    from tests.factories import make_plan

    return next(action for action in make_plan().schedule.start if action.id == "start_engine")


def limits() -> dict[str, Any]:
    """An engine that stops at a text and at a token, and is given more prompts than a batch holds."""
    overrides = {"workload.max_prompt_len": 56, "rollout.max_num_seqs": 16, "rollout.max_num_batched_tokens": 270}
    live = Live(**overrides, **{"rollout.stop": ["</answer>", 14]})
    asked = [
        dataclasses.replace(request(str(index), 3, 60), prompt=(5, *(6 + (index + i) % 9 for i in range(49))))
        for index in range(5)
    ]
    finished = live.engine.invoke("generate", asked)
    live.engine.invoke("reset_prefix_cache")  # from cached prefixes the last bits come out otherwise
    again = live.engine.invoke("generate", asked)
    completions = [completion for answered in finished for completion in answered.completions]
    live.engine.invoke("stop")
    return {
        "num_prompt_tokens": sum(len(question.prompt) * question.num_samples for question in asked),
        "tokens": [completion.tokens for completion in completions],
        "logprobs": [len(completion.logprobs) for completion in completions],
        "reasons": [completion.finish_reason for completion in completions],
        "repeats": finished == again,
        "difference": _against_fresh(live, asked, finished),
    }


def speculative_decoding() -> dict[str, Any]:
    """An engine with n-gram speculative decoding, on prompts that repeat themselves."""
    live = Live(**{"rollout.speculative_tokens": 3})
    lengths, differences, num_accepted = [], [], 0
    for temperature in (0.7, 1.0, 1.3):
        asked = dataclasses.replace(request("a", 3, 60), prompt=(5, 6, 7, 5, 6, 7, 5, 6), temperature=temperature)
        steps = live.engine.num_steps
        (finished,) = live.engine.invoke("generate", [asked])
        num_accepted += 60 - (live.engine.num_steps - steps)
        lengths += [len(c.tokens) for c in finished.completions]
        differences += [max(live.difference(asked.prompt, c, temperature)) for c in finished.completions]
    updates = _updates_in_flight(live)
    live.engine.invoke("stop")
    return {"lengths": lengths, "differences": differences, "num_accepted": num_accepted} | {
        name: updates[name] for name in ("old_difference", "new_difference")
    }


def alone(*_: int) -> dict[str, Any]:
    """The scenarios of engines on one rank, one engine after the other in one process."""
    from tests.runtime.live.live_adapters import versions
    from tests.runtime.live.live_base import shared_base

    answers = {"generation": generation(), "limits": limits(), "shared_base": shared_base(), "versions": versions()}
    return answers | {"speculative_decoding": speculative_decoding()}


def memory(*arguments: Any) -> dict[str, Any]:
    """Memory of a larger base, shared and not."""
    from tests.runtime.live.live_base import memory_of_base

    return memory_of_base(*arguments[3:])


def versions_on_ranks(*arguments: Any) -> dict[str, Any]:
    """Several versions of an adapter on the ranks of one engine."""
    from tests.runtime.live import live_adapters

    return live_adapters.versions_on_ranks(*arguments)


SCENARIOS: dict[str, Any] = {
    "alone": alone,
    "ranks": ranks,
    "base memory": memory,
    "versions on ranks": versions_on_ranks,
}


def main(path: str, scenario: str, *arguments: Any) -> None:
    """One rank. path: of what it says."""
    answer(Path(path), SCENARIOS[scenario](*arguments))
