"""Drawn lengths follow the distribution that they are drawn from."""

import pytest

from rlplan.simulate.engine_pool import LengthSampler
from rlplan.spec.parts.lengths import HistogramLengths, Lengths, LengthSpec, LogNormalLengths, UniformLengths


@pytest.mark.parametrize(
    "spec",
    [
        LogNormalLengths(kind="lognormal", median=500, sigma=1.0),
        UniformLengths(kind="uniform", low=10, high=900),
        HistogramLengths(kind="histogram", edges=(0, 100, 1000), counts=(3, 1)),
    ],
    ids=lambda spec: spec.kind,
)
def test_quantiles_of_many_drawn_lengths_are_those_of_the_distribution(spec: LengthSpec) -> None:
    lengths = Lengths(spec, 8192)
    drawn = sorted(LengthSampler(lengths, 3).draw(200_000))
    for share in (0.01, 0.1, 0.5, 0.9, 0.99, 0.999):
        assert drawn[int(share * len(drawn))] == pytest.approx(lengths.quantile(share), rel=0.03, abs=1)
    assert drawn[0] >= 1
    assert drawn[-1] <= 8192


def test_what_is_drawn_does_not_depend_on_how_many_are_asked_for_at_once() -> None:
    lengths = Lengths(LogNormalLengths(kind="lognormal", median=500, sigma=1.0), 8192)
    sampler, other = LengthSampler(lengths, 3), LengthSampler(lengths, 3)
    assert sampler.draw(10) == [length for _ in range(10) for length in other.draw(1)]
