"""Points about models alone: parameter counts, and the states of the ZeRO paper's arithmetic.

In: points. Out: predictions. Left out: what a trainer really holds (training points).
"""

import re

from rlplan.accuracy.named_models import model_of
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction, predicts
from rlplan.accuracy.settings import Settings
from rlplan.spec.base import shorten
from rlplan.spec.models.adapters import lora_parameters

_SCALES = {"k": 10**3, "m": 10**6, "b": 10**9, "thousand": 10**3, "million": 10**6, "billion": 10**9}


@predicts("param_count")
def predict_parameters(point: MeasuredPoint) -> Prediction:
    """Numbers stored, active a token, or trained by adapters, as the unit says."""
    settings, model = Settings(point), model_of(point)
    words = point.measured.unit.lower()
    rank = next((settings.count(key) for key in ("lora_r", "lora_rank", "r", "rank") if key in settings), None)
    if rank is not None and "total" not in words:
        targets = next((settings.raw(key) for key in ("targets", "target_modules") if key in settings), "all-linear")
        names = targets if isinstance(targets, str) else [str(name) for name in targets]
        count = sum(tensor.numel for tensor in lora_parameters(model, rank, names))
    elif "active" in words:
        count = model.num_active_parameters
    else:
        count = model.num_parameters
    scale = next((_SCALES[word] for word in re.findall(r"[a-z]+", words)[:1] if word in _SCALES), 1)
    return Prediction(count / scale if scale > 1 else count)


@predicts("zero_model_states")
def predict_zero_states(point: MeasuredPoint) -> Prediction:
    """Bytes of parameters, gradients and optimizer a rank, by the paper's arithmetic.

    Counts: (2 + 2 + K)P; K/N with Pos, 2/N more with Pos+g, all over N with Pos+g+p.
    Source: arXiv 1910.02054, section 5.
    Differs: what DeepSpeed holds beside it (buckets, flat buffers, copies) stands in memory/zero.py.
    """
    settings = Settings(point)
    stage = settings.word("stage").lower().replace(" ", "")
    ranks, optimizer = settings.count("dp"), settings.number("K", 12.0)
    shares = {
        "baseline": (1, 1, 1),
        "pos": (1, 1, ranks),
        "pos+g": (1, ranks, ranks),
        "pos+g+p": (ranks, ranks, ranks),
    }
    if stage not in shares:
        raise CannotPredict(f"stage {shorten(stage)} is none of {', '.join(shares)}")
    unit = point.measured.bytes_per_unit
    if unit is None:
        raise CannotPredict(f"unit {shorten(point.measured.unit)} is no size")
    parts = [size / share for size, share in zip((2, 2, optimizer), shares[stage], strict=True)]
    return Prediction(_num_parameters(point) * sum(parts) / unit)


def _num_parameters(point: MeasuredPoint) -> float:
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*([bBmM])\b", point.model or "")
    if match:
        return float(match.group(1)) * _SCALES[match.group(2).lower()]
    return float(model_of(point).num_parameters)
