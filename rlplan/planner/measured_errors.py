"""The interval of a predicted quantity: how far measurements of sources that nobody fitted to lay from predictions.

In: a kind of quantity, and whose model and trainer it is. Out: the MeasuredError of its stratum. Every command that
shows a range asks here, so that one job has one interval. Left out: how the factors are found
(rlplan/accuracy/intervals.py, which writes measured_errors.json), spreads of single rows of the ledger, by which a
verdict is made (memory/machine/spread.py).

A stratum is a kind of quantity, dense models or mixtures of experts, and who trains. Where it has fewer than
LEAST_POINTS, the interval is that of all trainers, else of all models, else it is unknown: a factor of 2.
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
"""Share of measurements that an interval should hold."""
LEAST_POINTS = 15
"""Fewer measured points give no interval."""
UNKNOWN_FACTOR = 2.0
"""The range that is taken where no interval is known, on either side."""
STEP, TRAINING, PEAK = "rl_step_time", "throughput_train", "train_peak"
"""Kinds: seconds of a step with rollouts and without, bytes of a trainer's peak."""
ENGINE_PEAK = "vllm_profile_peak"
"""Kind: bytes of an engine that works, its KV cache left out."""
TRAINER_PHASES = (Phase.TRAIN, Phase.SCORE)
PHASES = {
    Phase.ROLLOUT: "phase_generate",
    Phase.SCORE: "phase_score",
    Phase.TRAIN: "phase_train",
    Phase.SYNC: "phase_sync",
}
"""The kinds of the seconds of phases."""


@dataclass(frozen=True)
class Stratum:
    """The group of measurements that share one interval."""

    is_moe: bool
    """Whether the policy is a mixture of experts."""
    framework: str = ""
    """Who runs it: the framework of an RL step, the backend that trains; empty where it makes no difference."""

    @property
    def words(self) -> str:
        """`dense, fsdp2`."""
        return ", ".join(filter(None, ("mixtures of experts" if self.is_moe else "dense models", self.framework)))


@dataclass(frozen=True)
class MeasuredError:
    """Within which factor nine of ten measurements lie around a prediction."""

    kind: str
    of: str
    """The stratum in words; empty where points of all models are pooled."""
    factor: float
    """Measured over predicted, or predicted over measured; of throughputs, of the seconds that they stand for."""
    num_points: int
    num_sources: int
    """Publications; of tables of latencies pairs of model and GPU."""
    inside_left_out: float | None = None
    """Share of the points that lie inside when the interval is made without their source."""

    @property
    def is_known(self) -> bool:
        """Whether there are enough points, of enough sources, for an interval."""
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
        """Low and high end around a prediction."""
        return value / self.factor, value * self.factor

    @property
    def words(self) -> str:
        """Where the factor comes from."""
        if not self.is_known:
            points = f"{self.num_points or 'no'} measured point" + "s" * (self.num_points != 1)
            lacks = f"{LEAST_POINTS} are needed"
            if self.num_points >= LEAST_POINTS:
                lacks = f"nearly all of one of {self.num_sources} sources"
            return f"unknown, take a factor of {UNKNOWN_FACTOR:.0f}: {points} of {self.kind}, {lacks}"
        return (
            f"nine of ten measurements of a source that was left out lie within a factor of {self.factor:.2f} "
            f"({self.num_points} points of {self.num_sources} sources: {self.kind}{', ' * bool(self.of)}{self.of})"
        )

    def as_json(self) -> dict[str, Any]:
        """For other tools; `factor` is 2 where nothing is known."""
        return {**vars(self), "low": self.low, "high": self.high, "is_known": self.is_known}


@cache
def _read_errors() -> dict[tuple[str, str], MeasuredError]:
    path = Path(str(resources.files("rlplan.planner"))) / FILE
    rows: list[dict[str, Any]] = read_json(path, "the measured errors")["strata"]
    return {(row["kind"], row["of"]): MeasuredError(**row) for row in rows}


def forget_errors() -> None:
    """Read the file anew: for who writes it."""
    _read_errors.cache_clear()


def all_errors() -> tuple[MeasuredError, ...]:
    """Every stratum that has an interval, and the kinds that have too few points."""
    return tuple(_read_errors().values())


def find_error(kind: str, stratum: Stratum) -> MeasuredError:
    """The error of a kind of quantity: of its stratum, else of the nearest that has enough points."""
    known = _read_errors()
    for of in (stratum.words, Stratum(stratum.is_moe).words, ""):
        if (error := known.get((kind, of))) is not None and error.is_known:
            return error
    pooled = known.get((kind, ""))
    num_points, num_sources = (pooled.num_points, pooled.num_sources) if pooled else (0, 0)
    return MeasuredError(kind, "", UNKNOWN_FACTOR, num_points, num_sources)


def stratum_of(plan: "Plan", kind: str) -> Stratum:
    """The stratum of a plan's quantity: what trains decides its bytes and the seconds of training alone, the framework
    the seconds of a step with rollouts.
    """
    return Stratum(_has_experts(plan), plan.job.backend if kind in (PEAK, TRAINING) else plan.job.release.name)


def _has_experts(plan: "Plan") -> bool:
    try:
        return plan.job.load_model().experts is not None
    except SpecError:  # of a plan that was made elsewhere
        return False


def step_error(plan: "Plan") -> MeasuredError:
    """The error of the seconds of a plan's step."""
    kind = STEP if plan.job.has_rollouts else TRAINING
    return _build_unknown_error(kind) if plan.is_on_host else find_error(kind, stratum_of(plan, kind))


def find_phase_error(plan: "Plan", phase: Phase) -> MeasuredError:
    """The error of the seconds of a phase of a plan's step; of a step that trains alone, the step's."""
    if not plan.job.has_rollouts:
        return step_error(plan)
    kind = PHASES.get(phase, f"phase_{phase.value}")
    return _build_unknown_error(kind) if plan.is_on_host else find_error(kind, stratum_of(plan, kind))


def find_peak_error(plan: "Plan") -> MeasuredError:
    """The error of the bytes of a GPU at the plan's worst moment: of a trainer's peak, or of an engine that works."""
    actions = (action for _, part in plan.schedule.parts for action in part)
    action = next(action for action in actions if action.id == plan.binding.action_id)
    kind = PEAK if action.phase in TRAINER_PHASES else ENGINE_PEAK
    return find_error(kind, stratum_of(plan, kind))


def predict_peak_interval(plan: "Plan") -> tuple[int, int]:
    """Between which bytes the worst moment of the fullest GPU lies.

    A KV cache is as large as it is made, and is no part of the error. Where no interval is known, the factor of 2 is of
    the part that is unknown: kinds of bytes whose rows have a spread; weights and states are known.
    """
    error, sizes = find_peak_error(plan), [(kind, size) for _, _, kind, size in plan.binding.rows]
    kinds = set(MemoryKind) - {MemoryKind.KV_CACHE} if error.is_known else set(SPREADS)
    part = sum(size for kind, size in sizes if kind in kinds)
    fixed = plan.binding.num_bytes - part
    low, high = error.interval(part)
    return fixed + round(low), fixed + round(high)


def _build_unknown_error(kind: str) -> MeasuredError:
    """On a CPU host: every published point is of GPUs."""
    return MeasuredError(f"{kind} on CPU hosts", "", UNKNOWN_FACTOR, 0, 0)


def step_interval(plan: "Plan") -> tuple[float, float] | None:
    """Between which seconds nine of ten steps lie that are predicted so; None where nothing is predicted."""
    return None if plan.timing is None else step_error(plan).interval(plan.seconds)
