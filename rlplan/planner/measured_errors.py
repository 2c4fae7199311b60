"""The interval of a prediction tells how far measurements lie from it. Only sources that no formula was fitted to
count.

In: a kind of quantity and the stratum of a plan. Out: its MeasuredError. Every command that shows a range takes it from
here, so that one job has one interval. Left out: how the factors are computed (benchmarks/constants/intervals.py, which
writes measured_errors.json) and the spread of single ledger rows (memory/machine/spread.py).

A stratum is a kind of quantity, dense or mixture of experts, and the trainer. If it has fewer than LEAST_POINTS, the
interval of all trainers is used, then that of all models. Otherwise the interval is unknown: a factor of 2.
"""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplan.errors import SpecError
from rlplan.memory.machine.spread import PERCENT as SPREADS
from rlplan.spec.base import read_json
from rlplan.vocabulary import MemoryKind, Phase

if TYPE_CHECKING:
    from rlplan.planner.plan import Plan

FILE = "measured_errors.json"
NOMINAL = 0.9
"""Share of measurements that an interval should contain."""
LEAST_POINTS = 15
"""Minimum number of measured points for an interval."""
UNKNOWN_FACTOR = 2.0
"""Factor in both directions if no interval is known."""
STEP, TRAINING, PEAK = "rl_step_time", "throughput_train", "train_peak"
"""Kinds: step seconds with rollouts, step seconds of training alone, peak bytes of a trainer."""
ENGINE_PEAK = "vllm_profile_peak"
"""Kind: bytes of a working engine without its KV cache."""
TRAINER_PHASES = (Phase.TRAIN, Phase.SCORE)
PHASES = {
    Phase.ROLLOUT: "phase_generate",
    Phase.SCORE: "phase_score",
    Phase.TRAIN: "phase_train",
    Phase.SYNC: "weight_sync_time",
}
"""Kinds for the seconds of each phase."""


@dataclass(frozen=True)
class Stratum:
    """The group of measurements that share one interval."""

    is_moe: bool
    """Whether the policy is a mixture of experts."""
    framework: str = ""
    """The framework for RL steps, the trainer backend for training; empty if it makes no difference."""

    @property
    def words(self) -> str:
        """`dense, fsdp2`."""
        return ", ".join(filter(None, ("mixtures of experts" if self.is_moe else "dense models", self.framework)))


@dataclass(frozen=True)
class MeasuredError:
    """Factor around a prediction within which nine of ten measurements lie."""

    kind: str
    of: str
    """The stratum in words; empty if points of all models are pooled."""
    factor: float
    """Ratio of measured and predicted, the larger over the smaller. Throughputs count as the seconds they imply."""
    num_points: int
    num_sources: int
    """Publications; for latency tables, pairs of model and GPU."""
    inside_left_out: float | None = None
    """Share of points inside the interval when it is computed without their source."""

    @property
    def is_known(self) -> bool:
        """Whether enough points of enough sources exist for an interval."""
        return self.inside_left_out is not None

    @property
    def low(self) -> float:
        """Measured over predicted at the low end."""
        return 1 / self.factor

    @property
    def high(self) -> float:
        """Measured over predicted at the high end."""
        return self.factor

    def interval(self, value: float) -> tuple[float, float]:
        """Low and high end around a predicted value."""
        return value / self.factor, value * self.factor

    @property
    def words(self) -> str:
        """The factor and its measurements, in words."""
        if not self.is_known:
            points = f"{self.num_points or 'no'} measured point" + "s" * (self.num_points != 1)
            lacks = f"{LEAST_POINTS} are needed"
            if self.num_points >= LEAST_POINTS:
                lacks = f"almost all from one of {self.num_sources} sources"
            return f"unknown, take a factor of {UNKNOWN_FACTOR:.0f}: {points} of {self.kind}, {lacks}"
        return (
            f"nine of ten measurements of unseen sources lie within a factor of {self.factor:.2f} "
            f"({self.num_points} points from {self.num_sources} sources: {self.kind}{', ' * bool(self.of)}{self.of})"
        )

    def as_json(self) -> dict[str, Any]:
        """JSON for other tools; `factor` is 2 if no interval is known."""
        return {**vars(self), "low": self.low, "high": self.high, "is_known": self.is_known}


@cache
def _read_errors() -> dict[tuple[str, str], MeasuredError]:
    path = Path(str(resources.files("rlplan.planner"))) / FILE
    rows: list[dict[str, Any]] = read_json(path, "the measured errors")["strata"]
    return {(row["kind"], row["of"]): MeasuredError(**row) for row in rows}


def forget_errors() -> None:
    """Drop the cached file content, after the file was rewritten."""
    _read_errors.cache_clear()


def list_errors() -> tuple[MeasuredError, ...]:
    """All strata with an interval, and the kinds with too few points."""
    return tuple(_read_errors().values())


def find_error(kind: str, stratum: Stratum) -> MeasuredError:
    """Find the error of a stratum, or of the nearest wider stratum with enough points."""
    known = _read_errors()
    # from the narrowest stratum to all models pooled
    for of in (stratum.words, Stratum(stratum.is_moe).words, ""):
        if (error := known.get((kind, of))) is not None and error.is_known:
            return error
    pooled = known.get((kind, ""))
    num_points, num_sources = (pooled.num_points, pooled.num_sources) if pooled else (0, 0)
    return MeasuredError(kind, "", UNKNOWN_FACTOR, num_points, num_sources)


def find_stratum(plan: "Plan", kind: str) -> Stratum:
    """Find the stratum of a quantity of a plan.

    The trainer backend decides peaks and training seconds; the framework decides the seconds of steps with rollouts.
    """
    return Stratum(_has_experts(plan), plan.job.backend if kind in (PEAK, TRAINING) else plan.job.release.name)


def _has_experts(plan: "Plan") -> bool:
    try:
        return plan.job.load_model().experts is not None
    except SpecError:  # the plan was made on another machine, and its model is not here
        return False


def find_step_error(plan: "Plan") -> MeasuredError:
    """Find the error of a plan's step seconds."""
    kind = STEP if plan.job.has_rollouts else TRAINING
    return _build_unknown_error(kind) if plan.is_on_host else find_error(kind, find_stratum(plan, kind))


def find_phase_error(plan: "Plan", phase: Phase) -> MeasuredError:
    """Find the error of a phase's seconds; for a job that only trains, the error of its step."""
    if not plan.job.has_rollouts:
        return find_step_error(plan)
    kind = PHASES.get(phase, f"phase_{phase.value}")
    return _build_unknown_error(kind) if plan.is_on_host else find_error(kind, find_stratum(plan, kind))


def find_peak_error(plan: "Plan") -> MeasuredError:
    """Find the error of a plan's peak bytes: a trainer's peak, or that of a working engine."""
    actions = (action for _, part in plan.schedule.parts for action in part)
    action = next(action for action in actions if action.id == plan.binding.action_id)
    kind = PEAK if action.phase in TRAINER_PHASES else ENGINE_PEAK
    return find_error(kind, find_stratum(plan, kind))


def predict_peak_interval(plan: "Plan") -> tuple[int, int]:
    """Range in bytes for the peak of the fullest GPU.

    The KV cache has the size it is given and carries no error. Without a known interval, the factor of 2 applies to
    memory kinds with a spread only; weights and optimizer states are known exactly.
    """
    error, sizes = find_peak_error(plan), [(kind, size) for _, _, kind, size in plan.binding.rows]
    kinds = set(MemoryKind) - {MemoryKind.KV_CACHE} if error.is_known else set(SPREADS)
    part = sum(size for kind, size in sizes if kind in kinds)
    fixed = plan.binding.num_bytes - part
    low, high = error.interval(part)
    return fixed + round(low), fixed + round(high)


def _build_unknown_error(kind: str) -> MeasuredError:
    """Unknown error for CPU hosts: all published measurements are on GPUs."""
    return MeasuredError(f"{kind} on CPU hosts", "", UNKNOWN_FACTOR, 0, 0)


def predict_step_interval(plan: "Plan") -> tuple[float, float] | None:
    """Range in seconds that holds nine of ten steps; None if the plan predicts no seconds."""
    return None if plan.timing is None else find_step_error(plan).interval(plan.seconds)
