"""Plans for GPUs are reserved on Ray nodes with so many GPUs, or refused before anything starts. No GPU is needed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from rlplan.emit.ray import RayPlacement, gpu_placement
from rlplan.errors import HostError
from rlplan.planner.gpu.remedies import find_budget
from rlplan.runtime.cluster import Cluster
from rlplan.runtime.islands import Host, Unplaced, add_up, deal_islands
from rlplan.spec.budget import load_budget
from tests.factories import EXAMPLES

GPUS_PER_HOST = 8


def placement(name: str) -> RayPlacement:
    return gpu_placement(find_budget(load_budget(EXAMPLES / name)).candidate, GPUS_PER_HOST)


def hosts(count: int) -> list[Host]:
    offer = {"GPU": 8.0, "CPU": 8.0}
    return [Host(f"node-{index}", f"10.0.0.{index}", offer, offer) for index in range(count)]


@pytest.mark.parametrize(("name", "num_hosts"), [("grpo-7b-8xh100.yaml", 1), ("ppo-70b-64xh100.yaml", 8)])
def test_an_example_fits_on_its_hosts_and_on_no_fewer(name: str, num_hosts: int) -> None:
    wanted = placement(name)
    islands = [add_up([wanted.bundles[bundle] for bundle in island]) for island in wanted.islands]
    assert not isinstance(deal_islands(islands, hosts(num_hosts), wanted.spreads_islands), Unplaced)
    assert isinstance(deal_islands(islands, hosts(num_hosts - 1), wanted.spreads_islands), Unplaced)


@dataclass(frozen=True)
class FakeHosts:
    """A Ray cluster whose GPUs are numbers only."""

    count: int
    address: str


@pytest.fixture(scope="module", params=[2, pytest.param(8, marks=pytest.mark.nightly)])
def fake_hosts(request: pytest.FixtureRequest) -> Iterator[FakeHosts]:
    import ray
    from ray.cluster_utils import Cluster as RayCluster

    cluster = RayCluster()
    try:
        for _ in range(request.param):
            cluster.add_node(num_gpus=GPUS_PER_HOST, num_cpus=GPUS_PER_HOST, object_store_memory=80 << 20)
        yield FakeHosts(request.param, cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()


def together(*sizes: int) -> RayPlacement:
    """Islands of those sizes."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return RayPlacement(
        bundles=({"GPU": 1.0, "CPU": 1.0},) * sum(sizes),
        islands=tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)),
        spreads_islands=False,
        workers=(),
    )


@pytest.mark.engine
def test_every_gpu_of_the_cluster_is_reserved_and_each_island_on_one_host(fake_hosts: FakeHosts) -> None:
    from ray.util import placement_group_table

    cluster = Cluster(together(*[2, 4, 2] * fake_hosts.count), fake_hosts.address)
    try:
        cluster.start(60.0)
        tables = [placement_group_table(group) for group in cluster.groups]
        used: Counter[str] = Counter()
        for table in tables:
            assert len(set(table["bundles_to_node_id"].values())) == 1
            used.update(table["bundles_to_node_id"].values())
        assert sorted(used.values()) == [GPUS_PER_HOST] * fake_hosts.count
    finally:
        cluster.release()


@pytest.mark.engine
def test_what_the_cluster_does_not_have_is_refused_before_anything_starts(fake_hosts: FakeHosts) -> None:
    total = GPUS_PER_HOST * fake_hosts.count
    for sizes, reason in (
        ([GPUS_PER_HOST] * fake_hosts.count + [1], f"asks for {total + 1} GPUs, {total} GPUs free in the cluster"),
        ([2 * GPUS_PER_HOST], "no other host has the 16 GPUs and 16 CPUs free"),
    ):
        cluster = Cluster(together(*sizes), fake_hosts.address)
        try:
            with pytest.raises(HostError, match=reason):
                cluster.start(60.0)
            assert cluster.groups == []
        finally:
            cluster.release()
