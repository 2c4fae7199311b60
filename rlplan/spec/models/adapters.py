"""Additions to a model: a value or reward head in place of the language head, LoRA adapters on linear layers.

In: a ModelSpec, a rank, names of modules. Out: tensors. Left out: the base's dtype, DoRA.

Symbols: h hidden_size, r rank, V vocab_size.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from rlplan.errors import SpecError, did_you_mean
from rlplan.spec.model import Component, ModelSpec, Parameter

ALL_LINEAR = "all-linear"
EXPERTS = "experts"
"""Module name that stands for gate, up and down of every routed expert."""


def list_value_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """The parameters of a value or reward model on this backbone: its head is one row of h.

    Counts: h instead of V*h for an untied model; h more for a tied one, whose table is still the embedding.
    Source: transformers 5.19, `...ForSequenceClassification` with one label, `score` without bias.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("meta-llama/Llama-3.1-8B")
    >>> model.num_parameters - sum(tensor.numel for tensor in list_value_parameters(model))  # 128255 * 4096
    525332480
    """
    backbone = tuple(tensor for tensor in model.parameters if tensor.component is not Component.HEAD)
    return (*backbone, Parameter("score.weight", (1, model.hidden_size), Component.HEAD))


def list_linear_layers(model: ModelSpec) -> tuple[Parameter, ...]:
    """The weights of all `nn.Linear` modules except the language head: PEFT's `all-linear`.

    Counts: attention, dense and shared MLPs, vision towers, a few families' routers. Not: most routers and all routed
    experts, which transformers 5 stacks into parameters that no linear layer owns; convolutions; embeddings.
    """
    return tuple(tensor for tensor in model.parameters if tensor.is_linear)


def list_lora_parameters(
    model: ModelSpec, rank: int, targets: str | Iterable[str] = ALL_LINEAR
) -> tuple[Parameter, ...]:
    """The trained adapters: A of r by in, B of out by r, for every named linear layer. Raises: SpecError.

    Counts: r*(in + out) a layer. targets: names such as `q_proj`, or `all-linear`; `experts` adds all routed
    experts, with one pair of tensors per layer and matrix.
    Source: LoRA, arXiv 2106.09685, section 4.1; PEFT 0.18 tuners/lora/layer.py.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> pairs = list_lora_parameters(find_model("meta-llama/Llama-3.2-3B"), 32, ["q_proj", "v_proj"])
    >>> sum(tensor.numel for tensor in pairs)  # 28 layers * 32 * (3072 + 3072 + 3072 + 1024)
    9175040
    """
    if not 1 <= rank <= model.hidden_size:
        raise SpecError(
            f"rank is {rank}",
            where="rank",
            rule=f"from 1 to hidden_size, {model.hidden_size}",
            way_out="choose a rank such as 8 to 64",
        )
    return _adapters(model, rank, targets if isinstance(targets, str) else tuple(targets))


def adapted_modules(adapters: Iterable[Parameter]) -> list[str]:
    """Names of the adapted linear layers, as in PEFT's `target_modules`."""
    return sorted({adapter.name.split(".")[-3] for adapter in adapters})


@lru_cache(maxsize=64)
def _adapters(model: ModelSpec, rank: int, targets: str | tuple[str, ...]) -> tuple[Parameter, ...]:
    layers = list_linear_layers(model)
    if targets != ALL_LINEAR:
        names = {targets} if isinstance(targets, str) else set(targets)
        if EXPERTS in names and model.experts is not None:
            other_targets = tuple(name for name in targets if name != EXPERTS) if not isinstance(targets, str) else ()
            return (*(_adapters(model, rank, other_targets) if other_targets else ()), *_expert_adapters(model, rank))
        known = sorted({_module(tensor) for tensor in layers})
        for name in sorted(names - set(known)):
            raise SpecError(
                f"target {name!r} is not a linear layer of {model.architecture}",
                where="targets",
                rule=f"{ALL_LINEAR}, or some of {', '.join(known)}." + did_you_mean(name, known),
                way_out="name modules that the model has",
            )
        layers = tuple(tensor for tensor in layers if _module(tensor) in names)
    return tuple(adapter for tensor in layers for adapter in _pair(tensor, rank))


def _expert_adapters(model: ModelSpec, rank: int) -> Iterator[Parameter]:
    """Adapters of every routed expert: r by in and out by r of each matrix, with all experts of a layer in one
    tensor.
    """
    experts = model.experts
    assert experts is not None, "only mixtures of experts have expert adapters"
    width, inner = experts.latent_size or model.hidden_size, experts.intermediate_size
    sizes = {"up_proj": (width, inner), "down_proj": (inner, width)}
    if experts.num_matrices == 3:
        sizes["gate_proj"] = (width, inner)
    for layer in experts.layers:
        for name, (into, out) in sizes.items():
            module = f"model.layers.{layer}.mlp.experts.{name}"
            yield Parameter(f"{module}.lora_A.weight", (experts.num_experts * rank, into), Component.EXPERTS)
            yield Parameter(f"{module}.lora_B.weight", (experts.num_experts * out, rank), Component.EXPERTS)


def _pair(tensor: Parameter, rank: int) -> tuple[Parameter, Parameter]:
    module = tensor.name.removesuffix(".weight")
    out, into = tensor.shape
    return (
        Parameter(f"{module}.lora_A.weight", (rank, into), tensor.component),
        Parameter(f"{module}.lora_B.weight", (out, rank), tensor.component),
    )


def _module(tensor: Parameter) -> str:
    return tensor.name.removesuffix(".weight").rpartition(".")[2]
