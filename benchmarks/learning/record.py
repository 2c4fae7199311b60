"""Records of learning runs: curves, the condition for passing, and their files between runs of the scripts.

In: greedy held-out accuracies. Out: curves.json, in_process.json and trl.json in reports/learning, a curve a line.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rlplan.spec.parts.algorithm import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "reports" / "learning"
JOBS = {path.stem: path for path in sorted((ROOT / "examples" / "algorithms").glob("*.yaml"))}
EVERY = 5
"""Steps between two measurements."""
TARGET = 0.9
"""Greedy held-out accuracy that every seed has to reach after the job's own number of steps."""
DRIFT = 0.1
"""How far above the start policy a control may end."""
SEEDS = (0, 1, 2)
NUM_HELDOUT = 256
RESOLUTION = 0.01
"""The smallest meaningful difference of two accuracies: the standard error of 98 % on as many prompts is 0.9 points."""
CURVES, IN_PROCESS, BESIDE_TRL = "curves.json", "in_process.json", "trl.json"
LEARNING_RATE_0, SHUFFLED = "learning rate 0", "shuffled rewards"
CONTROLS = {
    LEARNING_RATE_0: ("algorithm.learning_rate=0", "algorithm.value_learning_rate=0"),
    SHUFFLED: ("controls.shuffle_rewards=true",),
}


def find_controls(algorithm: str) -> dict[str, tuple[str, ...]]:
    """The controls that an algorithm has: one that learns from answers has no rewards to shuffle."""
    has_rewards = ALGORITHMS[algorithm].given != "answer"
    return {case: overrides for case, overrides in CONTROLS.items() if has_rewards or case != SHUFFLED}


@dataclass(frozen=True)
class Curve:
    """Greedy held-out accuracy before training and after every so many steps."""

    algorithm: str
    case: str
    every: int
    accuracy: tuple[float, ...]

    @property
    def steps(self) -> list[int]:
        """The steps after which it was measured."""
        return [index * self.every for index in range(len(self.accuracy))]

    @property
    def has_passed(self) -> bool:
        """Whether it is where it must be: at the target, or where it began."""
        if self.case in CONTROLS:
            return self.accuracy[-1] <= self.accuracy[0] + DRIFT
        return self.accuracy[-1] >= TARGET


@dataclass(frozen=True)
class Beside:
    """Curves of the same seeds on both sides. in_process: ours is the algorithm alone, without engines."""

    every: int
    rlplan: tuple[tuple[float, ...], ...]
    trl: tuple[tuple[float, ...], ...]
    in_process: bool = False

    @property
    def points(self) -> list["Point"]:
        """Accuracies of both sides, step by step."""
        columns = zip(zip(*self.rlplan, strict=True), zip(*self.trl, strict=True), strict=True)
        return [Point(index * self.every, *column) for index, column in enumerate(columns)]


@dataclass(frozen=True)
class Point:
    """Accuracies of all seeds after a step."""

    step: int
    rlplan: tuple[float, ...]
    trl: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Difference of the means, rlplan's less TRL's."""
        return fmean(self.rlplan) - fmean(self.trl)

    @property
    def allowed(self) -> float:
        """The larger of the two spreads over seeds, and at least RESOLUTION.

        >>> Point(5, (0.25, 0.5), (0.25, 0.375)).allowed
        0.25
        """
        return max(RESOLUTION, *(max(side) - min(side) for side in (self.rlplan, self.trl)))

    @property
    def agrees(self) -> bool:
        """Whether the means are no further apart than that."""
        return math.isclose(abs(self.difference), self.allowed) or abs(self.difference) < self.allowed


def place(curve: Curve) -> tuple[int, int, str]:
    """Algorithms in the order of the examples, seeds before controls."""
    control = [*CONTROLS].index(curve.case) if curve.case in CONTROLS else -1
    return [*JOBS].index(curve.algorithm), control, curve.case


def add_curve(curve: Curve, file: str) -> None:
    """Keep a curve in a file, instead of an earlier one of the same case."""
    curves_by_key = {(each.algorithm, each.case): each for each in (*read_curves(file), curve)}
    write_curves(sorted(curves_by_key.values(), key=place), file)


def write_curves(curves: Sequence[Curve], file: str) -> None:
    """Keep these curves. A curve is a line, for a diff shows which were run again."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(curve)) for curve in curves)
    (REPORTS / file).write_text(f"[\n{lines}\n]\n", "utf-8")


def write_comparison(beside: Beside) -> None:
    """Keep this comparison."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    points = [
        {"step": p.step, "difference": p.difference, "allowed": p.allowed, "agrees": p.agrees} for p in beside.points
    ]
    (REPORTS / BESIDE_TRL).write_text(json.dumps(asdict(beside) | {"points": points}, indent=1) + "\n", "utf-8")


def read_curves(file: str) -> list[Curve]:
    """The curves of a file; none if there is no file."""
    path = REPORTS / file
    rows = json.loads(path.read_text("utf-8")) if path.exists() else []
    return [Curve(row["algorithm"], row["case"], row["every"], tuple(row["accuracy"])) for row in rows]


def read_comparison() -> Beside | None:
    """The comparison in trl.json."""
    path = REPORTS / BESIDE_TRL
    if not path.exists():
        return None
    record = json.loads(path.read_text("utf-8"))
    ours, theirs = (tuple(tuple(curve) for curve in record[side]) for side in ("rlplan", "trl"))
    return Beside(record["every"], ours, theirs, record["in_process"])
