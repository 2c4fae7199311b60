"""vLLM on GPUs: the arithmetic by hand, defaults by version, cache groups of every kind of model, sleep."""

from dataclasses import replace

import pytest

from rlplan.errors import SpecError
from rlplan.memory.serving.engine import EngineMemory, EngineSettings, predict_engine_memory
from rlplan.memory.serving.kv import CacheGroup, build_cache_pool
from rlplan.memory.serving.peaks import (
    count_graph_sizes,
    cuda_graph_bytes,
    encoder_peak_bytes,
    input_buffer_bytes,
    prefill_peak_bytes,
    sampler_peak_bytes,
)
from rlplan.memory.serving.versions import LATEST, BatchLimits, VllmVersion, find_default_limits, parse_version
from rlplan.spec.models.catalogue import find_model, load_catalogue
from rlplan.units import GIB, MIB

LLAMA = "meta-llama/Llama-3.1-8B"


def predict(name: str = LLAMA, total: int = 80 * GIB, **settings: object) -> EngineMemory:
    return predict_engine_memory(find_model(name), EngineSettings(total, **settings))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ the whole engine


def test_the_rows_add_up_to_the_fraction() -> None:
    memory = predict(gpu_memory_utilization=0.9, max_model_len=8192)
    spent = memory.model_bytes + memory.activation_peak + memory.non_torch + memory.cuda_graphs
    assert memory.requested == -(-80 * GIB * 9 // 10)
    assert memory.kv_budget == memory.requested - spent
    assert memory.kv_cache == memory.kv_budget // (2 * MIB) * 2 * MIB
    assert memory.num_tokens == memory.num_blocks * 16


def test_a_given_size_of_the_cache_replaces_the_fraction() -> None:
    memory = predict(kv_cache_memory_bytes=GIB + 1, max_model_len=4096)
    assert (memory.kv_budget, memory.num_blocks, memory.num_tokens) == (GIB + 1, 512, 8192)


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({"max_num_seqs": 64}, 1),
        ({"tp": 2}, 1),
        ({"enforce_eager": True}, 1),
        ({"gpu_memory_utilization": 0.8}, -1),
        ({"max_num_seqs": 4096}, -1),
        ({"max_num_batched_tokens": 65536}, -1),
    ],
)
def test_the_cache_grows_and_shrinks_as_it_must(change: dict[str, object], sign: int) -> None:
    before, after = predict(max_model_len=8192), predict(max_model_len=8192, **change)
    assert (after.kv_budget - before.kv_budget) * sign > 0


def test_the_cache_does_not_fit_beside_weights_that_are_too_large() -> None:
    memory = predict("meta-llama/Llama-3.1-70B", total=80 * GIB)
    assert (memory.kv_budget, memory.num_blocks) == (0, 0)


def test_the_rank_with_fewest_blocks_decides() -> None:
    model = find_model(LLAMA)
    memory = predict_engine_memory(model, EngineSettings(40 * GIB, pp=2, max_model_len=8192))
    assert memory.pool.bytes_per_block == 16 * 16 * 2 * 8 * 128 * 2, "16 of 32 layers"
    assert memory.sampler_peak > 0, "the last stage samples and has the head"


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_fraction_is_above_zero_and_at_most_one(share: float) -> None:
    with pytest.raises(SpecError, match="gpu_memory_utilization"):
        predict(gpu_memory_utilization=share)


def test_every_bundled_model_has_an_engine_s_memory() -> None:
    for name in load_catalogue():
        memory = predict(name, total=1 << 44, kv_cache_memory_bytes=8 * GIB, max_model_len=1024)
        assert memory.weights > 0, name
        assert memory.pool.bytes_per_block > 0, name
        assert memory.prefill_peak > 0, name


# ------------------------------------------------------------------------------------------ versions


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.8.4 V1", VllmVersion(0, 8, 4)),
        ("0.6.4 V0", VllmVersion(0, 6, 4, is_v0=True)),
        ("v0.7.3", VllmVersion(0, 7, 3, is_v0=True)),
        ("0.7.3 V1", VllmVersion(0, 7, 3)),
        ("0.8.5 V0", VllmVersion(0, 8, 5, is_v0=True)),
        ("0.11.0", VllmVersion(0, 11, 0)),
        ("V1", VllmVersion(0, 17)),
        ("", VllmVersion(0, 10)),
    ],
)
def test_versions_are_read_from_the_words_of_logs(text: str, version: VllmVersion) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("text", "sorts"),
    [
        ("0.6.4 V0", True),
        ("0.8.2 V1", False),
        ("0.8.3 V1", True),
        ("0.11.0", True),
        ("0.16.0", True),
        ("0.17.0", False),
    ],
)
def test_the_profile_run_sorts_the_vocabulary_until_vllm_0_17(text: str, sorts: bool) -> None:
    """Published: vLLM pull 33538 and the release notes of 0.16.0, whose branch was cut before it, and of 0.17.0."""
    assert parse_version(text).sorts_vocabulary is sorts


@pytest.mark.parametrize("text", ["0.2.4+PR2031", "0.5.5"])
def test_engines_from_before_0_6_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="not modelled"):
        parse_version(text)


@pytest.mark.parametrize(
    ("version", "gib", "is_a100", "length", "limits"),
    [
        (LATEST, 180, False, 8192, BatchLimits(1024, 16384)),
        (LATEST, 80, False, 8192, BatchLimits(1024, 8192)),
        (LATEST, 80, True, 8192, BatchLimits(256, 2048)),
        (LATEST, 24, False, 8192, BatchLimits(256, 2048)),
        (LATEST, 24, False, 4, BatchLimits(256, 1024)),
        (VllmVersion(0, 8, 4), 48, False, 8192, BatchLimits(1024, 2048)),
        (VllmVersion(0, 6, 4, is_v0=True), 24, False, 20000, BatchLimits(256, 20000)),
        (VllmVersion(0, 6, 4, is_v0=True), 24, False, 35000, BatchLimits(256, 512)),
        (VllmVersion(0, 7, 3, is_v0=True), 24, False, 35000, BatchLimits(256, 2048)),
    ],
)
def test_defaults_are_those_of_the_version_and_the_gpu(
    version: VllmVersion, gib: int, is_a100: bool, length: int, limits: BatchLimits
) -> None:
    assert find_default_limits(version, gib * GIB, length, is_a100=is_a100) == limits


def test_graphs_are_counted_inside_the_fraction_since_0_21() -> None:
    before, after = (
        predict(version=VllmVersion(0, minor), gpu_memory_utilization=0.9, max_model_len=8192) for minor in (20, 21)
    )
    assert before.kv_budget - after.kv_budget == after.cuda_graphs > 0


def test_graphs_take_what_qwen3_32b_said_in_its_log_and_twice_as_much_where_adapters_are_served() -> None:
    """vLLM 0.10, two ranks, 67 sizes of 64 layers: `Graph capturing finished in 9 secs, took 1.30 GiB`."""
    version = VllmVersion(0, 10, 0)
    assert cuda_graph_bytes(version, 64, 256) / GIB == pytest.approx(1.30, rel=0.06)
    assert cuda_graph_bytes(version, 64, 256, num_captures=2) == 2 * cuda_graph_bytes(version, 64, 256)
    assert cuda_graph_bytes(version, 64, 256, enforce_eager=True) == 0


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("Qwen/Qwen3-0.6B", 22),
        (LLAMA, 23),
        ("Qwen/Qwen3-30B-A3B", 24),
        ("Qwen/Qwen2.5-0.5B-Instruct", 25),
        ("google/gemma-4-E2B-it", 25),
        ("allenai/OLMoE-1B-7B-0924", 29),
    ],
)
def test_model_runner_v2_came_to_some_models_first_and_keeps_no_buffer_of_inputs(name: str, first: int) -> None:
    model = find_model(name)
    before, after = VllmVersion(0, first - 1, 9), VllmVersion(0, first, 0)
    assert not before.has_runner_v2(model)
    assert after.has_runner_v2(model)
    assert input_buffer_bytes(before, model, 1000) == 2000 * model.hidden_size
    assert input_buffer_bytes(after, model, 1000) == 0


def test_model_runner_v2_reserves_graphs_from_0_29_on() -> None:
    """vLLM issue 49224: it said 0 bytes before."""
    model = find_model(LLAMA)
    numbers = (20, 21, 23, 28, 29)
    assert [VllmVersion(0, number).reserves_graphs(model) for number in numbers] == [False, True, False, False, True]


def test_captured_sizes_follow_the_batch_and_the_version() -> None:
    assert count_graph_sizes(LATEST, 8) == 5 + 4, "1, 2, 4, 8, 16, and full ones up to 8"
    assert count_graph_sizes(VllmVersion(0, 8, 5), 8) == 67


def test_the_sampler_is_the_peak_of_small_prefills_and_the_prefill_of_large_ones() -> None:
    model = find_model(LLAMA)
    assert sampler_peak_bytes(LATEST, model, 2048, 256) > prefill_peak_bytes(model, 1, 2048)
    assert sampler_peak_bytes(LATEST, model, 16384, 256) < prefill_peak_bytes(model, 1, 16384)


def test_gemma_4_s_prefill_has_its_wider_mlps_and_the_inputs_of_all_layers() -> None:
    """Measured by AgileRL: 94 to 104 kB a token between 2,048 and 65,536."""
    token = 2 * (3 * 2 * 6144 + 2.9 * 1536 + 35 * 256)
    assert prefill_peak_bytes(find_model("google/gemma-4-E2B-it"), 1, 1000) == int(1000 * token)


def test_gemma_4_s_images_pass_one_by_one_whatever_the_tokens() -> None:
    model = find_model("google/gemma-4-E2B-it")
    assert encoder_peak_bytes(model, 65_536) == encoder_peak_bytes(model, 2048)
    assert encoder_peak_bytes(model, 2048) == 2 * 2520 * (2 * 3072 + 3 * 768 + 768)


# ------------------------------------------------------------------------------------------ the cache


def test_latent_attention_is_cached_whole_by_every_rank() -> None:
    model = find_model("deepseek-ai/DeepSeek-V3")
    pools = [build_cache_pool(model, tp=tp) for tp in (1, 8)]
    assert pools[0].bytes_per_block == pools[1].bytes_per_block == 64 * 61 * (512 + 64) * 2


def test_context_ranks_share_the_tokens() -> None:
    model = find_model("moonshotai/Kimi-K2-Thinking")
    alone, shared = build_cache_pool(model, tp=8), build_cache_pool(model, tp=8, context_ranks=8)
    assert shared.num_table_tokens(1000) == 8 * alone.num_table_tokens(1000)


def test_key_heads_are_repeated_where_there_are_more_ranks_than_heads() -> None:
    model = find_model("Qwen/Qwen2.5-7B")
    assert build_cache_pool(model, tp=4).bytes_per_block * 4 == build_cache_pool(model).bytes_per_block
    assert model.num_kv_heads == 4


def test_sliding_layers_form_groups_of_as_many_layers_as_the_full_ones() -> None:
    """Gemma 3 12B: 8 full layers and 40 sliding ones, 16 * 2 * 8 * 256 * 2 bytes a block of a layer."""
    pool = build_cache_pool(find_model("google/gemma-3-12b-it"))
    assert [group.kind for group in pool.groups] == ["sliding"] * 5 + ["full"]
    assert pool.bytes_per_block == 8 * 16 * 2 * 8 * 256 * 2


def test_a_last_group_is_padded() -> None:
    """Gemma 3 4B: 29 sliding and 5 full layers: six sliding groups of five, the last with one layer that is none."""
    pool = build_cache_pool(find_model("google/gemma-3-4b-it"))
    assert [(group.kind, group.num_layers) for group in pool.groups] == [("sliding", 5)] * 6 + [("full", 5)]


def test_before_the_hybrid_manager_sliding_layers_kept_all_tokens() -> None:
    model = find_model("google/gemma-3-12b-it")
    pool = build_cache_pool(model, splits_groups=False)
    assert len(pool.groups) == 1
    assert pool.bytes_per_block == 48 * 16 * 2 * 8 * 256 * 2


def test_beside_recurrent_layers_a_block_holds_a_whole_state() -> None:
    """Qwen3-Next: 36 recurrent and 12 full layers; a state is (32*128*128 + 3*8192) * 2 bytes, a token 2*2*256*2."""
    pool = build_cache_pool(find_model("Qwen/Qwen3-Next-80B-A3B-Instruct"))
    assert pool.block_size == 544
    assert [group.kind for group in pool.groups] == ["linear"] * 3 + ["full"]
    assert pool.bytes_per_block == 12 * 544 * 2 * 2 * 256 * 2
    assert pool.blocks_of_sequence(544 * 10) == 10 + 3


def test_a_window_holds_its_tokens_and_one_block_more() -> None:
    group = CacheGroup("sliding", 1, 16, window=1024)
    assert group.num_blocks(100_000) == 65
    assert group.num_blocks(100) == 8
    assert group.num_blocks(100_000, in_flight=8192) == 577


def test_tensorrt_llm_takes_its_fraction_of_the_free_memory() -> None:
    """Half of the fraction is half of the KV cache. vLLM's cache shrinks by the same bytes, half of the GPU."""
    model = find_model("meta-llama/Llama-3.1-8B")
    usual = EngineSettings(80 << 30, gpu_memory_utilization=0.8, max_model_len=8192, is_tensorrt_llm=True)
    whole, half = (
        predict_engine_memory(model, replace(usual, gpu_memory_utilization=share)).kv_cache for share in (0.8, 0.4)
    )
    assert half == pytest.approx(whole / 2, rel=1e-3)
    assert predict_engine_memory(model, usual).block_size == 32
