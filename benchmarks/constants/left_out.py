"""Predictions of points whose source had a part in a fitted constant, with that constant refitted without it.

In: the bundled points; fitted constants (trainers.py). Out: left_out.json beside this file: predictions by id,
which intervals are made from. `python -m benchmarks.constants.left_out` takes some minutes. Left out: the kernels
of serving, whose constants come from tables and from steps of B300, not from the points.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.constants.trainers import CONSTANTS, set_constant
from rlplan.accuracy.compare import compare
from rlplan.accuracy.files.reading import published_points
from rlplan.accuracy.points import MeasuredPoint

FILE = Path(__file__).with_name("left_out.json")


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
    for predictions in _predict_trainers():
        print(len(predictions), flush=True)
        kept_predictions |= predictions
    FILE.write_text(json.dumps(kept_predictions, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
