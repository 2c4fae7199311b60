"""States of a rank under other trainers, worked by hand."""

from dataclasses import replace

import pytest

from rlplan.memory.trainers.sharding import (
    FsdpSettings,
    MegatronRank,
    Sizes,
    build_fsdp_state,
    build_megatron_state,
    build_zero_state,
    measure_sizes,
)
from rlplan.memory.trainers.zero import ZeroSettings, ZeroStates
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.spec.models.catalogue import find_model
from rlplan.vocabulary import MemoryKind

SIZES = Sizes((800, 800), 0, layer=300, table=400, root=500, layer_weights=300, is_tied=False, largest_table=400)


def test_sizes_of_a_real_model_add_up() -> None:
    model = find_model("meta-llama/Llama-3.1-8B")
    sizes = measure_sizes(model.parameters, model.num_layers, is_tied=False)
    assert sizes.root + 32 * sizes.layer == sizes.num_trainable == model.num_parameters
    assert sizes.largest_table == sizes.table == 128256 * 4096
    adapters = list_lora_parameters(model, 8, ["q_proj"])
    frozen = measure_sizes(model.parameters, model.num_layers, is_tied=False, adapters=adapters, frozen_bytes=9)
    assert (frozen.num_trainable, frozen.table, frozen.root) == (32 * 8 * 8192, 0, sizes.root)


def test_fsdp_cuts_twelve_bytes_a_parameter_and_gathers_the_root_and_two_layers() -> None:
    rank_state = build_fsdp_state(SIZES, FsdpSettings(4))
    assert sum(rank_state.resident.values()) == 1600 // 4 * 12
    assert rank_state.gradients == 1600 // 4 * 4
    assert rank_state.passing == 2 * (500 + 300)
    assert rank_state.layer_passing == 2 * 300 + (2 + 4) * 300


def test_pools_of_other_streams_count_at_every_moment() -> None:
    rank_state = build_fsdp_state(SIZES, FsdpSettings(4, counts_every_stream=True))
    assert rank_state.kept_gradients == rank_state.gradients
    assert rank_state.passing == 2 * (500 + 300) + 2 * 2 * 300


def test_shards_on_the_host_leave_only_what_is_gathered() -> None:
    rank_state = build_fsdp_state(SIZES, FsdpSettings(4, is_on_host=True))
    assert (sum(rank_state.resident.values()), rank_state.gradients) == (0, 0)


@pytest.mark.parametrize(("distributed", "a_parameter"), [(True, 2 + 4 + 12 / 4), (False, 18)])
def test_megatron_holds_eighteen_bytes_or_six_and_its_share_of_twelve(distributed: bool, a_parameter: float) -> None:
    rank = MegatronRank(dense=800, experts=0, state_ranks=4, expert_state_ranks=2)
    rank_state = build_megatron_state(rank if distributed else replace(rank, state_ranks=1, expert_state_ranks=1))
    assert sum(rank_state.resident.values()) == 1600 // 2 * a_parameter


def test_megatron_with_narrow_gradients_and_moments_and_tensors_that_stand_for_gradients() -> None:
    """Worked by hand: 800 elements of 2 + 2 + 4 + 2 * 2 bytes, 2 of each of 100, and temporarily of the head's 50."""
    rank = MegatronRank(800, 0, 1, 1, gradient_bytes=2, moment_bytes=2, layer_matrices=100, head=50)
    rank_state = build_megatron_state(rank)
    assert sum(rank_state.resident.values()) == 800 * 12 + 200
    assert rank_state.head_gradient == 100


def test_megatron_shares_the_states_of_experts_over_fewer_ranks() -> None:
    dense, experts = 800, 400
    rank_state = build_megatron_state(MegatronRank(dense, experts, state_ranks=4, expert_state_ranks=2))
    assert rank_state.resident[MemoryKind.WEIGHTS] == 2 * (dense + experts)
    assert rank_state.resident[MemoryKind.OPTIMIZER] == 8 * (dense // 4 + experts // 2)


def test_zero_three_gathers_while_it_passes_and_zero_two_fills_a_bucket_and_copies_it() -> None:
    model = find_model("Qwen/Qwen2.5-0.5B")
    two, three = (build_zero_state(ZeroStates(ZeroSettings(stage, 4), model.parameters)) for stage in (2, 3))
    passing = [max(moment.buffers for moment in state.moments(24) if moment.place == "loss") for state in (two, three)]
    assert passing[0] == 2 * 500_000_000
    assert passing[1] > 0.99 * 2 * model.num_parameters
    assert three.resident[MemoryKind.WEIGHTS] < two.resident[MemoryKind.WEIGHTS] / 3
