"""The settings with which a Python script creates a TRL trainer: its configuration, model and adapters.

In: a script with calls such as `GRPOTrainer(model=..., args=GRPOConfig(...))`. Out: the value and the line of each key.
Left out: following the script (statements.py).
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.python.statements import Script
from rlplan.foreign.python.unsloth import LOADED, WHOLE_MODULES, enlarge_batch, list_defaults, list_keys, list_standby
from rlplan.foreign.python.values import MAX_NESTED, MAX_WORK, Made, get_name, is_made, simplify
from rlplan.foreign.settings import Given
from rlplan.foreign.table import list_given_trainers, load_table
from rlplan.foreign.unknown import is_known, strip_marks
from rlplan.reading import MAX_SPEC_BYTES, check_code, read_text

MAX_NOTEBOOK = 8 << 20
"""Size limit of a notebook, which holds images and sounds beside its cells."""
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}
"""Arguments of LoraConfig, with the names of ModelConfig's flags."""
_ONLINE = "GRPO"
"""The one TRL trainer whose policy generates rollouts."""
_BITS = ("load_in_4bit", "load_in_8bit")
"""Flags of ModelConfig, and arguments of BitsAndBytesConfig."""
_BY_FLAGS = ("get_peft_config", "get_quantization_config")
"""Functions of TRL that build configurations from ModelConfig's flags, which are read as flags."""
_IPYTHON = re.compile(r"^([ \t]*(?:\w+ = )?)[!%](?:.*\\\n)*.*$", re.MULTILINE)
"""Lines that only IPython understands, such as `!pip install`, over all that a backslash continues; they train nothing.
"""
_STRING = re.compile(r"""\bf(["'])(?!\1\1).*\1""")
"""An f-string of one line, up to the last of its quotes."""
MAX_STRINGS = 20
"""F-strings that are replaced."""
_OTHER_LANGUAGE = re.compile(r"\s*%%(?!capture\b|time\b|timeit\b|prun\b)\w")
"""The start of a cell that is no Python, such as `%%bash` or `%%writefile`."""


@dataclass(frozen=True)
class PythonScript:
    """The settings of a script."""

    entries: dict[str, Given]
    notes: tuple[str, ...]
    makes_grpo: bool
    """Whether it creates a GRPO trainer."""
    has_trainer: bool
    """Whether it creates a trainer, or the configuration of one."""
    has_own_flags: bool
    """Whether its command-line flags are its own, and not the trainer's."""
    used: frozenset[str]
    """Names of `--set` that the script has."""


def read_python(path: Path, outside: Mapping[str, str], flags: Mapping[str, str] | None = None) -> PythonScript:
    """The keys that a script sets.

    outside: values of `--set` for its names or options. flags: of the command line that starts it; None where the user
    gave the Python file itself. Raises: SpecError for a file that is not Python; without flags also for a `--set` name
    that the script lacks (the reader of a shell script checks its own names).
    """
    tree, text = parse_file(path)
    script = Script(tree, text, path.name, {**(flags or {}), **outside})
    is_long = script.spent > MAX_WORK and not script.followed_to and _names_a_trainer(tree)
    if is_long:  # a notebook may play a whole game before it trains
        script = Script(tree, text, path.name, {**(flags or {}), **outside}, MAX_WORK // 10)
    if is_long and script.spent > MAX_WORK and not script.followed_to:
        raise SpecError(
            "the script is too long to be followed",
            where=str(path),
            rule=f"at most {MAX_WORK:,} expressions and parts of values, loops counted as often as they run",
            way_out="give the YAML file or the command that starts the training, or the part that creates the trainer",
        )
    unused = [name for name in outside if name not in script.used]
    trainer, config, notes = _choose_trainer(script)
    if trainer is None and config is None:
        _check_trainer(script, path)
    notes += _list_not_counted(trainer) if trainer else ()
    if script.spent > MAX_WORK:
        notes.append(f"{path.name} is very long; nothing after the trainer at line {script.followed_to} is read")
    entries = dict(_list_entries(script, trainer, config))
    if trainer is not None and _is_online(trainer) and _has_unsloth(trainer):
        notes += filter(None, [enlarge_batch(entries)])
        entries |= list_standby(trainer.get("model"), script.environment, entries)
    if flags is None:
        _check_used(path, unused, {*script.names, *entries})
    makes_grpo = _is_online(trainer)
    has_trainer = trainer is not None or config is not None
    used = frozenset(script.used)
    return PythonScript(entries, (*script.notes, *notes), makes_grpo, has_trainer, script.has_own_flags, used)


def parse_file(path: Path) -> tuple[ast.Module, str]:
    """The syntax tree of a file, and its text. Raises: SpecError for a file that is not Python."""
    try:
        is_notebook = path.suffix == ".ipynb"
        text = read_text(path, "the script", limit=MAX_NOTEBOOK if is_notebook else MAX_SPEC_BYTES)
        if is_notebook:
            text = _join_cells(text)
        check_code(path, text)
        try:
            return _parse_strings(text)
        except SyntaxError:
            if not _IPYTHON.search(text):
                raise
        return _parse_strings(_IPYTHON.sub(_replace_magic, text))
    except (SyntaxError, ValueError, TypeError, KeyError) as error:
        raise SpecError(
            f"the script is not Python: {error}",
            where=str(path),
            rule="Python 3 or a notebook of it, read and not run",
            way_out="correct that line, or give the shell script or YAML file that starts the training",
        ) from None


def _parse_strings(text: str) -> tuple[ast.Module, str]:
    """The syntax tree of a text, and the text. Raises: SyntaxError.

    Python 3.11 does not read the quotes that PEP 701 allows within an f-string; such a string becomes an unknown value.
    """
    for _ in range(MAX_STRINGS):
        try:
            return ast.parse(text), text
        except SyntaxError as error:
            lines, at = text.split("\n"), (error.lineno or 1) - 1
            changed = _STRING.sub('f"{_}"', lines[at]) if at < len(lines) and error.msg.startswith("f-string") else ""
            if not changed or changed == lines[at]:
                raise
            text = "\n".join([*lines[:at], changed, *lines[at + 1 :]])
    return ast.parse(text), text


def _join_cells(notebook: str) -> str:
    """The Python cells of a notebook. Raises: ValueError, TypeError, KeyError for another file."""
    cells = [cell["source"] for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]
    texts = [cell if isinstance(cell, str) else "".join(cell) for cell in cells]
    return "\n".join("" if _OTHER_LANGUAGE.match(text) else text for text in texts) + "\n"


def _replace_magic(line: re.Match[str]) -> str:
    """Python of as many lines: a statement without effect, or a value that is known only at run time."""
    return line[1] + ("get_ipython()" if "=" in line[1] else "pass") + "\n" * line[0].count("\n")


def _names_a_trainer(tree: ast.Module) -> bool:
    """Whether a script's text calls a trainer or its configuration."""
    names = {get_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    ends = ("Trainer", "Config")
    return any(
        name.endswith(ends) and _is_known_trainer(name.removesuffix("Trainer").removesuffix("Config")) for name in names
    )


def _is_known_trainer(kind: str) -> bool:
    return kind == _ONLINE or kind.lower() in list_given_trainers()


_SETTINGS = ("Config", "TrainingArguments")


def _check_trainer(script: Script, path: Path) -> None:
    """Raises: SpecError for a trainer without a table."""
    others = [instance for instance in script.made if instance.name.endswith("Trainer")]
    if others:
        raise SpecError(
            f"{others[-1].name} is not read",
            where=f"{path.name}:{others[-1].line}",
            rule=f"a TRL trainer that is read: {_ONLINE}Trainer, SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer",
            way_out="write the job as an rlplan job file: rlplan init",
        )


def _list_not_counted(trainer: Made) -> Iterator[str]:
    """Notes on further models that TRL loads whole on each GPU."""
    rewards = trainer.get("reward_funcs")
    named = [reward for reward in (rewards if isinstance(rewards, list) else [rewards]) if _is_model(reward)]
    if named:
        yield f"{len(named)} reward model{'s' * (len(named) > 1)} of reward_funcs, whole on each GPU, not counted"
    if _is_model(trainer.get("ref_model")):
        yield "the reference model is counted in the policy's shape"


def _is_model(value: Any) -> bool:
    is_name = isinstance(value, str) and is_known(value) and "/" in value
    return is_name or is_made(value, "from_pretrained")


def _check_used(path: Path, unused: list[str], names: set[str]) -> None:
    """Raises: SpecError for a `--set` name that neither the script nor TRL has."""
    keys = {key for stack in ("trl", "trl_given") for key in load_table(stack).keys}
    for name in unused:
        if name not in keys:
            raise SpecError(
                f"--set {name} matches nothing in {path.name}",
                where="command line: --set",
                rule="a variable of the script, an option of its argument parser, or a key of TRL."
                + did_you_mean(name, names | keys),
                way_out="leave it out, or correct it",
            )


def _choose_trainer(script: Script) -> tuple[Made | None, Made | None, list[str]]:
    """The trainer and the configuration that are read, and notes: GRPO's trainer before others, then the last one."""
    trainers, configs = (list(_find_known(script, end)) for end in ("Trainer", "Config"))
    chosen = [candidate for candidate in trainers if candidate.name == f"{_ONLINE}Trainer"] or trainers
    trainer, notes = (chosen[-1] if chosen else None), []
    kind = trainer.name.removesuffix("Trainer") if trainer else ""
    config = trainer.get("args") if trainer else None
    if trainer and config is not None and not is_made(config, _SETTINGS):
        words = (
            strip_marks(config) if isinstance(config, str) else config.name if isinstance(config, Made) else str(config)
        )
        notes.append(f"the trainer's configuration, {words}, is known only at run time")
    if not is_made(config, _SETTINGS):
        of_kind = [candidate for candidate in configs if not kind or candidate.name == f"{kind}Config"]
        config = next(
            (candidate for candidate in reversed(of_kind) if candidate.name == f"{_ONLINE}Config"),
            of_kind[-1] if of_kind else None,
        )
    names = sorted({f"{candidate.name}:{candidate.line}" for candidate in trainers})
    if trainer and len(names) > 1:
        notes.append(f"{script.file} makes {len(names)} trainers; {trainer.name} at line {trainer.line} is read")
    return trainer, config, notes


def _find_known(script: Script, end: str) -> Iterator[Made]:
    """Recorded trainers, or configurations, that have a table."""
    for instance in script.made:
        if is_made(instance, end) and _is_known_trainer(instance.name.removesuffix(end)):
            yield instance


def _list_entries(script: Script, trainer: Made | None, config: Made | None) -> Iterator[tuple[str, Given]]:
    """Keys and values, in increasing precedence."""
    first = trainer or config
    if first is not None:
        kind = first.name.removesuffix("Trainer").removesuffix("Config").lower()
        if kind in list_given_trainers():
            yield "trainer", Given(kind, f"{script.file}:{first.line}")
    for instance in script.made:
        if instance.name == "ModelConfig":
            yield from _flatten_object(instance)
    if config is not None:
        if _has_unsloth(trainer) and config.name.endswith("Config"):
            yield from list_defaults(is_online=_is_online(trainer))
        yield from _flatten_object(config)
    if trainer is None:
        for lora in [instance for instance in script.made if instance.name == "LoraConfig"][-1:]:
            yield from _convert_adapters(lora, f"{script.file}:{lora.line}")
        return
    yield from _list_model_entries(trainer)
    if "max_seq_length" in trainer.entries:  # earlier versions of SFTTrainer take it
        yield "max_seq_length", trainer.entries["max_seq_length"]
    if "peft_config" in trainer.entries:
        adapters = trainer.entries["peft_config"]
        yield from _convert_adapters(adapters.value, adapters.place)


def _is_online(trainer: Made | None) -> bool:
    return trainer is not None and trainer.name == f"{_ONLINE}Trainer"


def _has_unsloth(trainer: Made | None) -> bool:
    """Whether a trainer's model is loaded by Unsloth."""
    return trainer is not None and is_made(trainer.get("model"), LOADED)


def _list_model_entries(trainer: Made) -> Iterator[tuple[str, Given]]:
    """Keys of the trainer's model, which the trainer or the script loads."""
    model = trainer.entries.get("model")
    if model is None:
        return
    yield from _convert_model(model)
    if is_made(model.value, LOADED):
        yield from list_keys(model.value, is_online=_is_online(trainer))
    if "quantization_config" in trainer.entries and not is_made(model.value, "from_pretrained"):
        yield from _convert_quantization(trainer.entries["quantization_config"])


def _flatten_object(instance: Made) -> Iterator[tuple[str, Given]]:
    for key, entry in instance.entries.items():
        if isinstance(entry.value, dict):
            for inner, value in flatten_keys(entry.value).items():
                yield from _convert_entry(f"{key}.{inner}", Given(value, entry.place))
        else:
            yield from _convert_entry(key, entry)


def _convert_entry(key: str, entry: Given) -> Iterator[tuple[str, Given]]:
    """A key with its value as a file would have it; a quantized base model becomes a flag."""
    if is_made(entry.value, ("BitsAndBytesConfig", "QuantizationConfig")) or key.endswith("quantization_config"):
        yield from _convert_quantization(entry)
    elif is_made(entry.value, "Config"):
        yield from ((f"{key}.{inner}", inner_entry) for inner, inner_entry in entry.value.entries.items())
    elif isinstance(entry.value, dict | list):
        yield key, Given(str(simplify(entry.value)), entry.place)
    else:
        yield key, entry


def _convert_quantization(entry: Given) -> Iterator[tuple[str, Given]]:
    """Keys of a base model's quantization: bitsandbytes by its flags, any other by its class."""
    config = entry.value
    if is_made(config, "BitsAndBytesConfig"):
        yield from ((key, config.entries[key]) for key in _BITS if key in config.entries)
    elif isinstance(config, Made):
        yield "quantization_config", Given(config.name, entry.place)
    elif isinstance(config, str) and strip_marks(config).partition("(")[0] not in _BY_FLAGS:
        yield _BITS[0], entry


def _convert_model(entry: Given, depth: int = 0) -> Iterator[tuple[str, Given]]:
    """Keys of a model that is a name or a call of `from_pretrained`."""
    model = entry.value
    if isinstance(model, str) and (is_known(model) or strip_marks(model).rpartition(".")[2] not in _MODEL_KEYS):
        yield "model_name_or_path", entry
    if not is_made(model, "from_pretrained") or depth > MAX_NESTED:
        return
    if not {"dtype", "torch_dtype"} & model.entries.keys():  # transformers 5: `if dtype is None: dtype = "auto"`
        yield "model_init_kwargs.dtype", Given("auto", entry.place)
    for key, argument in model.entries.items():
        if key in ("path", "model_name", "pretrained_model_name_or_path"):
            yield from _convert_model(argument, depth + 1)
        elif key in ("dtype", "torch_dtype"):
            yield "model_init_kwargs.dtype", argument
        elif key == "quantization_config":
            yield from _convert_quantization(argument)
        elif key == "peft_config":
            yield from _convert_adapters(argument.value, argument.place)
        elif key in _BITS:
            yield key, argument


_MODEL_KEYS = ("model_name_or_path",)
"""Attributes that ModelConfig's flags set."""


def _convert_adapters(value: Any, place: str) -> Iterator[tuple[str, Given]]:
    if value is None:
        yield "use_peft", Given(False, place)
    elif is_made(value, "LoraConfig"):
        yield "use_peft", Given(True, place)
        usual = {"lora_dropout": Given(0.0, place)}  # PEFT's default; ModelConfig's is 0.05
        for key, entry in (usual | value.entries).items():
            yield from _convert_entry(_LORA.get(key, key if key.startswith("lora_") else f"lora.{key}"), entry)
        modules = value.get("target_modules")
        if isinstance(modules, list) and (whole := [name for name in modules if name in WHOLE_MODULES]):
            yield "lora.modules_to_save", Given(str(whole), place)
    elif not (isinstance(value, str) and strip_marks(value).partition("(")[0] in _BY_FLAGS):
        yield "use_peft", Given(value, place)
