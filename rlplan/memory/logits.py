"""Logits: bytes of the vocabulary-wide tensors of a log-prob pass.

In: tokens and vocabulary. Out: bytes. Left out: chunked heads, where the logits never exist whole.

Symbols: n response tokens of a micro-batch, V vocab_size.
"""

from rlplan.units import ceil_div

ROWS_AT_ONCE = 256
"""Rows of logits that are turned into probabilities at a time. The runtime uses this very number."""


def logits_bytes(num_tokens: int, vocab_size: int) -> int:
    """Bytes of the logits of n tokens, in fp32, during the log-prob pass and its backward.

    Counts: n * V * 4. The backward pass writes the gradient over them.
    Source: `rlplan.runtime.logprob_model`. Differs: plain log_softmax under autograd holds 3 to 5 such tensors.

    >>> logits_bytes(352, 32_768)
    46137344
    """
    return num_tokens * vocab_size * 4


def probability_slice_bytes(num_tokens: int, vocab_size: int) -> int:
    """Bytes of the slices from which the entropy is taken: difference, exponential and product, in fp32.

    Source: `rlplan.runtime.logprob_model._entropy`.
    """
    return 3 * min(num_tokens, ROWS_AT_ONCE) * vocab_size * 4


def largest_micro_batch(num_rollouts: int, micro_batch_size: int) -> int:
    """Rollouts in the largest micro-batch of a share.

    >>> largest_micro_batch(3, 8)
    3
    """
    return min(num_rollouts, micro_batch_size)


def num_micro_batches(num_rollouts: int, micro_batch_size: int) -> int:
    """Micro-batches of a share."""
    return ceil_div(num_rollouts, micro_batch_size)
