"""Recognition of files and commands of stacks without a mapping table, which are refused by name.

In: the keys of a document, or the commands of a script. Out: a SpecError that names the stack, the keys by which it was
recognised, and the nearest `rlplan estimate` with the values that could be read. Left out: stacks with a table
(table.py).
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase, translate
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pydantic import Field

from rlplan.errors import SpecError
from rlplan.foreign.settings import Given, parse_word
from rlplan.foreign.shell.script import Command
from rlplan.foreign.table import SOURCES, load_identity
from rlplan.foreign.unknown import is_known
from rlplan.frameworks.rules import matches
from rlplan.spec.algorithms import ALGORITHMS
from rlplan.spec.base import Spec, validate
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.hardware.typed import has_count
from rlplan.spec.models.catalogue import find_bundled_id, find_nearest_id

FILE = Path(__file__).parent / "stacks.yaml"
ALGORITHM_WORDS = Path(__file__).parent / "algorithms.yaml"
MOST_SHOWN = 3
"""Most keys that a refusal lists."""
MODEL = "MODEL"
"""Placeholder for a model that a file does not name."""
USUAL_GPUS = "8xH100"
"""GPUs of the suggested command where the command line names none."""


class Readable(Spec):
    """Keys for the options of `rlplan estimate`; the first with a plain value counts."""

    model: tuple[str, ...] = ()
    method: tuple[str, ...] = ()
    """Keys with a word of algorithms.yaml."""
    lora: tuple[str, ...] = ()
    """Keys with the rank of adapters."""
    packed: tuple[str, ...] = ()
    """Keys that load the base model of the adapters in 4 bits: true, or 4."""
    prompt: tuple[str, ...] = ()
    response: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    """Keys that bound prompt and response together."""
    micro: tuple[str, ...] = ()
    """Keys with the sequences of a GPU's micro-batch."""
    samples: tuple[str, ...] = ()
    """Keys with the rollouts of a prompt."""


class Stack(Spec):
    """A stack without a table: how it is recognised, and which of its keys are read."""

    title: str
    repository: str
    commands: tuple[str, ...] = ()
    """Patterns of words that start it; several in a row where one has a space."""
    needs: tuple[str, ...] = ()
    """Patterns of required keys."""
    keys: tuple[str, ...] = ()
    """Patterns of its own keys."""
    least: int = 1
    """Fewest own keys."""
    unless: tuple[str, ...] = ()
    """Patterns of keys that exclude this stack: a supported stack wraps or resembles it."""
    words: tuple[str, ...] = ()
    """Patterns of values that name the stack; one counts as an own key."""
    suffix: str = ""
    """Suffix of its documents, where the keys alone are too common to decide."""
    reads: Readable = Readable()
    adapters: dict[str, tuple[Any, ...]] = Field(default={})
    """Keys whose values mean that adapters are trained; without any, a rank means it."""
    adapter_rank: int = 16
    """Rank where adapters are trained and none is given."""
    marks: dict[str, tuple[str, ...]] = Field(default={})
    """Patterns of keys and programs by algorithm."""
    usually: str = ""
    """The default algorithm; empty for the first of algorithms.yaml."""

    def recognise(self, entries: Mapping[str, Given], suffix: str = "") -> tuple[str, ...]:
        """The keys by which this stack is recognised; empty for another stack. suffix: of a document."""
        if self.suffix and suffix != self.suffix:
            return ()
        if any(fnmatchcase(key, pattern) for key in entries for pattern in self.unless):
            return ()
        needed = [next((key for key in entries if fnmatchcase(key, pattern)), "") for pattern in self.needs]
        own = [key for key in entries if any(fnmatchcase(key, pattern) for pattern in self.keys)]
        own += [key for key, entry in entries.items() if self._has_name(entry.value)]
        return (*needed, *own) if all(needed) and len(own) >= self.least else ()

    def _has_name(self, value: Any) -> bool:
        return isinstance(value, str) and any(fnmatchcase(value, pattern) for pattern in self.words)

    def find_start(self, command: Command) -> tuple[str, ...]:
        """The words of a command that start this stack; empty where it starts something else."""
        for entry in self.commands:
            patterns = entry.split()
            for at in find_candidates(command.words):
                words = command.words[at : at + len(patterns)]
                names = (PurePosixPath(words[0]).name, *words[1:])
                if len(words) < len(patterns):
                    continue
                if all(map(fnmatchcase, words, patterns)) or all(map(fnmatchcase, names, patterns)):
                    return words
        return ()


class Nearest(NamedTuple):
    """The GPUs and the model of the command line, which the suggested command repeats."""

    hardware: str = ""
    model: str | None = None

    def command(self, model: str = MODEL, algorithm: str = "ALGORITHM", words: Iterable[str] = ()) -> str:
        """The `rlplan estimate` command for a model and an algorithm on the given GPUs.

        >>> Nearest("4xA100").command("Qwen/Qwen3-4B", "sft"), Nearest("A100").command("Qwen/Qwen3-4B", "sft")[-6:]
        ('rlplan estimate --model Qwen/Qwen3-4B --algorithm sft --gpus 4xA100', '8xA100')
        """
        gpus = self.hardware or USUAL_GPUS
        if "+" not in gpus and not has_count(gpus):
            gpus = f"8x{gpus}"
        base = ["rlplan", "estimate", "--model", self.model or model, "--algorithm", algorithm, "--gpus", gpus]
        return " ".join((shlex.join(base), *words))


@lru_cache(maxsize=8)
def find_candidates(words: tuple[str, ...]) -> tuple[int, ...]:
    """Positions of the words that may start any stack.

    All stacks ask about the same command, and a hostile script has thousands of words: one expression rules them out.
    """
    return tuple(
        at
        for at, word in enumerate(words)
        if "=" not in word
        and not word.startswith("-")
        and compile_starts().fullmatch(word.rstrip("/").rpartition("/")[2])
    )


@cache
def compile_starts() -> re.Pattern[str]:
    """Matches the last part of every word with which a command of some stack begins."""
    firsts = {entry.split()[0].rpartition("/")[2] for stack in load_stacks() for entry in stack.commands}
    return re.compile("|".join(f"(?:{translate(first)})" for first in sorted(firsts)))


def is_verl_key(key: str) -> bool:
    """Whether a key is verl's: other projects wrap verl in commands of their own.

    >>> is_verl_key("actor_rollout_ref.model.path"), is_verl_key("model.path")
    (True, False)
    """
    return key.startswith(tuple(f"{root}." for root in load_identity("verl").roots))


@cache
def algorithm_words() -> dict[str, tuple[str, ...]]:
    """Other stacks' words for an algorithm, by rlplan's name of it."""
    words = read_yaml(ALGORITHM_WORDS, "the words for algorithms")
    return {name: tuple(theirs) for name, theirs in words.items()}


@cache
def load_stacks() -> tuple[Stack, ...]:
    """The stacks that are refused by name.

    >>> any(stack.title == "torchtune" for stack in load_stacks())
    True
    """
    entries = read_yaml(FILE, "the stacks without a table")
    return tuple(validate(Stack, entry, file=str(FILE)) for entry in entries)


def refuse_document(entries: Mapping[str, Given], path: Path, nearest: Nearest) -> None:
    """Raises: SpecError for a document of a stack without a table."""
    for stack in load_stacks():
        if keys := stack.recognise(entries, path.suffix):
            raise _refuse(stack, keys, str(path), _suggest_estimate(stack, entries, (), nearest))


def refuse_commands(commands: Sequence[Command], path: Path, nearest: Nearest) -> None:
    """Raises: SpecError where a script starts a stack without a table."""
    for command in commands:
        entries = flags_and_overrides(command)
        if any(is_verl_key(key) for key in entries):
            continue  # a wrapper of verl is read by verl's table
        where = f"{path}, at {command.places[0]}"
        for stack in load_stacks():  # a program decides before keys, which stacks may share
            if words := stack.find_start(command):
                raise _refuse(
                    stack, [" ".join(words)], where, _suggest_estimate(stack, entries, command.words, nearest)
                )
        for stack in load_stacks():
            if keys := stack.recognise(entries):
                raise _refuse(stack, keys, where, _suggest_estimate(stack, entries, command.words, nearest))


def flags_and_overrides(command: Command) -> dict[str, Given]:
    """All `--key value` and `key=value` of a command, whatever its program."""
    entries: dict[str, Given] = {}
    for word, after, place in zip(command.words, (*command.words[1:], "--"), command.places, strict=True):
        name, separator, value = word.partition("=")
        if word.startswith("--") and len(word) > 2:
            key = name[2:] if "." in name else name[2:].replace("-", "_")
            value = value if separator else "true" if after.startswith("--") else after
            entries[key] = Given(parse_word(value), place)
        elif separator and not word.startswith("-"):
            entries[name.lstrip("+")] = Given(parse_word(value), place)
    return entries


def _refuse(stack: Stack, keys: Sequence[str], where: str, command: str) -> SpecError:
    titles = ", ".join(dict.fromkeys(load_identity(name).title for name in SOURCES))
    return SpecError(
        f"this is a file of {stack.title} ({', '.join(dict.fromkeys(keys[:MOST_SHOWN]))}), which rlplan does not read",
        where=where,
        rule=f"rlplan reads {titles}",
        way_out=f"the nearest answer: {command}",
    )


def _suggest_estimate(stack: Stack, entries: Mapping[str, Given], words: Iterable[str], nearest: Nearest) -> str:
    """The `rlplan estimate` command with the model, algorithm, adapters and lengths that could be read."""
    reads = stack.reads
    algorithm = _find_algorithm(stack, entries, words)
    overrides = [f"{key}={value}" for key, value in _find_lengths(reads, entries, algorithm).items()]
    rank = _find_rank(stack, entries)
    if rank and not ALGORITHMS[algorithm].trains_scalar:
        overrides.append(f"training.lora.rank={rank}")
        if any(matches(_find_value(entries, (key,)), [True, 4]) for key in reads.packed):
            overrides.append("training.lora.base_dtype=nf4")
    return nearest.command(_find_model(reads, entries), algorithm, overrides)


def _find_model(reads: Readable, entries: Mapping[str, Given]) -> str:
    """The model's id, from the id or the last part of its path; MODEL for an unknown one."""
    name = _find_value(entries, reads.model)
    if not isinstance(name, str) or not is_known(name) or "$" in name:
        return MODEL
    known = find_bundled_id(name) or find_nearest_id(PurePosixPath(name.rstrip("/")).name)
    is_hub_id = name.count("/") == 1 and not name.startswith(("~", "/", "."))
    return known or (name if is_hub_id else MODEL)


def _find_algorithm(stack: Stack, entries: Mapping[str, Given], words: Iterable[str]) -> str:
    method = str(_find_value(entries, stack.reads.method) or "").lower()
    for ours, theirs in algorithm_words().items():
        if method in theirs:
            return ours
    names = [*entries, *words]
    marked = (
        ours
        for ours, patterns in stack.marks.items()
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
    )
    return next(marked, stack.usually or next(iter(algorithm_words())))


def _find_lengths(reads: Readable, entries: Mapping[str, Given], algorithm: str) -> dict[str, int]:
    """Lengths of prompt and response, and the samples per prompt of an online algorithm."""
    both, prompt, response = (_find_number(entries, keys) for keys in (reads.length, reads.prompt, reads.response))
    lengths: dict[str, int] = {}
    if both and not response:
        prompt = prompt or (both + 1) // 2
        response = max(1, both - prompt)
    if prompt:
        lengths["workload.max_prompt_len"] = prompt
    if response:
        lengths["workload.max_response_len"] = response
    samples = _find_number(entries, reads.samples)
    if samples > 1 and not ALGORITHMS[algorithm].given:
        lengths["workload.num_samples_per_prompt"] = samples
    return lengths


def _find_rank(stack: Stack, entries: Mapping[str, Given]) -> int:
    """The LoRA rank; 0 for full training."""
    rank = _find_number(entries, stack.reads.lora)
    if not stack.adapters:
        return rank
    is_trained = any(matches(_find_value(entries, (key,)), list(values)) for key, values in stack.adapters.items())
    return (rank or stack.adapter_rank) * is_trained


def _find_number(entries: Mapping[str, Given], keys: Sequence[str]) -> int:
    value = _find_value(entries, keys)
    value = int(value.replace("_", "")) if isinstance(value, str) and value.replace("_", "").isdecimal() else value
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _find_value(entries: Mapping[str, Given], patterns: Sequence[str]) -> Any:
    """The first value of a key that matches one of the patterns, with references followed."""
    for pattern in patterns:
        for key, entry in entries.items():
            if fnmatchcase(key, pattern) and entry.value is not None:
                return _follow(entries, entry.value)
    return None


def _follow(entries: Mapping[str, Given], value: Any) -> Any:
    """A value, or the value of the key that it refers to."""
    for _ in range(4):
        if not (isinstance(value, str) and value.startswith("${") and value.endswith("}")):
            break
        reference = entries.get(value[2:-1])
        if reference is None:
            break
        value = reference.value
    return value
