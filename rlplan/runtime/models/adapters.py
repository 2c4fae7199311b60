"""LoRA adapters in a trained module, by PEFT: added, switched off, merged into the weights, written in PEFT's layout.

In: a Hugging Face module and the job's `training.lora`. Out: the same module with adapters beside its linear layers.
The base is frozen and shared: with the adapters off it is the reference, to the bit. With a `lora.base_dtype` its
linear layers are in 4 bits (quantized_base.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rlplan.memory.model.quantization import BASE_FORMATS
from rlplan.runtime.models.quantized_base import quantize_base, whole_weight
from rlplan.runtime.run_folder.disk_errors import writing_file
from rlplan.runtime.weight_sync.contents.adapter import ADAPTER_FILE, PEFT_PREFIX
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.spec.resolved import ResolvedJob

ADAPTER = "default"
"""PEFT's name for an adapter that has none."""
_BASE = ".base_layer."


def add_adapters(model: Any, job: ResolvedJob) -> None:
    """Put adapters beside the linear layers that the job names, and freeze everything else. B starts at zero."""
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    if job.training.quantization != "none":
        quantize_base(
            model, [p.name for p in job.load_model().parameters if BASE_FORMATS[job.training.quantization].covers(p)]
        )
    inject_adapter_in_model(_config(job), model, adapter_name=ADAPTER)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside the block the module computes with its base alone."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@dataclass(frozen=True)
class _Change:
    """What adapters add to a weight: scaling * B A."""

    a: nn.Parameter
    b: nn.Parameter
    scaling: float

    def added_to(self, weight: torch.Tensor) -> torch.Tensor:
        """A new tensor; computed in fp32, as a forward pass in fp32 would compute it."""
        change = self.b.detach().float() @ self.a.detach().float()
        return (weight.float() + self.scaling * change).to(weight.dtype)


class MergedWeights(WeightSource):
    """The weights of a module without adapters that computes the same: each change is added as its tensor is asked for.

    One weight at a time exists anew; the module itself is not changed.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        whole = self._parameters
        self._changes = {
            name.replace(_BASE, "."): _Change(
                whole[name.replace(f"{_BASE}weight", f".lora_A.{ADAPTER}.weight")],
                whole[name.replace(f"{_BASE}weight", f".lora_B.{ADAPTER}.weight")],
                cast(Any, module.get_submodule(name.removesuffix(f"{_BASE}weight"))).scaling[ADAPTER],
            )
            for name in whole
            if name.endswith(f"{_BASE}weight")
        }
        self._parameters = {name.replace(_BASE, "."): p for name, p in whole.items() if ".lora_" not in name}

    def read(self, name: str) -> torch.Tensor:
        weight = whole_weight(self._parameters[name])
        change = self._changes.get(name)
        return weight if change is None else change.added_to(weight)

    def needed_for(self, names: Sequence[str]) -> list[nn.Parameter]:
        changes = [self._changes[name] for name in names if name in self._changes]
        return [self._parameters[name] for name in names] + [p for c in changes for p in (c.a, c.b)]


class AdapterWeights(WeightSource):
    """The adapters of a module alone, by PEFT's names without their prefix: what an engine that has the base needs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        whole = self._parameters.items()
        self._parameters = {name.replace(f".{ADAPTER}.", "."): p for name, p in whole if ".lora_" in name}


def adapter_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The adapters by PEFT's names, as views. Under ZeRO-3 gather them first."""
    return {
        PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): parameter.detach()
        for name, parameter in module.named_parameters()
        if ".lora_" in name
    }


def save_adapter(module: nn.Module, job: ResolvedJob, folder: Path) -> None:
    """Write the adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`."""
    from safetensors.torch import save_file

    # Copied, for under ZeRO they are all views of one buffer, which the format refuses.
    tensors = {name: tensor.clone().contiguous() for name, tensor in adapter_tensors(module).items()}
    with writing_file(folder / ADAPTER_FILE, sum(tensor.nbytes for tensor in tensors.values())):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(folder / ADAPTER_FILE), metadata={"format": "pt"})
        _config(job).save_pretrained(str(folder))


def _config(job: ResolvedJob) -> Any:
    from peft import LoraConfig

    lora = job.training.lora
    assert lora is not None, "there are adapters"
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=job.adapted_modules(job.load_model()),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=job.policy.path,
    )
