"""A live engine whose weights are the frozen base of a trainer's module, both in one process here.

In: a model's folder. Out: whether they agree, and what the kernel says that both take, once and twice.
"""

import gc
from pathlib import Path
from typing import Any

from tests.runtime.live.live_engine import Live, _start_action, request

SHARES = {"training.lora": {"rank": 8}, "placement.sync_content": "adapter", "rollout.shares_base": True}


def draw_adapters(model: Any, seed: int) -> None:
    """Give a module's adapters values of their own, with which they change what it computes."""
    import torch

    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


class SharedLive(Live):
    """The comparison model is the trainer's: its frozen weights are views of the memory that the engine opens."""

    base: Any = None

    @property
    def folder(self) -> str:
        return str(self.job.policy.path)

    def start(self, rank: int = 0, address: tuple[str, int] | None = None) -> None:
        import torch

        from rlplan.runtime.models.adapters import add_adapters
        from rlplan.runtime.weight_sync.shared_base import HeldBase

        if self.base is None:
            add_adapters(self.model, self.job)
            self.base = HeldBase(self.job.load_model(), self.model.dtype, torch.device("cpu"))
            self.base.adopt_module(self.model)
        handle = self.base.handle() if self.job.rollout.shares_base else None
        self.engine.invoke("start", self.folder, rank, address, 0, handle)

    def trained(self, version: int) -> list[float]:
        """Differences of log-probs with adapters of their own."""
        draw_adapters(self.model, version)
        self.update(version)
        asked = request("a", 2, 30)
        finished = self.engine.invoke("generate", [asked])[0]
        return [difference for c in finished.completions for difference in self.difference(asked.prompt, c)]


def shared_base() -> dict[str, Any]:
    """An engine without weights: before any adapter and with two, and once more after it was stopped."""
    from rlplan.memory.roles.cpu_engine import EngineForecast

    live = SharedLive(**SHARES)
    engine, asked = live.engine, request("a", 3, 20)
    finished = engine.invoke("generate", [asked])[0]
    before = [difference for c in finished.completions for difference in live.difference(asked.prompt, c)]
    forecast = EngineForecast(live.job, live.job.load_model(), live.job.load_profile())
    answer = {
        "before": max(before),
        "trained": [max(live.trained(version)) for version in (1, 2)],
        "held": {kind: size for (_, kind), size in engine.components().items()},
        "forecast": {str(kind): size for kind, size in forecast.predict_resident(_start_action(), "steady").items()},
        "is_the_trainer_s": all(
            engine.base.holds(parameter.data) for parameter in engine._vllm_worker.model_runner.model.parameters()
        ),
    }
    live.start()
    answer["again"] = max(live.trained(3))
    engine.invoke("stop")
    answer["refused"] = _other_numbers(live)
    return answer


def _other_numbers(live: SharedLive) -> str:
    """The engine's error if its loader makes another parameter of the trainer's weights than the base has."""
    from rlplan.errors import RunError
    from rlplan.runtime.weight_sync.shared_base import OpenedBase

    weights = OpenedBase.weights

    def exchange_weights(base: OpenedBase) -> Any:
        for name, tensor, part_of in weights(base):
            yield name, tensor.flip(0) if "k_proj" in name else tensor, part_of

    OpenedBase.weights = exchange_weights  # type: ignore[method-assign]
    try:
        live.start()
    except RunError as error:
        return str(error)
    finally:
        OpenedBase.weights = weights  # type: ignore[method-assign]
    return ""


def memory_of_base(folder: str, dtype: str) -> dict[str, Any]:
    """This process's memory by the kernel beside a trainer's base: an engine with weights of its own, and
    without. Pages that are mapped twice count once.

    folder: of a model with weights.
    """
    from rlplan.memory.serving.generation import packed_weight_bytes, unpacked_remainder_bytes

    job = {"policy.path": folder, "training.dtype": dtype, "rollout.dtype": dtype}
    live, taken = SharedLive(**SHARES | job | {"rollout.shares_base": False}), []
    asked, handle = request("a", 3, 20), live.base.handle()
    for base in (
        handle,
        None,
        handle,
    ):  # kernels that either compiles stay, so that the last two differ in weights alone
        live.engine.invoke("start", folder, 0, None, 0, base)
        live.engine.invoke("generate", [asked])
        taken.append(_measure_taken())
    model, size = live.job.load_model(), live.job.rollout.dtype.num_bytes
    packing = live.job.load_profile().weight_packing
    return {
        "taken": taken,
        "own": unpacked_remainder_bytes(model, size) + packed_weight_bytes(model, size, packing),
    }


def _measure_taken() -> tuple[int, int]:
    """Bytes of this process by the kernel (Pss) and by our own account."""
    from rlplan.runtime.measure.memory_meter import give_memory_back, resident_bytes

    gc.collect()
    give_memory_back()
    lines = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    (proportional,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")]
    return proportional, resident_bytes()
