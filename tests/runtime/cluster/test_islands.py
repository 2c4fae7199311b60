"""Placements up to 64 GPUs on 8 hosts are satisfied, or refused with the reason, before anything starts."""

import pytest

from rlplan.runtime.cluster.islands import Host, add_up, deal_islands


def hosts(*gpus: int) -> list[Host]:
    return [
        Host(f"node-{index}", f"10.0.0.{index}", {"GPU": float(count), "CPU": 16.0}, {"GPU": 8.0, "CPU": 16.0})
        for index, count in enumerate(gpus)
    ]


def islands(*gpus: int) -> list[dict[str, float]]:
    return [{"GPU": float(count), "CPU": float(count)} for count in gpus]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_64_gpus_in_engines_of_any_size_fill_8_hosts_of_8(size: int) -> None:
    wanted = islands(*[size] * (64 // size))
    dealt = deal_islands(wanted, hosts(*[8] * 8), spreads=False)
    assert not isinstance(dealt, str)
    for host in range(8):
        assert add_up([island for island, place in zip(wanted, dealt, strict=True) if place == host])["GPU"] == 8


def test_one_gpu_more_than_there_are_is_refused_with_both_numbers() -> None:
    dealt = deal_islands(islands(*[8] * 8, 1), hosts(*[8] * 8), spreads=False)
    assert dealt == "the plan needs 65 GPUs, 64 GPUs free in the cluster"


def test_gpus_that_are_there_but_not_together_are_refused() -> None:
    dealt = deal_islands(islands(8), hosts(4, 4), spreads=False)
    assert isinstance(dealt, str)
    assert "0 of 1 parts have a host; the next one needs 8 GPUs and 8 CPUs on one host" in dealt
    assert "the most that any of 2 hosts has free is 4 GPUs" in dealt


def test_a_small_island_does_not_take_the_host_that_a_large_one_needs() -> None:
    assert deal_islands(islands(2, 8, 2), hosts(8, 4), spreads=False) == (1, 0, 1)


def test_spread_islands_have_hosts_of_their_own() -> None:
    assert deal_islands(islands(1, 1), hosts(8, 8), spreads=True) == (0, 1)
    assert deal_islands(islands(1, 1, 1), hosts(8, 8), spreads=True) == ("the plan needs 3 hosts, the cluster has 2")
