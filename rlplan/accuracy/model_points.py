"""Points about models alone: parameter counts, and the states of the ZeRO paper's arithmetic.

In: points. Out: predictions. Left out: what a trainer really holds (training points).
"""

import re

from rlplan.accuracy.named_models import config_of, model_of
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction, predicts
from rlplan.accuracy.settings import Settings, unit_bytes
from rlplan.spec.base import shorten
from rlplan.spec.model import ModelSpec, model_from_config
from rlplan.spec.models.adapters import linear_layers, lora_parameters, value_head_parameters

_SCALES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12, "thousand": 10**3, "million": 10**6, "billion": 10**9}
RANKS = ("lora_r", "lora_rank", "r", "rank")
TARGETS = ("targets", "target_modules")
HEADS = ("head", "value_head", "reward_head", "critic", "role")


@predicts("param_count")
def predict_parameters(point: MeasuredPoint) -> Prediction:
    """Numbers stored, active a token, or trained by adapters, as the unit says."""
    settings, model = Settings(point), _with_positions(point)
    words = point.measured.unit.lower()
    rank = next((settings.count(key) for key in RANKS if key in settings), None)
    if rank is not None and "total" not in words:
        count = _num_adapted(settings, model, rank)
    elif "trainable" in words and "full" not in settings.word("method", "full").lower():
        raise CannotPredict(f"the rank of method {shorten(settings.word('method'))} is not stated, or it has none")
    elif "active" in words:
        count = model.num_active_parameters
    elif _has_value_head(settings, words):
        count = sum(tensor.numel for tensor in value_head_parameters(model))
    else:
        count = model.num_parameters
    scale = next((_SCALES[word] for word in re.findall(r"[a-z]+", words)[:1] if word in _SCALES), 1)
    return Prediction(count / scale if scale > 1 else count)


def _num_adapted(settings: Settings, model: ModelSpec, rank: int) -> int:
    """Trained numbers of LoRA; DoRA has a magnitude for every row of an adapted layer beside them."""
    stated = next((settings.raw(key) for key in TARGETS if key in settings), "all-linear")
    if not isinstance(stated, str | list):
        raise CannotPredict(f"the adapted layers are {shorten(stated)}, neither a name nor a list of names")
    named = re.split(r"[\s,]+", stated.strip()) if isinstance(stated, str) else [str(name) for name in stated]
    known = {tensor.name.removesuffix(".weight").rpartition(".")[2] for tensor in linear_layers(model)}
    names = [name if name in known or f"{name}_proj" not in known else f"{name}_proj" for name in named]
    targets = "all-linear" if names in (["all-linear"], ["all", "linear"]) else names
    count = sum(tensor.numel for tensor in lora_parameters(model, rank, targets))
    if settings.flag("use_dora") or "dora" in settings.word("method").lower():
        layers = [tensor for tensor in linear_layers(model) if targets == "all-linear" or _named(tensor.name, names)]
        count += sum(tensor.shape[0] for tensor in layers)
    return count


def _named(name: str, names: list[str]) -> bool:
    return name.removesuffix(".weight").rpartition(".")[2] in names


def _has_value_head(settings: Settings, words: str) -> bool:
    """Whether one row stands where the language head was."""
    values = [settings.raw(key) for key in HEADS]
    said = any(value is True for value in values) or any(
        isinstance(value, str) and _is_scalar(value) for value in values
    )
    return said or _is_scalar(words)


def _is_scalar(text: str) -> bool:
    return re.search(r"\b(value|reward|critic|scalar|score)\b", text.lower()) is not None


def _with_positions(point: MeasuredPoint) -> ModelSpec:
    """llm-foundry's benchmarks have as many learned positions as the sequence is long (`max_seq_len`)."""
    settings, name = Settings(point), point.model or ""
    if "config" in settings or not name.endswith("-bench") or "seq" not in settings:
        return model_of(point)
    return model_from_config({**config_of(name), "n_positions": settings.count("seq")}, where=point.id)


@predicts("zero_model_states")
def predict_zero_states(point: MeasuredPoint) -> Prediction:
    """Bytes of parameters, gradients and optimizer a rank, by the paper's arithmetic.

    Counts: (2 + 2 + K)P; K/N with Pos, 2/N more with Pos+g, all over N with Pos+g+p.
    Source: arXiv 1910.02054, section 5.
    Differs: what DeepSpeed holds beside it (buckets, flat buffers, copies) stands in memory/trainers/zero.py.
    """
    settings = Settings(point)
    ranks, optimizer = settings.count("dp"), settings.number("K", 12.0)
    unit = unit_bytes(point)
    stage = zero_stage_of(settings.raw("stage"))
    shares = ((1, 1, 1), (1, 1, ranks), (1, ranks, ranks), (ranks, ranks, ranks))[stage]
    parts = [size / share for size, share in zip((2, 2, optimizer), shares, strict=True)]
    return Prediction(_num_parameters(point) * sum(parts) / unit)


def zero_stage_of(value: object) -> int:
    """Stage 0 to 3, as the paper's letters or as a number. Raises: CannotPredict.

    >>> [zero_stage_of(word) for word in ("baseline", "Pos", "P_os+g", "Pos+g+p", "ZeRO-3", 1)]
    [0, 1, 2, 3, 3, 1]
    """
    word = re.sub(r"[\s_\-]", "", str(value).lower())
    lettered = {"baseline": 0, "dp": 0, "os": 1, "os+g": 2, "os+g+p": 3}
    if word.removeprefix("p") in lettered:
        return lettered[word.removeprefix("p")]
    if word in lettered:
        return lettered[word]
    match = re.fullmatch(r"(zero|stage|z|zerostage)?([0-3])", word)
    if match is None:
        raise CannotPredict(f"stage {shorten(value)} is none of baseline, Pos, Pos+g, Pos+g+p and 0 to 3")
    return int(match.group(2))


def _num_parameters(point: MeasuredPoint) -> float:
    match = re.search(r"(?:^|\s)(\d+(?:\.\d+)?)\s*([bBmMT])\b", point.model or "")
    if match:
        return float(match.group(1)) * _SCALES[match.group(2).lower()]
    return float(model_of(point).num_parameters)
