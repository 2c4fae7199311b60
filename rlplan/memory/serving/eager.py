"""Eager generation on one GPU: weights, a static KV cache and one forward pass, as litgpt and Hugging Face run it.

In: a ModelSpec, element bytes, batch and lengths. Out: bytes of tensors at the peak. Left out: paging, beams, offload.
Symbols: L layers, k kv heads, d head_dim, h hidden_size, I intermediate_size, V vocab_size, T prompt tokens.
"""

from rlplan.memory.model.quantization import Quantization, weight_bytes
from rlplan.memory.serving.peaks import prefill_peak_bytes
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.kv import kv_elements_per_token


def eager_generation_bytes(
    model: ModelSpec,
    *,
    element_bytes: int,
    batch_size: int,
    prompt_len: int,
    response_len: int,
    scheme: Quantization | None = None,
) -> int:
    """Allocated bytes at the peak.

    Counts: weights; keys and values of the longest sequence; the larger of one layer's prefill and the logits with
    their fp32 copy; of 4-bit weights also the largest matrix, dequantised for its matmul.
    Source: litgpt tutorials/resource-tables.md and generate/base.py; bitsandbytes autograd/_functions.py MatMul4Bit.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("meta-llama/Llama-2-7b-hf")
    >>> # 2 * 6738415616 + 2*32*2*4096*100 of cache + 50*32000*6 of logits
    >>> eager_generation_bytes(model, element_bytes=2, batch_size=1, prompt_len=50, response_len=50)
    13538860032
    """
    weights = weight_bytes(model.tensors, element_bytes, scheme)
    cache = sum(kv_elements_per_token(model).values()) * batch_size * (prompt_len + response_len) * element_bytes
    logits = batch_size * prompt_len * model.vocab_size * (element_bytes + 4)
    passing = max(prefill_peak_bytes(model, 1, batch_size * prompt_len, element_bytes), logits)
    widest = 0
    if scheme is not None and scheme.form.bits < 8:
        widest = max((tensor.numel for tensor in model.tensors if scheme.covers(tensor)), default=0) * element_bytes
    return weights + cache + passing + widest
