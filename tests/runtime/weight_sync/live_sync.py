"""A live trainer and live engines with nothing between them but the handover of weights.

In: a model, the number of trainer ranks. Out: cases of one transport and content
each, which restart only the trainer.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rlplan.emit.execution import ExecutionSpec, execution_spec
from rlplan.emit.vllm import engine_arguments
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rollout.experience import RolloutRequest, TrainSample
from rlplan.runtime.weight_sync.weight_sync_driver import WeightSync
from rlplan.vocabulary import ActionKind
from tests.factories import make_plan
from tests.runtime.live.live_engine import ENVIRONMENT
from tests.runtime.live.live_workers import START_S, LiveWorkerGroup, start_trainers

PROMPT = (5, 6, 7, 8)


def build_spec(num_ranks: int, stage: int, transport: str, content: str, tp: int, **more: Any) -> ExecutionSpec:
    """A job of so many training devices beside the engine's."""
    plan = make_plan(
        **{
            "placement.placement": "disaggregated",
            "placement.transport": transport,
            "placement.sync_content": content,
            "placement.sync_bucket": 1_000_000,
            "hardware.num_devices": num_ranks + tp,
            "training.zero_stage": stage,
            **({"rollout.tp": tp} if tp > 1 else {}),
            "algorithm.learning_rate": 1e-3,
            "algorithm.kl_coef": 0.0,
            "workload.ignores_eos": True,
            "limits.action_timeout_s": scale_seconds(40.0),
            **more,
        }
    )
    return execution_spec(plan)


class Setup:
    """Live processes. `case` makes the trainer of a ZeRO stage and the driver's side of a transport."""

    def __init__(self, folder: Path, model: str, num_ranks: int, **more: Any) -> None:
        """more: overrides of every job."""
        self.model, self.num_ranks, self.more = model, num_ranks, {"policy.path": model, **more}
        self.worker_group, self.port = LiveWorkerGroup(folder), 0
        self.trainers = start_trainers(self.worker_group, self.build_spec(2, "auto", "full", 1))
        self.engines: dict[int, list[str]] = {}
        calls = [self.worker_group.submit(name, "invoke", "import_libraries") for name in self.trainers]
        self.worker_group.gather(calls, START_S)

    def build_spec(self, stage: int, transport: str, content: str, tp: int) -> ExecutionSpec:
        return build_spec(self.num_ranks, stage, transport, content, tp, **self.more)

    def list_engines(self, tp: int) -> list[str]:
        """The ranks of an engine of that size."""
        if tp not in self.engines:
            self.engines[tp] = self._begin_engine(tp)
            self._start_engine(tp)
        return self.engines[tp]

    def _begin_engine(self, tp: int) -> list[str]:
        job = self.build_spec(2, "auto", "full", tp).job
        names = [f"rollout_engine/{tp}{rank}" for rank in range(tp)]
        path, environment = "rlplan.runtime.workers.engine.rollout_engine:RolloutEngine", {"OMP_NUM_THREADS": "1"}
        self.worker_group.begin_alike(names, path, ENVIRONMENT | environment, job, engine_arguments(job), 1)
        return names

    def _start_engine(self, tp: int) -> None:
        names = self.engines[tp]
        self.worker_group.gather(
            [self.worker_group.submit(name, "invoke", "import_libraries") for name in names], START_S
        )
        if tp > 1:
            address = ("127.0.0.1", self.worker_group.call(names[0], "open_rendezvous", "127.0.0.1", 0))
            calls = [
                self.worker_group.submit(name, "invoke", "start", self.model, rank, address)
                for rank, name in enumerate(names)
            ]
        else:
            calls = [self.worker_group.submit(names[0], "invoke", "start", self.model)]
        self.worker_group.gather(calls, START_S)

    def case(self, stage: int, transport: str, content: str, tp: int) -> "Case":
        return Case(self, self.build_spec(stage, transport, content, tp), self.list_engines(tp))


class Case:
    """A trainer of one stage, an engine, and the handover between them."""

    def __init__(self, setup: Setup, spec: ExecutionSpec, engines: list[str]) -> None:
        self.worker_group, self.trainers, self.engines = setup.worker_group, setup.trainers, engines
        self._restart_trainers(setup, spec)
        self.weight_sync = WeightSync(spec, self.worker_group)  # type: ignore[arg-type]
        self.weight_sync.engines, self.weight_sync.channels = engines, [(self.trainers[0], engines)]
        sync = next(action for action in spec.schedule.step if action.kind is ActionKind.SYNC_WEIGHTS)
        trainers = tuple(process for process in sync.processes if process in self.trainers)
        self.action = replace(sync, processes=(*trainers, *engines))
        for engine in engines:
            self.worker_group.call(engine, "__setattr__", "job", spec.job)

    def _restart_trainers(self, setup: Setup, spec: ExecutionSpec) -> None:
        for name in self.trainers:
            if setup.port:
                self.worker_group.call(name, "stop")
            self.worker_group.call(name, "__setattr__", "job", spec.job)
            self.worker_group.call(name, "__setattr__", "config", spec.deepspeed["policy"])
            self.worker_group.call(name, "__setattr__", "sender", None)
        setup.port = setup.port or self.worker_group.call(self.trainers[0], "open_rendezvous", "127.0.0.1", 0)
        calls = [
            self.worker_group.submit(
                name, "invoke", "start", rank, setup.num_ranks, ("127.0.0.1", setup.port), setup.model
            )
            for rank, name in enumerate(self.trainers)
        ]
        self.worker_group.gather(calls, START_S)

    def train(self) -> None:
        """One optimizer step on made-up samples."""
        tokens = tuple(range(3, 13))
        sample = TrainSample(PROMPT, tokens, (-1.0,) * 10, (), (1.0,) * 10)
        for method in (("forward_backward", [[sample]], [[0.05]]), ("optimizer_step",)):
            self.worker_group.gather(
                [self.worker_group.submit(name, "invoke", *method) for name in self.trainers], START_S
            )

    def sync(self) -> None:
        self.weight_sync.sync(self.action)

    def difference(self) -> float:
        """The largest difference in log-prob between engine and trainer, on what the engine samples now."""
        requests = [RolloutRequest(f"v{self.weight_sync.version}", PROMPT, 2, 1.0, 3, 12)]
        calls = [self.worker_group.submit(engine, "invoke", "generate", requests) for engine in self.engines]
        finished = self.worker_group.gather(calls, START_S)[0]
        samples = [TrainSample(PROMPT, c.tokens, c.logprobs, (), (1.0,) * 12) for c in finished[0].completions]
        calls = [
            self.worker_group.submit(n, "invoke", "forward_backward", [samples], [[0.0, 0.0]]) for n in self.trainers
        ]
        return max(float(result["logprob_difference_max"]) for result in self.worker_group.gather(calls, START_S))
