"""Adapters in PEFT's layout that a job starts from or holds beside the trained one: what their files say.

In: a folder with `adapter_config.json` and `adapter_model.safetensors`. Out: a LoraSpec; parameters. Left out: values.
Source: PEFT 0.21, `LoraConfig`, `save_pretrained`. What changes the product B A otherwise than by alpha / rank is
refused by its key.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rlplan.errors import SpecError
from rlplan.spec.base import read_json, shorten
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.models.adapters import ALL_LINEAR, lora_parameters
from rlplan.spec.models.headers import read_header
from rlplan.spec.parts.training import LoraSpec

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""Of every name in PEFT's files."""
MAX_RANK = 65536
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
}
"""Keys that make another adapter of the same tensors, or more tensors, and the values with which they do not."""


def read_adapter(folder: Path, *, where: str) -> LoraSpec:
    """What `adapter_config.json` says. Raises: SpecError for what the runtime does not have."""
    file = folder / CONFIG_FILE
    data = read_json(file, f"the adapter of {where}")
    if not isinstance(data, dict) or data.get("peft_type") != "LORA":
        _refuse(where, file, "peft_type", data.get("peft_type") if isinstance(data, dict) else data, "LORA")
    for key, plain in _PLAIN.items():
        if data.get(key) not in plain:
            _refuse(where, file, key, data[key], "left out: the runtime has plain adapters, scaled by alpha / rank")
    rank, alpha, targets = data.get("r"), data.get("lora_alpha"), data.get("target_modules")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        _refuse(where, file, "r", rank, f"a whole number from 1 to {MAX_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e9:
        _refuse(where, file, "lora_alpha", alpha, "a number above 0")
    if targets == ALL_LINEAR:
        return LoraSpec(rank=rank, alpha=alpha, path=str(folder))
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        _refuse(where, file, "target_modules", targets, f"{ALL_LINEAR}, or a list of names of linear layers")
    return LoraSpec(rank=rank, alpha=alpha, target_modules=tuple(sorted(set(targets))), path=str(folder))


def check_same_adapter(model: ModelSpec, trained: LoraSpec, stored: LoraSpec) -> None:
    """Raises: SpecError where the adapter that training starts from is not the one that the job trains."""
    for key in ("rank", "alpha"):
        mine, theirs = getattr(trained, key), getattr(stored, key)
        if mine != theirs:
            way_out = f"training.lora.{key}={theirs:g}"
            raise _another(stored, f"{key} {theirs:g}, training.lora.{key} is {mine:g}", way_out)
    mine_too = lora_parameters(model, trained.rank, trained.target_modules)
    if mine_too != lora_parameters(model, stored.rank, stored.target_modules):
        names = ", ".join(stored.target_modules) if isinstance(stored.target_modules, tuple) else stored.target_modules
        way_out = f"'training.lora.target_modules=[{names}]'"
        raise _another(stored, f"other layers than training.lora.target_modules: {names}", way_out)


def held_beside(model: ModelSpec, adapters: Mapping[str, LoraSpec]) -> tuple[Parameter, ...]:
    """The parameters of adapters beside a model's linear layers. adapters: by name, which is in theirs.

    Raises: SpecError.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> one = LoraSpec(rank=8, target_modules=("q_proj",))
    >>> held_beside(find_model("Qwen/Qwen3-0.6B"), {"reference": one})[0].name
    'model.layers.0.self_attn.q_proj.lora_A.reference.weight'
    """
    return tuple(
        replace(tensor, name=tensor.name.removesuffix("weight") + f"{name}.weight")
        for name, adapter in adapters.items()
        for tensor in lora_parameters(model, adapter.rank, adapter.target_modules)
    )


def check_tensors(adapter: LoraSpec, model: ModelSpec, *, where: str) -> None:
    """The weights' file has an adapter's tensors in their shapes. Raises: SpecError."""
    file = Path(str(adapter.path)) / WEIGHTS_FILE
    stored = {tensor.name: tensor.shape for tensor in read_header(file)}
    wanted = lora_parameters(model, adapter.rank, adapter.target_modules)
    for name, shape in {PEFT_PREFIX + each.name: each.shape for each in wanted}.items():
        if (found := stored.pop(name, None)) != shape:
            has = f"has {name} of {found}" if found else f"lacks {name}"
            _refuse_tensors(where, file, f"{has}, {shape} is needed")
    if stored:
        _refuse_tensors(where, file, f"has {shorten(next(iter(stored)))}, which stands beside no layer of the policy")


def _refuse_tensors(where: str, file: Path, what: str) -> NoReturn:
    rule = "exactly the A and B of every layer that the adapter's configuration names, on the policy's own base"
    raise SpecError(
        f"the adapter {what}", where=f"{where}: {file}", rule=rule, way_out="name an adapter of this policy"
    )


def _another(stored: LoraSpec, what: str, way_out: str) -> SpecError:
    return SpecError(
        f"the adapter in {stored.path} has {what}",
        where="training.lora.path",
        rule="training goes on with the adapter that it starts from: rank, alpha and layers stay the same",
        way_out=f"{way_out}, or another adapter",
    )


def _refuse(where: str, file: Path, key: str, value: Any, rule: str) -> NoReturn:
    raise SpecError(
        f"{key} is {shorten(value)}",
        where=f"{where}: {file}: {key}",
        rule=f"{key}: {rule}",
        way_out="name an adapter that PEFT saved with plain LoRA, or merge this one into a model of its own",
    )
