"""Speed: the interface of a rollout engine to the simulator.

In: sequences that decode together, tokens in their KV cache. Out: seconds.
Left out: computing the seconds; `serving.generation.EngineSpeed` does that from a model and a GPU.
"""

from typing import Protocol


class Speed(Protocol):
    """Seconds of one engine (all its tensor-parallel ranks)."""

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """Seconds of a step with one token for each of `num_seqs` sequences with `context_tokens` in total."""
        ...

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """Seconds to prefill `num_tokens` of one prompt after `context_tokens` cached ones."""
        ...


def batch_prefill_s(speed: Speed, num_tokens: int, num_attended: float) -> float:
    """Seconds to prefill several prompts together. num_attended: attended tokens, summed over all prompt tokens.

    Counts: one prompt with the same sums. With c cached tokens before it, t tokens attend to t (c + t / 2), so
    c = attended / t - t / 2, which is negative for many short prompts.
    Assumes: seconds depend on these two numbers only.
    """
    return speed.prefill_s(num_tokens, num_attended / num_tokens - num_tokens / 2)


CELL = 1 << 14
"""Grid of context tokens on which a remembered speed is computed; values in between are interpolated."""


class RememberedSpeed:
    """Cache of another speed, computed once for each number of sequences and grid cell of tokens.

    A simulation asks a million times, and the model of an engine needs microseconds for each answer.
    """

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._lines: dict[tuple[float, int], tuple[float, float]] = {}

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """Seconds of a step with one token for each sequence."""
        cell = int(context_tokens) // CELL
        line = self._lines.get((num_seqs, cell))
        if line is None:
            low, high = (self._speed.decode_step_s(num_seqs, place * CELL) for place in (cell, cell + 1))
            line = self._lines[(num_seqs, cell)] = (low, (high - low) / CELL)
        return line[0] + (context_tokens - cell * CELL) * line[1]

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """Seconds to prefill tokens of one prompt."""
        return self._speed.prefill_s(num_tokens, context_tokens)
