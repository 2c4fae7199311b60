"""Adapters of a training point: which layers are adapted, by what rank, and what that saves.

In: a model, the words of the method. Out: trained tensors and `Frozen`; None where everything is trained.
Left out: what each method keeps (methods.py). Raises CannotPredict for what is not stated or not described.
"""

import re
from dataclasses import replace

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict
from rlplan.accuracy.training.methods import DORA, LORA_RANKS, Method, method_of, num_prompt_tokens
from rlplan.accuracy.training.settings import RunSettings
from rlplan.accuracy.training.trainers import Trainer
from rlplan.memory.model.frozen import Frozen
from rlplan.records import dataclass
from rlplan.spec.base import shorten
from rlplan.spec.model import Component, ModelSpec, Parameter
from rlplan.spec.models.adapters import linear_layers, lora_parameters
from rlplan.spec.parts.training import LoraSpec

MODEL_BYTES = 2
"""An element of a frozen weight and of what it gives."""
TARGETS = (
    ("q_proj", "v_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
"""Sets of layers that people adapt, by the names of Llama's modules."""
TYPES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
"""Bytes of an adapter's element by the word for its type."""
DROPOUTS = ("lora_dropout", "adapter_dropout")
TARGET_KEYS = ("targets", "target_modules", "lora_targets", "lora_target_modules", "lora_target", "target")
_PLACES = {
    "attention": r"q_proj|k_proj|v_proj|query_key_value|Wqkv|qkv|c_attn|query|key|value",
    "output": r"o_proj|out_proj|dense$|attn\.c_proj|self_attention\.dense",
    "mlp": r"gate|up_proj|fc1|fc_in|w1|w3|h_to_4h|c_fc",
    "down": r"down_proj|fc2|fc_out|w2|4h_to_h|mlp\.c_proj",
}


@dataclass(frozen=True)
class Adapters:
    """What is trained beside a frozen model."""

    parameters: tuple[Parameter, ...]
    frozen: Frozen
    element_bytes: int
    num_virtual_tokens: int = 0
    """Trained tokens that stand before each sequence."""
    copies_table: bool = False
    """The language head multiplies with a copy of the vocabulary table, into which trained rows are put."""
    reference_bytes: int = 0
    """Of a second set of adapters that is not trained, the reference's."""
    lora: LoraSpec | None = None
    """What is beside linear layers outside of experts, where it is LoRA."""


def read_adapters(point: MeasuredPoint, model: ModelSpec, trainer: Trainer, *, is_quantized: bool) -> Adapters | None:
    """Adapters of a point; None for full training. Raises: CannotPredict."""
    settings = RunSettings(point)
    method = method_of(settings, f"{point.id} {point.source}")
    if method is None:
        return None
    trainer = _as_stated(settings, trainer)
    keeps, element = trainer.keeps_inputs and is_quantized, trainer.adapter_bytes
    if method.trains_norms:
        norms = tuple(p for p in model.parameters if len(p.shape) == 1 and "norm" in p.name)
        return Adapters(norms, Frozen(trains_norms=True, keeps_inputs=keeps), element)
    if method.is_lora:
        targets, rank = _targets(settings, point, model, trainer, method)
        trained = tuple(lora_parameters(model, rank, _names(model, targets)))
        if (scope := settings.word("lora_scope", "all").lower()) not in ("all", "language_model"):
            raise CannotPredict(f"setting 'lora_scope' is {shorten(scope)}; known are all and language_model")
        if scope == "language_model":
            trained = tuple(tensor for tensor in trained if tensor.component is not Component.VISION)
        frozen = _inputs(model, targets, trainer, keeps)
        if _adapts_experts(settings, trainer, targets):
            trained += _beside_experts(model, rank)
            frozen = replace(frozen, adapts_experts=True)
        return Adapters(
            trained,
            _with_kept_outputs(frozen, method, model, targets, element),
            element,
            reference_bytes=element * sum(p.numel for p in trained) * ("reference" in _adapter_words(settings)),
            lora=LoraSpec(rank=rank, target_modules=tuple(_names(model, targets))),
        )
    numbers = (Parameter("adapters", (settings.count("trainable_params"),)),)
    if method.scales:
        return Adapters(numbers, Frozen(adapts_down=True, adapter_bytes=element, keeps_inputs=keeps), element)
    frozen = _inputs(model, trainer.targets, trainer, keeps) if method.reads_inputs else Frozen(keeps_inputs=keeps)
    if method.shares_inputs:
        frozen = replace(frozen, adapter_bytes=MODEL_BYTES)
    frozen = _with_kept_outputs(frozen, method, model, trainer.targets, element)
    virtual = _num_virtual(model, numbers[0].numel) if method.adds_tokens else 0
    return Adapters(numbers, frozen, 4, virtual, method.copies_table and model.has_tied_embeddings)


def _adapts_experts(settings: RunSettings, trainer: Trainer, targets: tuple[str, ...]) -> bool:
    """Whether routed experts have adapters: by the trainer's default, or as linear modules among all of them."""
    if settings.first(TARGET_KEYS) is None:
        return trainer.adapts_experts
    return trainer.has_expert_modules and targets == TARGETS[-1]


def _beside_experts(model: ModelSpec, rank: int) -> tuple[Parameter, ...]:
    """Adapters of gate, up and down of every routed expert: r (h + Ie) numbers each, a layer's as one tensor."""
    experts = model.experts
    if experts is None:
        return ()
    width = experts.latent_size or model.hidden_size
    each = experts.num_matrices * rank * (width + experts.intermediate_size)
    return tuple(
        Parameter(f"layers.{layer}.experts.lora", (experts.num_experts * each,), Component.EXPERTS)
        for layer in experts.layers
    )


def _as_stated(settings: RunSettings, trainer: Trainer) -> Trainer:
    """The trainer with what a point says of its adapters: their type, and whether dropout stands before them."""
    words = _adapter_words(settings)
    if words & TYPES.keys():
        trainer = replace(trainer, adapter_bytes=max(TYPES[word] for word in words & TYPES.keys()))
    if key := settings.first(DROPOUTS):
        trainer = replace(trainer, dropout=settings.number(key, high=1.0) > 0)
    return trainer


def _adapter_words(settings: RunSettings) -> set[str]:
    """What `adapters` says, such as `policy + reference adapter, fp32`. Raises: CannotPredict for other words."""
    words = set(re.findall(r"[a-z0-9]+", settings.word("adapters").lower()))
    known = {"policy", "reference", "adapter", "adapters", "and", "lora"} | TYPES.keys()
    if unknown := words - known:
        raise CannotPredict(f"setting 'adapters' says {shorten(min(unknown))}, which is not modelled")
    return words


def _with_kept_outputs(
    frozen: Frozen, method: Method, model: ModelSpec, targets: tuple[str, ...], element: int
) -> Frozen:
    """What a method keeps of outputs and of changed weights, averaged over the layers."""
    if not (method.outputs or method.output_copies or method.changes or method.change_copies):
        return frozen
    names = set(_names(model, targets))
    shapes = [t.shape for t in linear_layers(model) if t.name.removesuffix(".weight").rpartition(".")[2] in names]
    outputs = sum(shape[0] for shape in shapes) // model.num_layers
    weights = sum(shape[0] * shape[1] for shape in shapes) // model.num_layers
    return replace(
        frozen,
        more_token_bytes=outputs * (method.outputs * element + method.output_copies * MODEL_BYTES),
        more_layer_bytes=weights * (method.changes * element + method.change_copies * MODEL_BYTES),
    )


def _num_virtual(model: ModelSpec, trainable: int) -> int:
    """Trained tokens before each sequence. Raises: CannotPredict."""
    tokens = num_prompt_tokens(trainable, model.hidden_size)
    if tokens is None:
        width = model.hidden_size
        raise CannotPredict(f"how many tokens of width {width} are {trainable:,} trainable parameters is not stated")
    return tokens


def _targets(
    settings: RunSettings, point: MeasuredPoint, model: ModelSpec, trainer: Trainer, method: Method
) -> tuple[tuple[str, ...], int]:
    """Adapted layers and rank: stated, else those that give the stated number of parameters, else the default."""
    text = f"{settings.text} {settings.raw('target') or ''} {point.id}".lower()
    stated = settings.first(LORA_RANKS)
    match = re.search(r"(?:^|[\s\-_,(])r(?:ank)?[ =_\-]?(\d+)", text)
    rank = settings.count(stated) if stated else int(match.group(1)) if match else None
    listed = _stated_targets(settings, model) or _listed(text)
    if listed is None and "trainable_params" in settings:
        return _counted(model, settings.count("trainable_params"), rank, method)
    return listed or trainer.targets, rank or trainer.rank


def _stated_targets(settings: RunSettings, model: ModelSpec) -> tuple[str, ...] | None:
    """Layers that a setting names: `all-linear`, a list, or names with commas. None where the words are no names.

    Raises: CannotPredict for a layer that the model has not, or that no adapter is described for.
    """
    key = settings.first(TARGET_KEYS)
    value = settings.raw(key) if key else None
    if not isinstance(value, str | list | tuple) or not value:
        return None
    names = value.split(",") if isinstance(value, str) else [str(name) for name in value]
    names = [name.strip().lower() for name in names]
    if len(names) == 1 and re.fullmatch(r"all([ \-_](linear|layers|targets))?", names[0]):
        return TARGETS[-1]
    known = {tensor.name.removesuffix(".weight").rpartition(".")[2] for tensor in linear_layers(model)}
    spelled = {short.lower(): name for name in known for short in (name, name.removesuffix("_proj"))}
    found = tuple(dict.fromkeys(spelled[name] for name in names if name in spelled))
    if not found and isinstance(value, str) and "," not in value:
        return None  # words of a remark, such as `see config`
    for name in names:
        if name not in spelled or not any(re.search(place, spelled[name]) for place in _PLACES.values()):
            raise CannotPredict(f"setting '{key}' names layer {shorten(name)}, which is not modelled in this model")
    return found


def _listed(text: str) -> tuple[str, ...] | None:
    """Layers that a text names."""
    if re.search(r"\b(q, ?v|qv|q/v|q_proj, ?v_proj)\b", text):
        return TARGETS[0]
    if re.search(r"all[ -]linear|all layers|all targets", text):
        return TARGETS[-1]
    if re.search(r"target[ \-]mlp|\bmlp only\b", text):
        return TARGETS[2]
    return None


def _counted(model: ModelSpec, trainable: int, rank: int | None, method: Method) -> tuple[tuple[str, ...], int]:
    """The first usual set of layers that gives the number, at the stated rank or at a power of two."""
    for targets in TARGETS:
        pairs = lora_parameters(model, 1, _names(model, targets))
        each = sum(p.numel for p in pairs)
        magnitudes = sum(p.shape[0] for p in pairs if p.shape[1] == 1) if method is DORA else 0
        found = (trainable - magnitudes) // each
        if trainable - magnitudes == each * found and (found == rank if rank else found.bit_count() == 1):
            return targets, found
    raise CannotPredict(f"no usual set of layers gives {trainable:,} trainable parameters")


def _names(model: ModelSpec, targets: tuple[str, ...]) -> list[str]:
    """The model's own names of the layers that stand where Llama's targets stand."""
    wanted = {place for place, pattern in _PLACES.items() for target in targets if re.search(pattern, target)}
    known = {tensor.name.removesuffix(".weight").rpartition(".")[2] for tensor in linear_layers(model)}
    if set(targets) <= known:
        return sorted(targets)
    found = {name for name in known for place in wanted if re.search(f"^({_PLACES[place]})", name)}
    if not found:
        raise CannotPredict(f"which layers of {model.architecture} are adapted is not stated")
    return sorted(found)


def _inputs(model: ModelSpec, targets: tuple[str, ...], trainer: Trainer, keeps: bool) -> Frozen:
    """Modules by what they read; a fused projection is one module."""
    known = {tensor.name.removesuffix(".weight").rpartition(".")[2] for tensor in linear_layers(model)}
    is_fused = trainer.views_fused or not set(targets) <= known
    count = {place: sum(bool(re.search(pattern, name)) for name in targets) for place, pattern in _PLACES.items()}
    return Frozen(
        attention_inputs=min(1, count["attention"]) if is_fused else count["attention"],
        adapts_output=count["output"] > 0,
        mlp_inputs=count["mlp"],
        adapts_down=count["down"] > 0,
        adapter_bytes=trainer.adapter_bytes,
        has_dropout=trainer.dropout,
        keeps_inputs=keeps,
    )
