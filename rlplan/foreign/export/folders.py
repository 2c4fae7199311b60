"""The folder with which another stack is started: files in its own syntax, and a README with the command and the notes.

In: a Plan, the name of a stack. Out: files that the stack's own parser accepts (tests/foreign/export/test_upstream.py).
Left out: what the settings are (backwards.py).
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.export.backwards import Export, exported
from rlplan.foreign.table import load_table, table_name
from rlplan.planner.plan import Plan
from rlplan.spec.base import writing
from rlplan.spec.files.job_file import changed
from rlplan.spec.job import JobSpec


class _Form(NamedTuple):
    """How a stack is started. files: their texts by name, of the settings; command: in that folder."""

    files: Callable[[Export], dict[str, str]]
    command: str
    lacks: str = "with the data and rewards of your own in it"


def _script(export: Export, before: str = "", shape: str = "", program: str = "") -> dict[str, str]:
    """The command. before: lines above it. shape: words behind the program that say a model's shape. program: another
    than the table's first.
    """
    table, settings = export.table, export.settings
    entry = program or table.entries[0]
    words = [f"python3 -m {entry}" if "." in entry.removesuffix(".py") else "python3 train.py"]
    preset = next((name for name, values in table.presets.items() if values.items() <= settings.items()), None)
    if preset is not None and table.syntax == "overrides":
        words.append(f"--config-name={'one_step_off_' * bool(program)}{preset}")
    elif preset is not None:  # a program of its own, which has no flags for these
        words = [f"python3 {preset}"]
        settings = {key: value for key, value in settings.items() if key not in table.presets[preset]}
    words[0] += shape
    for key, value in settings.items():
        quoted = shlex.quote(str(value))
        if isinstance(value, list) and table.syntax == "flags":
            quoted = " ".join(shlex.quote(str(each)) for each in value)
        if table.syntax == "overrides":
            is_appended = any(fnmatchcase(key, pattern) for pattern in table.appended)
            words.append(f"{'++' * is_appended}{key}={quoted}")
        elif key.endswith(".0"):  # a flag with two values
            words.append(f"--{key[:-2]} {quoted} {shlex.quote(str(settings[key[:-1] + '1']))}")
        elif key.endswith(".1"):
            continue
        elif value is not False:
            words.append(
                f"--{key.replace('_', '-') if table.title == 'slime' else key}" + f" {quoted}" * (value is not True)
            )
    return {"train.sh": f"#!/bin/bash\nset -x\n{before}" + " \\\n    ".join(words) + ' "$@"\n'}


def _verl_ahead(export: Export) -> dict[str, str]:
    """The trainer that generates one step ahead, whose configuration looks for verl's own below verl's folder."""
    before = 'cd "${VERL:?the folder of verl}" || exit\n'
    return _script(export, before, program="verl.experimental.one_step_off_policy.main_ppo")


_REST_OF_A_NAME = ("", "base", "chat", "instruct", "it")
"""How models of one shape differ in their names."""


def _slime(export: Export) -> dict[str, str]:
    """In slime's folder, with the file of the model's shape, which Megatron's flags ask for."""
    name = _shape_file(str(export.settings["hf_checkpoint"]), export.table.model_files)
    file = (
        f"scripts/models/{name}.sh" if name else '"${MODEL_FILE:?one as in scripts/models, of the shape of the model}"'
    )
    before = f'cd "${{SLIME:?the folder of slime}}" || exit\nsource {file}\n'
    return _script(export, before, ' "${MODEL_ARGS[@]}"')


def _shape_file(model: str, files: Sequence[str]) -> str:
    """The file of a model's shape, by its name; empty where none is certain.

    >>> files = ("qwen3-4B", "qwen3-4B-Instruct-2507", "llama3.1-8B-Instruct")
    >>> [_shape_file(name, files) for name in ("Qwen/Qwen3-4B-Base", "Qwen/Qwen3-4B-Instruct-2507")]
    ['qwen3-4B', 'qwen3-4B-Instruct-2507']
    >>> _shape_file("meta-llama/Llama-3.1-8B-Instruct", files), _shape_file("Qwen/Qwen3-4B-Thinking-2507", files)
    ('llama3.1-8B-Instruct', '')
    """

    def plain(name: str) -> str:
        return name.lower().replace("-", "")

    name = plain(model.rstrip("/").rpartition("/")[2])
    fitting = [file for file in files if name.startswith(plain(file)) and name[len(plain(file)) :] in _REST_OF_A_NAME]
    return max(fitting, key=len, default="")


def _yaml(settings: dict[str, Any]) -> str:
    return "".join(f"{key}: {json.dumps(one)}\n" for key, one in nested(settings).items())


def _nemo_rl(export: Export) -> dict[str, str]:
    return {"train.yaml": "defaults: grpo_math_1B.yaml\n" + _yaml(export.settings)}


_LAUNCHER, _SERVER = "accelerate.", "vllm_serve."
"""Before TRL's keys stand those of the program that starts its processes, and of the engine's server."""


def _trl(export: Export) -> dict[str, str]:
    table, settings = export.table, export.settings
    told = {key: settings.get(key, table.defaults[key]) for key in (f"{_LAUNCHER}distributed_type",)}
    launcher = {key: one for key, one in (told | settings).items() if key.startswith(_LAUNCHER)}
    server = {key.removeprefix(_SERVER): one for key, one in settings.items() if key.startswith(_SERVER)}
    program = {key: one for key, one in settings.items() if key not in launcher and not key.startswith(_SERVER)}
    trainer = program.pop("trainer", None) or table.programs[0]
    command = f"trl {trainer} --config train.yaml --accelerate_config accelerate.yaml"
    return {
        "train.yaml": _yaml(program),
        "accelerate.yaml": _yaml({key.removeprefix(_LAUNCHER): one for key, one in launcher.items()}),
        "train.sh": f'#!/bin/bash\nset -x\n{_beside_server(export, server) if server else ""}{command} "$@"\n',
    }


def _beside_server(export: Export, server: dict[str, Any]) -> str:
    """Lines that start `trl vllm-serve` on the GPUs of the same host that are numbered after those that train."""
    settings = export.settings
    num_training = settings["accelerate.num_processes"]
    said = {"model": settings["model_name_or_path"], **server, "max_model_len": export.longest}
    num_engines, tp = server.get("data_parallel_size", 1), server.get("tensor_parallel_size", 1)
    of_all = [str(gpu) for gpu in range(num_training + num_engines * tp)]
    words = " ".join(f"--{_dashed(key)} {shlex.quote(str(one))}" for key, one in said.items())
    return (
        f"CUDA_VISIBLE_DEVICES={','.join(of_all[num_training:])} trl vllm-serve {words} &\n"
        f"trap 'kill %1' EXIT\nexport CUDA_VISIBLE_DEVICES={','.join(of_all[:num_training])}\n"
    )


def _vllm(export: Export) -> dict[str, str]:
    return {"vllm.yaml": _yaml({_dashed(key): one for key, one in export.settings.items()})}


def _dashed(key: str) -> str:
    first, dot, rest = key.partition(".")
    return first.replace("_", "-") + dot + rest


def _deepspeed(export: Export) -> dict[str, str]:
    return {"deepspeed.json": json.dumps(nested(export.settings), indent=1) + "\n"}


_FORMS = {
    "verl": _Form(_script, "bash train.sh"),
    "openrlhf": _Form(_script, "bash train.sh"),
    "slime": _Form(
        _slime,
        "SLIME=FOLDER bash train.sh",
        "FOLDER being slime's, with the data and rewards of your own in it and Megatron's checkpoints (--load, and "
        "--ref-load where there is a KL)",
    ),
    "nemo_rl": _Form(
        _nemo_rl,
        'cp train.yaml "$NEMO_RL/examples/configs/planned.yaml" && cd "$NEMO_RL" && '
        "python examples/run_grpo.py --config examples/configs/planned.yaml",
        "NEMO_RL being the folder of NeMo-RL, with the data and rewards of your own in the file",
    ),
    "trl": _Form(_trl, "bash train.sh --dataset_name DATASET --reward_funcs REWARD"),
    "vllm": _Form(_vllm, "vllm serve --config vllm.yaml", "for the engine alone"),
    "deepspeed": _Form(_deepspeed, "deepspeed train.py --deepspeed_config deepspeed.json", "train.py being your own"),
}
_TRL_GIVEN = _Form(_trl, "bash train.sh --dataset_name DATASET", "with the data of your own in its place")
"""The entry points of TRL's trainers that learn from given answers."""
_VERL_AHEAD = _Form(
    _verl_ahead, "VERL=FOLDER bash train.sh", "FOLDER being verl's, with the data and rewards of your own in it"
)
"""The entry point of verl's trainer that generates one step ahead."""
TARGETS = tuple(_FORMS)
"""Stacks that a plan can be written for in their own keys."""


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as mappings, numbered ones as lists.

    >>> nested({"a.b": 1, "a.c.0": 2, "a.c.1": 3})
    {'a': {'b': 1, 'c': [2, 3]}}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *above, last = key.split(".")
        inner = found
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return {key: _listed(value) for key, value in found.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    parts = {key: _listed(one) for key, one in value.items()}
    return list(parts.values()) if parts and all(key.isdigit() for key in parts) else parts


def for_stack(job: JobSpec, stack: str) -> JobSpec:
    """The job for a stack's framework, where it leaves open which framework runs it."""
    table = load_table(stack)
    return changed(job, [f"framework={table.framework}"]) if table.trains and job.framework == "auto" else job


def check_stack(target: str, others: Sequence[str] = ()) -> str:
    """The name of a stack's table. others: targets that are not written here. Raises: SpecError."""
    known = (*TARGETS, *others)
    if table_name(target) not in TARGETS:
        raise SpecError(
            f"'{target}' is no stack that a plan can be written for",
            where="command line: --target",
            rule=f"one of {', '.join(known)}.{did_you_mean(table_name(target), known)}",
            way_out="leave it out for rlplan's own bundle",
        )
    return table_name(target)


class Rendered(NamedTuple):
    """An export and the files that are written for it. texts: by the name of a file."""

    export: Export
    texts: dict[str, str]


def render_export(plan: Plan, target: str) -> Rendered:
    """The texts of the files that start a stack, and of a README. Raises: EmitError, SpecError."""
    stack = check_stack(target)
    export = exported(plan, stack)
    form = _TRL_GIVEN if "trainer" in export.settings else _FORMS[stack]
    form = _VERL_AHEAD if export.settings.get("actor_rollout_ref.hybrid_engine") is False else form
    return Rendered(export, {**form.files(export), "README.md": _readme(plan, export, form)})


def write_export(plan: Plan, target: str, folder: Path) -> list[Path]:
    """The folder with the files that start a stack, and a README. Raises: EmitError, SpecError."""
    return write_texts(render_export(plan, target).texts, folder)


def write_texts(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """The files of a rendered export in a folder. Raises: SpecError where it cannot be written."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _readme(plan: Plan, export: Export, form: _Form) -> str:
    table = export.table
    text = (
        f"# {plan.job.name} for {table.title} {table.version}\n\nMade by rlplan from a plan for {plan.devices}. "
        f"Start it with `{form.command}`, {form.lacks}.\n\n"
        "Everything that is not named there has the stack's default.\n"
    )
    if watts := plan.job.hardware.power_limit:
        text += f"\nThe plan is for GPUs limited to {watts} W, each with `nvidia-smi -pl {watts}`.\n"
    if export.unsaid:
        text += f"\nWhat the plan says beside, and {table.title} has no key for:\n\n"
        text += "".join(f"- `{key}={json.dumps(value)}`\n" for key, value in export.unsaid.items())
    return text
