"""Changes of a job: what each would bring, from a whole search of the changed job.

In: a JobSpec, overrides as they are typed. Out: Outcomes: seconds, room and verdict, or what is in the way.
Left out: which changes are worth a question (families.py).
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from rlplan.errors import RlplanError, SpecError
from rlplan.planner.machine import search_of
from rlplan.planner.memo import Memo
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.remedies import find_fitting_plan, list_changes, list_resets
from rlplan.spec.files.job_file import changed
from rlplan.spec.job import JobSpec
from rlplan.units import format_bytes
from rlplan.vocabulary import words_of

MAX_REMEDIES = 11
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
    """What a change leads to; verdict, seconds and headroom_bytes are None where it cannot be built."""

    change: Change
    """What is asked."""
    num_devices: int | None = None
    """That it takes."""
    verdict: Verdict | None = None
    """On the best plan of the changed job."""
    seconds: float | None = None
    """Of its step; 0 where they are not known."""
    headroom_bytes: int | None = None
    """Where there is least room, at the high end; negative where it does not fit."""
    why: str = ""
    """What is in the way."""
    way_out: str = ""
    """The first further change that would make it fit."""
    plan: Plan | None = field(default=None, repr=False, compare=False)
    """The whole answer."""

    @property
    def fits(self) -> bool:
        """Whether the changed job has a plan that fits (`Plan.fits`)."""
        return self.plan is not None and self.plan.fits

    @property
    def may_fit(self) -> bool:
        """Whether the changed job has a plan that fits, at least as expected."""
        return self.verdict is not None and self.verdict.may_fit

    def as_json(self) -> dict[str, Any]:
        """Everything but the whole answer."""
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
"""Told how many questions are answered, of how many, and which comes now."""


def ask(spec: JobSpec, change: Change, *, finds_way_out: bool = False, memo: Memo | None = None) -> Outcome:
    """What a change leads to. What is wrong in it is said in the outcome. memo: of searches for jobs like it."""
    memo = memo or Memo()
    try:
        other = changed(spec, change.overrides)
        plan = search_of(other, memo).run(with_others=False)
    except RlplanError as error:
        return Outcome(change, why=f"{error.what}: {error.rule}" if error.rule else error.what)
    why = way_out = ""
    if plan.verdict is not Verdict.FITS:
        why = next(iter(plan.refusals), "") or bottleneck_of(plan)
    if finds_way_out and not plan.fits and not plan.refusals:
        way_out = _first_way_out(plan, change, memo)
    return Outcome(change, plan.num_devices, plan.verdict, plan.seconds, plan.headroom_bytes, why, way_out, plan)


def check_change(spec: JobSpec, change: Change) -> None:
    """Raises: SpecError where a typed change is invalid, not just too large."""
    other = changed(spec, change.overrides)
    search_of(other)
    if other == spec:
        raise SpecError(
            f"'{change.typed}' changes nothing",
            where="command line",
            rule="a what-if must change something in the plan",
            way_out="another value, or another key of docs/job.md",
        )


def check_changes(spec: JobSpec, typed: Sequence[str]) -> list[Change]:
    """Changes that were typed: each alone, and of several all together. Raises: SpecError as `check_change`."""
    changes = [Change((override,)) for override in typed]
    changes += [Change(tuple(typed), "together")] if len(typed) > 1 else []
    for change in changes:
        check_change(spec, change)
    return changes


def bottleneck_of(plan: Plan) -> str:
    """Everything that is too small, by how much, and the largest part of it; empty where it fits at the high end."""
    words = []
    for short in plan.shortages:
        process, _, kind, size = short.peak.rows[0]
        needed, room = short.needed_bytes, short.available_bytes
        words.append(
            f"{format_bytes(needed - room)} too much for {short.of} in {short.peak.action_id}: {format_bytes(needed)} "
            f"needed, {format_bytes(room)} available; largest: {words_of(kind)} of {process}, {format_bytes(size)}"
        )
    return "; ".join(words)


def _first_way_out(plan: Plan, change: Change, memo: Memo) -> str:
    """The mildest remedy that leaves the change itself alone; nothing where none of the first few leads to a fit."""
    keys = {override.partition("=")[0] for override in change.overrides}
    kinds = chain(list_changes(plan.asked, plan.binding.num_bytes), list_resets(plan.asked))
    remedies = (remedy for kind in kinds for remedy in kind)
    apart = (words for words in remedies if not keys & {word.partition("=")[0] for word in words.split()})
    tried = islice(apart, MAX_REMEDIES)
    return next((words for words in tried if find_fitting_plan(plan.asked, words, memo) is not None), "")
