"""Logits: bytes of the vocabulary-wide tensors of a loss or a log-prob pass, by implementation.

In: tokens, vocabulary, implementation. Out: bytes. Left out: the head's weight and its gradient.

Symbols: n tokens whose logits are computed, V vocabulary (the rank's part, where the head is cut), e bytes of an
element of the model. Validated by traces: tests/memory/model/test_activations_traced.py.
"""

from typing import NamedTuple

from rlplan.memory.model.block import FLOAT_BYTES
from rlplan.units import ceil_div
from rlplan.vocabulary import Loss


class RowsAtOnce(NamedTuple):
    """Rows of logits that a row-chunked loss holds at a time."""

    multiplied: int
    """Rows that one matmul of the head computes."""
    upcast: int
    """Rows among them whose fp32 copies and exponentials exist together."""


ROWS_ON_CPU = RowsAtOnce(256, 8)
"""Rows in 16 bits; see `rows_on_cpu`. Larger matmuls are faster, and a few fp32 rows stay in a core's cache for all
passes over them. Measured with one thread, 2,048 rows of 512 in bf16, vocabulary 32,768, forward and backward: 0.64 s
of CPU time, against 0.88 with (128, 128), 0.73 with (128, 8), 0.59 with (512, 16)."""
ROWS_ON_GPU = RowsAtOnce(1024, 1024)
"""Each matmul reads the head's weight again. Its gradient takes rows / 2 FLOPs per byte of it in 16 bits, and an H100
computes 989e12 / 3.35e12 = 295 FLOPs in the time that it moves a byte."""
CHUNKS = 8
"""Chunks of a chunked loss. Source: torchtune 0.6, modules/loss/ce_chunked_output_loss.py, `num_output_chunks`."""


def rows_on_cpu(element_bytes: int) -> RowsAtOnce:
    """Rows of a block of logits, which takes 512 bytes per vocabulary entry.

    With more rows and a vocabulary from 65,536 on, glibc no longer takes the tensor from its heap (`rlplan.emit.ray`),
    and freed memory stays resident.

    >>> rows_on_cpu(2), rows_on_cpu(4).multiplied
    (RowsAtOnce(multiplied=256, upcast=8), 128)
    """
    return ROWS_ON_CPU._replace(multiplied=ROWS_ON_CPU.multiplied * 2 // element_bytes)


def saved_loss_bytes(loss: Loss, num_tokens: int, vocab_size: int, element_bytes: int) -> int:
    """Bytes of the loss's tensors that wait for the backward pass.

    Counts: log-probabilities (or logits) 4*V*n in fp32; e*V*n where the backward pass recomputes them, 2e*V*n where
    logits are kept with them; shifted 8*V*n; fused none, because the forward pass computes the gradient; by rows the
    normalizers 4*n; uncast e*V*n.
    Source: torch 2.13 autograd (`_log_softmax`, `nll_loss`), traces.

    >>> saved_loss_bytes(Loss.PLAIN, 10, 1000, 2), saved_loss_bytes(Loss.COMPILED_CHUNKED, 10, 1000, 2)
    (40000, 20000)
    """
    if loss in (Loss.NONE, Loss.FUSED, Loss.COMPILED_ROWS):
        return 0
    if loss is Loss.BY_ROWS:
        return FLOAT_BYTES * num_tokens
    e = element_bytes
    widths = {
        Loss.COMPILED_CHUNKED: e,
        Loss.UNCAST: e,
        Loss.UNCAST_CHUNKED: 2 * e,
        Loss.SHIFTED: 2 * FLOAT_BYTES,
    }
    return widths.get(loss, FLOAT_BYTES) * vocab_size * num_tokens


def loss_peak_bytes(
    loss: Loss,
    num_tokens: int,
    vocab_size: int,
    element_bytes: int,
    hidden: int = 0,
    *,
    has_gradient: bool = True,
    rows_at_once: RowsAtOnce = ROWS_ON_GPU,
) -> int:
    """Peak bytes of the loss's tensors, including those that wait for the backward pass.

    Counts, for a token and vocabulary entry. Plain: log-probabilities and two gradients 12 (forward: e + 8). Chunked:
    logits e, log-probabilities 4, one chunk in fp32. Compiled chunks: logits e, each replaced by its gradient, and one
    chunk. Uncast chunks: logits and log-probabilities 2e, each replaced by its gradient, and one chunk. Shifted: 12,
    and the logits that the output keeps 4. Parallel: log-probabilities, their one-hot target, exponential and sum 16.
    Megatron: logits, their upcast and the shifted copy that becomes the gradient e + 8. In place: logits in fp32 and in
    the model's type (4 + e; 4 if that is fp32). Uncast 2e and copied 8, each with and without gradient. Kept: logits in
    fp32, their gradient and its copy in the model's type 8 + e. Fused: one chunk of logits in e and fp32 with its
    gradient, and the rows' gradient e*h. Compiled rows: the rows of one matmul in e and fp32. By rows, with and without
    gradient: `rows_bytes` with exponentials, and normalizers 4*n. Without gradient: logits e and fp32, and for plain
    log-probabilities 4; for chunks logits e, one chunk in fp32 and its log-probabilities.
    Source: torch 2.13 autograd, distributed/tensor/parallel/loss.py (`_nll_loss_and_log_softmax_backward`); litgpt 0.5
    utils.py (`chunked_cross_entropy`); transformers 4.38 modeling_llama.py (`shift_logits`); of 2026-08 verl
    workers/engine/fsdp/transformer_impl.py, slime utils/ppo_utils.py (`_VocabParallelLogProbEntropy`), OpenRLHF
    models/actor.py and trainer/ray/ppo_actor.py (`output`).
    Differs: Wijmans et al. 2024 count 8 for bf16 logits with fp32 gradient.

    >>> loss_peak_bytes(Loss.PLAIN, 10, 1000, 2), loss_peak_bytes(Loss.CHUNKED, 10, 1000, 2)
    (120000, 65000)
    >>> loss_peak_bytes(Loss.IN_PLACE, 10, 1000, 4)
    40000
    >>> [loss_peak_bytes(loss, 10, 1000, 2) for loss in (Loss.UNCAST, Loss.COPIED, Loss.KEPT)]
    [40000, 80000, 100000]
    >>> loss_peak_bytes(Loss.BY_ROWS, 2048, 1000, 2)  # 1024 * 1000 * (2 + 8) + 4 * 2048
    10248192
    """
    words, e = vocab_size * num_tokens, element_bytes
    if loss is Loss.NONE:
        return 0
    if loss is Loss.BY_ROWS:
        return rows_bytes(num_tokens, vocab_size, e, rows_at_once) + saved_loss_bytes(loss, num_tokens, vocab_size, e)
    if loss is Loss.COMPILED_ROWS:
        return min(num_tokens, rows_at_once.multiplied) * vocab_size * (e + FLOAT_BYTES)
    if loss is Loss.FUSED:
        rows = fused_chunk_rows(num_tokens, vocab_size, hidden)
        return rows * vocab_size * (e + 2 * FLOAT_BYTES) + e * num_tokens * hidden
    if not has_gradient and loss is Loss.CHUNKED:
        return words * e + 2 * ceil_div(words * FLOAT_BYTES, CHUNKS)
    if has_gradient and loss is Loss.CHUNKED:
        return words * (e + FLOAT_BYTES) + ceil_div(words * FLOAT_BYTES, CHUNKS)
    if has_gradient and loss in (Loss.COMPILED_CHUNKED, Loss.UNCAST_CHUNKED):
        return saved_loss_bytes(loss, num_tokens, vocab_size, e) + ceil_div(words * e, CHUNKS)
    return words * _word_bytes(loss, e, has_gradient=has_gradient)


def _word_bytes(loss: Loss, element_bytes: int, *, has_gradient: bool) -> int:
    """Peak bytes per token and vocabulary entry of a loss that computes all logits at once."""
    upcast = 0 if element_bytes == FLOAT_BYTES else element_bytes
    if loss is Loss.UNCAST:
        return 2 * element_bytes
    if loss is Loss.COPIED:
        return 2 * FLOAT_BYTES
    if not has_gradient:
        return upcast + FLOAT_BYTES + (FLOAT_BYTES if loss is Loss.PLAIN else 0)
    per_word = {
        Loss.PLAIN: 3 * FLOAT_BYTES,
        Loss.SHIFTED: 4 * FLOAT_BYTES,
        Loss.PARALLEL: 4 * FLOAT_BYTES,
        Loss.MEGATRON: 2 * FLOAT_BYTES + upcast,
        Loss.IN_PLACE: FLOAT_BYTES + upcast,
        Loss.KEPT: 2 * FLOAT_BYTES + upcast,
    }
    return per_word[loss]


def rows_bytes(
    num_tokens: int,
    vocab_size: int,
    element_bytes: int,
    rows_at_once: RowsAtOnce = ROWS_ON_GPU,
    *,
    has_exponentials: bool = True,
) -> int:
    """Bytes of the rows of logits that the runtime holds at a time.

    Counts: V elements in the model's type for each row of one matmul. For each row that is upcast, V elements in fp32
    unless the model's type is fp32, and V exponentials in fp32 (in the forward pass, and in a backward pass through the
    entropy). The backward pass recomputes the logits and overwrites them by their gradient.
    Source: `rlplan.runtime.models.logprob_model.HeadLogprobs`. Differs: plain log_softmax under autograd holds 3 to 5
    tensors of n * V. Assumes: not yet run on a GPU.

    >>> rows_bytes(8192, 1000, 2), rows_bytes(8192, 1000, 4, has_exponentials=False)
    (10240000, 4096000)
    >>> rows_bytes(352, 1000, 2, ROWS_ON_CPU)  # 1000 * (256 * 2 + 8 * (4 + 4))
    576000
    """
    multiplied, upcast = (min(num_tokens, rows) for rows in rows_at_once)
    in_fp32 = (element_bytes != FLOAT_BYTES) + has_exponentials
    return vocab_size * (multiplied * element_bytes + upcast * FLOAT_BYTES * in_fp32)


def fused_chunk_rows(num_tokens: int, vocab_size: int, hidden: int) -> int:
    """Rows of logits that a fused loss holds at a time.

    Source: Liger-Kernel 0.6, ops/fused_linear_cross_entropy.py: the logits of a chunk take no more than all hidden
    states, with the rows rounded up to a power of two.

    >>> fused_chunk_rows(8192, 128_256, 4096)
    256
    """
    parts = max(1, ceil_div(vocab_size, max(1, hidden)))
    rows = ceil_div(num_tokens, parts)
    return min(num_tokens, 1 << (rows - 1).bit_length())
