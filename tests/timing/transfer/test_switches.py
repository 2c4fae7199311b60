"""Sleep, wake, offload and checkpoints: hand-worked seconds."""

import pytest

from rlplan.spec.hardware.catalogue import get_gpu, get_node
from rlplan.spec.hardware.profile import NodeProfile
from rlplan.timing.cost import Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.transfer.switches import (
    MAP_S_PER_GIB,
    SWITCH_S,
    checkpoint_cost,
    host_copy_cost,
    sleep_cost,
    wake_kv_cost,
)
from rlplan.timing.transfer.wires import find_gather_wire, find_inner_wire, find_sender_wire, host_link_bytes_per_s
from rlplan.units import GIB


def cluster(num_gpus: int = 8, name: str = "dgx-h100") -> Cluster:
    node = get_node(name, where="test")
    return Cluster(get_gpu(name, where="test"), num_gpus, node.num_gpus, node)


def test_level_one_copies_the_weights_and_level_two_drops_them():
    first, second = (sleep_cost(14 * GIB, cluster(), level=level, kv_bytes=40 * GIB) for level in (1, 2))
    assert second.parts == {Resource.LATENCY: pytest.approx(SWITCH_S + 54 * MAP_S_PER_GIB)}
    copied = 14 * GIB / host_link_bytes_per_s(cluster())
    assert first.seconds - second.seconds == pytest.approx(copied)


def test_waking_the_kv_cache_copies_nothing():
    assert set(wake_kv_cost(40 * GIB).parts) == {Resource.LATENCY}


def test_the_gpus_of_a_host_share_its_memory():
    """Where memory streams 80 GB/s, each of eight GPUs gets 10, and one alone its own link's share."""
    data = get_node("dgx-h100", where="test").model_dump(mode="json")
    data["efficiencies"]["host_memory_bytes_per_s"]["value"] = 80_000_000_000
    slow, gpu = NodeProfile.model_validate(data), get_gpu("h100", where="test")
    assert gpu.host_link
    assert gpu.efficiencies
    assert host_link_bytes_per_s(Cluster(gpu, 16, 8, slow)) == pytest.approx(10e9)
    alone = gpu.host_link.bytes_per_s.value * gpu.efficiencies.host_link.value
    assert host_link_bytes_per_s(Cluster(gpu, 1, 8, slow)) == pytest.approx(alone)


def test_a_checkpoint_of_two_hosts_takes_half():
    single, two = (checkpoint_cost(100e9, hosts, cluster(16)) for hosts in (1, 2))
    assert single.seconds == pytest.approx(2 * two.seconds)
    assert single.bound_by is Resource.DISK


def test_copies_of_nothing_take_nothing():
    assert host_copy_cost(0, cluster()).seconds == 0


def test_one_host_gathers_over_nvlink_and_two_over_the_network():
    assert find_gather_wire(cluster(8), 8, is_strided=False).resource is Resource.DEVICE_LINK
    assert find_gather_wire(cluster(16), 16, is_strided=False).resource is Resource.NETWORK
    assert find_gather_wire(cluster(72, "gb200-nvl72"), 72, is_strided=False).resource is Resource.DEVICE_LINK


def test_cards_without_peer_access_go_through_the_host():
    assert find_inner_wire(cluster(8, "rtx-4090-8x")).resource is Resource.HOST_LINK


def test_a_sender_has_its_nodes_network_where_that_is_small():
    small = cluster(8, "rtx-4090-8x")
    assert small.node
    share = small.node_efficiencies.network.value
    assert find_sender_wire(small, small).bytes_per_s == pytest.approx(small.node.network_bytes_per_s.value * share)


def test_parts_of_one_host_need_no_network_and_parts_of_two_do():
    """Three and five of a host's eight cards, which no link joins; three of one host of four and five of others."""
    whole = cluster(8, "rtx-4090-8x")
    three, five = (Cluster(whole.gpu, size, size, whole.node, host_gpus=8) for size in (3, 5))
    assert find_sender_wire(three, five).resource is Resource.HOST_LINK
    apart = (Cluster(whole.gpu, size, min(size, 4), whole.node, host_gpus=4) for size in (3, 5))
    assert find_sender_wire(*apart).resource is Resource.NETWORK
