"""Commands that start TRL: `trl sft`, and programs behind `accelerate launch`, `torchrun`, `deepspeed` or `python`.

In: the words behind the launcher's name. Out: what they give, with the files that they name, and the trainer.
Left out: Python (python/file.py), the grammar of bash (shell/script.py).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rlplan.foreign.documents import read_beside
from rlplan.foreign.python.file import PythonScript, read_python
from rlplan.foreign.settings import Given, flags_of
from rlplan.foreign.shell.script import Command
from rlplan.foreign.trl.shipped import shipped
from rlplan.foreign.trl.trainers import is_of_trl, online, programs
from rlplan.reading import is_file

_SHORT = re.compile(r"-[A-Za-z]\w*")
_SERVERS = ("vllm-serve", "vllm_serve.py", "trl.scripts.vllm_serve")
"""Words that start the engine's own server beside a training."""
_SIZES = ("vllm_serve.tensor_parallel_size", "vllm_serve.data_parallel_size")
"""What it has one of unless it is told."""
_OF_LAUNCHER = (
    *(
        "num_processes",
        "num_machines",
        "mixed_precision",
        "multi_gpu",
        "config_file",
        "machine_rank",
        "main_",
        "gpu_ids",
    ),
    *("use_deepspeed", "use_fsdp", "zero_stage", "offload_", "fsdp_", "parallelism_config_"),
)
"""Beginnings of flags that `trl sft` hands on to `accelerate launch`."""
_MODULES = "trl.scripts."
"""Before the names of TRL's programs where they are started as modules."""
_NAMED = "accelerate_config"
"""The key of accelerate's file in TRL's own commands and files."""
_PER_HOST, _HOSTS = ("nproc_per_node", "num_gpus"), ("nnodes", "num_nodes")
"""Flags of torchrun and of DeepSpeed's launcher, for what accelerate has as `num_processes` and `num_machines`."""
Words = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Launch:
    """A command. given: its keys. is_known: whether it is one of TRL's. used: names given from outside that its
    program has.
    """

    given: dict[str, Given]
    is_known: bool
    used: frozenset[str] = frozenset()


def launched(words: Words, folder: Path, notes: list[str], outside: Mapping[str, str]) -> Launch:
    """The launcher's flags, the program and its flags, with what the files that they name say below them."""
    words = [(f"{word[len(_MODULES) :]}.py" if word.startswith(_MODULES) else word, place) for word, place in words]
    at = next((i for i, (word, _) in enumerate(words) if word.endswith(".py") or word in programs()), len(words))
    before = [pair for pair in words[:at] if pair[0] != "-m"]
    flags = dict(_switched(words[at + 1 :]))
    launcher = {f"accelerate.{key}": Given(value, place) for key, value, place in flags_of(before)}
    found = _configuration(folder, launcher.get("accelerate.config_file"), notes)
    if at < len(words) and words[at][0] in programs():  # TRL's own command, which hands on what it does not know
        flags = with_launcher(read_beside(folder, flags.get("config"), notes) | flags, folder, notes)
    else:
        flags = read_beside(folder, flags.get("config"), notes) | flags
    script = _program(words[at:], folder, flags, outside)
    if script is not None:
        notes += script.notes
        found |= script.given
        flags = {} if script.has_own_flags else flags
    said, used = found | _counted(launcher) | flags, script.used if script else frozenset[str]()
    if script is not None and script.makes_grpo:
        return Launch(said | {"trainer": Given(online(), words[at][1])}, is_known=True, used=used)
    program = Path(words[at][0]).stem.removesuffix("_modeling") if at < len(words) else ""
    if "trainer" not in said and program in programs():
        said["trainer"] = Given(program, words[at][1])
    is_elsewhere = script is None or script.has_trainer
    return Launch(said, "trainer" in said or (is_elsewhere and is_of_trl(said)), used)


def with_launcher(given: Mapping[str, Given], folder: Path, notes: list[str]) -> dict[str, Given]:
    """Keys of `trl sft`, on its command line or in its file, with those that it hands on to `accelerate launch`."""
    handed = {key: one for key, one in given.items() if key.startswith(_OF_LAUNCHER)}
    own = {key: one for key, one in given.items() if key not in handed and key != _NAMED}
    named = handed.pop("config_file", given.get(_NAMED))
    launcher = {f"accelerate.{key}": one for key, one in handed.items()}
    return _configuration(folder, named, notes) | own | launcher


def _switched(words: Words) -> Iterator[tuple[str, Given]]:
    """Flags of a program; `--no_key` sets a key that is true by itself to false."""
    for key, value, place in flags_of(words):
        is_off = key.startswith("no_") and value is True
        yield (key.removeprefix("no_"), Given(False, place)) if is_off else (key, Given(value, place))


def _program(words: Words, folder: Path, flags: Mapping[str, Given], outside: Mapping[str, str]) -> PythonScript | None:
    """What the program itself says, where it lies beside the script."""
    program = folder / words[0][0] if words else folder
    if program.suffix != ".py" or not is_file(program):
        return None
    return read_python(program, outside, _short(words[1:]) | {key: str(one.value) for key, one in flags.items()})


def _configuration(folder: Path, named: Given | None, notes: list[str]) -> dict[str, Given]:
    """The keys of accelerate's file, or of the one that TRL ships by that name."""
    known = None if named is None or is_file(folder / str(named.value)) else shipped(str(named.value))
    if known is None or named is None:
        found = read_beside(folder, named, notes)
    else:
        found = {key: Given(value, f"{named.place}, {named.value} of TRL") for key, value in known.items()}
    return {f"accelerate.{key}": one for key, one in found.items()}


def _counted(launcher: Mapping[str, Given]) -> dict[str, Given]:
    """The launcher's flags, with processes and hosts as accelerate counts them: all of them, not those of a host."""
    found = dict(launcher)
    per_host = next((launcher[key] for name in _PER_HOST if (key := f"accelerate.{name}") in launcher), None)
    hosts = next((launcher[key] for name in _HOSTS if (key := f"accelerate.{name}") in launcher), None)
    if hosts is not None and isinstance(hosts.value, int):
        found["accelerate.num_machines"] = hosts
    if per_host is not None and isinstance(per_host.value, int):
        num_hosts = hosts.value if hosts is not None else 1
        if isinstance(num_hosts, int):
            found["accelerate.num_processes"] = Given(per_host.value * num_hosts, per_host.place)
    return found


def is_server(command: Command) -> bool:
    """Whether a command starts TRL's server of an engine."""
    return any(word.endswith(_SERVERS) for word in command.words)


def served(commands: Iterable[Command]) -> dict[str, Given]:
    """What a server of TRL's that the same script starts is told: `trl vllm-serve --tensor-parallel-size 2`."""
    for command in commands:
        at = next((at for at, word in enumerate(command.words) if word.endswith(_SERVERS)), None)
        if at is not None:
            words = tuple(zip(command.words[at + 1 :], command.places[at + 1 :], strict=True))
            said = {f"vllm_serve.{key}": Given(value, place) for key, value, place in flags_of(words)}
            return {key: Given(1, command.places[at]) for key in _SIZES} | said
    return {}


def _short(words: Words) -> dict[str, str]:
    """`-k value` and `-k` alone, which is true."""
    said = [word for word, _ in words]
    pairs = pairwise([*said, "-"])
    return {word[1:]: "True" if after.startswith("-") else after for word, after in pairs if _SHORT.fullmatch(word)}
