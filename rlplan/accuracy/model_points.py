"""Predictor of parameter counts.

In: a point. Out: the parameter counts of its job's model. Left out: bytes, which points of trainers have.
"""

import re
from typing import Any

from rlplan.accuracy.named_models import find_config, make_policy
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import validate_job
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.settings import Settings
from rlplan.spec.base import shorten_value
from rlplan.spec.models.adapters import list_linear_layers, list_lora_parameters, list_value_parameters

_SCALES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12, "thousand": 10**3, "million": 10**6, "billion": 10**9}
RANKS = ("lora_r", "lora_rank", "r", "rank")
TARGETS = ("targets", "target_modules")
HEADS = ("head", "value_head", "reward_head", "critic", "role")


def predict_parameters(point: MeasuredPoint) -> Prediction:
    """Stored parameters, parameters per token, or trained parameters of adapters, as the unit says."""
    settings, words = Settings(point), point.measured.unit.lower()
    job = validate_job(counted_job(point))
    model, lora = job.load_model(), job.training.lora
    if lora is not None and "total" not in words:
        count = sum(tensor.numel for tensor in list_lora_parameters(model, lora.rank, lora.target_modules))
    elif "trainable" in words and "full" not in settings.word("method", "full").lower():
        raise CannotPredict(
            f"the rank of method {shorten_value(settings.word('method'))} is not stated, or it has none"
        )
    elif "active" in words:
        count = model.num_active_parameters
    elif _has_value_head(settings, words):
        count = sum(tensor.numel for tensor in list_value_parameters(model))
    else:
        count = model.num_parameters
    scale = next((_SCALES[word] for word in re.findall(r"[a-z]+", words)[:1] if word in _SCALES), 1)
    return Prediction(count / scale if scale > 1 else count)


def counted_job(point: MeasuredPoint) -> dict[str, Any]:
    """The job of a model, with adapters where a rank is stated. Raises: CannotPredict."""
    settings, policy = Settings(point), make_policy(point)
    if "config" not in settings and (point.model or "").endswith("-bench") and "seq" in settings:
        # llm-foundry's benchmarks have as many learned positions as the sequence is long (`max_seq_len`)
        policy["config"] = {**find_config(point.model or ""), "n_positions": settings.read_count("seq")}
    job: dict[str, Any] = {
        "policy": policy,
        "hardware": "1xH100",
        "workload": {"max_prompt_len": 1, "max_response_len": 1},
    }
    rank = next((settings.read_count(key) for key in RANKS if key in settings), None)
    if rank is not None:
        if settings.flag("use_dora") or "dora" in settings.word("method").lower():
            raise CannotPredict("DoRA: a job trains all weights, or LoRA")
        job["training"] = {"lora": {"rank": rank, "target_modules": _find_targets(settings, job)}}
    return job


def _find_targets(settings: Settings, job: dict[str, Any]) -> str | list[str]:
    """The adapted layers, by their names in the model."""
    stated = next((settings.raw(key) for key in TARGETS if key in settings), "all-linear")
    if not isinstance(stated, str | list):
        raise CannotPredict(f"the adapted layers are {shorten_value(stated)}, neither a name nor a list of names")
    words = re.split(r"[\s,]+", stated.strip()) if isinstance(stated, str) else [str(name) for name in stated]
    tensors = list_linear_layers(validate_job(job).load_model())
    known = {tensor.name.removesuffix(".weight").rpartition(".")[2] for tensor in tensors}
    names = [name if name in known or f"{name}_proj" not in known else f"{name}_proj" for name in words]
    return "all-linear" if names in (["all-linear"], ["all", "linear"]) else names


def _has_value_head(settings: Settings, words: str) -> bool:
    """Whether a head with one output replaces the language head."""
    values = [settings.raw(key) for key in HEADS]
    has_scalar = any(value is True or (isinstance(value, str) and _is_scalar(value)) for value in values)
    return has_scalar or _is_scalar(words)


def _is_scalar(text: str) -> bool:
    return re.search(r"\b(value|reward|critic|scalar|score)\b", text.lower()) is not None
