"""A speed to simulate with whose seconds can be added up by hand, or fitted to a published engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearSpeed:
    """A straight line: weights and launches once a step, matmuls a sequence, KV cache a token held.

    Counts: base_s + per_seq_s x sequences + per_token_s x tokens held; a prefill is prefill_token_s x tokens.
    Source: the decode roofline with its two sides added up instead of the larger taken.
    Assumes: batches small enough that neither side hides the other. Good for calibrated engines, and to test with.

    >>> LinearSpeed(base_s=0.01, per_seq_s=0.001, per_token_s=1e-6).decode_step_s(10, 5000)
    0.025
    """

    base_s: float
    per_seq_s: float = 0.0
    per_token_s: float = 0.0
    prefill_token_s: float = 0.0

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """One token for each sequence."""
        return self.base_s + self.per_seq_s * num_seqs + self.per_token_s * context_tokens

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """So many tokens of prompts."""
        return self.prefill_token_s * num_tokens
