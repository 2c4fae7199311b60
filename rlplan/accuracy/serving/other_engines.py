"""Points about other engines: TensorRT-LLM's capacity, and eager generation with a static cache.

In: points. Out: predictions. Left out: vLLM (engine.py).
"""

from rlplan.accuracy.named_models import model_of, quantization_of
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction, predicts
from rlplan.accuracy.settings import Settings, total_bytes, unit_bytes
from rlplan.memory.model.quantization import NF4, NF4_DOUBLE, Quantization
from rlplan.memory.serving.eager import eager_generation_bytes
from rlplan.memory.serving.trtllm import TrtllmSettings, num_trtllm_sequences
from rlplan.spec.base import shorten

SHORT_PROMPT, SHORT_RESPONSE = 10, 50
"""Tokens where a point about generation states none: a short sentence, and litgpt's default of new tokens."""


@predicts("trtllm_kv_capacity")
def predict_trtllm(point: MeasuredPoint) -> Prediction:
    """Sequences of the largest length at once."""
    settings = Settings(point)
    if "sequence" not in point.measured.unit.lower():
        raise CannotPredict(f"unit {shorten(point.measured.unit)} is not a number of sequences")
    for key in ("pp", "attention_dp", "dp"):
        if settings.count(key, 1) > 1:
            raise CannotPredict(f"TensorRT-LLM with {key} {settings.count(key)} is not modelled")
    longest = settings.count("max_seq_len", settings.count("isl", 0, at_least=0) + settings.count("osl", 0, at_least=0))
    engine = TrtllmSettings(
        total_bytes(point),
        max_seq_len=longest,
        max_num_tokens=settings.count("max_num_tokens", 8192),
        free_fraction=settings.number("free_gpu_memory_fraction", 0.9, high=1.0),
        tp=settings.degree("tp"),
        kv_element_bytes=settings.element_bytes("kv_dtype"),
        quantization=quantization_of(point),
    )
    return Prediction(num_trtllm_sequences(model_of(point), engine))


@predicts("inference_peak")
def predict_eager_peak(point: MeasuredPoint) -> Prediction:
    """Allocated bytes at the peak of eager generation on one GPU."""
    settings, unit = Settings(point), unit_bytes(point)
    engine = settings.word("engine", "eager").lower()
    if "eager" not in engine and "hf" not in engine and "litgpt" not in engine:
        raise CannotPredict(f"engine {shorten(engine)} is not modelled; eager generation is")
    for key in ("tp", "devices", "gpus", "num_gpus"):
        if settings.count(key, 1) > 1:
            raise CannotPredict(f"eager generation over {settings.count(key)} GPUs is not modelled")
    peak = eager_generation_bytes(
        model_of(point),
        element_bytes=settings.element_bytes("dtype", "precision"),
        batch_size=settings.count("batch", 1),
        prompt_len=settings.count("prompt", SHORT_PROMPT),
        response_len=settings.count("gen", SHORT_RESPONSE),
        scheme=_eager_scheme(point),
    )
    return Prediction(peak / unit)


def _eager_scheme(point: MeasuredPoint) -> Quantization | None:
    scheme = quantization_of(point)
    if scheme is None or scheme.form not in (NF4, NF4_DOUBLE):
        return scheme
    return Quantization(scheme.form, covers_head=True)
