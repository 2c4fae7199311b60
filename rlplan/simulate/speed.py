"""Speed: what the simulator asks of a rollout engine.

In: sequences that decode together, tokens in their KV cache. Out: seconds.
Left out: how the seconds come about; `serving.generation.EngineSpeed` works them out of a model and a GPU.
"""

from typing import Protocol


class Speed(Protocol):
    """Seconds of one engine (all its tensor-parallel ranks)."""

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """One token for each of `num_seqs` sequences that hold `context_tokens` together."""
        ...

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """So many tokens of one prompt, behind `context_tokens` of it that are held already."""
        ...


def batch_prefill_s(speed: Speed, num_tokens: int, num_attended: float) -> float:
    """Seconds to prefill several prompts together. num_attended: tokens that each attends to, summed over the tokens.

    Counts: as one prompt of as many tokens that attends to as many: t tokens behind c attend to t (c + t / 2), so that
    c = attended / t - t / 2, which is below 0 for many short prompts.
    Assumes: seconds depend on these two numbers.
    """
    return speed.prefill_s(num_tokens, num_attended / num_tokens - num_tokens / 2)


CELL = 1 << 14
"""Tokens held, in steps of which a remembered speed is computed; between two it is interpolated."""


class RememberedSpeed:
    """Another speed, computed once for each number of sequences and CELL of tokens.

    A simulation asks a million times, and a model of an engine thinks for microseconds.
    """

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._lines: dict[tuple[float, int], tuple[float, float]] = {}

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """One token for each sequence."""
        cell = int(context_tokens) // CELL
        line = self._lines.get((num_seqs, cell))
        if line is None:
            low, high = (self._speed.decode_step_s(num_seqs, place * CELL) for place in (cell, cell + 1))
            line = self._lines[(num_seqs, cell)] = (low, (high - low) / CELL)
        return line[0] + (context_tokens - cell * CELL) * line[1]

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """So many tokens of one prompt."""
        return self._speed.prefill_s(num_tokens, context_tokens)
