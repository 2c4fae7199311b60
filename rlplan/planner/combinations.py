"""Changes that make a job fit: single ones, and the smallest sets of them that only fit together.

In: kinds of changes, each a ladder of values from mild to strong, and a function that plans the job with some values.
Out: values that fit, in order of their effect on training. Left out: which changes exist (remedies.py for jobs, the
tables of foreign/ for other stacks).

All pairs and triples would take hundreds of searches. Instead, all kinds of an effect are tried together. If they fit,
kinds are left out one after another while the rest still fits, so that a minimal set of any size takes few searches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, TypeVar

Values = dict[str, Any]
"""New values by key."""
Result = TypeVar("Result")


MOST_TOGETHER = 3
"""Kinds in a set, if a smaller set is known."""


class Effect(IntEnum):
    """Effect of a change on the experiment, from none to a smaller one; the last ones need other hardware."""

    NONE = 0
    NUMERICS = 1
    TRAINS_LESS = 2
    SMALLER_JOB = 3
    MORE_HARDWARE = 4


@dataclass(frozen=True)
class Kind:
    """Changes of one kind."""

    steps: tuple[Values, ...]
    """Values from mild to strong."""
    effect: Effect = Effect.NONE

    def drop_keys(self, keys: set[str]) -> "Kind":
        """The kind without steps that set one of the keys."""
        return Kind(tuple(values for values in self.steps if not keys & values.keys()), self.effect)


@dataclass(frozen=True)
class Trial(Generic[Result]):
    """A job planned with some values."""

    result: Result
    fits: bool
    excess: float = 0.0
    """Bytes that are missing; 0 if unknown."""


@dataclass
class Combinations(Generic[Result]):
    """Search for changes that fit. Iterating yields (values, result), each kind alone before sets of kinds."""

    kinds: Sequence[Kind]
    plan_values: Callable[[Values], Trial[Result] | None]
    """Plans the job with some values; None if they are refused."""
    enough: int
    """Number of changes after which milder ones suffice, so that stronger effects are not tried."""
    most_trials: int
    """Limit on planned jobs."""
    excess: float | None = None
    """Bytes that are missing without a change; None if unknown."""
    _trials: dict[frozenset[tuple[str, str]], Trial[Result] | None] = field(default_factory=dict)
    _left: list[Kind] = field(default_factory=list)
    """Kinds that do not fit alone, up to their strongest useful step; the strongest kinds first."""

    def __iter__(self) -> Iterator[tuple[Values, Result]]:
        count = 0
        for effect in Effect:
            num_before = count
            for kind in self.kinds:
                for remedy in self._try_alone(kind) if kind.effect is effect else ():
                    count += 1
                    yield remedy
            if count == num_before and (count == 0 or effect <= Effect.TRAINS_LESS):
                for remedy in self._list_sets(effect):
                    count += 1
                    yield remedy
            if count >= self.enough:
                return

    def _try(self, values: Values) -> Trial[Result] | None:
        key = frozenset((name, str(value)) for name, value in values.items())
        if key not in self._trials and len(self._trials) < self.most_trials:
            self._trials[key] = self.plan_values(values)
        return self._trials.get(key)

    def _helps(self, trial: Trial[Result]) -> bool:
        """Whether a trial fits, or misses no more than the job without a change."""
        return trial.fits or (self.excess is not None and trial.excess <= self.excess)

    def _fits(self, values: Values) -> bool:
        trial = self._try(values)
        return trial is not None and trial.fits

    def _try_alone(self, kind: Kind) -> Iterator[tuple[Values, Result]]:
        """Find the mildest step of a kind that fits alone; else keep the kind for sets."""
        planned: list[tuple[float, int]] = []
        for index, values in enumerate(kind.steps):
            trial = self._try(values)
            if trial is not None and trial.fits:
                yield values, trial.result
                return
            if trial is not None:
                planned.append((trial.excess, -index))
            if planned == [(self.excess, 0)]:
                # the mildest step leaves the peak that does not fit; if a strong one does too, so do those between
                steps = reversed([*enumerate(kind.steps)])
                last, at = next((last, at) for at, step in steps if (last := self._try(step)) and self._helps(last))
                if last.excess == self.excess and not last.fits:
                    planned.append((last.excess, -at))
                    break
        if planned:
            # the last of the steps that miss least: a smaller share for the engine may starve its KV cache
            self._left.insert(0, Kind(kind.steps[: 1 - min(planned)[1]], kind.effect))

    def _list_sets(self, effect: Effect) -> Iterator[tuple[Values, Result]]:
        """List minimal sets of kinds up to an effect that fit together: one, and one without each of its members."""
        everything = [kind for kind in self._left if kind.effect <= effect]
        first = self._find_set(everything)
        others = (self._find_set([kind for kind in everything if kind is not member]) for member in first)
        sets = {frozenset(map(id, members)): members for members in (first, *others) if members}
        small = [members for members in sets.values() if len(members) <= MOST_TOGETHER]
        yield from map(self._use_mildest_steps, small or sets.values())

    def _find_set(self, kinds: Sequence[Kind]) -> list[Kind]:
        """Find a minimal set that fits, without the strongest effects where possible; empty if no set fits."""
        members: list[Kind] = []
        fitting: list[Kind] = []
        excess = float("inf")
        # strong effects first: where two kinds contradict each other, the stronger one decides
        for kind in sorted(kinds, key=lambda kind: -kind.effect):
            merged = _merge(member.steps[-1] for member in members)
            if any(merged.get(key, value) != value for key, value in kind.steps[-1].items()):
                continue
            trial = self._try(merged | kind.steps[-1])
            if trial is not None and trial.excess <= excess:
                members, excess = [*members, kind], trial.excess
                fitting = members if trial.fits else fitting
        for kind in tuple(fitting):
            rest = [member for member in fitting if member is not kind]
            if len(rest) > 1 and self._fits(_merge(member.steps[-1] for member in rest)):
                fitting = rest
        return fitting[::-1]

    def _use_mildest_steps(self, members: Sequence[Kind]) -> tuple[Values, Result]:
        """Replace each member's strongest step by the mildest with which the set still fits."""
        chosen = [member.steps[-1] for member in members]
        for index, member in enumerate(members):
            milder = ([*chosen[:index], values, *chosen[index + 1 :]] for values in member.steps)
            chosen = next(steps for steps in milder if self._fits(_merge(steps)))
        trial = self._try(_merge(chosen))
        assert trial is not None, "the strongest steps fit together"
        return _merge(chosen), trial.result


def _merge(steps: Iterable[Values]) -> Values:
    return {key: value for values in steps for key, value in values.items()}
