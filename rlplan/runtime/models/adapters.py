"""LoRA adapters through PEFT: injected, disabled, merged into weights, and saved in PEFT's layout.

The base is frozen and shared. With the adapters disabled it is bit for bit the reference model. Frozen roles may have
adapters of their own on it; one adapter is active at a time. With `lora.base_dtype` the base is in 4 bits
(quantized_base.py).

In: a Hugging Face module and the job's `training.lora`. Out: the same module with adapters beside its linear layers.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rlplan.memory.model.quantization import BASE_FORMATS
from rlplan.runtime.models.quantized_base import dequantize_weight, quantize_base
from rlplan.runtime.models.start_checkpoint import save_tensors
from rlplan.runtime.run_folder.disk_errors import writing_file
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.spec.models.adapters import adapted_modules, list_lora_parameters
from rlplan.spec.parts.adapter_files import PEFT_PREFIX, WEIGHTS_FILE, check_tensors
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import ResolvedJob

ADAPTER = "default"
"""PEFT's default name of an adapter, used for the trained one."""
_BASE = ".base_layer."


def add_adapters(model: Any, job: ResolvedJob) -> None:
    """Add the trained adapter with its start values, and the adapters of frozen roles.

    Raises: SpecError when a file's tensors do not match its configuration.
    """
    add_trained_adapter(model, job)
    lora = job.training.lora
    if lora is not None and lora.path is not None:
        _read_values(model, ADAPTER, lora, job, "training.lora.path")
    for role, adapter in job.frozen_adapters.items():
        _inject(model, role.value, adapter, job)
        _read_values(model, role.value, adapter, job, f"roles.{role}.adapter")
    # PEFT makes every injected adapter trainable.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_trained(name))
    for layer in _list_adapted_layers(model):
        layer._active_adapter = [ADAPTER]  # the trained adapter is active outside of `activate_adapter`


def add_trained_adapter(model: Any, job: ResolvedJob) -> None:
    """Add the trained adapter to the job's target modules and freeze everything else. B starts at zero."""
    model.requires_grad_(False)
    if job.training.quantization != "none":
        quantize_base(
            model, [p.name for p in job.load_model().parameters if BASE_FORMATS[job.training.quantization].covers(p)]
        )
    assert job.training.lora is not None, "there are adapters"
    _inject(model, ADAPTER, job.training.lora, job)


@contextmanager
def activate_adapter(model: nn.Module, role: str) -> Iterator[None]:
    """Inside the block the module computes with a frozen role's adapter, or with the base if the role has none.

    PEFT's own `set_adapter` would make the adapter trainable, so its private attribute is set instead.
    """
    layers = _list_adapted_layers(model)
    has_adapter = any(role in layer.lora_A for layer in layers)
    for layer in layers:
        if has_adapter:
            layer._active_adapter = [role]
        else:
            layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            if has_adapter:
                layer._active_adapter = [ADAPTER]
            else:
                layer.enable_adapters(True)


def _list_adapted_layers(model: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def _is_trained(name: str) -> bool:
    """Whether a parameter belongs to the trained adapter, not to the base or a frozen role."""
    return ".lora_" in name and f".{ADAPTER}." in name


def _inject(model: Any, name: str, adapter: LoraSpec, job: ResolvedJob) -> None:
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are intended
        inject_adapter_in_model(_make_peft_config(adapter, job), model, adapter_name=name)


@torch.no_grad()
def _read_values(model: nn.Module, name: str, adapter: LoraSpec, job: ResolvedJob, where: str) -> None:
    """Fill an adapter from its file, tensor by tensor. Raises: SpecError."""
    from safetensors import safe_open

    check_tensors(adapter, job.load_model(), where=where)
    parameters = dict(model.named_parameters())
    with safe_open(str(Path(str(adapter.path)) / WEIGHTS_FILE), framework="pt") as file:
        for stored in file.keys():  # noqa: SIM118 - no mapping
            name_in_model = stored.removeprefix(PEFT_PREFIX).removesuffix("weight") + f"{name}.weight"
            parameters[name_in_model].copy_(file.get_tensor(stored))


@dataclass(frozen=True)
class _Change:
    """The update of a weight by an adapter: scaling * B A."""

    a: nn.Parameter
    b: nn.Parameter
    scaling: float
    """alpha / rank."""

    def merge(self, weight: torch.Tensor) -> torch.Tensor:
        """The updated weight as a new tensor, computed in fp32."""
        change = self.b.detach().float() @ self.a.detach().float()
        return (weight.float() + self.scaling * change).to(weight.dtype)


class MergedWeights(WeightSource):
    """Weights of an equivalent module without adapters; each update is merged when its tensor is read.

    Only one merged weight exists at a time, and the module itself is not changed.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        parameters = self._parameters
        self._changes = {
            name.replace(_BASE, "."): _Change(
                parameters[name.replace(f"{_BASE}weight", f".lora_A.{ADAPTER}.weight")],
                parameters[name.replace(f"{_BASE}weight", f".lora_B.{ADAPTER}.weight")],
                cast(Any, module.get_submodule(name.removesuffix(f"{_BASE}weight"))).scaling[ADAPTER],
            )
            for name in parameters
            if name.endswith(f"{_BASE}weight")
            and name.replace(f"{_BASE}weight", f".lora_A.{ADAPTER}.weight") in parameters
        }
        self._parameters = {name.replace(_BASE, "."): p for name, p in parameters.items() if ".lora_" not in name}

    def read(self, name: str) -> torch.Tensor:
        weight = dequantize_weight(self._parameters[name])
        change = self._changes.get(name)
        return weight if change is None else change.merge(weight)

    def find_parameters(self, names: Sequence[str]) -> list[nn.Parameter]:
        changes = [self._changes[name] for name in names if name in self._changes]
        return [self._parameters[name] for name in names] + [p for c in changes for p in (c.a, c.b)]


class AdapterWeights(WeightSource):
    """Weights of the trained adapter only, with PEFT's names without their prefix, for an engine that has the base."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        whole = self._parameters.items()
        self._parameters = {name.replace(f".{ADAPTER}.", "."): p for name, p in whole if _is_trained(name)}


def save_adapter(module: nn.Module, job: ResolvedJob, folder: Path) -> None:
    """Write the trained adapter in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

    Under ZeRO-3 its tensors are gathered first.
    """
    # Copies, because under ZeRO all tensors are views of one buffer, which safetensors refuses.
    tensors = {
        PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): parameter.detach().clone().contiguous()
        for name, parameter in module.named_parameters()
        if _is_trained(name)
    }
    with writing_file(folder / WEIGHTS_FILE, sum(tensor.nbytes for tensor in tensors.values())):
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, folder / WEIGHTS_FILE)
        assert job.training.lora is not None, "there are adapters"
        _make_peft_config(job.training.lora, job).save_pretrained(str(folder))


def _make_peft_config(adapter: LoraSpec, job: ResolvedJob) -> Any:
    from peft import LoraConfig

    parameters = list_lora_parameters(job.load_model(), adapter.rank, adapter.target_modules)
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=adapted_modules(parameters),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=job.policy.path,
    )
