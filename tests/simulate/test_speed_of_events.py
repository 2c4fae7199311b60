"""An event costs the same whatever the number of engines, sequences and tokens. Ratios, for machines differ."""

from dataclasses import replace

import pytest

from benchmarks.bench_simulate import seconds_per_event, setting
from rlplan.spec.parts.lengths import Lengths, LogNormalLengths


@pytest.mark.nightly
@pytest.mark.parametrize("num_engines", [64])
def test_more_engines_do_not_make_events_slower(num_engines: int) -> None:
    few, _ = seconds_per_event(setting(8, num_steps=4))
    many, _ = seconds_per_event(setting(num_engines, num_steps=1))
    assert many < 2.5 * few


def test_longer_responses_make_no_more_events() -> None:
    short = setting(4, num_steps=2)
    assert short.rollouts is not None
    longer = Lengths(LogNormalLengths(kind="lognormal", median=10_000, sigma=1.0), 163_840)
    limits = replace(short.rollouts.limits, num_blocks=400_000)
    long = replace(short, rollouts=replace(short.rollouts, lengths=longer, limits=limits))
    assert seconds_per_event(long, 1)[1] <= 1.05 * seconds_per_event(short, 1)[1]
