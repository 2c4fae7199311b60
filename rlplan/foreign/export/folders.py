"""The folder that starts a plan in another stack: files in its own syntax, and a README with the command and the notes.

In: a Plan, the name of a stack. Out: files that the stack's own parser accepts (tests/foreign/export/test_upstream.py).
Left out: the settings (backwards.py).
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.foreign.export.backwards import Export, export_plan
from rlplan.foreign.table import get_table_name, load_table
from rlplan.planner.plan import Plan
from rlplan.spec.base import explain_write_errors
from rlplan.spec.files.job_file import override_job
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.job import JobSpec


def _write_script(export: Export, before: str = "", shape: str = "", program: str = "") -> dict[str, str]:
    """The script with the command.

    before: lines above the command. shape: words after the program for a model's shape. program: in place of the
    table's first entry.
    """
    table, settings = export.table, export.settings
    entry = program or table.entries[0]
    words = [f"python3 -m {entry}" if "." in entry.removesuffix(".py") else "python3 train.py"]
    preset = next((name for name, values in table.presets.items() if values.items() <= settings.items()), None)
    if preset is not None and table.syntax == "overrides":
        words.append(f"--config-name={'one_step_off_' * bool(program)}{preset}")
    elif preset is not None:  # the preset is a program, which has no flags for its own settings
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


def _write_verl_ahead(export: Export) -> dict[str, str]:
    """The script of verl's one-step-off trainer, whose configuration searches below verl's folder."""
    before = 'cd "${VERL:?the folder of verl}" || exit\n'
    return _write_script(export, before, program="verl.experimental.one_step_off_policy.main_ppo")


_REST_OF_A_NAME = ("", "base", "chat", "instruct", "it")
"""Suffixes in the names of models that have the same shape."""


def _write_slime(export: Export) -> dict[str, str]:
    """The script for slime, which sources the file of the model's shape: Megatron needs it as flags."""
    name = _find_shape_file(str(export.settings["hf_checkpoint"]), export.table.model_files)
    file = (
        f"scripts/models/{name}.sh" if name else '"${MODEL_FILE:?one as in scripts/models, of the shape of the model}"'
    )
    before = f'cd "${{SLIME:?the folder of slime}}" || exit\nsource {file}\n'
    return _write_script(export, before, ' "${MODEL_ARGS[@]}"')


def _find_shape_file(model: str, files: Sequence[str]) -> str:
    """The file of a model's shape, by the model's name; empty where no file is certain.

    >>> files = ("qwen3-4B", "qwen3-4B-Instruct-2507", "llama3.1-8B-Instruct")
    >>> [_find_shape_file(name, files) for name in ("Qwen/Qwen3-4B-Base", "Qwen/Qwen3-4B-Instruct-2507")]
    ['qwen3-4B', 'qwen3-4B-Instruct-2507']
    >>> [_find_shape_file(name, files) for name in ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-4B-Thinking-2507")]
    ['llama3.1-8B-Instruct', '']
    """

    def plain(name: str) -> str:
        return name.lower().replace("-", "")

    name = plain(model.rstrip("/").rpartition("/")[2])
    fitting = [file for file in files if name.startswith(plain(file)) and name[len(plain(file)) :] in _REST_OF_A_NAME]
    return max(fitting, key=len, default="")


def _dump_yaml(settings: dict[str, Any]) -> str:
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in nest(settings).items())


def _write_nemo_rl(export: Export) -> dict[str, str]:
    return {"train.yaml": "defaults: grpo_math_1B.yaml\n" + _dump_yaml(export.settings)}


_LAUNCHER, _SERVER = "accelerate.", "vllm_serve."
"""Prefixes of keys that belong to the launcher and to the engine's server, not to TRL itself."""


def _write_trl(export: Export) -> dict[str, str]:
    table, settings = export.table, export.settings
    usual = {key: settings.get(key, table.defaults[key]) for key in (f"{_LAUNCHER}distributed_type",)}
    launcher = {key: value for key, value in (usual | settings).items() if key.startswith(_LAUNCHER)}
    server = {key.removeprefix(_SERVER): value for key, value in settings.items() if key.startswith(_SERVER)}
    program = {key: value for key, value in settings.items() if key not in launcher and not key.startswith(_SERVER)}
    trainer = program.pop("trainer", None) or table.programs[0]
    command = f"trl {trainer} --config train.yaml --accelerate_config accelerate.yaml"
    return {
        "train.yaml": _dump_yaml(program),
        "accelerate.yaml": _dump_yaml({key.removeprefix(_LAUNCHER): value for key, value in launcher.items()}),
        "train.sh": f'#!/bin/bash\nset -x\n{_start_server(export, server) if server else ""}{command} "$@"\n',
    }


def _start_server(export: Export, server: dict[str, Any]) -> str:
    """Lines that start `trl vllm-serve` on the GPUs after the training GPUs of the same host."""
    settings = export.settings
    num_training = settings["accelerate.num_processes"]
    arguments = {"model": settings["model_name_or_path"], **server, "max_model_len": export.longest}
    num_engines, tp = server.get("data_parallel_size", 1), server.get("tensor_parallel_size", 1)
    gpus = [str(gpu) for gpu in range(num_training + num_engines * tp)]
    words = " ".join(f"--{_dash(key)} {shlex.quote(str(value))}" for key, value in arguments.items())
    return (
        f"CUDA_VISIBLE_DEVICES={','.join(gpus[num_training:])} trl vllm-serve {words} &\n"
        f"trap 'kill %1' EXIT\nexport CUDA_VISIBLE_DEVICES={','.join(gpus[:num_training])}\n"
    )


def _write_vllm(export: Export) -> dict[str, str]:
    return {"vllm.yaml": _dump_yaml({_dash(key): value for key, value in export.settings.items()})}


def _dash(key: str) -> str:
    first, dot, rest = key.partition(".")
    return first.replace("_", "-") + dot + rest


def _write_deepspeed(export: Export) -> dict[str, str]:
    return {"deepspeed.json": json.dumps(nest(export.settings), indent=1) + "\n"}


_WRITERS: dict[str, Callable[[Export], dict[str, str]]] = {
    "verl": _write_script,
    "openrlhf": _write_script,
    "slime": _write_slime,
    "nemo_rl": _write_nemo_rl,
    "trl": _write_trl,
    "vllm": _write_vllm,
    "deepspeed": _write_deepspeed,
    "trl_given": _write_trl,
    "verl_ahead": _write_verl_ahead,
}
"""Writers of the texts by file name, for each entry of starts.yaml."""
TARGETS = tuple(name for name in _WRITERS if name not in ("trl_given", "verl_ahead"))
"""Stacks that a plan can be exported to."""


@cache
def _load_starts() -> dict[str, dict[str, str]]:
    """How the files of each entry are started."""
    starts: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_name("starts.yaml"), "the commands of exports")
    return starts


def nest(settings: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as mappings, numbered ones as lists.

    >>> nest({"a.b": 1, "a.c.0": 2, "a.c.1": 3})
    {'a': {'b': 1, 'c': [2, 3]}}
    """
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *above, last = key.split(".")
        inner = tree
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return {key: _convert_lists(value) for key, value in tree.items()}


def _convert_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    parts = {key: _convert_lists(part) for key, part in value.items()}
    return list(parts.values()) if parts and all(key.isdigit() for key in parts) else parts


def set_framework(job: JobSpec, stack: str) -> JobSpec:
    """The job with the stack's framework, where its own is `auto`."""
    table = load_table(stack)
    return override_job(job, [f"framework={table.framework}"]) if table.trains and job.framework == "auto" else job


def check_stack(target: str, others: Sequence[str] = ()) -> str:
    """The name of a stack's table. others: further targets for the message. Raises: SpecError."""
    known = (*TARGETS, *others)
    if get_table_name(target) not in TARGETS:
        raise SpecError(
            f"'{target}' is no stack that a plan can be exported to",
            where="command line: --target",
            rule=f"one of {', '.join(known)}.{did_you_mean(get_table_name(target), known)}",
            way_out="leave it out for rlplan's own bundle",
        )
    return get_table_name(target)


def write_export(plan: Plan, target: str, folder: Path) -> list[Path]:
    """Write the files that start a stack, and their README, into a folder.

    Raises: EmitError; SpecError, also where the folder cannot be written.
    """
    stack = check_stack(target)
    export = export_plan(plan, stack)
    entry = "trl_given" if "trainer" in export.settings else stack
    entry = "verl_ahead" if export.settings.get("actor_rollout_ref.hybrid_engine") is False else entry
    texts = {**_WRITERS[entry](export), "README.md": _write_readme(plan, export, _load_starts()[entry])}
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _write_readme(plan: Plan, export: Export, start: Mapping[str, str]) -> str:
    table = export.table
    text = (
        f"# {plan.job.name} for {table.title} {table.version}\n\nMade by rlplan from a plan for {plan.devices}. "
        f"Start it with `{start['command']}`, {start['lacks']}.\n\n"
        "Every other setting has the stack's default.\n"
    )
    if watts := plan.job.hardware.power_limit:
        text += f"\nThe plan is for GPUs limited to {watts} W, each with `nvidia-smi -pl {watts}`.\n"
    if export.unsaid:
        text += f"\nSettings of the plan that {table.title} has no key for:\n\n"
        text += "".join(f"- `{key}={json.dumps(value)}`\n" for key, value in export.unsaid.items())
    return text
