"""What a Python script tells a trainer of TRL: the configuration, the model and the adapters that it is made with.

In: a script with calls such as `GRPOTrainer(model=..., args=GRPOConfig(...))`. Out: what each key is given, with its
line. Left out: what a script does before that (statements.py).
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.documents import flat
from rlplan.foreign.python.statements import Script
from rlplan.foreign.python.text import parsed
from rlplan.foreign.python.unsloth import LOADED, SHARED, keys_of
from rlplan.foreign.python.values import MAX_NESTED, MAX_WORK, Made, is_made, name_of
from rlplan.foreign.settings import Given
from rlplan.foreign.table import given_trainers, load_table
from rlplan.foreign.unknown import is_known, shown

_LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}
"""Arguments of LoraConfig that ModelConfig's flags name otherwise."""
_ONLINE = "GRPO"
"""Of TRL's trainers the one whose policy generates."""
_BITS = ("load_in_4bit", "load_in_8bit")
"""Of ModelConfig and of BitsAndBytesConfig."""
_BY_FLAGS = ("get_peft_config", "get_quantization_config")
"""Functions of TRL that take from ModelConfig what its flags say."""


@dataclass(frozen=True)
class PythonScript:
    """What a script says. makes_grpo: whether a trainer of GRPO is among it. has_trainer: whether any is, or the
    configuration of one. has_own_flags: whether its flags are its own, and none of the trainer's. used: names given
    from outside that it has.
    """

    given: dict[str, Given]
    notes: tuple[str, ...]
    makes_grpo: bool
    has_trainer: bool
    has_own_flags: bool
    used: frozenset[str]


def read_python(path: Path, outside: Mapping[str, str], flags: Mapping[str, str] | None = None) -> PythonScript:
    """The keys that a script gives. outside: names of it, or options of its own, that `--set` says. flags: those of the
    command line that starts it; None where the Python file itself was given. Raises: SpecError where it is not Python;
    without flags, also where `--set` names nothing of it (names of a shell script are checked by its reader).
    """
    tree = parsed(path)
    script = Script(tree, path.name, {**(flags or {}), **outside})
    if script.spent > MAX_WORK and not script.followed_to and _names_a_trainer(tree):
        raise SpecError(
            "the script is too long to be followed",
            where=str(path),
            rule=f"at most {MAX_WORK:,} expressions and parts of values, loops counted as often as they run",
            way_out="give the YAML file or the command that starts the training, or the part that makes the trainer",
        )
    unused = [name for name in outside if name not in script.used]
    trainer, config, notes = _chosen(script)
    if trainer is None and config is None:
        _check_trainer(script, path)
    notes += _not_counted(trainer) if trainer else ()
    if script.spent > MAX_WORK:
        notes.append(
            f"{path.name} is very long; what it does behind the trainer at line {script.followed_to} is not read"
        )
    found = dict(_told(script, trainer, config))
    if flags is None:
        _check_used(path, unused, {*script.names, *found})
    makes_grpo = trainer is not None and trainer.name == f"{_ONLINE}Trainer"
    has_trainer = trainer is not None or config is not None
    used = frozenset(script.used)
    return PythonScript(found, (*script.notes, *notes), makes_grpo, has_trainer, script.has_own_flags, used)


def _names_a_trainer(tree: ast.Module) -> bool:
    """Whether a script's text has a call of a trainer, or of a configuration of one."""
    names = {name_of(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    ends = ("Trainer", "Config")
    return any(
        name.endswith(ends) and _is_of_trl(name.removesuffix("Trainer").removesuffix("Config")) for name in names
    )


def _is_of_trl(kind: str) -> bool:
    return kind == _ONLINE or kind.lower() in given_trainers()


_SETTINGS = ("Config", "TrainingArguments")


def _check_trainer(script: Script, path: Path) -> None:
    """Raises: SpecError where the script makes a trainer that there is no table for."""
    others = [one for one in script.made if one.name.endswith("Trainer")]
    if others:
        raise SpecError(
            f"{others[-1].name} is not read",
            where=f"{path.name}:{others[-1].line}",
            rule=f"a trainer of TRL that is: {_ONLINE}Trainer, SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer",
            way_out="describe the job in rlplan's own words: rlplan init",
        )


def _not_counted(trainer: Made) -> Iterator[str]:
    """Notes on models beside the policy that TRL loads whole."""
    rewards = trainer.of("reward_funcs")
    named = [one for one in (rewards if isinstance(rewards, list) else [rewards]) if _is_model(one)]
    if named:
        yield f"{len(named)} reward model{'s' * (len(named) > 1)} of reward_funcs, whole on each GPU, not counted"
    model = trainer.of("model")
    if is_made(model, LOADED) and model.of("fast_inference") is True and trainer.name == f"{_ONLINE}Trainer":
        yield SHARED
    if _is_model(trainer.of("ref_model")):
        yield "the reference model is counted in the policy's shape"


def _is_model(value: Any) -> bool:
    is_name = isinstance(value, str) and is_known(value) and "/" in value
    return is_name or is_made(value, "from_pretrained")


def _check_used(path: Path, unused: list[str], names: set[str]) -> None:
    """Raises: SpecError where `--set` names nothing of the script."""
    keys = {key for stack in ("trl", "trl_given") for key in load_table(stack).keys}
    for name in unused:
        if name not in keys:
            raise SpecError(
                f"--set {name} names nothing of {path.name}",
                where="command line: --set",
                rule="a variable of the script, an option of its argument parser, or a key of TRL."
                + did_you_mean(name, names | keys),
                way_out="leave it out, or correct it",
            )


def _chosen(script: Script) -> tuple[Made | None, Made | None, list[str]]:
    """The trainer and the configuration that are read: the last trainer's, GRPO's before others; a note on others."""
    trainers, configs = (list(_of_trl(script, end)) for end in ("Trainer", "Config"))
    chosen = [one for one in trainers if one.name == f"{_ONLINE}Trainer"] or trainers
    trainer, notes = (chosen[-1] if chosen else None), []
    kind = trainer.name.removesuffix("Trainer") if trainer else ""
    config = trainer.of("args") if trainer else None
    if trainer and config is not None and not is_made(config, _SETTINGS):
        said = shown(config) if isinstance(config, str) else config.name if isinstance(config, Made) else str(config)
        notes.append(f"what the trainer's configuration is, {said}, is not known before it runs")
    if not is_made(config, _SETTINGS):
        of_kind = [one for one in configs if not kind or one.name == f"{kind}Config"]
        config = next(
            (one for one in reversed(of_kind) if one.name == f"{_ONLINE}Config"), of_kind[-1] if of_kind else None
        )
    names = sorted({f"{one.name}:{one.line}" for one in trainers})
    if trainer and len(names) > 1:
        notes.append(f"{script.file} makes {len(names)} trainers; {trainer.name} at line {trainer.line} is read")
    return trainer, config, notes


def _of_trl(script: Script, end: str) -> Iterator[Made]:
    """Trainers, or configurations, that there is a table for."""
    for one in script.made:
        if is_made(one, end) and _is_of_trl(one.name.removesuffix(end)):
            yield one


def _told(script: Script, trainer: Made | None, config: Made | None) -> Iterator[tuple[str, Given]]:
    """Keys and what they are given, the weaker first."""
    first = trainer or config
    if first is not None:
        kind = first.name.removesuffix("Trainer").removesuffix("Config").lower()
        if kind in given_trainers():
            yield "trainer", Given(kind, f"{script.file}:{first.line}")
    for made in script.made:
        if made.name == "ModelConfig":
            yield from _flat(made)
    if config is not None:
        yield from _flat(config)
    if trainer is None:
        for lora in [one for one in script.made if one.name == "LoraConfig"][-1:]:
            yield from _adapters(lora, f"{script.file}:{lora.line}")
        return
    yield from _loaded(trainer)
    if "max_seq_length" in trainer.given:  # of earlier versions
        yield "max_seq_length", trainer.given["max_seq_length"]
    if "peft_config" in trainer.given:
        adapters = trainer.given["peft_config"]
        yield from _adapters(adapters.value, adapters.place)


def _loaded(trainer: Made) -> Iterator[tuple[str, Given]]:
    """What the trainer's model is loaded with, by the trainer or before it."""
    model = trainer.given.get("model")
    if model is None:
        return
    yield from _model(model)
    if is_made(model.value, LOADED):
        yield from keys_of(model.value, is_online=trainer.name == f"{_ONLINE}Trainer")
    if "quantization_config" in trainer.given and not is_made(model.value, "from_pretrained"):
        yield from _quantisation(trainer.given["quantization_config"])


def _flat(made: Made) -> Iterator[tuple[str, Given]]:
    for key, one in made.given.items():
        if isinstance(one.value, dict):
            for inner, value in flat(one.value).items():
                yield from _single(f"{key}.{inner}", Given(value, one.place))
        else:
            yield from _single(key, one)


def _single(key: str, one: Given) -> Iterator[tuple[str, Given]]:
    """A key with a value as files have it; a quantised base by the flag that stands for it."""
    if is_made(one.value, ("BitsAndBytesConfig", "QuantizationConfig")) or key.endswith("quantization_config"):
        yield from _quantisation(one)
    elif is_made(one.value, "Config"):
        yield from ((f"{key}.{inner}", given) for inner, given in one.value.given.items())
    elif isinstance(one.value, dict | list):
        yield key, Given(str(one.value), one.place)
    else:
        yield key, one


def _quantisation(given: Given) -> Iterator[tuple[str, Given]]:
    """What a base is packed in: bitsandbytes by its flags, another by its class, and what is not known as such."""
    config = given.value
    if is_made(config, "BitsAndBytesConfig"):
        yield from ((key, config.given[key]) for key in _BITS if key in config.given)
    elif isinstance(config, Made):
        yield "quantization_config", Given(config.name, given.place)
    elif isinstance(config, str) and shown(config).partition("(")[0] not in _BY_FLAGS:
        yield _BITS[0], given


def _model(given: Given, depth: int = 0) -> Iterator[tuple[str, Given]]:
    """A name, or what `from_pretrained` was called with."""
    model = given.value
    if isinstance(model, str) and (is_known(model) or shown(model).rpartition(".")[2] not in _MODEL_KEYS):
        yield "model_name_or_path", given
    if not is_made(model, "from_pretrained") or depth > MAX_NESTED:
        return
    if not {"dtype", "torch_dtype"} & model.given.keys():  # transformers 5: `if dtype is None: dtype = "auto"`
        yield "model_init_kwargs.dtype", Given("auto", given.place)
    for key, one in model.given.items():
        if key in ("path", "model_name", "pretrained_model_name_or_path"):
            yield from _model(one, depth + 1)
        elif key in ("dtype", "torch_dtype"):
            yield "model_init_kwargs.dtype", one
        elif key == "quantization_config":
            yield from _quantisation(one)
        elif key == "peft_config":
            yield from _adapters(one.value, one.place)
        elif key in _BITS:
            yield key, one


_MODEL_KEYS = ("model_name_or_path",)
"""Attributes that flags of ModelConfig give."""


def _adapters(value: Any, place: str) -> Iterator[tuple[str, Given]]:
    if value is None:
        yield "use_peft", Given(False, place)
    elif is_made(value, "LoraConfig"):
        yield "use_peft", Given(True, place)
        usual = {"lora_dropout": Given(0.0, place)}  # PEFT's; ModelConfig has another
        for key, one in (usual | value.given).items():
            yield from _single(_LORA.get(key, key if key.startswith("lora_") else f"lora.{key}"), one)
    elif not (isinstance(value, str) and shown(value).partition("(")[0] in _BY_FLAGS):
        yield "use_peft", Given(value, place)
