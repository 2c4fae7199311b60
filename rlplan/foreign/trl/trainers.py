"""Which of TRL's trainers a configuration is for: by the trainer's name, or by keys that one trainer's alone has.

In: the keys that a file or a command line gives. Out: a trainer, and its table. Left out: Python (python/file.py).
"""

from collections.abc import Mapping
from functools import cache

from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.settings import Given
from rlplan.foreign.table import Table, given_trainers, load_table


@cache
def online() -> str:
    """Of the trainers that are read the one whose policy generates; the others are in a table of their own."""
    return load_table("trl").programs[0]


@cache
def programs() -> frozenset[str]:
    """Programs of TRL that train, also those that are not read."""
    return given_trainers() | frozenset(load_table("trl").programs)


def read_trainers() -> tuple[str, ...]:
    """The trainers that are read."""
    return (online(), *sorted(given_trainers()))


def trainer_of(given: Mapping[str, Given]) -> str:
    """The trainer whose keys these are; empty where no key tells."""
    if "trainer" in given:
        return str(given["trainer"].value)
    for name, keys in load_table("trl_given").own_keys.items():
        if not given.keys().isdisjoint(keys):
            return name
    return "" if given.keys().isdisjoint(load_table("trl").roots) else online()


def is_of_trl(given: Mapping[str, Given]) -> bool:
    """Whether these are keys of a configuration of TRL's, whatever its trainer."""
    return bool(trainer_of(given)) or not given.keys().isdisjoint(load_table("trl").shared_roots)


def of_trainer(given: Mapping[str, Given], where: str) -> tuple[Table, dict[str, Given]]:
    """The table of the trainer, and the keys that it asks for. Raises: SpecError where it is not told or not read."""
    name, known = trainer_of(given), read_trainers()
    if name not in known:
        raise SpecError(
            f"{name}, a trainer of TRL, is not read" if name else "it does not say which of TRL's trainers it is for",
            where=given["trainer"].place if "trainer" in given else where,
            rule=f"one of {', '.join(known)}" + did_you_mean(name, known) * bool(name),
            way_out=" or ".join(f"--set trainer={one}" for one in known)
            if not name
            else "describe the job in rlplan's own words: rlplan init",
        )
    keys = {key: one for key, one in given.items() if key != "trainer"}
    if name == online():
        return load_table("trl"), keys
    return load_table("trl_given"), keys | {"trainer": given.get("trainer", Given(name, where))}
