"""LoRA of a training point as the keys of a job.

In: a model, the words of the method. Out: `training.lora` of a job; None for full training. Left out: bytes.
Raises CannotPredict for missing settings, and for methods that no job has: a job trains all weights, or LoRA.
"""

import re
from typing import Any

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import CannotPredict
from rlplan.accuracy.settings import KEYS, WORDS
from rlplan.accuracy.training.settings import RunSettings
from rlplan.accuracy.training.trainers import AGILERL, Trainer
from rlplan.spec.base import shorten_value
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.adapters import EXPERTS, list_linear_layers, list_lora_parameters

TARGETS: tuple[tuple[str, ...], ...] = tuple(map(tuple, WORDS["targets"]))
"""Common sets of adapted layers, by the names of Llama's modules."""
ALL_LINEAR = TARGETS[-1]
LORA, OTHER_METHODS, FULL, POLICY_GRADIENTS, PREFERENCE = (
    frozenset[str](WORDS["methods"][name]) for name in ("lora", "others", "full", "policy_gradients", "preference")
)
"""Methods by what they train: LoRA's matrices, something that no job has, all weights; and algorithms."""
_PLACES: dict[str, str] = WORDS["places"]


def read_lora(point: MeasuredPoint, model: ModelSpec, trainer: Trainer) -> dict[str, Any] | None:
    """`training.lora` without `base_dtype`; None for full training. Raises: CannotPredict."""
    settings = RunSettings(point)
    if not _trains_lora(settings, f"{point.id} {point.source}"):
        return None
    words = set(re.findall(r"[a-z0-9]+", settings.word("adapters").lower()))
    if unknown := words - {"policy", "reference", "adapter", "adapters", "and", "lora", "fp32", "bf16"}:
        raise CannotPredict(f"setting 'adapters' says {shorten_value(min(unknown))}, which a job cannot express")
    if "reference" in words and trainer is not AGILERL:
        raise CannotPredict("a second set of adapters: a job cannot express that for a training step alone")
    if (scope := settings.word("lora_scope", "all").lower()) not in ("all", "language_model"):
        raise CannotPredict(f"setting 'lora_scope' is {shorten_value(scope)}; known are all and language_model")
    targets, rank = _read_targets(settings, point, model, trainer)
    key = settings.first(KEYS["dropout"])
    lora: dict[str, Any] = {"rank": rank, "target_modules": _map_names(model, targets)}
    if model.experts and _adapts_experts(settings, trainer, targets):
        lora["target_modules"].append(EXPERTS)
    if settings.number(key, high=1.0) if key else trainer.dropout:
        lora["dropout"] = settings.number(key, high=1.0) if key else trainer.dropout
    if "fp32" in words or (trainer.has_fp32_adapters and "bf16" not in words):
        lora["dtype"] = "float32"
    return lora


def _trains_lora(settings: RunSettings, hint: str) -> bool:
    """Whether LoRA is trained. hint: the point's id, which may name the variant.

    Raises: CannotPredict for other methods, and for algorithms with further passes or models.
    """
    words = [*_split_words(settings.text), *sorted(settings.techniques & {"dora", "qdora"})]
    if preferences := PREFERENCE & set(words):
        raise CannotPredict(
            f"{sorted(preferences)[0].upper()} has more passes than one, which the point does not state"
        )
    variants = {*words, *_split_words(hint), *(["dora"] if settings.raw("use_dora") is True else [])}
    named = LORA & set(words)
    key = _find_lora_key(settings)
    if other := OTHER_METHODS & (variants if named or key else set(words)):
        raise CannotPredict(f"method {sorted(other)[0]}: a job trains all weights, or LoRA")
    if key and not named and FULL & set(words):
        raise CannotPredict(f"'{settings.text}' is full training, and setting '{key}' speaks of LoRA")
    has_lora = bool(named or key)
    _check_algorithm(settings, has_lora=has_lora)
    if not has_lora and "method" in settings and not {*FULL, "offload"} & set(words):
        raise CannotPredict(
            f"method {shorten_value(settings.raw('method'))} is not modelled: a job trains all weights, or LoRA"
        )
    return has_lora


def _find_lora_key(settings: RunSettings) -> str | None:
    """The setting that implies LoRA without naming the method: a rank above 0, or a flag."""
    if settings.says(*KEYS["lora_flag"]):
        return next(key for key in KEYS["lora_flag"] if settings.says(key))
    key = settings.first(KEYS["lora_rank"])
    return key if key and settings.read_count(key, at_least=0) else None


def _check_algorithm(settings: RunSettings, *, has_lora: bool) -> None:
    """Raises: CannotPredict for an algorithm with more passes or models than a training step of the policy.

    A policy-gradient step is one pass like any other. Full training needs a reference model, which the point does not
    state; with LoRA the reference is the frozen model itself.
    """
    words = set(_split_words(str(settings.raw(settings.first(KEYS["algorithm"]) or "") or "")))
    if not words or words <= FULL | {"sft"}:
        return
    if not words <= POLICY_GRADIENTS or not has_lora:
        name = " ".join(sorted(words)).upper()
        raise CannotPredict(f"{name} has passes or models beside the policy's, which the point does not state")


def _adapts_experts(settings: RunSettings, trainer: Trainer, targets: tuple[str, ...]) -> bool:
    """Whether routed experts have adapters: by the trainer's default, or because they are linear modules."""
    if settings.first(KEYS["targets"]) is None:
        return trainer.adapts_experts
    return trainer.has_expert_modules and targets == ALL_LINEAR


def _read_targets(
    settings: RunSettings, point: MeasuredPoint, model: ModelSpec, trainer: Trainer
) -> tuple[tuple[str, ...], int]:
    """Adapted layers and rank: stated, else derived from the number of parameters, else the trainer's default."""
    text = f"{settings.text} {settings.raw('target') or ''} {point.id}".lower()
    stated = settings.first(KEYS["lora_rank"])
    match = re.search(r"(?:^|[\s\-_,(])r(?:ank)?[ =_\-]?(\d+)", text)
    rank = settings.read_count(stated) if stated else int(match.group(1)) if match else None
    listed = _read_stated_targets(settings, model) or _find_listed(text)
    if listed is None and "trainable_params" in settings:
        return _infer_targets(model, settings.read_count("trainable_params"), rank)
    return listed or trainer.targets, rank or trainer.rank


def _read_stated_targets(settings: RunSettings, model: ModelSpec) -> tuple[str, ...] | None:
    """Layers that a setting names: `all-linear`, a list, or names with commas; None for other words.

    Raises: CannotPredict for a layer that the model does not have.
    """
    key = settings.first(KEYS["targets"])
    value = settings.raw(key) if key else None
    if not isinstance(value, str | list | tuple) or not value:
        return None
    names = value.split(",") if isinstance(value, str) else [str(name) for name in value]
    names = [name.strip().lower() for name in names]
    if len(names) == 1 and re.fullmatch(r"all([ \-_](linear|layers|targets))?", names[0]):
        return ALL_LINEAR
    known = {tensor.name.removesuffix(".weight").rpartition(".")[2] for tensor in list_linear_layers(model)}
    spelled = {short.lower(): name for name in known for short in (name, name.removesuffix("_proj"))}
    targets = tuple(dict.fromkeys(spelled[name] for name in names if name in spelled))
    if not targets and isinstance(value, str) and "," not in value:
        return None  # a remark, such as `see config`
    for name in names:
        if name not in spelled:
            raise CannotPredict(
                f"setting '{key}' names layer {shorten_value(name)}, which is not modelled in this model"
            )
    return targets


def _find_listed(text: str) -> tuple[str, ...] | None:
    """Layers that a text names; None without any."""
    if re.search(r"\b(q, ?v|qv|q/v|q_proj, ?v_proj)\b", text):
        return TARGETS[0]
    if re.search(r"all[ -]linear|all layers|all targets", text):
        return ALL_LINEAR
    if re.search(r"target[ \-]mlp|\bmlp only\b", text):
        return TARGETS[2]
    return None


def _infer_targets(model: ModelSpec, trainable: int, rank: int | None) -> tuple[tuple[str, ...], int]:
    """The first common set of layers with this number of parameters, at the stated rank or a power of two."""
    for targets in TARGETS:
        per_rank = sum(p.numel for p in list_lora_parameters(model, 1, _map_names(model, targets)))
        implied = trainable // per_rank
        if trainable == per_rank * implied and (implied == rank if rank else implied.bit_count() == 1):
            return targets, implied
    raise CannotPredict(f"no usual set of layers gives {trainable:,} trainable parameters")


def _map_names(model: ModelSpec, targets: tuple[str, ...]) -> list[str]:
    """The model's names of the layers that correspond to Llama's."""
    wanted = {place for place, pattern in _PLACES.items() for target in targets if re.search(pattern, target)}
    known = {tensor.name.removesuffix(".weight").rpartition(".")[2] for tensor in list_linear_layers(model)}
    if set(targets) <= known:
        return sorted(targets)
    names = {name for name in known for place in wanted if re.search(f"^({_PLACES[place]})", name)}
    if not names:
        raise CannotPredict(f"which layers of {model.architecture} are adapted is not stated")
    return sorted(names)


def _split_words(text: str) -> list[str]:
    """Words without dashes: "full-finetuning" is two words, "p-tuning" and "LN Tuning" are one each."""
    known, words = LORA | OTHER_METHODS, list[str]()
    for word in re.findall(r"[a-z0-9_\-]+", text.lower().replace(" tuning", "tuning")):
        joined, parts = re.sub(r"[_\-]", "", word), re.split(r"[_\-]", word)
        is_split = joined not in known and (
            parts[0] in WORDS["methods"]["backends"] or set(parts) & (FULL | {"dora", "lorafa"})
        )
        words += parts if is_split else [joined]
    return words
