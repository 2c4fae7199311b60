"""Adapters of a training point: which layers are adapted, by what rank, and what that saves.

In: a model, the words of the method. Out: trained tensors and `Frozen`; None where everything is trained.
Raises CannotPredict for methods whose own tensors are not modelled (dense changes of weights, rotations, spectra).
"""

import re
from dataclasses import dataclass

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict
from rlplan.accuracy.training_settings import RunSettings
from rlplan.accuracy.training_trainers import Trainer
from rlplan.memory.frozen import Frozen
from rlplan.spec.base import shorten
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.models.adapters import linear_layers, lora_parameters

LORA = ("qlora", "lora", "rslora", "pissa", "loftq", "olora", "eva", "corda")
"""Two matrices beside each layer, of one rank: they differ in how they start."""
LIKE_LORA = ("adalora", "lorafa", "lora-fa", "lora_fa", "vera", "vblora", "delora", "randlora", "bone", "miss")
"""Methods that read the inputs of the same layers, into fewer or shared numbers; what they keep of a rank's width is
left out, which is at most r/h of what is counted."""
SCALING = ("ia3", "ia-3")
"""Vectors that scale keys, values and the MLP's product, of which the last is the wide one."""
WITHOUT_INPUTS = (
    *("prompt", "prompt_tuning", "ptuning", "p-tuning", "p_tuning", "prefix", "prefix_tuning"),
    *("trainable_tokens", "trainable-tokens"),
)
"""Trained tokens: no layer's input is kept for them."""
TARGETS = (
    ("q_proj", "v_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
"""Sets of layers that people adapt, by the names of Llama's modules."""
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


def read_adapters(point: MeasuredPoint, model: ModelSpec, trainer: Trainer, *, is_quantized: bool) -> Adapters | None:
    """Adapters of a point; None for full training. Raises: CannotPredict."""
    settings = RunSettings(point)
    method = method_of(settings)
    if method == "full":
        return None
    keeps = trainer.keeps_inputs and is_quantized
    if method == "ln_tuning":
        norms = tuple(p for p in model.parameters if len(p.shape) == 1 and "norm" in p.name)
        return Adapters(norms, Frozen(trains_norms=True, keeps_inputs=keeps), trainer.adapter_bytes)
    if method in WITHOUT_INPUTS:
        return Adapters((Parameter("prompt", (settings.count("trainable_params"),)),), Frozen(keeps_inputs=keeps), 4)
    if method in SCALING:
        scales = (Parameter("scales", (settings.count("trainable_params"),)),)
        reads = Frozen(adapts_down=True, adapter_bytes=trainer.adapter_bytes, keeps_inputs=keeps)
        return Adapters(scales, reads, trainer.adapter_bytes)
    if method in LIKE_LORA:
        numbers = (Parameter("adapters", (settings.count("trainable_params"),)),)
        return Adapters(numbers, _inputs(model, trainer.targets, trainer, trainer.adapter_bytes, keeps), 4)
    targets, rank = _targets(settings, point, model, trainer)
    element = trainer.adapter_bytes
    return Adapters(
        lora_parameters(model, rank, _names(model, targets)),
        _inputs(model, targets, trainer, element, keeps),
        element,
    )


def method_of(settings: RunSettings) -> str:
    """What is trained: `full`, `lora`, `ln_tuning`, a kind of prompt. Raises: CannotPredict for the rest.

    >>> point = MeasuredPoint(id="a", kind="k", settings={"method": "qlora nf4"}, measured={"value": 1, "unit": "GiB"})
    >>> method_of(RunSettings(point))
    'lora'
    """
    text = settings.text
    words = re.findall(r"[a-z0-9_\-]+", text)
    if any(word in ("dora", "qdora") for word in words) or settings.raw("use_dora"):
        raise CannotPredict("DoRA's normalised weights are not modelled")
    for word in words:
        if word in ("ln_tuning", *LIKE_LORA, *SCALING, *WITHOUT_INPUTS):
            return str(word)
    if any(word in LORA for word in words):
        return "lora"
    if "method" in settings and not ({"full", "sft", "pretrain", "pretraining", "fft", "finetune"} & set(words)):
        raise CannotPredict(f"method {shorten(settings.raw('method'))} is not modelled")
    return "full"


def _targets(
    settings: RunSettings, point: MeasuredPoint, model: ModelSpec, trainer: Trainer
) -> tuple[tuple[str, ...], int]:
    """Adapted layers and rank: stated, else those that give the stated number of parameters, else the default."""
    text = f"{settings.text} {settings.raw('target') or ''} {point.id}".lower()
    stated = next((key for key in ("rank", "lora_rank", "lora_r", "r") if key in settings), None)
    match = re.search(r"(?:^|[\s\-_,(])r(?:ank)?[ =_\-]?(\d+)", text)
    rank = settings.count(stated) if stated else int(match.group(1)) if match else None
    listed = _listed(text)
    if listed is None and "trainable_params" in settings:
        return _counted(model, settings.count("trainable_params"), rank)
    return listed or trainer.targets, rank or trainer.rank


def _listed(text: str) -> tuple[str, ...] | None:
    """Layers that a text names."""
    if re.search(r"\b(q, ?v|qv|q/v|q_proj, ?v_proj)\b", text):
        return TARGETS[0]
    if re.search(r"all[ -]linear|all layers|all targets", text):
        return TARGETS[-1]
    if re.search(r"target[ \-]mlp|\bmlp only\b", text):
        return TARGETS[2]
    return None


def _counted(model: ModelSpec, trainable: int, rank: int | None) -> tuple[tuple[str, ...], int]:
    """The first usual set of layers that gives the number, at the stated rank or at a power of two."""
    for targets in TARGETS:
        each = sum(p.numel for p in lora_parameters(model, 1, _names(model, targets)))
        found = trainable // each
        if trainable == each * found and (found == rank if rank else found.bit_count() == 1):
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


def _inputs(model: ModelSpec, targets: tuple[str, ...], trainer: Trainer, element: int, keeps: bool) -> Frozen:
    """Modules by what they read; a fused projection is one module."""
    known = {tensor.name.removesuffix(".weight").rpartition(".")[2] for tensor in linear_layers(model)}
    is_fused = trainer.views_fused or not set(targets) <= known
    count = {place: sum(bool(re.search(pattern, name)) for name in targets) for place, pattern in _PLACES.items()}
    return Frozen(
        attention_inputs=min(1, count["attention"]) if is_fused else count["attention"],
        adapts_output=count["output"] > 0,
        mlp_inputs=count["mlp"],
        adapts_down=count["down"] > 0,
        adapter_bytes=element,
        has_dropout=trainer.dropout,
        keeps_inputs=keeps,
    )
