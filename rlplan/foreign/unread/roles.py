"""Settings of a single role, such as the critic, where rlplan uses the policy's layout for that role.

In: Settings whose rows have been converted. Out: the values that differ from the policy's and change memory or
time. Left out: a layout of a role by itself, for which a job has no keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.settings import Settings
from rlplan.frameworks.rules import format_value
from rlplan.spec.algorithms import ALGORITHMS
from rlplan.vocabulary import Role

_OF_MEMORY = ("training.", "workload.micro_batch", "placement.offload")
"""Prefixes of job keys that change a role's memory or time."""
_SAVING = ("offload", "checkpointing", "distributed_optimizer", "sequence_parallel")
"""Parts of the names of switches that save memory."""
_SIZES = ("micro_batch", "token")
"""Parts of the names of micro-batch sizes."""
_NAMES = {Role.VALUE: "the critic", Role.REFERENCE: "the reference"}


@dataclass(frozen=True)
class Difference:
    """A setting of a role that differs from the policy's."""

    words: str
    may_take_more: bool
    """Whether it can need more memory than the policy's value."""


@dataclass(frozen=True)
class DifferingRole:
    """A role that has settings of its own, and is counted with the policy's."""

    name: str
    differences: tuple[Difference, ...]

    @property
    def note(self) -> str:
        """The note on all differences."""
        words = ", ".join(difference.words for difference in self.differences)
        return f"not read, may change memory and time: {words}; {self.name} is counted with the policy's settings"

    @property
    def not_counted(self) -> tuple[str, ...]:
        """Differences that can need more memory than the plan counts."""
        return tuple(difference.words for difference in self.differences if difference.may_take_more)


def find_differing_roles(settings: Settings) -> tuple[DifferingRole, ...]:
    """Roles of the job whose settings differ from the policy's."""
    converted = settings.ours
    present = {
        Role.VALUE: _trains_value(converted.get("algorithm.name")),
        Role.REFERENCE: (converted.get("algorithm.kl_coef") or 0) > 0,
    }
    by_role = {role: tuple(dict.fromkeys(_find_differences(settings, role))) for role in _NAMES if present[role]}
    return tuple(DifferingRole(_NAMES[role], differences) for role, differences in by_role.items() if differences)


def _may_take_more(key: str, value: Any, policy: Any) -> bool:
    """Whether a role's own setting can need more memory than the policy's; True where that is unknown.

    Offloading and checkpointing save memory. Larger micro-batches need more, and so do fewer ranks per model.
    """
    name = key.rpartition(".")[2]
    if isinstance(value, bool) and any(word in name for word in _SAVING):
        return not value
    if all(isinstance(number, int | float) and not isinstance(number, bool) for number in (value, policy)):
        if any(word in name for word in _SIZES):
            return bool(value > policy)
        if name.endswith("parallel_size"):
            return bool(value < policy)
    return True


def _trains_value(algorithm: Any) -> bool:
    return algorithm in ALGORITHMS and Role.VALUE in ALGORITHMS[algorithm].trained_roles


def _find_differences(settings: Settings, role: Role) -> Iterator[Difference]:
    """The differences of a role in keys that change memory or time, as `KEY=VALUE (VALUE for the policy)`."""
    table = settings.table
    read = {key for rows in table.rows.values() for row in rows for key in row.keys if key}
    own_begin, compared = table.of_roles.get(role, {}), table.compared.get(role, {})
    for key in _find_memory_keys(settings):
        names = [mirrored + key.removeprefix(begins) for begins, mirrored in compared.items() if key.startswith(begins)]
        own = next(
            (mirrored + key.removeprefix(begins) for begins, mirrored in own_begin.items() if key.startswith(begins)),
            "",
        )
        if not read.isdisjoint({own, *names}):
            continue
        stated = next((name for name in (own, *names) if name in settings.entries), "")
        value = settings.resolve(stated) if stated else None
        if not stated and own and role is Role.VALUE:  # upstream's critic does not inherit the policy's value
            stated, value = own, settings.defaults.get(own, settings.defaults.get(key))
        policy = settings.resolve(key)
        if value is not None and format_value(value).lower() != format_value(policy).lower():
            words = f"{stated}={format_value(value)} ({format_value(policy)} for the policy)"
            yield Difference(words, _may_take_more(stated, value, policy))


def _find_memory_keys(settings: Settings) -> list[str]:
    """The policy's keys in rows whose conditions hold, apart from conditions on the key itself."""
    keys: dict[str, None] = {}
    for ours, rows in settings.table.rows.items():
        if not ours.startswith(_OF_MEMORY):
            continue
        for row in rows:
            for key in (row.key, *row.when):
                if key and key not in settings.table.rows and _holds_without(settings, row.when, key):
                    keys[key] = None
    return list(keys)


def _holds_without(settings: Settings, condition: dict[str, Any], key: str) -> bool:
    """Whether a condition holds when one of its keys is ignored."""
    try:
        return settings.holds({name: wanted for name, wanted in condition.items() if name != key})
    except SpecError:
        return False
