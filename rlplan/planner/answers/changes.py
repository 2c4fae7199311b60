"""What-ifs: the effect of a change, from a complete search of the changed job.

In: a JobSpec, overrides as typed. Out: Outcomes with seconds, headroom and verdict, or the reason for a failure. Left
out: which changes are worth trying (families.py).
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlplan.errors import RlplanError, SpecError
from rlplan.planner.machine import open_search
from rlplan.planner.memo import Memo
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.remedies import find_remedies, list_kinds
from rlplan.spec.files.job_file import override_job
from rlplan.spec.job import JobSpec
from rlplan.units import format_bytes
from rlplan.vocabulary import format_name

MAX_REMEDIES = 11
"""Remedies tried for a change that does not fit; each one is a search."""


@dataclass(frozen=True)
class Change:
    """A what-if question: overrides and a short description."""

    overrides: tuple[str, ...]
    words: str = ""

    @property
    def typed(self) -> str:
        """The overrides as one shell-quoted string."""
        return shlex.join(self.overrides)


@dataclass(frozen=True)
class Outcome:
    """Effect of a change. verdict, seconds and headroom_bytes are None if no layout can be built."""

    change: Change
    """The change."""
    num_devices: int | None = None
    """Devices used by the changed job's best plan."""
    verdict: Verdict | None = None
    """Verdict on the changed job's best plan."""
    seconds: float | None = None
    """Seconds of its step; 0 if unknown."""
    headroom_bytes: int | None = None
    """Bytes left on the fullest device in the worst case; negative if it does not fit."""
    why: str = ""
    """The reason why it does not fit or cannot be built."""
    way_out: str = ""
    """The first additional change that makes it fit."""
    plan: Plan | None = field(default=None, repr=False, compare=False)
    """The changed job's best plan."""

    @property
    def fits(self) -> bool:
        """Whether the changed job has a plan that fits (`Plan.fits`)."""
        return self.plan is not None and self.plan.fits

    @property
    def may_fit(self) -> bool:
        """Whether the changed job has a plan that fits at least in expectation."""
        return self.verdict is not None and self.verdict.may_fit

    def as_json(self) -> dict[str, Any]:
        """JSON without the plan."""
        return {
            "change": self.change.typed,
            "words": self.change.words,
            "num_devices": self.num_devices,
            "verdict": self.verdict and self.verdict.value,
            "seconds": self.seconds,
            "headroom_bytes": self.headroom_bytes,
            "why": self.why,
            "way_out": self.way_out,
        }


Listener = Callable[[int, int, str], None]
"""Progress callback: (questions answered, total, next question)."""


def ask(spec: JobSpec, change: Change, *, finds_way_out: bool = False, memo: Memo | None = None) -> Outcome:
    """Plan the changed job; an invalid change is an outcome too. memo: shared with searches for similar jobs."""
    memo = memo or Memo()
    try:
        other = override_job(spec, change.overrides)
        plan = open_search(other, memo).run(with_others=False)
    except RlplanError as error:
        return Outcome(change, why=f"{error.what}: {error.rule}" if error.rule else error.what)
    why = way_out = ""
    if plan.verdict is not Verdict.FITS:
        why = next(iter(plan.refusals), "") or describe_bottleneck(plan)
    if finds_way_out and not plan.fits and not plan.refusals:
        way_out = _first_way_out(plan, change, memo)
    return Outcome(change, plan.num_devices, plan.verdict, plan.seconds, plan.headroom_bytes, why, way_out, plan)


def check_change(spec: JobSpec, change: Change) -> None:
    """Raise SpecError if a typed change is invalid, not merely too large."""
    other = override_job(spec, change.overrides)
    open_search(other)
    if other == spec:
        raise SpecError(
            f"'{change.typed}' changes nothing",
            where="command line",
            rule="a what-if must change the job",
            way_out="set another value, or override another key (docs/job.md)",
        )


def check_changes(spec: JobSpec, typed: Sequence[str]) -> list[Change]:
    """Parse typed changes: each one alone, and several also together. Raises: SpecError as `check_change`."""
    changes = [Change((override,)) for override in typed]
    changes += [Change(tuple(typed), "together")] if len(typed) > 1 else []
    for change in changes:
        check_change(spec, change)
    return changes


def describe_bottleneck(plan: Plan) -> str:
    """Describe everything that is too small, by how much, and its largest part; empty if the plan fits in the worst
    case.
    """
    words = []
    for short in plan.shortages:
        process, _, kind, size = short.peak.rows[0]
        needed, room = short.needed_bytes, short.available_bytes
        words.append(
            f"{format_bytes(needed - room)} too much for {short.of} in {short.peak.action_id}: {format_bytes(needed)} "
            f"needed, {format_bytes(room)} available; largest: {format_name(kind)} of {process}, {format_bytes(size)}"
        )
    return "; ".join(words)


def _first_way_out(plan: Plan, change: Change, memo: Memo) -> str:
    """Find the mildest remedy that keeps the change; empty if there is none."""
    # a remedy that resets the changed key would undo the question
    keys = {override.partition("=")[0] for override in change.overrides}
    kinds = [kind.drop_keys(keys) for kind in list_kinds(plan)]
    return next((words for words, _ in find_remedies(plan.asked, kinds, memo, most_trials=MAX_REMEDIES)), "")
