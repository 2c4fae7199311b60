"""Exchanges between ranks of a micro-batch, and the position of groups: seconds worked by hand."""

from dataclasses import replace

import pytest

from rlplan.accuracy.named_models import model_by_name
from rlplan.dataflow.choice import TrainerChoice
from rlplan.spec.hardware.catalogue import get_gpu, get_node
from rlplan.spec.resolved import SettledTraining
from rlplan.timing.cost import Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.network.collectives import time_all_reduce
from rlplan.timing.training.flops import Lengths
from rlplan.timing.training.optimizer import num_stepped
from rlplan.timing.training.settings import MicroBatch, TrainSetting
from rlplan.timing.training.shards import (
    HIDDEN_BY_ASYNC_TP,
    ROWS_SHARE,
    exchange_cost,
    expert_exchange_cost,
    ordered_bytes,
    pass_traffic,
    stage_transfer_cost,
    step_traffic,
)
from rlplan.vocabulary import Role

MIXTURE = model_by_name("Qwen/Qwen3-30B-A3B")  # 48 layers of 128 experts, 8 of them active, hidden size 2048
PLAIN = TrainerChoice(1, True, False, False, 1)
BATCH = MicroBatch(2, Lengths(4096, 4096**2), 8192)
ROW = 2 * 2048  # bytes of a token's hidden state


def cluster(num_gpus: int) -> Cluster:
    return Cluster(get_gpu("h100", where="test"), num_gpus, 8, get_node("dgx-h100", where="test"))


def setting(num_ranks: int, **axes: int) -> TrainSetting:
    choice = replace(PLAIN, **axes)
    return TrainSetting(MIXTURE, Role.POLICY, SettledTraining(), choice, num_ranks, "megatron")


def change_kernels(setting: TrainSetting, **kernels: object) -> TrainSetting:
    """The same with other kernels."""
    kernels_spec = setting.training.kernels.model_copy(update=kernels)
    return replace(setting, training=setting.training.model_copy(update={"kernels": kernels_spec}))


def test_experts_over_tensor_and_data_parallel_ranks_of_one_node_take_no_network() -> None:
    args = (setting(8, tp=4, ep=8), BATCH, 3.0, cluster(8))
    cost = exchange_cost(*args) + expert_exchange_cost(*args)
    assert Resource.NETWORK not in cost.parts
    rate = 450e9 * cluster(8).efficiencies.device_link.value
    gathers = 4 * 48 * 3 * 3 / 4 * ROW * 8192 / rate
    sent = 8 * ROW * 8192 / 4  # of a rank's share of the rows a copy to each of eight experts
    sent_s = 2 * 48 * 3 * 7 / 8 * sent / (rate * ROWS_SHARE)
    assert cost.parts[Resource.DEVICE_LINK] == pytest.approx(gathers + sent_s)


def test_groups_of_ranks_with_a_copy_of_the_states_each_gather_inside_and_add_up_their_shares() -> None:
    whole = replace(setting(16), model=model_by_name("Qwen/Qwen2.5-7B"), choice=replace(PLAIN, zero_stage=3))
    groups = replace(whole, training=SettledTraining(fsdp_size=8))
    numel, hosts = whole.model.num_parameters, cluster(16)
    cost = pass_traffic(groups, hosts, is_training=True)
    shares = time_all_reduce(numel * groups.runs.reduce_bytes / 8, 2, hosts, 8)
    assert cost.parts[Resource.NETWORK] == pytest.approx(shares.parts[Resource.NETWORK])  # all else stays in a node
    assert cost.parts[Resource.NETWORK] < pass_traffic(whole, hosts, is_training=True).parts[Resource.NETWORK] / 2


def test_experts_over_two_nodes_send_half_of_their_rows_through_the_network() -> None:
    cost = expert_exchange_cost(setting(16, ep=16), BATCH, 1.0, cluster(16))
    network = 400e9 * cluster(16).node_efficiencies.network.value
    sent = 8 * ROW * 8192
    assert cost.parts[Resource.NETWORK] == pytest.approx(2 * 48 * 8 * sent * 8 / 16 / network)


def test_a_dispatcher_that_sends_once_takes_a_row_to_each_host_and_not_to_each_expert() -> None:
    """Eight experts of a row over eight hosts: 8 (1 - (7/8)^8) hosts on average, instead of eight rows."""
    every = expert_exchange_cost(setting(64, ep=64), BATCH, 1.0, cluster(64))
    once = expert_exchange_cost(change_kernels(setting(64, ep=64), expert_dispatcher="deepep"), BATCH, 1.0, cluster(64))
    hosts = 8 * (1 - (1 - 1 / 8) ** 8)
    assert once.parts[Resource.NETWORK] == pytest.approx(every.parts[Resource.NETWORK] * hosts / 8)


def test_a_row_goes_to_no_more_hosts_than_its_groups_of_experts_lie_on() -> None:
    """Four of eight groups over eight hosts: four hosts at most, although eight random experts lie on 5.25."""
    experts = MIXTURE.experts
    assert experts is not None
    limited = MIXTURE.model_copy(update={"experts": experts.model_copy(update={"num_groups": 8, "active_groups": 4})})
    ranks = change_kernels(setting(64, ep=64), expert_dispatcher="deepep")
    random, grouped = (
        expert_exchange_cost(replace(ranks, model=model), BATCH, 1.0, cluster(64)).parts[Resource.NETWORK]
        for model in (MIXTURE, limited)
    )
    assert grouped / random == pytest.approx(4 / (8 * (1 - (7 / 8) ** 8)))


def test_the_busiest_rank_of_experts_takes_as_much_longer_as_it_has_more_rows() -> None:
    even, uneven = setting(8, ep=8), change_kernels(setting(8, ep=8), expert_imbalance=1.5)
    costs = [expert_exchange_cost(ranks, BATCH, 1.0, cluster(8)).seconds for ranks in (even, uneven)]
    assert costs[1] / costs[0] == pytest.approx(1.5)
    assert change_kernels(setting(8, ep=1), expert_imbalance=1.5).expert_imbalance == 1


@pytest.mark.parametrize(
    ("kernels", "halves"),
    [
        ({}, 4 + 4),  # two gathers and two reductions, forward and backward
        ({"matmuls": "fp8"}, 4 / 2 + 4),
        ({"overlaps_tp": True}, 8 * (1 - HIDDEN_BY_ASYNC_TP)),
    ],
)
def test_fsdp2_puts_rows_of_several_sequences_in_order_around_collectives(
    kernels: dict[str, object], halves: float
) -> None:
    ranks = replace(change_kernels(setting(8, tp=4), **kernels), backend="fsdp2")
    assert ordered_bytes(ranks, BATCH, 2.0) == pytest.approx(halves * 2 * ROW * 8192 * 48)  # each read and written
    assert not ordered_bytes(ranks, replace(BATCH, num_sequences=1), 2.0)
    assert not ordered_bytes(replace(ranks, choice=PLAIN), BATCH, 2.0)
    assert not ordered_bytes(replace(ranks, backend="megatron"), BATCH, 2.0)


def test_rows_in_eight_bits_take_half_of_a_gather() -> None:
    ranks = replace(setting(8, tp=4), backend="fsdp2")
    half, whole = (
        exchange_cost(change_kernels(ranks, matmuls=matmuls), BATCH, 2.0, cluster(8)) for matmuls in ("fp8", "auto")
    )
    assert half.parts[Resource.DEVICE_LINK] == pytest.approx(whole.parts[Resource.DEVICE_LINK] * 6 / 8)


def test_a_stage_hands_its_rows_to_the_next_by_one_gpu_s_adapter() -> None:
    near, far = (stage_transfer_cost(setting(size, tp=2, pp=2), BATCH, cluster(size)) for size in (8, 16))
    assert far.parts[Resource.NETWORK] == pytest.approx(ROW * 8192 / 2 / (400e9 / 8 * 0.85))
    assert Resource.NETWORK not in near.parts
    assert not stage_transfer_cost(setting(8, tp=2), BATCH, cluster(8)).parts


def test_experts_gradients_are_reduced_among_the_ranks_that_have_the_same_experts() -> None:
    """Eight ranks with ep 8 have different experts, so only the other parameters are reduced."""
    rate = 450e9 * cluster(8).efficiencies.device_link.value
    experts = 48 * 128 * 3 * 768 * 2048
    outside = MIXTURE.num_parameters - experts
    alone = step_traffic(setting(8, ep=8), cluster(8)).parts[Resource.DEVICE_LINK]
    assert alone == pytest.approx(2 * 2 * outside * 7 / 8 / rate)
    pairs = step_traffic(setting(8, ep=4), cluster(8)).parts[Resource.DEVICE_LINK]
    assert pairs == pytest.approx(alone + 2 * 2 * experts / 4 / 2 / rate)


@pytest.mark.parametrize("axes", [{}, {"ep": 8}, {"tp": 4, "ep": 8}, {"tp": 2}, {"pp": 2, "ep": 4}])
def test_every_parameter_is_stepped_once(axes: dict[str, int]) -> None:
    assert num_stepped(setting(8, **axes)) == pytest.approx(MIXTURE.num_parameters / 8)
