"""Response lengths as distributions, in tokens.

In: the `response_lengths:` part of a job's workload. Out: mean, deviation, probabilities and quantiles in tokens. Left
out: correlation of lengths (rollouts of one prompt are somewhat alike); prompts, which count at their mean.

Every distribution is capped at max_response_len: the engine stops longer responses there, so that they have that
length.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rlplan.spec.base import Spec

MAX_LEN = 1 << 30
POINTS = 200
"""Quantiles from which the mean and deviation of a capped distribution are computed."""
_STANDARD = NormalDist()


class ConstantLengths(Spec):
    """Every response has `value` tokens; without a value, max_response_len."""

    kind: Literal["constant"] = "constant"
    value: int | None = Field(default=None, ge=1, le=MAX_LEN)
    """Tokens of every response; None: max_response_len."""

    def quantile(self, share: float) -> float:
        """Number of tokens that a fraction `share` of the responses does not exceed."""
        return float(MAX_LEN if self.value is None else self.value)


class UniformLengths(Spec):
    """Lengths are uniform from `low` to `high`."""

    EXAMPLE: ClassVar[str] = "{kind: uniform, low: 100, high: 2000}"
    kind: Literal["uniform"]
    low: int = Field(ge=1, le=MAX_LEN)
    """Shortest length in tokens."""
    high: int = Field(ge=1, le=MAX_LEN)
    """Longest length in tokens."""

    @model_validator(mode="after")
    def _low_is_below_high(self) -> "UniformLengths":
        if self.low > self.high:
            raise ValueError(f"low = {self.low} must be at most high = {self.high}")
        return self

    def quantile(self, share: float) -> float:
        """Number of tokens that a fraction `share` of the responses does not exceed."""
        return self.low + share * (self.high - self.low)


class LogNormalLengths(Spec):
    """Log-normal lengths: few short, many usual, a long tail."""

    EXAMPLE: ClassVar[str] = "{kind: lognormal, median: 600, sigma: 0.9}"
    kind: Literal["lognormal"]
    median: float = Field(gt=0, le=MAX_LEN)
    """Median length in tokens."""
    sigma: float = Field(gt=0, le=5)
    """Standard deviation of the natural logarithm of the length."""

    def quantile(self, share: float) -> float:
        """Number of tokens that a fraction `share` of the responses does not exceed."""
        clipped = min(max(share, 1e-12), 1 - 1e-12)  # inv_cdf is infinite at 0 and 1
        return math.exp(math.log(self.median) + self.sigma * _STANDARD.inv_cdf(clipped))


def build_histogram(lengths: Sequence[int], num_bins: int = 20) -> "HistogramLengths":
    """Lengths from data as a distribution, in bins of one width.

    >>> build_histogram([1, 2, 2, 9], num_bins=2)
    HistogramLengths(kind='histogram', edges=(1, 6, 11), counts=(3, 1))
    """
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // num_bins))
    num_bins = -(-(high - low + 1) // width)
    counts = [0] * num_bins
    for length in lengths:
        counts[(length - low) // width] += 1
    edges = tuple(low + width * index for index in range(num_bins + 1))
    return HistogramLengths(kind="histogram", edges=edges, counts=tuple(counts))


class HistogramLengths(Spec):
    """Measured lengths: `counts[i]` responses have from `edges[i]` to `edges[i + 1]` tokens, evenly spread."""

    EXAMPLE: ClassVar[str] = "{kind: histogram, edges: [0, 500, 2000], counts: [3, 1]}"
    kind: Literal["histogram"]
    edges: tuple[int, ...] = Field(min_length=2, max_length=10_000)
    """Edges of the bins in tokens, one more than there are counts."""
    counts: tuple[int, ...] = Field(min_length=1, max_length=10_000)
    """Number of responses in each bin."""

    @model_validator(mode="after")
    def _fits_together(self) -> "HistogramLengths":
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.counts)} counts need {len(self.counts) + 1} edges, not {len(self.edges)}")
        if any(a >= b for a, b in zip(self.edges, self.edges[1:], strict=False)) or self.edges[0] < 0:
            raise ValueError("edges grow, from 0 or more")
        if self.edges[-1] > MAX_LEN or min(self.counts) < 0 or not sum(self.counts):
            raise ValueError("counts are at least 0, not all of them 0, and edges are tokens")
        return self

    def quantile(self, share: float) -> float:
        """Number of tokens that a fraction `share` of the responses does not exceed."""
        remaining = share * sum(self.counts)
        for index, count in enumerate(self.counts):
            if remaining <= count and count:
                return self.edges[index] + remaining / count * (self.edges[index + 1] - self.edges[index])
            remaining -= count
        return float(self.edges[-1])


LengthSpec = Annotated[
    ConstantLengths | UniformLengths | LogNormalLengths | HistogramLengths, Field(discriminator="kind")
]


class Lengths:
    """A distribution capped at `longest` tokens, as numbers."""

    def __init__(self, spec: LengthSpec, longest: int) -> None:
        self.spec, self.longest = spec, longest
        values = [self.quantile((index + 0.5) / POINTS) for index in range(POINTS)]
        self.mean = sum(values) / POINTS
        self.variance = sum((value - self.mean) ** 2 for value in values) / POINTS

    def quantile(self, share: float) -> float:
        """Number of tokens that a fraction `share` of the responses does not exceed.

        >>> Lengths(UniformLengths(kind="uniform", low=100, high=300), 250).quantile(0.5)
        200.0
        >>> Lengths(UniformLengths(kind="uniform", low=100, high=300), 250).quantile(0.9)
        250.0
        """
        return min(float(self.longest), self.spec.quantile(share))

    def compute_probability(self, tokens: float) -> float:
        """Probability that a response has at most `tokens` tokens, to a precision of 2^-40.

        >>> lengths = Lengths(UniformLengths(kind="uniform", low=100, high=300), 1000)
        >>> [round(lengths.compute_probability(num_tokens), 6) for num_tokens in (150, 300, 99)]
        [0.25, 1.0, 0.0]
        """
        if tokens >= self.longest or self.quantile(1.0) <= tokens:
            return 1.0
        if self.quantile(0.0) > tokens:
            return 0.0
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.quantile(middle) <= tokens else (low, middle)
        return high if high == 1.0 else low

    def estimate_longest(self, count: int) -> float:
        """Median of the longest of `count` responses, in tokens.

        Counts: the quantile at 0.5 ** (1 / count). Assumes: lengths are independent.

        >>> Lengths(UniformLengths(kind="uniform", low=0 + 1, high=1001), 2000).estimate_longest(1)
        501.0
        """
        return self.quantile(0.5 ** (1 / count))

    def sum_at_most(self, tokens: float, count: int) -> float:
        """Probability that `count` responses have at most `tokens` tokens together.

        Counts: the normal distribution of the sum. Assumes: many, independent (central limit theorem).

        >>> Lengths(ConstantLengths(value=10), 100).sum_at_most(1000, 100)
        1.0
        """
        deviation = math.sqrt(count * self.variance)
        if deviation < 1e-9:
            return float(count * self.mean <= tokens)
        return NormalDist(count * self.mean, deviation).cdf(tokens)

    def sum_quantile(self, share: float, count: int) -> float:
        """Number of tokens that `count` responses together do not exceed with probability `share`."""
        deviation = math.sqrt(count * self.variance)
        total = count * self.mean + (_STANDARD.inv_cdf(share) * deviation if deviation else 0.0)
        return min(total, float(count * self.longest))


@lru_cache(maxsize=64)
def cut_lengths(spec: LengthSpec, longest: int) -> Lengths:
    """The distribution capped at `longest` tokens, cached."""
    return Lengths(spec, longest)
