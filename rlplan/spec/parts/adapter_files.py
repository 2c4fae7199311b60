"""PEFT adapters that a job starts from or keeps beside the trained one, as their files describe them.

In: a folder with `adapter_config.json` and `adapter_model.safetensors`. Out: a LoraSpec; parameters. Left out: values.

Only plain LoRA is read: a key that changes the product B A other than by alpha / rank is an error. Source: PEFT 0.21,
`LoraConfig`, `save_pretrained`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rlplan.errors import SpecError
from rlplan.spec.base import read_json, shorten_value
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.models.adapters import ALL_LINEAR, list_lora_parameters
from rlplan.spec.models.headers import read_header
from rlplan.spec.parts.training import LoraSpec

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""Prefix of every tensor name in PEFT's files."""
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
"""Keys that change an adapter beyond plain LoRA, each with the values that leave it plain."""


def read_adapter(folder: Path, *, where: str) -> LoraSpec:
    """The LoRA settings in `adapter_config.json`. Raises: SpecError for settings that the runtime does not support."""
    file = folder / CONFIG_FILE
    data = read_json(file, f"the adapter of {where}")
    if not isinstance(data, dict) or data.get("peft_type") != "LORA":
        _refuse(where, file, "peft_type", data.get("peft_type") if isinstance(data, dict) else data, "LORA")
    for key, plain in _PLAIN.items():
        if data.get(key) not in plain:
            _refuse(where, file, key, data[key], "left out: the runtime has plain adapters, scaled by alpha / rank")
    rank, alpha, targets = data.get("r"), data.get("lora_alpha"), data.get("target_modules")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:  # True is an integer too
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
        wanted, actual = getattr(trained, key), getattr(stored, key)
        if wanted != actual:
            way_out = f"training.lora.{key}={actual:g}"
            raise _another(stored, f"{key} {actual:g}, training.lora.{key} is {wanted:g}", way_out)
    wanted_tensors = list_lora_parameters(model, trained.rank, trained.target_modules)
    if wanted_tensors != list_lora_parameters(model, stored.rank, stored.target_modules):
        names = ", ".join(stored.target_modules) if isinstance(stored.target_modules, tuple) else stored.target_modules
        way_out = f"'training.lora.target_modules=[{names}]'"
        raise _another(stored, f"other layers than training.lora.target_modules: {names}", way_out)


def list_frozen_adapters(model: ModelSpec, adapters: Mapping[str, LoraSpec]) -> tuple[Parameter, ...]:
    """The parameters of frozen adapters on a model's linear layers. adapters: by name, which becomes part of tensor
    names.

    Raises: SpecError.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> lora = LoraSpec(rank=8, target_modules=("q_proj",))
    >>> list_frozen_adapters(find_model("Qwen/Qwen3-0.6B"), {"reference": lora})[0].name
    'model.layers.0.self_attn.q_proj.lora_A.reference.weight'
    """
    return tuple(
        replace(tensor, name=tensor.name.removesuffix("weight") + f"{name}.weight")
        for name, adapter in adapters.items()
        for tensor in list_lora_parameters(model, adapter.rank, adapter.target_modules)
    )


def check_tensors(adapter: LoraSpec, model: ModelSpec, *, where: str) -> None:
    """Check that the weights' file has exactly the adapter's tensors, in their shapes. Raises: SpecError."""
    file = Path(str(adapter.path)) / WEIGHTS_FILE
    stored = {tensor.name: tensor.shape for tensor in read_header(file)}
    wanted = list_lora_parameters(model, adapter.rank, adapter.target_modules)
    for name, shape in {PEFT_PREFIX + tensor.name: tensor.shape for tensor in wanted}.items():
        if (shape_in_file := stored.pop(name, None)) != shape:
            has = f"has {name} of {shape_in_file}" if shape_in_file else f"lacks {name}"
            _refuse_tensors(where, file, f"{has}, {shape} is needed")
    if stored:
        _refuse_tensors(
            where, file, f"has {shorten_value(next(iter(stored)))}, which belongs to no layer of the policy"
        )


def _refuse_tensors(where: str, file: Path, what: str) -> NoReturn:
    rule = "exactly the A and B of every layer that the adapter's configuration names, on the policy's own base"
    raise SpecError(
        f"the adapter {what}", where=f"{where}: {file}", rule=rule, way_out="name an adapter of this policy"
    )


def _another(stored: LoraSpec, what: str, way_out: str) -> SpecError:
    return SpecError(
        f"the adapter in {stored.path} has {what}",
        where="training.lora.path",
        rule="training continues the adapter that it starts from, with the same rank, alpha and layers",
        way_out=f"{way_out}, or another adapter",
    )


def _refuse(where: str, file: Path, key: str, value: Any, rule: str) -> NoReturn:
    raise SpecError(
        f"{key} is {shorten_value(value)}",
        where=f"{where}: {file}: {key}",
        rule=f"{key}: {rule}",
        way_out="name an adapter that PEFT saved with plain LoRA, or merge this one into a model",
    )
