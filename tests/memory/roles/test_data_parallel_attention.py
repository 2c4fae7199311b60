"""Engines whose ranks attend to sequences of their own and share the experts: bytes of a rank, worked by hand.

DeepSeek-V3: h 7168, 58 layers of 256 routed experts and a shared one, each 3 x 7168 x 2048; a latent of 576 numbers a
token in each of 61 layers. Qwen3-30B-A3B: 4 key heads.
"""

import pytest

from rlplan.dataflow.choice import EngineChoice
from rlplan.memory.roles.engine import EngineOnGpu, Incoming
from rlplan.memory.serving.engine import EngineSettings, predict_engine_memory
from rlplan.spec.hardware.profile import GpuOverheads
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.catalogue import find_model
from rlplan.spec.resolved import SettledRollout
from rlplan.vocabulary import MemoryKind, Placement

V3 = find_model("deepseek-ai/DeepSeek-V3")
MIXTURE = find_model("Qwen/Qwen3-30B-A3B")
EXPERT = 3 * 7168 * 2048
ROUTED, SHARED = 58 * 256 * EXPERT, 58 * EXPERT


def engine(
    overheads: GpuOverheads, tp: int, dp: int, model: ModelSpec = V3, max_num_seqs: int = 512, whole: bool = True
) -> EngineOnGpu:
    forecast = EngineChoice(tp, 0, max_num_seqs, has_expert_parallel=whole and tp * dp > 1, attention_dp=dp)
    return EngineOnGpu(model, SettledRollout(), forecast, Placement.HYBRID, overheads, Incoming(1 << 29))


def test_a_rank_has_its_share_of_the_experts_and_all_else_whole(overheads: GpuOverheads) -> None:
    alone, shared = engine(overheads, 1, 1), engine(overheads, 1, 8)
    assert alone.weight_bytes - shared.weight_bytes == 2 * ROUTED * 7 // 8


def test_ranks_that_share_a_layer_too_have_the_shared_expert_whole(overheads: GpuOverheads) -> None:
    """vLLM cuts tokens over them before the experts (`use_sequence_parallel_moe`), and its shared expert not at all."""
    cut, both = engine(overheads, 4, 1), engine(overheads, 4, 2)
    assert both.weight_bytes - cut.weight_bytes == 2 * (SHARED * 3 // 4 - ROUTED // 8)


def test_a_latent_cache_is_held_once_for_each_sequence_and_not_by_every_rank(overheads: GpuOverheads) -> None:
    plain, shared = engine(overheads, 8, 1), engine(overheads, 1, 8)
    block = 64 * 61 * 576 * 2
    assert plain.pool.bytes_per_block == shared.pool.bytes_per_block == block
    tokens = [forecast.pool.num_tokens(forecast.pool.num_blocks(8 << 30), 4096) for forecast in (plain, shared)]
    assert tokens[0] == tokens[1], "of a rank: 8 of them hold the same tokens, or 8 times as many"


def test_key_heads_are_cut_over_the_ranks_that_share_a_layer_alone(overheads: GpuOverheads) -> None:
    cut, shared = engine(overheads, 4, 1, MIXTURE), engine(overheads, 1, 4, MIXTURE)
    assert shared.pool.bytes_per_block == 4 * cut.pool.bytes_per_block == 48 * 16 * 2 * 4 * 128 * 2


def test_a_rank_gathers_the_tokens_of_all_and_attends_to_its_own(overheads: GpuOverheads) -> None:
    """8192 tokens a step: 8 rows of each for the experts, the gathered hidden states and their sums; 1024 of its own
    through the shared expert and the residual stream.
    """
    rows = 8192 * (8 * (max(2 * 2048, 7168) + 2048) + 2 * 7168) + 1024 * 3 * 2048
    assert engine(overheads, 1, 8).activation_bytes == int(2 * (rows + 1024 * 2.9 * 7168))
    both = 8192 * (8 * 9216 + 2 * 7168) + 256 * 3 * 2048
    assert engine(overheads, 4, 8).activation_bytes == int(2 * (both + 1024 * 2.9 * 7168))


def test_a_rank_captures_graphs_for_its_part_of_the_sequences(overheads: GpuOverheads) -> None:
    graphs = [engine(overheads, 8 // dp, dp, max_num_seqs=64 * dp).asleep[MemoryKind.CUDA_GRAPHS] for dp in (1, 8)]
    assert graphs[0] == graphs[1]


def test_a_rank_has_communicators_for_its_layer_for_attention_and_for_experts(overheads: GpuOverheads) -> None:
    pair, many = overheads.communicator_of_two.value, overheads.communicator_of_many.value
    buffers = {cut: engine(overheads, *cut).asleep[MemoryKind.COMM_BUFFERS] for cut in ((8, 1), (4, 2), (1, 8))}
    assert buffers == {(8, 1): many, (4, 2): many + pair + many, (1, 8): 2 * many}


@pytest.mark.parametrize(("tp", "dp"), [(1, 8), (4, 2), (2, 4)])
def test_vllm_s_share_of_a_gpu_is_spent_on_the_same_bytes(overheads: GpuOverheads, tp: int, dp: int) -> None:
    """Limits are those of the engine; vLLM takes them per rank."""
    limits = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "max_model_len": 4096}
    memory = predict_engine_memory(V3, EngineSettings(80 << 30, tp=tp, ep=8, attention_dp=dp, **limits))  # type: ignore[arg-type]
    forecast = engine(overheads, tp, dp)
    assert memory.model_bytes == forecast.weight_bytes
    assert memory.activation_peak == forecast.activation_bytes
    usual = predict_engine_memory(V3, EngineSettings(80 << 30, tp=tp, ep=8, attention_dp=dp, max_model_len=4096)).limits
    alone = predict_engine_memory(V3, EngineSettings(80 << 30, tp=8, max_model_len=4096)).limits
    assert (usual.max_num_seqs, usual.max_num_batched_tokens) == (
        dp * alone.max_num_seqs,
        dp * alone.max_num_batched_tokens,
    )
