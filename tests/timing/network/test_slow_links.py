"""Slow links: TCP under loss, trees of places, transfers worked by hand and as published."""

import sys

import pytest

from rlplan.spec.parts.placement import LinkSpec
from rlplan.timing.network.slow_links import SHARD_BYTES, count_levels, plan_broadcast, tcp_bytes_per_s


def link(**values: object) -> LinkSpec:
    return LinkSpec.model_validate({"bandwidth": "1Gb/s", **values})


def test_one_place_gets_bytes_over_bandwidth_and_one_latency() -> None:
    assert plan_broadcast(link(latency_s=0.5), 10**9).seconds == pytest.approx(10**9 / 125e6 + 0.5)


def test_loss_slows_each_connection_as_mathis_says_and_bandwidth_caps_them_all() -> None:
    lossy = link(latency_s=0.05, loss=0.00015)
    assert tcp_bytes_per_s(lossy) == pytest.approx(1460 / 0.1 * 100)
    assert tcp_bytes_per_s(lossy.model_copy(update={"num_connections": 10})) == pytest.approx(14_600_000)
    assert tcp_bytes_per_s(lossy.model_copy(update={"num_connections": 1000})) == 125e6


def test_trainers_that_send_to_all_themselves_share_their_way_out() -> None:
    assert plan_broadcast(link(num_places=8, fan_out=8), 10**9).seconds == pytest.approx(8 * 10**9 / 125e6)


def test_a_chain_takes_one_shard_more_for_each_place() -> None:
    tree = plan_broadcast(link(num_places=3, fan_out=1, latency_s=0.1), 10**9)
    assert tree.seconds == pytest.approx((10**9 + 2 * SHARD_BYTES) / 125e6 + 3 * 0.1)
    assert tree.num_levels == count_levels(3, 1) == 3


@pytest.mark.parametrize(("loss", "num_places"), [(0.0, 5), (1e-4, 40), (0.01, 60)])
def test_the_tree_that_is_taken_is_the_fastest_of_all(loss: float, num_places: int) -> None:
    free = link(num_places=num_places, loss=loss, latency_s=0.08)
    every = [free.model_copy(update={"fan_out": fan_out}) for fan_out in range(1, num_places + 1)]
    assert plan_broadcast(free, 2 * 10**9).seconds == min(
        plan_broadcast(candidate, 2 * 10**9).seconds for candidate in every
    )


def test_intellect_2_sends_62_gb_at_590_mb_a_second_in_14_minutes() -> None:
    """arXiv 2505.07291: 62 GB, 14 minutes on average, about 590 Mb/s."""
    assert plan_broadcast(link(bandwidth="590Mb/s"), 62e9).seconds / 60 == pytest.approx(14, rel=0.02)


def test_a_hundred_thousand_places_are_counted_as_fast_as_a_thousand() -> None:
    def num_calls(num_places: int) -> int:
        levels = [0]
        sys.setprofile(lambda *_: levels.__setitem__(0, levels[0] + 1))
        plan_broadcast(link(num_places=num_places, latency_s=0.05, loss=0.001), 62e9)
        sys.setprofile(None)
        return levels[0]

    assert num_calls(100_000) < 2 * num_calls(1_000)
