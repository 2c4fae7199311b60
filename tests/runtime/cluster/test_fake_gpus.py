"""Plans for GPUs are reserved on Ray nodes with so many GPUs, or refused before anything starts. No GPU is needed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlplan.emit.bundle import read_bundle, write_bundle
from rlplan.emit.ray import RayPlacement, WorkerPlacement
from rlplan.errors import HostError
from rlplan.planner.executable import require_executable
from rlplan.planner.search import find_best_plan
from rlplan.runtime.cluster.islands import Host, add_up, deal_islands
from rlplan.runtime.cluster.ray_cluster import Cluster
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.spec.files.job_file import load_job
from tests.factories import EXAMPLES
from tests.repository.at_night import mark_nightly

GPUS_PER_HOST = 8


def placement(name: str, folder: Path) -> RayPlacement:
    """The Ray placement in the example's bundle."""
    write_bundle(require_executable(find_best_plan(load_job(EXAMPLES / name))), folder)
    return read_bundle(folder).ray


def hosts(count: int) -> list[Host]:
    offer = {"GPU": 8.0, "CPU": 8.0}
    return [Host(f"node-{index}", f"10.0.0.{index}", offer, offer) for index in range(count)]


@pytest.mark.parametrize(
    ("name", "num_hosts"), mark_nightly([("grpo-7b-8xh100.yaml", 1), ("ppo-70b-64xh100.yaml", 8)], but=1)
)
def test_an_example_fits_on_its_hosts_and_on_no_fewer(name: str, num_hosts: int, tmp_path: Path) -> None:
    wanted = placement(name, tmp_path)
    islands = [add_up([wanted.bundles[bundle] for bundle in island]) for island in wanted.islands]
    assert not isinstance(deal_islands(islands, hosts(num_hosts), wanted.spreads_islands), str)
    assert isinstance(deal_islands(islands, hosts(num_hosts - 1), wanted.spreads_islands), str)


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

    cluster = Cluster(fake_hosts.address)
    try:
        cluster.reserve(together(*[2, 4, 2] * fake_hosts.count), 60.0)
        tables = [placement_group_table(group) for group in cluster.groups]
        used: Counter[str] = Counter()
        for table in tables:
            assert len(set(table["bundles_to_node_id"].values())) == 1
            used.update(table["bundles_to_node_id"].values())
        assert sorted(used.values()) == [GPUS_PER_HOST] * fake_hosts.count
    finally:
        cluster.close()


@pytest.mark.engine
def test_the_bundle_of_an_example_has_its_gpus_or_is_refused(fake_hosts: FakeHosts, tmp_path: Path) -> None:
    """64 GPUs on 8 nodes: each GPU holds two trainers, an engine's rank and two scorers."""
    cluster, asked = Cluster(fake_hosts.address), placement("ppo-70b-64xh100.yaml", tmp_path)
    try:
        if fake_hosts.count < 8:
            with pytest.raises(HostError, match="needs 64 GPUs, 16 GPUs free"):
                cluster.reserve(asked, 60.0)
            return
        cluster.reserve(asked, 60.0)
        assert len(cluster.groups) == 8
        assert [island(worker.bundle) for worker in asked.workers if worker.worker == "rollout_engine"] == [
            bundle // GPUS_PER_HOST for bundle in range(64)
        ]
        seen = _gpus_seen_on_one_bundle(cluster, [worker for worker in asked.workers if worker.bundle == 0])
        assert len(seen) == 5
        assert len(set(seen)) == 1
    finally:
        cluster.close()


def island(bundle: int) -> int:
    return bundle // GPUS_PER_HOST


def _gpus_seen_on_one_bundle(cluster: Cluster, own: list[WorkerPlacement]) -> list[tuple[str, ...]]:
    """Devices that Ray shows to each process of the first GPU."""
    import ray

    @ray.remote
    class Looker:
        def look(self) -> tuple[str, ...]:
            return tuple(str(gpu) for gpu in ray.get_gpu_ids())

    actors = [
        Looker.options(  # type: ignore[attr-defined]
            num_cpus=worker.num_cpus, num_gpus=worker.num_gpus, scheduling_strategy=cluster.strategy(0)
        ).remote()
        for worker in own
    ]
    try:
        return list(ray.get([actor.look.remote() for actor in actors], timeout=scale_seconds(60)))
    finally:
        for actor in actors:
            ray.kill(actor)


@pytest.mark.engine
def test_what_the_cluster_does_not_have_is_refused_before_anything_starts(fake_hosts: FakeHosts) -> None:
    total = GPUS_PER_HOST * fake_hosts.count
    for sizes, reason in (
        ([GPUS_PER_HOST] * fake_hosts.count + [1], f"needs {total + 1} GPUs, {total} GPUs free in the cluster"),
        ([2 * GPUS_PER_HOST], "the next one needs 16 GPUs and 16 CPUs on one host"),
    ):
        cluster = Cluster(fake_hosts.address)
        try:
            with pytest.raises(HostError, match=reason):
                cluster.reserve(together(*sizes), 60.0)
            assert cluster.groups == []
        finally:
            cluster.close()
