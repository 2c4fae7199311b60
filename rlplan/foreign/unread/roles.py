"""Settings that a configuration gives a role of its own, where rlplan lays that role out as the policy.

In: Settings whose rows have been converted. Out: the values that differ from the policy's and change memory or
time. Left out: the layout of a role by itself, which no job can say.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.settings import Settings
from rlplan.frameworks.rules import word_of
from rlplan.spec.algorithms import ALGORITHMS
from rlplan.vocabulary import Role

_OF_MEMORY = ("training.", "workload.micro_batch", "placement.offload")
"""Beginnings of our keys that change a role's memory or time."""
_SAVING = ("offload", "checkpointing", "distributed_optimizer", "sequence_parallel")
"""Parts of the names of switches that save memory when they are on."""
_SIZES = ("micro_batch", "token")
"""Parts of the names of sizes of a pass."""
_NAMES = {Role.VALUE: "the critic", Role.REFERENCE: "the reference"}


@dataclass(frozen=True)
class Difference:
    """A setting of a role beside the policy's. may_take_more: whether it can need more memory than the policy's."""

    words: str
    may_take_more: bool


@dataclass(frozen=True)
class DifferingRole:
    """A role whose settings differ from the policy's, with which it is counted."""

    name: str
    differences: tuple[Difference, ...]

    @property
    def note(self) -> str:
        """All of them, for people."""
        words = ", ".join(difference.words for difference in self.differences)
        return f"not read, may change memory and time: {words}; {self.name} is counted with the policy's settings"

    @property
    def not_counted(self) -> tuple[str, ...]:
        """Differences that can need more memory than the plan counts."""
        return tuple(difference.words for difference in self.differences if difference.may_take_more)


def differing_roles(settings: Settings) -> tuple[DifferingRole, ...]:
    """The roles that are there and that have settings in which they differ from the policy."""
    converted = settings.ours
    present = {
        Role.VALUE: _trains_value(converted.get("algorithm.name")),
        Role.REFERENCE: (converted.get("algorithm.kl_coef") or 0) > 0,
    }
    by_role = {role: tuple(dict.fromkeys(_differences(settings, role))) for role in _NAMES if present[role]}
    return tuple(DifferingRole(_NAMES[role], differences) for role, differences in by_role.items() if differences)


def _may_take_more(key: str, value: Any, policy: Any) -> bool:
    """Whether a role's own setting can need more memory than the policy's; True where that is not known.

    Switches that save memory are names of offloading and checkpointing. Larger micro-batches take more; so do fewer
    ranks that share a model.
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


def _differences(settings: Settings, role: Role) -> Iterator[Difference]:
    """`KEY=VALUE (POLICY'S VALUE for the policy)` of each key that changes memory or time."""
    table = settings.table
    read = {key for rows in table.rows.values() for row in rows for key in row.keys if key}
    own_begin, compared = table.of_roles.get(role, {}), table.compared.get(role, {})
    for key in _keys_of_memory(settings):
        names = [mirrored + key.removeprefix(begins) for begins, mirrored in compared.items() if key.startswith(begins)]
        own = next(
            (mirrored + key.removeprefix(begins) for begins, mirrored in own_begin.items() if key.startswith(begins)),
            "",
        )
        if not read.isdisjoint({own, *names}):
            continue
        given = next((name for name in (own, *names) if name in settings.given), "")
        value = settings.known(given) if given else None
        if not given and own and role is Role.VALUE:  # upstream's default, whatever the policy is given
            given, value = own, settings.defaults.get(own, settings.defaults.get(key))
        policy = settings.known(key)
        if value is not None and word_of(value).lower() != word_of(policy).lower():
            words = f"{given}={word_of(value)} ({word_of(policy)} for the policy)"
            yield Difference(words, _may_take_more(given, value, policy))


def _keys_of_memory(settings: Settings) -> list[str]:
    """The policy's keys of rows that hold, but for what these ask of the key itself."""
    found: dict[str, None] = {}
    for ours, rows in settings.table.rows.items():
        if not ours.startswith(_OF_MEMORY):
            continue
        for row in rows:
            for key in (row.key, *row.when):
                if key and key not in settings.table.rows and _holds_beside(settings, row.when, key):
                    found[key] = None
    return list(found)


def _holds_beside(settings: Settings, condition: dict[str, Any], key: str) -> bool:
    """Whether a condition holds, whatever the value of one of its keys."""
    try:
        return settings.holds({name: wanted for name, wanted in condition.items() if name != key})
    except SpecError:
        return False
