"""Detection of the TRL trainer of a configuration, by its name or by keys that only one trainer has.

In: the keys of a file or a command line. Out: a trainer, and its table. Left out: Python (python/file.py).
"""

from collections.abc import Mapping
from functools import cache

from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.settings import Given
from rlplan.foreign.table import Table, list_given_trainers, load_table


@cache
def get_online_trainer() -> str:
    """The one supported trainer whose policy generates rollouts; the others share the table `trl_given`."""
    return load_table("trl").programs[0]


@cache
def list_programs() -> frozenset[str]:
    """Programs of TRL that train, supported or not."""
    return list_given_trainers() | frozenset(load_table("trl").programs)


def list_trainers() -> tuple[str, ...]:
    """The supported trainers."""
    return (get_online_trainer(), *sorted(list_given_trainers()))


def find_trainer(entries: Mapping[str, Given]) -> str:
    """The trainer that the keys belong to; empty where no key decides."""
    if "trainer" in entries:
        return str(entries["trainer"].value)
    for name, keys in load_table("trl_given").own_keys.items():
        if not entries.keys().isdisjoint(keys):
            return name
    return "" if entries.keys().isdisjoint(load_table("trl").roots) else get_online_trainer()


def is_trl(entries: Mapping[str, Given]) -> bool:
    """Whether the keys belong to TRL, whichever the trainer."""
    return bool(find_trainer(entries)) or not entries.keys().isdisjoint(load_table("trl").shared_roots)


def choose_table(entries: Mapping[str, Given], where: str) -> tuple[Table, dict[str, Given]]:
    """The trainer's table, and the keys for it. Raises: SpecError for an unknown or unsupported trainer."""
    name, known = find_trainer(entries), list_trainers()
    if name not in known:
        raise SpecError(
            f"{name}, a trainer of TRL, is not read" if name else "it does not say which of TRL's trainers it is for",
            where=entries["trainer"].place if "trainer" in entries else where,
            rule=f"one of {', '.join(known)}" + did_you_mean(name, known) * bool(name),
            way_out=" or ".join(f"--set trainer={trainer}" for trainer in known)
            if not name
            else "write the job as an rlplan job file: rlplan init",
        )
    keys = {key: entry for key, entry in entries.items() if key != "trainer"}
    if name == get_online_trainer():
        return load_table("trl"), keys
    return load_table("trl_given"), keys | {"trainer": entries.get("trainer", Given(name, where))}
