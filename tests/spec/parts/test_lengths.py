"""Response lengths as distributions: hand-worked values, and what holds for every distribution."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.errors import SpecError
from rlplan.spec.base import validate
from rlplan.spec.parts.lengths import ConstantLengths, HistogramLengths, Lengths, LogNormalLengths, UniformLengths
from rlplan.spec.parts.workload import WorkloadSpec

UNIFORM = UniformLengths(kind="uniform", low=100, high=300)
KINDS = (
    ConstantLengths(value=150),
    UNIFORM,
    LogNormalLengths(kind="lognormal", median=200, sigma=1.0),
    HistogramLengths(kind="histogram", edges=(0, 100, 200, 400), counts=(1, 0, 3)),
)


def test_a_uniform_distribution_is_what_is_worked_by_hand() -> None:
    lengths = Lengths(UNIFORM, 1000)
    assert lengths.mean == pytest.approx(200)
    assert lengths.variance == pytest.approx(200**2 / 12, rel=1e-3)
    assert lengths.sum_quantile(0.5, 100) == pytest.approx(20_000)
    assert lengths.estimate_longest(4) == pytest.approx(100 + 200 * 0.5**0.25)


def test_what_is_longer_than_allowed_has_the_longest_length() -> None:
    lengths = Lengths(UNIFORM, 200)
    assert lengths.quantile(0.9) == 200
    assert lengths.mean == pytest.approx(175)  # half are 200, the others 150 on average
    assert lengths.compute_probability(199.9) == pytest.approx(0.4995, abs=1e-3)
    assert lengths.compute_probability(200) == 1.0


def test_a_histogram_is_spread_evenly_inside_its_bins() -> None:
    lengths = Lengths(KINDS[3], 1000)
    assert lengths.quantile(0.25) == pytest.approx(100)
    assert lengths.quantile(0.625) == pytest.approx(300)
    assert lengths.mean == pytest.approx(0.25 * 50 + 0.75 * 300, rel=1e-3)


def test_a_constant_without_a_value_is_the_longest_allowed() -> None:
    lengths = Lengths(ConstantLengths(), 777)
    assert (lengths.mean, lengths.variance, lengths.estimate_longest(10), lengths.compute_probability(776)) == (
        777,
        0,
        777,
        0,
    )


@pytest.mark.parametrize("spec", KINDS)
@given(share=st.floats(0.01, 0.99), other=st.floats(0.01, 0.99), count=st.integers(1, 10_000))
def test_quantiles_grow_and_probabilities_are_their_inverse(spec, share, other, count) -> None:  # type: ignore[no-untyped-def]
    lengths = Lengths(spec, 350)
    low, high = sorted((share, other))
    assert lengths.quantile(low) <= lengths.quantile(high) <= 350
    assert lengths.compute_probability(lengths.quantile(share)) >= share - 1e-6
    assert lengths.sum_quantile(0.99, count) >= lengths.sum_quantile(0.5, count) - 1e-6
    assert lengths.sum_quantile(0.99, count) <= count * 350


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "uniform", "low": 300, "high": 100}, "low = 300 must be at most high = 100"),
        ({"kind": "histogram", "edges": [0, 1], "counts": [1, 2]}, "2 counts need 3 edges, not 2"),
        ({"kind": "histogram", "edges": [5, 1], "counts": [1]}, "edges grow"),
        ({"kind": "histogram", "edges": [0, 1], "counts": [0]}, "not all of them 0"),
        ({"kind": "normal"}, "kind"),
        ({"kind": "lognormal", "median": 0, "sigma": 1}, "median"),
    ],
)
def test_a_broken_distribution_is_refused_with_its_rule(spec: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate(WorkloadSpec, {"response_lengths": spec}, file="budget.yaml")
    assert words in str(caught.value)
