"""A memo stores results of pure methods by their frozen arguments. One search owns it and shares it with searches it
starts.

A memoized method depends only on its arguments, which form the key, and on facts of its object that never change.
Nobody writes keys by hand: a method with one result for several candidates takes only what they have in common. Objects
with equal facts share a table, so a search on fewer GPUs, or for a job with other choices, reuses results.

Facts are the parts of a job that bytes and seconds depend on, in addition to a choice; all other keys are set to None.
A method that reads such a key fails, so cached results hold for every job with equal facts.

In: a SettledJob, methods. Out: facts, tables of results. Left out: rates and capacities of devices (setting.py).
"""

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from rlplan.spec.resolved import SettledHardware, SettledJob

OPEN = {
    "workload": ("micro_batch_size_per_gpu",),
    "training": (
        *("zero_stage", "gradient_checkpointing", "offloads_optimizer", "offloads_parameters"),
        *("ulysses", "tp", "pp", "cp", "ep", "max_tokens_per_micro_batch"),
    ),
    "rollout": (
        *("num_engines", "tp", "attention_dp", "has_expert_parallel", "sleep_level", "kv_cache_memory"),
        "gpu_memory_utilization",
        *("max_num_seqs", "quantization"),
    ),
    "placement": (
        *("placement", "num_generation_devices", "num_scoring_devices", "offload", "offload_roles"),
        *("transport", "sync_content", "max_staleness", "partial_rollouts"),
    ),
}
"""Keys that state a choice. Methods for bytes and seconds take the choice as an argument instead."""
APART = ("name", "objective", "limits")
"""Parts that affect neither bytes nor seconds."""
NOT_OF_ENGINES = ("training", "roles")
"""Parts that affect no engine."""


def strip_devices(job: SettledJob) -> SettledJob:
    """Drop the number of GPUs."""
    hardware = SettledHardware.model_construct(profile=job.hardware.profile, num_devices=1, num_hosts=1)
    return job.model_copy(update={"hardware": hardware, **dict.fromkeys(APART)})


def strip_choices(job: SettledJob) -> SettledJob:
    """Drop everything that the search may choose, and the number of GPUs."""
    parts = {name: getattr(job, name).model_copy(update=dict.fromkeys(keys)) for name, keys in OPEN.items()}
    return strip_devices(job).model_copy(update=parts)


def strip_trainers(job: SettledJob) -> SettledJob:
    """Drop everything that the search may choose, the number of GPUs, and the trainers."""
    return strip_choices(job).model_copy(update=dict.fromkeys(NOT_OF_ENGINES))


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Table = dict[tuple[object, ...], Any]
"""Results by method and arguments."""
MOST_TABLES = 256
"""Most recently used tables that a memo keeps: `explain` asks about some forty jobs with six tables each."""


class Memo:
    """Tables of results. is_on=False stores nothing, so that tests can prove that caching changes no answer."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._tables: deque[tuple[tuple[object, ...], Table]] = deque(maxlen=MOST_TABLES)

    def get_table(self, *facts: object) -> Table:
        """Get the table of all objects with equal facts. The first fact names the class that owns the methods."""
        if not self.is_on:
            return _Forgetful()
        for index, entry in enumerate(self._tables):
            if entry[0] == facts:
                del self._tables[index]
                self._tables.appendleft(entry)
                return entry[1]
        table: Table = {}
        self._tables.appendleft((facts, table))
        return table

    def create_table(self) -> Table:
        """Create a table for a single object."""
        return {} if self.is_on else _Forgetful()


class _Forgetful(Table):
    """A table that stores nothing."""

    def __setitem__(self, key: tuple[object, ...], value: Any) -> None:
        pass


class HasTable(Protocol):
    """An object with memoized methods."""

    known: Table


Owner = TypeVar("Owner", bound=HasTable)


def memoize(
    method: Callable[Concatenate[Owner, Parameters], Result],
) -> Callable[Concatenate[Owner, Parameters], Result]:
    """Compute a method once per facts of its object and arguments, which must be hashable."""

    @wraps(method)
    def look_up(self: Owner, *arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        key = (method, arguments, *named.items()) if named else (method, arguments)
        try:
            return self.known[key]  # type: ignore[no-any-return]
        except KeyError:
            result = self.known[key] = method(self, *arguments, **named)
            return result

    return cast(Callable[Concatenate[Owner, Parameters], Result], look_up)
