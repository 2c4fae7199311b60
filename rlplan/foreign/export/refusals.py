"""Why a stack does not take a plan, and the way out of it, which is tried before it is printed.

In: a job, a refusal, how a job is planned for the stack. Out: EmitError whose overrides, typed with the same command,
make a plan that the stack takes and that fits. Left out: what a stack can say (backwards.py).
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlplan.errors import EmitError, RlplanError
from rlplan.foreign.export.experiment import changes_learning
from rlplan.foreign.settings import word_of
from rlplan.spec.files.job_file import changed
from rlplan.spec.job import JobSpec
from rlplan.spec.job_keys import job_keys

MAX_TRIES = 6
"""Changed jobs that are planned at most, to find one that the stack takes."""
ADAPTERS = "training.lora.rank"
_OTHERS = "emit the job for another target, of which `rlplan emit --help` has the list"
_RISK = "limits."
"""Keys that take a risk rather than change a plan."""


class ReadBackError(EmitError):
    """A stack has values of its own where the plan has others. read_back: its values, by our keys."""

    read_back: Mapping[str, Any] = {}


def list_overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Values of our keys as they are typed; no adapters are `training.lora=null`.

    >>> list_overrides({"training.pp": 2, "training.lora.rank": None})
    ('training.pp=2', 'training.lora=null')
    """
    return tuple(
        "training.lora=null" if key == ADAPTERS and value is None else f"{key}={word_of(value)}"
        for key, value in values.items()
    )


def word_way_out(overrides: Sequence[str]) -> str:
    """Overrides as a way out; what changes what is learned is named apart from what changes the layout alone.

    >>> word_way_out(["training.backend=fsdp2", "algorithm.kl_in=loss"])
    'plan the job with what it can say: training.backend=fsdp2 and (this changes what is learned) algorithm.kl_in=loss'
    """
    layout = [shlex.quote(override) for override in overrides if not changes_learning(override.partition("=")[0])]
    learned = [shlex.quote(override) for override in overrides if changes_learning(override.partition("=")[0])]
    words = [
        *layout,
        *["and"] * bool(layout and learned),
        *["(this changes what is learned)"] * bool(learned),
        *learned,
    ]
    return f"plan the job with what it can say: {' '.join(words)}"


def with_tried_way_out(
    error: RlplanError, asked: JobSpec, plan_for_stack: Callable[[JobSpec], tuple[str, ...]], *, is_planned: bool
) -> EmitError:
    """The refusal with overrides that were tried, or without a command where none of those tried helps.

    plan_for_stack: plans a job for the stack and gives the overrides that settle what the job leaves open; it raises
    where the stack does not take the job. is_planned: the plan is given, so that the way out says what is settled, too.
    """
    search = _Search(asked, plan_for_stack)
    overrides = search.try_job(()) if is_planned else None
    overrides = overrides or search.try_ways_out((), error)
    if overrides is None:
        way_out = _OTHERS if list(_list_ways_out(error.way_out)) or "=" in error.way_out else error.way_out
    else:
        way_out = word_way_out((*overrides, *search.settled) if is_planned else overrides)
    return EmitError(error.what, where=error.where, rule=error.rule, way_out=way_out)


class _Search:
    """A search for overrides with which a stack takes a job, from refusal to refusal."""

    def __init__(self, asked: JobSpec, plan_for_stack: Callable[[JobSpec], tuple[str, ...]]) -> None:
        self._asked, self._plan_for_stack = asked, plan_for_stack
        self._tried: set[tuple[str, ...]] = set()
        self.settled: tuple[str, ...] = ()
        """Overrides that settle for the stack what the accepted job leaves open."""

    def try_job(self, overrides: tuple[str, ...]) -> tuple[str, ...] | None:
        """The overrides with which the stack takes the job: these, or these and what the next refusals ask for."""
        if overrides in self._tried or len(self._tried) >= MAX_TRIES:
            return None
        self._tried.add(overrides)
        try:
            self.settled = self._plan_for_stack(changed(self._asked, overrides))
        except RlplanError as error:
            return self.try_ways_out(overrides, error)
        return overrides

    def try_ways_out(self, overrides: tuple[str, ...], error: RlplanError) -> tuple[str, ...] | None:
        """Each of a refusal's ways out beside the overrides, in its order."""
        for more in self._ways_out(error):
            keys = tuple(f"{override.partition('=')[0]}=" for override in more)
            others = tuple(override for override in overrides if not override.startswith(keys))
            if (found := self.try_job((*others, *more))) is not None:
                return found
        return None

    def _ways_out(self, error: RlplanError) -> Iterator[tuple[str, ...]]:
        """First what the job itself says and the stack has otherwise: what it leaves open is settled by the plan."""
        if isinstance(error, ReadBackError) and error.read_back:
            fixed_by_user = {key: value for key, value in error.read_back.items() if self._is_fixed_by_user(key)}
            if fixed_by_user:
                yield list_overrides(fixed_by_user)
            yield list_overrides(error.read_back)
        yield from _list_ways_out(error.way_out)

    def _is_fixed_by_user(self, key: str) -> bool:
        part: object = self._asked
        for name in key.split("."):
            part = getattr(part, name, None)
        return part != "auto"


def _list_ways_out(text: str) -> Iterator[tuple[str, ...]]:
    """The overrides of each alternative in a way out; other stacks' keys and words in capitals are none.

    >>> list(_list_ways_out("training.lora.base_dtype=auto, or framework=rlplan"))
    [('training.lora.base_dtype=auto',), ('framework=rlplan',)]
    >>> list(_list_ways_out("--set actor.model=ORG/NAME, or another file"))
    []
    """
    keys = job_keys()
    known = {".".join(key.split(".")[:length]) for key in keys for length in range(1, len(key.split(".")) + 1)}
    for alternative in text.replace("; ", " or ").split(" or "):
        try:
            words = shlex.split(alternative)
        except ValueError:  # an apostrophe in a sentence
            words = alternative.split()
        stripped = [word.strip("`,.():") for word in words]
        overrides = [word for word in stripped if word.partition("=")[0] in known and word.partition("=")[2]]
        if overrides and not any(word.startswith(_RISK) for word in overrides):
            yield tuple(overrides)
