"""Predictions of points whose source had a part in a fitted constant, with that constant refitted without it.

In: the bundled points; the constants of serving by the pair that is left out (reports/accuracy/serving.json), those of
trainers (trainers.py). Out: left_out.json beside this file: predictions by id, which intervals are made from.
`python -m benchmarks.constants.left_out` takes some minutes; run it after `benchmarks.constants.serving`.

A pair's constants stand in profiles of its GPU in a folder of their own, as anybody may give his (RLPLAN_PROFILES).
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.constants.serving import FILE as SERVING
from benchmarks.constants.trainers import CONSTANTS, set_constant
from rlplan.accuracy.compare import compare
from rlplan.accuracy.files.reading import published_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.settings import find_gpu
from rlplan.spec.hardware.catalogue import FOLDER_VARIABLE, profile_folder

FILE = Path(__file__).with_name("left_out.json")
LATENCIES = ("serving_tpot", "serving_ttft", "throughput_infer")


def read_left_out() -> dict[str, float]:
    """Predictions by id."""
    predictions: dict[str, float] = json.loads(FILE.read_text())
    return predictions


def _predictions(points: Iterable[MeasuredPoint]) -> dict[str, float]:
    return {
        compared.id: float(f"{compared.predicted:.6g}")
        for compared in compare(points).points
        if isinstance(compared.predicted, int | float)
    }


def _predict_pairs() -> Iterator[dict[str, float]]:
    pairs: list[dict[str, Any]] = json.loads(SERVING.read_text())["pairs"]
    for pair in pairs:
        points = [point for point in published_points() if point.kind in LATENCIES and _belongs_to_pair(point, pair)]
        with _profile(pair["gpu"], pair["constants_left_out"]):
            yield _predictions(points)


def _belongs_to_pair(point: MeasuredPoint, pair: dict[str, Any]) -> bool:
    gpu, words = find_gpu(point), str(point.settings.get("precision") or "bf16").lower()
    names = (point.model or "").rpartition("/")[2] == pair["model"] and gpu is not None and gpu.name == pair["gpu"]
    return names and words in pair["format"]


@contextmanager
def _profile(gpu: str, constants: dict[str, float]) -> Iterator[None]:
    """A GPU with other constants of serving."""
    yaml = YAML()
    profile = yaml.load((profile_folder() / "gpu" / f"{gpu}.yaml").read_text())
    for name, value in constants.items():
        profile["serving"][name]["value"] = min(1.0, value) if name in ("memory", "matmul") else value
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / f"{gpu}.yaml").open("w") as file:
            yaml.dump(profile, file)
        os.environ[FOLDER_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER_VARIABLE]


def _predict_trainers() -> Iterator[dict[str, float]]:
    """Points that a value was fitted to, by the values that were fitted to others."""
    for constant in CONSTANTS:
        concerned = [point for point in published_points() if constant.concerns(point)]
        for fitted in constant.fits:
            seen = [point for point in concerned if constant.seen(point, fitted)]
            others = [name for name in constant.fits if name not in (fitted, "now")]
            if seen and others:
                with set_constant(constant, constant.fits[others[0]]):
                    yield _predictions(seen)


def main() -> int:
    """Write the file."""
    kept_predictions: dict[str, float] = {}
    for predictions in (*_predict_pairs(), *_predict_trainers()):
        print(len(predictions), flush=True)
        kept_predictions |= predictions
    FILE.write_text(json.dumps(kept_predictions, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
