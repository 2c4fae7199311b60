"""Solve for the largest value that fits: response length, samples per prompt, concurrent sequences.

In: a JobSpec, a key. Out: a Solution with the value, its plan, and what fails at the next value. Left out: other
settings that would be best then (the plan states them) and keys where less is worse.

Counts: each value is a complete search with the exact memory model. Assumes: if a value does not fit, no larger one
does. Values are doubled, then bisected. Values that a rule forbids (mini-batches that do not divide) are skipped, at
most MAX_FORBIDDEN in a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

from rlplan.errors import NoFeasiblePlanError, SpecError, did_you_mean
from rlplan.planner.answers.changes import Change, Listener, Outcome, ask, describe_bottleneck
from rlplan.planner.memo import Memo
from rlplan.planner.plan import Plan
from rlplan.spec.base import shorten_value
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.workload import MAX_COUNT

SOLUTION_SCHEMA_VERSION = 1
MAX_FORBIDDEN = 8
FIRST_SEQS = 256
"""First number of concurrent sequences to try if the job leaves it open."""
KEYS = {
    "max_response_len": "workload.max_response_len",
    "num_samples_per_prompt": "workload.num_samples_per_prompt",
    "max_num_seqs": "rollout.max_num_seqs",
    "model": "policy",
}
ALSO = {
    **dict.fromkeys(("response", "response_len", "context", "ctx", "max_tokens", "length"), "max_response_len"),
    **dict.fromkeys(("n", "samples", "batch", "batch_size", "group_size", "num_generations"), "num_samples_per_prompt"),
    **dict.fromkeys(("concurrency", "num_seqs"), "max_num_seqs"),
    **dict.fromkeys(("policy.path", "size"), "model"),
}
"""Further names of the keys."""
LADDER = tuple(f"Qwen/{name}" for name in (
    *("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen2.5-72B"),
    "Qwen3-235B-A22B",
))  # fmt: skip
"""Models that a question for the largest model tries: one family, by size."""


@dataclass(frozen=True)
class Breaking:
    """The reason why a value does not fit."""

    value: int | str
    phase: str
    """Phase of the peak; empty if memory is not the reason."""
    action_id: str
    device: str
    """GPU or host that is too small."""
    needed_bytes: int
    available_bytes: int
    why: str
    """The missing bytes and the largest part, or the violated rule."""


@dataclass(frozen=True)
class Solution:
    """The largest value that fits in the worst case."""

    key: str
    """Dotted key."""
    value: int | str
    """The value; a model's id for `policy`."""
    plan: Plan
    """The plan with that value."""
    next: Breaking | None
    """The next value and the reason why it does not fit; None if a larger value changes nothing."""
    asked: tuple[Outcome, ...]
    """All values tried, in order."""

    @property
    def override(self) -> str:
        """The solution as an override."""
        return f"{self.key}={self.value}"

    def as_json(self) -> dict[str, Any]:
        """JSON without the plan."""
        broken = self.next
        return {
            "schema_version": SOLUTION_SCHEMA_VERSION,
            "key": self.key,
            "value": self.value,
            "override": self.override,
            "verdict": self.plan.verdict.value,
            "seconds": self.plan.seconds,
            "headroom_bytes": self.plan.headroom_bytes,
            "next": None if broken is None else dict(vars(broken)),
            "asked": [outcome.as_json() for outcome in self.asked],
        }


def solve(asked: JobSpec, key: str, listen: Listener | None = None) -> Solution:
    """Find the largest value of a key with which the job fits in the worst case. key: short or dotted.

    For lengths, the result fits and the next value does not. Bytes are rounded up to KV blocks, so a slightly larger
    value may fit again.

    Raises: SpecError for another key or a job that generates nothing, NoFeasiblePlanError if no value fits.
    """
    question = _Question(asked, expand_key(key), listen)
    best, beyond = question.find_bounds()
    while (middle := question.find_next_value(best, beyond)) is not None:
        best, beyond = (middle, beyond) if question.fits(middle) else (best, middle)
    chosen = question.outcomes[best].plan
    assert chosen is not None
    breaks = None if beyond > question.most else _find_breaking(question.name(beyond), question.outcomes[beyond])
    return Solution(question.key, question.name(best), chosen, breaks, tuple(question.outcomes.values()))


def expand_key(key: str) -> str:
    """Expand a short key. Raises: SpecError."""
    key = ALSO.get(key.lower().replace("-", "_"), key)
    if key in KEYS or key in KEYS.values():
        return KEYS.get(key, key)
    raise SpecError(
        f"'{shorten_value(key)[1:-1]}' cannot be solved for",
        where="command line",
        rule=f"one of {', '.join(KEYS)}.{did_you_mean(key.rpartition('.')[2], KEYS)}",
        way_out="for example: rlplan solve max_response_len qwen3 8b 8xH100",
    )


class _Question:
    """State of the search: the job, the key, and outcomes so far."""

    def __init__(self, asked: JobSpec, key: str, listen: Listener | None) -> None:
        work, rollouts = asked.workload, asked.workload.num_rollouts_per_step
        if key not in (KEYS["max_response_len"], KEYS["model"]) and not asked.algorithm.declaration.has_rollouts:
            raise SpecError(
                f"{key} has no largest value: {asked.algorithm.name} generates nothing",
                where=key,
                rule="it learns from answers in the data: no engine runs, and the number of responses is fixed",
                way_out="rlplan solve max_response_len, or another algorithm",
            )
        self.asked, self.key, self.listen = asked, key, listen
        self.outcomes: dict[int, Outcome] = {}
        self.memo = Memo()
        self.unit, self.least, self.most = 1, 1, MAX_COUNT
        if key == KEYS["max_response_len"]:
            self.first = work.max_response_len
        elif key == KEYS["model"]:
            self.first, self.most = 4, len(LADDER)
        elif key == KEYS["max_num_seqs"]:
            stated_seqs = asked.rollout.max_num_seqs
            self.most = rollouts  # an engine never gets more sequences than a step has rollouts
            self.first = min(rollouts, FIRST_SEQS if stated_seqs == "auto" else int(stated_seqs))
        else:
            self.least = asked.algorithm.declaration.min_samples_per_prompt
            self.first = work.num_samples_per_prompt
            if work.mini_batch_size is not None:
                # other numbers of samples would not divide into mini-batches
                self.unit = work.mini_batch_size // gcd(work.mini_batch_size, work.num_prompts_per_step)

    def evaluate(self, value: int) -> Outcome:
        """Plan the job with a value; each value is planned once."""
        if value not in self.outcomes:
            if self.listen is not None:
                self.listen(len(self.outcomes), len(self.outcomes) + 1, f"{self.key}={self.name(value)}")
            self.outcomes[value] = ask(self.asked, Change((f"{self.key}={self.name(value)}",)), memo=self.memo)
        return self.outcomes[value]

    def name(self, value: int) -> int | str:
        """The value of an override: a model is counted by its place in the ladder, from 1."""
        return LADDER[value - 1] if self.key == KEYS["model"] else value

    def fits(self, value: int) -> bool:
        """Whether the job fits with a value (`Plan.fits`)."""
        return self.evaluate(value).fits

    def is_forbidden(self, value: int) -> bool:
        """Whether a rule forbids this value but perhaps not larger ones, such as samples that mini-batches do not
        divide.
        """
        return self.key == KEYS["num_samples_per_prompt"] and self.evaluate(value).verdict is None

    def find_bounds(self) -> tuple[int, int]:
        """Find (a value that fits, a larger one that does not or exceeds the limit). Raises: NoFeasiblePlanError."""
        value, beyond = self.first, 0
        while not self.fits(value):
            beyond = value
            value = self._round_to_unit(value // 2)
            if value < self.least or value == beyond:
                raise self._explain_no_value(beyond)
        while not beyond:
            if value >= self.most:
                return value, self.most + 1
            larger = min(self._round_to_unit(2 * value), self.most)
            if self.fits(larger):
                value = larger
            else:
                beyond = larger
        return value, beyond

    def find_next_value(self, best: int, beyond: int) -> int | None:
        """Find the next value to try: the middle or the nearest allowed one; None if there is none."""
        values = list(_list_middle_values(best, beyond, self.unit)) if beyond <= self.most else []
        return next((value for value in values if not self.is_forbidden(value)), values[0] if values else None)

    def _round_to_unit(self, value: int) -> int:
        return max(self.unit, value // self.unit * self.unit) if self.unit > 1 else value

    def _explain_no_value(self, smallest: int) -> NoFeasiblePlanError:
        outcome = self.outcomes[smallest]
        return NoFeasiblePlanError(
            f"no value of {self.key} fits, not even {self.name(smallest)}",
            where=self.key,
            rule=outcome.why or "a GPU runs out of memory in the worst case",
            way_out="`rlplan plan JOB` names other changes that make it fit",
        )


def _list_middle_values(best: int, beyond: int, unit: int) -> Iterator[int]:
    """List values between two bounds, the middle first, `unit` apart: at most MAX_FORBIDDEN.

    >>> list(_list_middle_values(8, 16, 2)), list(_list_middle_values(8, 9, 1))
    ([12, 10, 14], [])
    """
    steps = (beyond - best - 1) // unit
    middle = (steps + 1) // 2
    order = sorted(range(1, steps + 1), key=lambda step: (abs(step - middle), step))
    yield from (best + step * unit for step in order[:MAX_FORBIDDEN])


def _find_breaking(value: int | str, outcome: Outcome) -> Breaking:
    """Find the reason for a failed value: memory or a rule."""
    short = outcome.plan.shortage if outcome.plan is not None and not outcome.plan.refusals else None
    if outcome.plan is None or short is None:
        return Breaking(value, "", "", "", 0, 0, outcome.why)
    phase = next((action.phase.value for _, part in outcome.plan.schedule.parts for action in part
                  if action.id == short.peak.action_id), "")  # fmt: skip
    needed, room = short.needed_bytes, short.available_bytes
    return Breaking(
        value, phase, short.peak.action_id, short.peak.scope, needed, room, describe_bottleneck(outcome.plan)
    )
