"""Commands that start TRL: `trl sft`, and programs after `accelerate launch`, `torchrun`, `deepspeed` or `python`.

In: the words after the launcher's name. Out: their keys, the keys of the files that they name, and the trainer.
Left out: Python (python/file.py), the grammar of bash (shell/script.py).
Source: trl/cli/accelerate_config.py for the accelerate configurations that TRL ships, with facts in
frameworks/keys/accelerate.yaml.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from rlplan.foreign.documents import flatten_keys, read_named_file
from rlplan.foreign.python.file import PythonScript, read_python
from rlplan.foreign.settings import Given, read_flags
from rlplan.foreign.table import read_facts
from rlplan.foreign.trl.trainers import get_online_trainer, is_trl, list_programs
from rlplan.foreign.trl.training_arguments import Shipped, find_known
from rlplan.reading import is_file

_SHORT = re.compile(r"-[A-Za-z]\w*")
_OF_LAUNCHER = (
    *("num_processes", "num_machines", "mixed_precision", "multi_gpu", "config_file", "machine_rank", "main_"),
    *("gpu_ids", "use_deepspeed", "use_fsdp", "zero_stage", "offload_", "fsdp_", "parallelism_config_"),
)
"""Prefixes of flags that `trl sft` passes on to `accelerate launch`."""
_MODULES = "trl.scripts."
"""Prefix of TRL's programs that are started as modules (`python -m`)."""
_NAMED = "accelerate_config"
"""The key of accelerate's file in TRL's own commands and files."""
_PER_HOST, _HOSTS = ("nproc_per_node", "num_gpus"), ("nnodes", "num_nodes")
"""Flags of torchrun and of DeepSpeed's launcher for accelerate's `num_processes` (per host) and `num_machines`."""
_FOLDER = "accelerate_configs"
"""Folder of accelerate configurations in TRL's package and in its examples."""
Words = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Launch:
    """The keys of a command."""

    entries: dict[str, Given]
    is_known: bool
    """Whether the command starts the table's stack."""
    used: frozenset[str] = frozenset()
    """Names of `--set` that the command's program has."""


def read_launch(words: Words, folder: Path, notes: list[str], outside: Mapping[str, str]) -> Launch:
    """The keys of a launcher, of its program and of the files that they name; flags win over files."""
    words = [(f"{word[len(_MODULES) :]}.py" if word.startswith(_MODULES) else word, place) for word, place in words]
    at = next((i for i, (word, _) in enumerate(words) if word.endswith(".py") or word in list_programs()), len(words))
    flags = dict(_read_switches(words[at + 1 :]))
    launcher = read_launcher(words[:at], folder, notes, {})
    if at < len(words) and words[at][0] in list_programs():  # TRL's own command passes flags on to accelerate
        flags = add_launcher(read_named_file(folder, flags.get("config"), notes) | flags, folder, notes)
    else:
        flags = read_named_file(folder, flags.get("config"), notes) | flags
    script = _read_program(words[at:], folder, flags, outside)
    if script is not None:
        notes += script.notes
        launcher |= script.entries
        flags = {} if script.has_own_flags else flags
    entries, used = launcher | flags, script.used if script else frozenset[str]()
    if script is not None and script.makes_grpo:
        return Launch(entries | {"trainer": Given(get_online_trainer(), words[at][1])}, is_known=True, used=used)
    program = Path(words[at][0]).stem.removesuffix("_modeling") if at < len(words) else ""
    if "trainer" not in entries and program in list_programs():
        entries["trainer"] = Given(program, words[at][1])
    is_elsewhere = script is None or script.has_trainer
    return Launch(entries, "trainer" in entries or (is_elsewhere and is_trl(entries)), used)


def read_launcher(words: Words, folder: Path, notes: list[str], shipped: Shipped) -> dict[str, Given]:
    """The keys of `accelerate launch`, `torchrun` or `deepspeed`, and of the file that they name, for all processes."""
    flags = read_flags([pair for pair in words if pair[0] != "-m"])
    launcher = {f"accelerate.{key}": Given(value, place) for key, value, place in flags}
    named, missing = launcher.get("accelerate.config_file"), list[str]()
    configured = _read_configuration(folder, named, missing)
    if named is not None and not configured:
        configured = find_known(named, shipped)
    notes += [] if configured else missing
    return configured | _count_processes(launcher)


def add_launcher(entries: Mapping[str, Given], folder: Path, notes: list[str]) -> dict[str, Given]:
    """Keys of `trl sft`, with those that it passes on to `accelerate launch` under `accelerate.`."""
    handed = {key: entry for key, entry in entries.items() if key.startswith(_OF_LAUNCHER)}
    own = {key: entry for key, entry in entries.items() if key not in handed and key != _NAMED}
    named = handed.pop("config_file", entries.get(_NAMED))
    launcher = {f"accelerate.{key}": entry for key, entry in handed.items()}
    return _read_configuration(folder, named, notes) | own | launcher


def _read_switches(words: Words) -> Iterator[tuple[str, Given]]:
    """Flags of a program; `--no_key` sets a key to false whose default is true."""
    for key, value, place in read_flags(words):
        is_off = key.startswith("no_") and value is True
        yield (key.removeprefix("no_"), Given(False, place)) if is_off else (key, Given(value, place))


def _read_program(
    words: Words, folder: Path, flags: Mapping[str, Given], outside: Mapping[str, str]
) -> PythonScript | None:
    """The keys of the Python program itself, where it lies beside the script."""
    program = folder / words[0][0] if words else folder
    if program.suffix != ".py" or not is_file(program):
        return None
    return read_python(
        program, outside, _read_short_flags(words[1:]) | {key: str(entry.value) for key, entry in flags.items()}
    )


def _read_configuration(folder: Path, named: Given | None, notes: list[str]) -> dict[str, Given]:
    """The keys of an accelerate configuration: a file, or one that TRL ships by that name."""
    known = None if named is None or is_file(folder / str(named.value)) else find_shipped(str(named.value))
    if known is None or named is None:
        entries = read_named_file(folder, named, notes)
    else:
        entries = {key: Given(value, f"{named.place}, {named.value} of TRL") for key, value in known.items()}
    return {f"accelerate.{key}": entry for key, entry in entries.items()}


def _count_processes(launcher: Mapping[str, Given]) -> dict[str, Given]:
    """The launcher's flags, with processes counted over all hosts, as accelerate does."""
    counted = dict(launcher)
    per_host = next((launcher[key] for name in _PER_HOST if (key := f"accelerate.{name}") in launcher), None)
    hosts = next((launcher[key] for name in _HOSTS if (key := f"accelerate.{name}") in launcher), None)
    if hosts is not None and isinstance(hosts.value, int):
        counted["accelerate.num_machines"] = hosts
    if per_host is not None and isinstance(per_host.value, int):
        num_hosts = hosts.value if hosts is not None else 1
        if isinstance(num_hosts, int):
            counted["accelerate.num_processes"] = Given(per_host.value * num_hosts, per_host.place)
    return counted


def _read_short_flags(words: Words) -> dict[str, str]:
    """Short flags: `-k value`, and `-k` alone, which is true."""
    texts = [word for word, _ in words]
    pairs = pairwise([*texts, "-"])
    return {word[1:]: "True" if after.startswith("-") else after for word, after in pairs if _SHORT.fullmatch(word)}


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
