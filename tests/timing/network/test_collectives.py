"""Links and collectives: seconds by hand on one host and on several, and what never gets cheaper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.spec.hardware.catalogue import get_gpu, get_node
from rlplan.timing.cost import Resource
from rlplan.timing.network import collectives
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.network.collectives import find_link, find_outer_link

MANY = [
    collectives.time_all_gather,
    collectives.time_reduce_scatter,
    collectives.time_all_reduce,
    collectives.time_all_to_all,
]


def cluster(name: str, num_gpus: int) -> Cluster:
    node = get_node(name, where="test")
    return Cluster(get_gpu(name, where="test"), num_gpus, node.num_gpus, node)


def test_a_gather_in_a_host_takes_seven_eighths_of_its_bytes_over_nvlink():
    host = cluster("dgx-h100", 8)
    rate = 450e9 * host.efficiencies.device_link.value
    assert collectives.time_all_gather(80e9, 8, host).parts[Resource.DEVICE_LINK] == pytest.approx(70e9 / rate)


def test_ranks_of_whole_hosts_share_all_adapters_and_one_rank_a_host_has_its_own():
    pod = cluster("dgx-h100", 64)
    share = pod.node_efficiencies.network.value
    assert find_link(pod, 64).bytes_per_s == pytest.approx(
        min(400e9 * share, 450e9 * pod.efficiencies.device_link.value)
    )
    assert find_link(pod, 8, stride=8).bytes_per_s == pytest.approx(50e9 * share)


def test_a_reduction_moves_twice_what_a_gather_does():
    host = cluster("dgx-a100-80gb", 8)
    gathered = collectives.time_all_gather(1e10, 8, host).parts[Resource.DEVICE_LINK]
    reduced = collectives.time_all_reduce(1e10, 8, host).parts[Resource.DEVICE_LINK]
    assert reduced == pytest.approx(2 * gathered)


def test_a_small_reduction_goes_over_trees():
    pod = cluster("dgx-h100", 512)
    ring_hops = 2 * 511 * find_link(pod, 512).latency_s
    assert collectives.time_all_reduce(1024, 512, pod).seconds < ring_hops / 10


def test_gpus_without_links_between_them_use_the_host_link():
    box = cluster("l40s-8x", 8)
    assert find_link(box, 8).resource is Resource.HOST_LINK


def test_a_mesh_gives_a_pair_one_link_and_all_of_them_every_link():
    mesh = cluster("mi300x-8x", 8)
    assert find_link(mesh, 2).bytes_per_s == pytest.approx(64e9 * mesh.efficiencies.device_link.value)
    assert find_link(mesh, 8).bytes_per_s == pytest.approx(448e9 * mesh.efficiencies.device_link.value)


def test_a_domain_of_links_may_leave_the_host():
    rack = cluster("gb200-nvl72", 72)
    assert find_link(rack, 72).resource is Resource.DEVICE_LINK


@pytest.mark.parametrize(("gpu", "bytes_per_s"), [("h100", 0.8 * 12.5e9), ("rtx-5080", 0.8 * 1.25e9)])
def test_hosts_without_a_node_profile_have_an_assumed_network(gpu, bytes_per_s):
    """100 Gbit/s in a data center, 10 Gbit/s for cards that may drive a display; eight ranks of a host share it."""
    link = find_outer_link(Cluster(get_gpu(gpu, where="test"), 16, 8), 16)
    assert link.bytes_per_s == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("collective", MANY)
def test_one_rank_and_no_bytes_cost_nothing(collective):
    host = cluster("dgx-h100", 8)
    assert collective(1e9, 1, host).seconds == 0
    assert collective(0, 8, host).seconds == 0


@pytest.mark.parametrize("collective", MANY)
@given(size=st.floats(1, 1e12), ranks=st.sampled_from([2, 8, 16, 64, 512]))
def test_more_bytes_never_take_less_time(collective, size, ranks):
    pod = cluster("dgx-h100", 512)
    assert collective(size, ranks, pod).seconds <= collective(1.5 * size, ranks, pod).seconds


@pytest.mark.parametrize("collective", MANY)
@given(size=st.floats(1e6, 1e12))
def test_leaving_the_host_is_never_faster(collective, size):
    pod = cluster("dgx-a100-80gb", 64)
    assert collective(size, 8, pod).seconds <= collective(size, 16, pod).seconds


def test_a_faster_link_inside_hosts_never_makes_an_exchange_between_hosts_slower() -> None:
    """A ring is bound inside a host with adapters as fast as its links; an exchange still leaves its host."""
    gpu, node = get_gpu("h200", where=""), get_node("dgx-h200", where="")
    assert gpu.efficiencies is not None
    assert gpu.efficiencies.device_link is not None
    seconds = []
    for share in (0.5, 0.7, 0.75, 0.8, 0.9, 1.0):
        rate = gpu.efficiencies.device_link.model_copy(update={"value": share})
        efficiencies = gpu.efficiencies.model_copy(update={"device_link": rate})
        cluster = Cluster(gpu.model_copy(update={"efficiencies": efficiencies}), 16, 8, node)
        seconds.append(collectives.time_all_to_all(1e9, 16, cluster).seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert collectives.time_all_to_all(1e9, 16, cluster).bound_by is Resource.NETWORK
