"""Changes of a job: what each would bring, from a whole search of the changed job.

In: a JobSpec, overrides as they are typed. Out: Outcomes: seconds, room and verdict, or what is in the way.
Left out: which changes are worth a question (families.py).
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rlplan.errors import RlplanError, SpecError
from rlplan.planner.gpu.remedies import better, kinds_of_changes, search_of
from rlplan.planner.gpu_plan import GpuPlan, Verdict
from rlplan.spec.base import validate
from rlplan.spec.job import JobSpec
from rlplan.spec.job_file import WAY_OUT
from rlplan.spec.yaml import apply_overrides
from rlplan.units import format_bytes

MAX_WAYS_OUT = 11
"""Remedies that are tried of a family that does not fit: each is a search."""


@dataclass(frozen=True)
class Change:
    """What is asked: overrides, and in a few words what they mean."""

    overrides: tuple[str, ...]
    words: str = ""

    @property
    def typed(self) -> str:
        """As it stands on a command line."""
        return shlex.join(self.overrides)


@dataclass(frozen=True)
class Outcome:
    """What a change leads to. verdict, seconds, headroom_bytes: None where it cannot be built.

    headroom_bytes: of the fullest GPU at the high end; negative where it does not fit. why: what is in the way.
    way_out: the first further change that would make it fit. budget: the whole answer.
    """

    change: Change
    num_gpus: int | None = None
    verdict: Verdict | None = None
    seconds: float | None = None
    headroom_bytes: int | None = None
    why: str = ""
    way_out: str = ""
    budget: GpuPlan | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether it fits at all."""
        return self.verdict not in (None, Verdict.DOES_NOT_FIT)

    def as_json(self) -> dict[str, Any]:
        """Everything but the whole answer."""
        return {
            "change": self.change.typed,
            "words": self.change.words,
            "num_gpus": self.num_gpus,
            "verdict": self.verdict and self.verdict.value,
            "seconds": self.seconds,
            "headroom_bytes": self.headroom_bytes,
            "why": self.why,
            "way_out": self.way_out,
        }


Listener = Callable[[int, int, str], None]
"""Told how many questions are answered, of how many, and which comes now."""


def changed(spec: JobSpec, overrides: Sequence[str]) -> JobSpec:
    """The job with overrides laid over it. Raises: SpecError."""
    data = apply_overrides(spec.model_dump(mode="json"), overrides)
    return validate(JobSpec, data, file="command line", way_out=WAY_OUT)


def headroom(budget: GpuPlan) -> int:
    """Bytes that are left on the GPU with the least room at the high end of the interval."""
    ledger = budget.ledger
    return min(ledger.capacity_of(one) - ledger.device_peak(one, "high").num_bytes for one in ledger.devices)


def ask(spec: JobSpec, change: Change, *, finds_way_out: bool = False) -> Outcome:
    """What a change leads to. What is wrong in it is said in the outcome."""
    try:
        other = changed(spec, change.overrides)
        budget = search(other)
    except RlplanError as error:
        return Outcome(change, why=f"{error.what}: {error.rule}" if error.rule else error.what)
    why = way_out = ""
    if budget.verdict is not Verdict.FITS:
        why = what_binds(budget)
    if budget.verdict is Verdict.DOES_NOT_FIT and finds_way_out:
        way_out = _first_way_out(other, change, budget.verdict)
    count = budget.setting.num_gpus
    return Outcome(change, count, budget.verdict, budget.seconds, headroom(budget), why, way_out, budget)


def search(spec: JobSpec) -> GpuPlan:
    """The best budget of a spec, with nothing said about others. Raises: SpecError, NoFeasiblePlanError."""
    return search_of(spec).run(with_others=False)


def check_change(spec: JobSpec, change: Change) -> None:
    """Raises: SpecError where a change that somebody typed is wrong in itself, not just too large."""
    other = changed(spec, change.overrides)
    search_of(other)
    if other == spec:
        raise SpecError(
            f"'{change.typed}' changes nothing",
            where="command line",
            rule="a what-if differs from the plan",
            way_out="another value, or another key of docs/job.md",
        )


def what_binds(budget: GpuPlan) -> str:
    """What is too small, by how much, and what is the largest part of it; nothing where it fits at the high end."""
    if budget.shortage is None:
        return ""
    of, needed, room = budget.shortage
    peak = budget.ledger.host_peak() if of == "a host's memory" else budget.binding
    process, _, kind, size = peak.rows[0]
    return (
        f"{format_bytes(needed - room)} too much for {of} in {peak.action_id}: {format_bytes(needed)} needed, "
        f"{format_bytes(room)} available; largest: {kind} of {process}, {format_bytes(size)}"
    )


def _first_way_out(spec: JobSpec, change: Change, verdict: Verdict) -> str:
    """The mildest remedy that leaves the change itself alone; nothing where none of the first few leads to a fit."""
    keys = {override.partition("=")[0] for override in change.overrides}
    remedies = (remedy for kind in kinds_of_changes(spec) for remedy in kind)
    apart = (one for one in remedies if not keys & {word.partition("=")[0] for word in one[0].split()})
    for words, other in islice(apart, MAX_WAYS_OUT):
        found = better(other, verdict)
        if found is not None and found.verdict is Verdict.FITS:
            return words
    return ""
