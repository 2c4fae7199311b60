"""Live engines whose base is a checkpoint in 4 bits, each held to the model that its bits stand for.

In: the methods of four_bits.py. Out: how far apart log-probs are, and what memory the engine and its forecast say.
"""

import tempfile
from pathlib import Path
from typing import Any

from rlplan.emit.ray import WHOLE_ACTIVATIONS
from tests.factories import EXAMPLES
from tests.runtime.live.four_bits import METHODS, quantize
from tests.runtime.live.live_base import draw_adapters
from tests.runtime.live.live_engine import DEADLINE_S, Live, _start_action, count_threads, request
from tests.runtime.live.live_forks import SERVING, answer, read_answers, start

SORTER = EXAMPLES / "models" / "sorter"
ASKED = {"training.lora": {"rank": 8}, "placement.sync_content": "adapter", "rollout.dtype": "bfloat16"}


class PackedLive(Live):
    """The comparison model has the weights that the engine's bits stand for, in fp32, and the trained adapters."""

    def __init__(self, method: str, folder: Path) -> None:
        from rlplan.runtime.models.adapters import add_adapters

        self.base = folder / method
        meant = quantize(SORTER, self.base, method)
        super().__init__(**ASKED, **{"rollout.base_path": str(self.base)})
        self.model = meant
        add_adapters(self.model, self.job)

    def start(self, rank: int = 0, address: tuple[str, int] | None = None) -> None:
        self.engine.invoke("start", str(self.base), rank, address)

    def differences(self, name: str) -> list[float]:
        asked = request(name, 4, 40)
        (finished,) = self.engine.invoke("generate", [asked])
        return [value for c in finished.completions for value in self.difference(asked.prompt, c)]

    def load_adapter(self, version: int) -> list[float]:
        """Differences with adapters of their own."""
        draw_adapters(self.model, version)
        self.update(version)
        return self.differences("b")


def ask_engines() -> dict[str, Any]:
    """Answers of an engine of each method, all in one process of their own."""
    environment = {"OMP_NUM_THREADS": str(count_threads(1)), **WHOLE_ACTIVATIONS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.json"
        target, log = "tests.runtime.workers.engine.live_four_bits:main", path.with_suffix(".log")
        process = start(target, str(path), log=log, environment=environment, libraries=SERVING)
        try:
            answers: dict[str, Any] = read_answers([process], [path], DEADLINE_S)[0]
        finally:
            process.close()
    return answers


def main(path: str) -> None:
    """The process. path: of what it says."""
    with tempfile.TemporaryDirectory() as folder:
        answer(Path(path), {method: _engine(method, Path(folder)) for method in METHODS})


def _engine(method: str, folder: Path) -> dict[str, Any]:
    from rlplan.memory.roles.cpu_engine import EngineForecast

    live = PackedLive(method, folder)
    engine, forecast = live.engine, EngineForecast(live.job, live.job.load_model(), live.job.load_profile())
    results = {
        "loaded": (engine.packing.loaded_bytes, forecast.predict_loaded(_start_action())["weights"]),
        "held": {kind: size for (_, kind), size in engine.components().items()},
        "forecast": {str(kind): size for kind, size in forecast.predict_resident(_start_action(), "steady").items()},
        "before": live.differences("a"),
        "trained": [live.load_adapter(version) for version in (1, 2)],
    }
    engine.invoke("stop")
    return results
