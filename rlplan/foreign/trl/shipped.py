"""Accelerate configurations that TRL ships, by name.

In: a name (`zero3`), or a path that ends with one of TRL's files. Out: the file's keys; None for any other name.
Source: trl/cli/accelerate_config.py (`--accelerate_config`), facts in frameworks/keys/accelerate.yaml.
"""

from functools import cache
from pathlib import PurePosixPath
from typing import Any

from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.table import read_facts

_FOLDER = "accelerate_configs"
"""Folder of the configurations in TRL's package and in its examples."""


@cache
def _files() -> dict[str, dict[str, Any]]:
    read = read_facts("accelerate")
    return {name: flatten_keys({**read["all"], **keys}) for name, keys in read["files"].items()}


def find_shipped(named: str) -> dict[str, Any] | None:
    """The keys of an accelerate configuration that TRL ships; None for another name.

    >>> find_shipped("zero2")["deepspeed_config.zero_stage"]
    2
    >>> find_shipped("trl/accelerate_configs/fsdp2.yaml")["num_processes"]
    8
    >>> find_shipped("fsdp2.yaml") is None
    True
    """
    path = PurePosixPath(named)
    is_file_of_trl = path.suffix in (".yaml", ".yml") and path.parent.name == _FOLDER
    name = path.stem.removeprefix("deepspeed_") if is_file_of_trl else named
    return _files().get(name)
