"""Weight syncs: hand-worked seconds, published ones, and what must hold for any model and number of GPUs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.accuracy.named_models import model_by_name
from rlplan.spec.hardware.catalogue import get_gpu, get_node
from rlplan.timing.cost import Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.transfer import weight_sync as sync
from rlplan.timing.transfer import wires
from rlplan.timing.transfer.weight_sync import Loader, SyncSetup, num_sent_tensors, sync_cost

SMALL, MIDDLE = model_by_name("Qwen/Qwen2.5-7B"), model_by_name("Qwen/Qwen2.5-32B")
LARGE, GLM = model_by_name("Qwen/Qwen3-235B-A22B"), model_by_name("GLM-4.5-355B-A32B")
COUNTS = st.sampled_from([8, 16, 32, 64])


def cluster(num_gpus: int, name: str = "dgx-h100") -> Cluster:
    node = get_node(name, where="test")
    return Cluster(get_gpu(name, where="test"), num_gpus, node.num_gpus, node)


def seconds(model: object, setup: SyncSetup, name: str = "dgx-h100") -> float:
    sides = cluster(setup.num_training, name), cluster(setup.num_generation, name)
    return sync_cost(model, setup, *sides).seconds  # type: ignore[arg-type]


# verl docs/advance/delta_weight_sync.md, second figures of the bundled points.
DELTAS = [(SMALL, 8, 8, (3.9, 4.9)), (MIDDLE, 16, 16, (11.2, 11.9)), (LARGE, 64, 16, (11.4, 14.9))]


@pytest.mark.parametrize(("model", "training", "generation", "measured"), DELTAS)
def test_published_sparse_hand_overs_are_met_within_a_third(model, training, generation, measured):
    setup = SyncSetup("delta", 2, training, generation, tp=8, loader=Loader.PICKLED, trainer="fsdp2")
    assert measured[0] / 1.34 <= seconds(model, setup) <= measured[1] * 1.34


def test_one_thread_codes_what_has_changed_by_hand():
    """rlplan's own runtime from four GPUs to four on another host: 15.2 GB at 1.67 GB/s are the slowest stage.

    In it also: gathered over the host link, packed, copied to the host. Of the others a bucket of 512 MiB each: 3 bytes
    of 3 % of the elements over 10 Gbit/s; all weights to each GPU and into the model.
    """
    setup, side = SyncSetup("delta", 2, 4, 4), cluster(4, "rtx-4090-4x")
    num_bytes, tensors, num_buckets = 15_231_233_024, 339, 29
    link = wires.host_link_bytes_per_s(side)
    memory = side.memory_bytes_per_s * side.efficiencies.memory.value
    gather = tensors * sync.GATHER_S_PER_TENSOR + num_bytes * (3 / 4 / link + 2 / memory)
    coded = gather + num_bytes / link + num_bytes / 1.67e9
    send = side.node_efficiencies.network_latency.value + 0.09 * 7_615_616_512 / (
        1.25e9 * side.node_efficiencies.network.value
    )
    load = tensors * sync.LOAD_S_PER_TENSOR + num_buckets * sync.ROUND_TRIP_S + num_bytes * (2 / memory + 1 / link)
    by_hand = coded + (send + load) / num_buckets
    assert sync_cost(SMALL, setup, side, side).seconds == pytest.approx(by_hand, rel=1e-9)
    assert num_bytes / 1.67e9 < by_hand < 1.2 * num_bytes / 1.67e9


@pytest.mark.parametrize(("machines", "wins"), [("rtx-4090-4x", True), ("rtx-4090-8x", False), ("dgx-h100", False)])
def test_changes_alone_are_faster_where_the_network_is_slower_than_the_coding(machines, wins):
    """10 Gbit/s are 1.0 GB/s of messages, 25 Gbit/s 2.5, an adapter of 400 Gbit/s 45; one thread codes 1.67 GB/s."""
    num_gpus = int(machines[-2]) if machines.startswith("rtx") else 8
    full, delta = (seconds(SMALL, SyncSetup(way, 2, num_gpus, num_gpus), machines) for way in ("nccl", "delta"))
    assert (delta < full) is wins


def test_of_elements_of_32_bits_all_change_so_that_all_of_them_travel():
    full, delta = (SyncSetup(way, 4, 4, 4) for way in ("nccl", "delta"))
    assert sync.changed_bytes(SMALL, delta) == 4 * SMALL.num_parameters
    assert seconds(SMALL, delta, "rtx-4090-4x") > seconds(SMALL, full, "rtx-4090-4x")


def test_packed_buckets_in_turn_take_less_than_half_of_tensors_that_travel_alone():
    """verl docs/advance/fully_async.md, 235B on 64 + 64 H20: 23.7 s with a checkpoint engine, 58.6 without."""
    packed = SyncSetup("nccl", 2, 64, 64, tp=8, trainer="megatron")
    assert seconds(LARGE, packed, "hgx-h20") == pytest.approx(23.7, rel=0.1)
    assert seconds(LARGE, replace(packed, bucket_bytes=0), "hgx-h20") == pytest.approx(58.6, rel=0.1)


def test_experts_are_counted_as_a_checkpoint_names_them():
    layers = 94
    assert num_sent_tensors(LARGE) - len(LARGE.parameters) == layers * (3 * 128 - 2)
    assert num_sent_tensors(SMALL) == len(SMALL.parameters) == 339


def test_a_model_of_experts_waits_for_its_tensors_a_dense_one_for_its_bytes():
    setup = SyncSetup("nccl", 2, 64, 16, tp=16, loader=Loader.PICKLED, trainer="fsdp2")
    sides = cluster(64), cluster(16)
    assert sync_cost(LARGE, setup, *sides).bound_by is Resource.LATENCY
    assert sync_cost(MIDDLE, replace(setup, tp=8), *sides).bound_by is Resource.HOST


def test_the_tensors_of_a_large_model_in_place_by_hand():
    """Colocated: n (gather + load), k requests, bytes over each GPU's adapter, packed and copied at memory speed."""
    setup = SyncSetup("cuda_ipc", 2, 64, 64, tp=8, bucket_bytes=1 << 30, trainer="megatron", same_devices=True)
    both = cluster(64)
    num_bytes, tensors = 2 * GLM.num_parameters, num_sent_tensors(GLM)
    by_hand = tensors * (sync.GATHER_S_PER_TENSOR + sync.LOAD_S_PER_TENSOR) - (-num_bytes // 2**30) * sync.ROUND_TRIP_S
    by_hand += num_bytes * 7 / 8 / (50e9 * both.node_efficiencies.network.value)
    memory = both.memory_bytes_per_s * both.efficiencies.memory.value
    by_hand += 2 * num_bytes / memory * (1 + 1 / 8)
    assert sync_cost(GLM, setup, both, both).seconds == pytest.approx(by_hand, rel=1e-3)


def test_ranks_that_hold_everything_gather_nothing():
    whole = SyncSetup("cuda_ipc", 2, 8, 8, zero_stage=2, same_devices=True)
    cost, both = sync_cost(SMALL, whole, cluster(8), cluster(8)), cluster(8)
    assert Resource.DEVICE_LINK not in cost.parts
    assert cost.seconds < sync_cost(SMALL, replace(whole, zero_stage=3), both, both).seconds


def test_an_adapter_costs_a_small_part_of_the_model():
    adapter = SyncSetup("adapter", 2, 8, 8, adapter_bytes=160 << 20)
    assert seconds(SMALL, adapter) < seconds(SMALL, replace(adapter, transport="disk")) / 4


def test_disk_is_written_once_and_read_once():
    cost = sync_cost(SMALL, SyncSetup("disk", 2, 8, 8), cluster(8), cluster(8))
    disk = cluster(8).node_efficiencies.disk_bytes_per_s.value
    assert disk > sync.WRITTEN_BYTES_PER_S
    size = 2 * SMALL.num_parameters
    assert cost.parts[Resource.DISK] == pytest.approx(size / sync.WRITTEN_BYTES_PER_S + size / disk)


def test_files_are_written_as_fast_as_prime_rl_s_baselines_say():
    """Source: prime-rl v0.4.0, benchmarks/baselines: seconds outside the steps (tokens / throughput - step_time)."""
    measured = {"Qwen/Qwen3-0.6B": 0.74, "Qwen/Qwen3-4B": 5.14, "Qwen/Qwen3-30B-A3B": 36.7}
    for name, outside_s in measured.items():
        assert sync.write_cost(2 * model_by_name(name).num_parameters, cluster(8)).seconds == pytest.approx(
            outside_s, rel=0.12
        )


def test_engines_in_the_trainers_host_need_no_network():
    inside = sync_cost(SMALL, SyncSetup("nccl", 2, 4, 4), cluster(4), cluster(4))
    assert Resource.NETWORK not in inside.parts
    outside = sync_cost(SMALL, SyncSetup("nccl", 2, 8, 8), cluster(8), cluster(8))
    assert outside.parts[Resource.NETWORK] > 0


def test_eight_bit_weights_bring_their_scales_along():
    setup = SyncSetup("cuda_ipc", 2, 64, 64, tp=8, trainer="megatron", same_devices=True)
    assert seconds(GLM, replace(setup, element_bytes=1)) > seconds(GLM, setup)


@given(training=COUNTS, generation=COUNTS, loader=st.sampled_from(Loader), share=st.floats(0.001, 0.2))
def test_a_larger_model_never_takes_less_and_nothing_is_free(training, generation, loader, share):
    for transport in ("cuda_ipc", "shared_memory", "nccl", "disk", "delta"):
        setup = SyncSetup(transport, 2, training, generation, loader=loader, changed_share=share)
        small, large = (seconds(model, setup) for model in (SMALL, MIDDLE))
        assert 0 < small <= large


@given(stages=st.lists(st.floats(0, 100), min_size=1, max_size=4), buckets=st.integers(1, 1000))
def test_overlapped_stages_lie_between_the_slowest_and_the_sum(stages, buckets):
    total = sync.overlap_stages(tuple(sync.Cost({Resource.LATENCY: stage}) for stage in stages), buckets).seconds
    assert max(stages) - 1e-9 <= total <= sum(stages) + 1e-9


# verl docs/advance/delta_weight_sync.md, full broadcast over NCCL to SGLang, H100 unless it lies within one host
FULL = [
    ("Qwen/Qwen2.5-32B", 16, False, 14.2),
    ("Qwen/Qwen2.5-72B", 32, False, 28.8),
    ("Qwen/Qwen2.5-7B", 8, True, 5.75),
]


@pytest.mark.parametrize(("name", "num_gpus", "is_offloaded", "measured"), FULL)
def test_published_broadcasts_to_servers_are_met_within_an_eighth(name, num_gpus, is_offloaded, measured):
    setup = SyncSetup("nccl", 2, num_gpus, num_gpus, tp=8, loader=Loader.PICKLED, trainer="fsdp2")
    setup = replace(setup, gathered_element_bytes=4, stages_masters=is_offloaded)
    assert seconds(model_by_name(name), setup) == pytest.approx(measured, rel=0.125)


def test_a_request_for_each_tensor_takes_a_millisecond_beside_gather_send_and_load():
    """Qwen3-30B-A3B has 18,867 tensors: TRL was measured with 40 s."""
    setup = SyncSetup("nccl", 2, 8, 8, bucket_bytes=0, trainer="fsdp2")
    model = model_by_name("Qwen/Qwen3-30B-A3B")
    alone = seconds(model, replace(setup, requests_each_tensor=True))
    assert alone - seconds(model, setup) == pytest.approx(18.867)
    assert alone == pytest.approx(40, rel=0.1)
