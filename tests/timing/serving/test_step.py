"""A step of a rollout engine: counts by hand, the roofline's two sides, and how links and launches add up."""

import pytest

from rlplan.memory.model.quantization import EXPERTS, FP8_BLOCK, FP8_TENSOR, MXFP4, NVFP4, Quantization
from rlplan.memory.serving.versions import VllmVersion
from rlplan.spec.hardware.catalogue import get_gpu, get_node
from rlplan.spec.hardware.profile import ComputeDtype
from rlplan.spec.models.catalogue import find_model
from rlplan.timing.cost import Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving.counts import EngineCounts, EngineCut, engine_counts
from rlplan.timing.serving.step import (
    ATTENTION_RAMP,
    CACHE_READS,
    KERNEL,
    PREFILL_ATTENTION,
    SEQUENCE,
    SERIAL,
    SERIAL_SEQUENCE,
    SUSTAINED,
    EngineRates,
    StepLoad,
    Wire,
    expected_tokens,
    find_compute_dtype,
    find_wire,
    has_fused_experts,
    has_slow_experts,
)

H100, B200 = (get_gpu(name, where="test") for name in ("h100-sxm", "b200"))
HOST = Cluster(H100, 8, 8, get_node("dgx-h100", where="test"))
LLAMA = find_model("meta-llama/Llama-3.1-8B")


def rates(model: str = "meta-llama/Llama-3.1-8B", cluster: Cluster = HOST, **cut: int) -> EngineRates:
    counts = engine_counts(find_model(model), EngineCut(**cut))
    return EngineRates(counts, cluster, kv_element_bytes=cut.get("kv_element_bytes", 2))


def test_one_token_takes_the_weights_bytes_over_the_memory_and_the_layers() -> None:
    """Llama-3.1-8B: 6,979,321,856 + 128,256 * 4,096 weights of 2 bytes, 32 layers of four matmuls, and the head."""
    weights = 2 * (6_979_321_856 + 128_256 * 4_096) / (3.35e12 * H100.serving.memory.value)  # type: ignore[union-attr]
    layers = 32 * H100.serving.layer.value + (4 * 32 + 1) * KERNEL[16]  # type: ignore[union-attr]
    assert rates().seconds(StepLoad(1, 0)) == pytest.approx(weights + layers + SEQUENCE, rel=0.001)


def test_each_cached_token_adds_its_bytes() -> None:
    speed, context = rates(), 1_000_000
    added = speed.seconds(StepLoad(64, context)) - speed.seconds(StepLoad(64, 0))
    assert added == pytest.approx(context * 131_072 / (3.35e12 * CACHE_READS))


def test_a_long_prompt_is_bound_by_matmuls_and_a_token_by_memory() -> None:
    speed = rates()
    assert speed.cost(StepLoad(0, 0, 8192, 8192**2 / 2, 1)).bound_by is Resource.COMPUTE
    assert speed.cost(StepLoad(8, 8000)).bound_by is Resource.MEMORY


def test_windows_read_no_more_than_they_hold() -> None:
    speed = rates("openai/gpt-oss-120b")
    short, long = (speed.seconds(StepLoad(1, context)) for context in (4_096, 8_192))
    full = next(
        cache for cache in engine_counts(find_model("openai/gpt-oss-120b"), EngineCut()).caches if not cache.window
    )
    assert long - short == pytest.approx(4_096 * full.num_bytes / (3.35e12 * CACHE_READS))


def test_heads_that_are_held_twice_are_read_twice() -> None:
    eight, sixteen = (engine_counts(LLAMA, EngineCut(tp=tp)).caches[0].num_bytes for tp in (8, 16))
    assert eight == sixteen == 131_072 // 8


def test_latent_caches_are_read_whole_by_every_rank() -> None:
    model = find_model("deepseek-ai/DeepSeek-V3")
    counts = engine_counts(model, EngineCut(tp=8, scheme=Quantization(FP8_TENSOR)))
    assert counts.caches[0].num_bytes == 61 * (512 + 64) * 2


def test_few_tokens_read_few_experts_and_many_read_all() -> None:
    experts = engine_counts(find_model("openai/gpt-oss-120b"), EngineCut(scheme=Quantization(MXFP4, EXPERTS))).experts
    assert experts is not None
    assert experts.num_hit(1) == 4  # that one token chooses
    assert 120 < experts.num_hit(8192) <= 128
    hits = [experts.num_hit(tokens) for tokens in range(1, 200)]
    assert hits == sorted(hits)


def test_whole_experts_on_ranks_hold_as_many_bytes_as_slices_of_all() -> None:
    model = find_model("Qwen/Qwen3-30B-A3B")
    cut, spread = (engine_counts(model, EngineCut(tp=4, ep=ep)).experts for ep in (1, 4))
    assert cut is not None
    assert spread is not None
    assert cut.num_bytes * cut.num_held == pytest.approx(spread.num_bytes * spread.num_held)
    assert (cut.num_held, spread.num_held) == (128, 32)


@pytest.mark.parametrize(
    ("gpu", "form", "dtype"),
    [
        ("h100-sxm", "", ComputeDtype.BFLOAT16),
        ("h100-sxm", "fp8-block", ComputeDtype.FLOAT8),
        ("h100-sxm", "nvfp4", ComputeDtype.BFLOAT16),
        ("b200", "nvfp4", ComputeDtype.FLOAT4),
        ("b200", "mxfp4", ComputeDtype.FLOAT8),
        ("a100-sxm-80gb", "fp8", ComputeDtype.BFLOAT16),
        ("a100-sxm-80gb", "awq", ComputeDtype.BFLOAT16),
        ("t4", "", ComputeDtype.FLOAT16),
    ],
)
def test_matmuls_run_in_the_type_that_the_chip_has_for_a_format(gpu: str, form: str, dtype: ComputeDtype) -> None:
    assert find_compute_dtype(get_gpu(gpu, where="test"), form) is dtype


def test_fewer_bits_are_read_faster_but_not_in_proportion() -> None:
    def step(scheme: Quantization | None) -> float:
        cluster = Cluster(B200, 8, 8, get_node("dgx-b200", where="test"))
        counts = engine_counts(find_model("meta-llama/Llama-3.1-70B"), EngineCut(scheme=scheme))
        return EngineRates(counts, cluster, kv_element_bytes=2).seconds(StepLoad(4, 4000))

    plain, eight, four = step(None), step(Quantization(FP8_TENSOR)), step(Quantization(NVFP4))
    assert plain > eight > four > plain / 4


def test_more_ranks_read_less_and_wait_for_each_other() -> None:
    single, eight = (rates(tp=tp).cost(StepLoad(32, 32_000)) for tp in (1, 8))
    assert eight.parts[Resource.MEMORY] < single.parts[Resource.MEMORY] / 6
    assert Resource.DEVICE_LINK not in single.parts
    assert eight.parts[Resource.LATENCY] > single.parts[Resource.LATENCY]


def test_large_messages_take_two_rounds_and_small_ones_one() -> None:
    wire = Wire(100e9, 10e-6)
    assert wire.time_all_reduce(1_000, 8) == pytest.approx(10e-6 + 7 * 1_000 / 100e9)
    assert wire.time_all_reduce(10**8, 8) == pytest.approx(20e-6 + 2 * 7 / 8 * 10**8 / 100e9)


def test_nccl_s_latency_is_counted_once() -> None:
    wire = Wire(100e9, 10e-6, reads_peers=False)
    assert wire.time_all_reduce(0, 8) == 10e-6
    assert wire.time_all_reduce(10**8, 8) == pytest.approx(10e-6 + 2 * 7 / 8 * 10**8 / 100e9)


@pytest.mark.parametrize(("mib", "own_us", "nccl_us"), [(0.5, 10, 21), (1, 14, 23), (1.5, 19, 25), (2, 23, 28)])
def test_nccl_takes_as_much_longer_than_vllm_s_kernels_as_was_measured(mib: float, own_us: int, nccl_us: int) -> None:
    """Measured on four H100, in CUDA graphs. Source: vLLM pull request 24532, ca_1stage and pynccl."""
    own, nccl = (find_wire(HOST, 4, reads_peers=reads).time_all_reduce(mib * 2**20, 4) for reads in (True, False))
    assert (nccl - own) * 1e6 == pytest.approx(nccl_us - own_us, abs=2)


def test_ranks_beyond_a_host_go_through_the_network() -> None:
    near, far = find_wire(HOST, 8), find_wire(Cluster(H100, 16, 8, HOST.node), 16)
    assert far.bytes_per_s < near.bytes_per_s / 4
    assert far.latency_s > near.latency_s


def test_a_step_without_a_graph_takes_at_least_its_launches() -> None:
    counts = engine_counts(LLAMA, EngineCut())
    eager = EngineRates(counts, HOST, kv_element_bytes=2, has_graphs=False)
    assert eager.seconds(StepLoad(1, 100)) > 2 * rates().seconds(StepLoad(1, 100))


def test_all_ranks_wait_for_the_one_that_most_tokens_choose() -> None:
    model = find_model("MiniMaxAI/MiniMax-M2.5")
    cut, whole = (engine_counts(model, EngineCut(tp=8, ep=ep)).experts for ep in (1, 8))
    assert cut is not None
    assert whole is not None
    assert cut.slowest(16) == cut.num_hit(16)  # every rank has a part of each
    assert 1.3 < whole.slowest(16) * 8 / cut.num_hit(16) < 2
    assert whole.slowest(10**6) == 256 / 8


def test_replicas_share_experts_and_nothing_else() -> None:
    """Worked by hand: 64 sequences, 8 per replica; each rank has an eighth of the experts and all other weights."""
    model = find_model("MiniMaxAI/MiniMax-M2.5")
    replicas, alone, cut = (
        engine_counts(model, EngineCut(tp=tp, ep=ep, replicas=dp)) for tp, ep, dp in ((1, 8, 8), (1, 1, 1), (8, 8, 1))
    )
    assert replicas.experts == cut.experts
    assert (replicas.matmuls, replicas.caches) == (alone.matmuls, alone.caches)
    assert (replicas.num_collectives, cut.num_collectives) == (0, 4 * 62 + 1)

    def seconds(counts: EngineCounts, load: StepLoad) -> float:
        return EngineRates(counts, HOST, kv_element_bytes=2).seconds(load)

    short, long = StepLoad(64, 64_000), StepLoad(64, 64 * 128_000)
    assert seconds(replicas, short) > seconds(cut, short)  # each reads all of the attention's weights

    latent = find_model("moonshotai/Kimi-K2.5")
    replicas, cut = (engine_counts(latent, EngineCut(tp=tp, ep=8, replicas=8 // tp)) for tp in (1, 8))
    assert seconds(replicas, long) < seconds(cut, long) / 2  # ranks that share sequences read all of their latents


def test_ranks_of_replicas_that_are_cut_exchange_tokens_instead_of_adding_up() -> None:
    model = find_model("MiniMaxAI/MiniMax-M2.5")
    assert engine_counts(model, EngineCut(tp=2, ep=8, replicas=4)).num_collectives == 3 * 62 + 1


def test_norms_over_all_heads_need_the_variances_of_all_ranks() -> None:
    """MiniMax-M2 normalizes queries and keys over all heads, Qwen3 each head alone."""
    wide, narrow = (
        engine_counts(find_model(name), EngineCut(tp=2)).num_collectives
        for name in ("MiniMaxAI/MiniMax-M2.5", "Qwen/Qwen3-32B")
    )
    assert (wide, narrow) == (4 * 62 + 1, 2 * 64 + 1)


def test_a_shared_expert_that_is_whole_sees_a_part_of_the_tokens() -> None:
    """DeepSeek-V3, tp 4 and two replicas: a shared expert of 3 x 7168 x 2048 in each of 58 layers is read whole, and
    multiplied with a fourth of its replica's tokens.
    """
    model, shared = find_model("deepseek-ai/DeepSeek-V3"), 58 * 3 * 7168 * 2048
    cut, both = (engine_counts(model, EngineCut(tp=4, ep=4 * dp, replicas=dp)).matmuls[0] for dp in (1, 2))
    assert both.num_weights == cut.num_weights
    assert both.num_bytes - cut.num_bytes == 2 * shared * 3 // 4


def test_the_last_sequence_of_replicas_is_read_whole_while_the_others_wait() -> None:
    """DeepSeek-V3's cache of 100,000 tokens: 61 layers of 128 heads of 2 x (2 x 512 + 64) FLOPs, which take longer than
    the bytes; as long for one rank as for all eight.
    """
    counts = engine_counts(find_model("deepseek-ai/DeepSeek-V3"), EngineCut(ep=8, replicas=8))
    engine = EngineRates(counts, HOST, kv_element_bytes=2)
    reads = [engine.parts(StepLoad(count, count * 10**5))[1] - engine.parts(StepLoad(count, 0))[1] for count in (1, 8)]
    flops = 61 * 128 * 2 * (2 * 512 + 64) * 10**5
    rate = H100.dense_flops_per_s[ComputeDtype.BFLOAT16].value * PREFILL_ATTENTION / SUSTAINED
    assert reads == pytest.approx([flops / rate] * 2)
    assert engine.parts(StepLoad(1, 0))[4] == SEQUENCE


def test_replicas_on_two_hosts_exchange_over_the_network() -> None:
    counts = engine_counts(find_model("deepseek-ai/DeepSeek-V3"), EngineCut(tp=8, ep=16, replicas=2))
    two = EngineRates(counts, Cluster(H100, 16, 8, HOST.node), kv_element_bytes=2)
    assert two.link is Resource.NETWORK
    within = engine_counts(find_model("deepseek-ai/DeepSeek-V3"), EngineCut(tp=4, ep=8, replicas=2))
    inside = EngineRates(within, HOST, kv_element_bytes=2)
    assert inside.link is Resource.DEVICE_LINK
    load = StepLoad(256, 256 * 1000)
    assert two.cost(load).parts[Resource.NETWORK] > 3 * inside.cost(load).parts[Resource.DEVICE_LINK]


@pytest.mark.parametrize(
    ("gpu", "form", "fused"),
    [("b200", "mxfp4", True), ("b200", "fp8", False), ("h100-sxm", "mxfp4", False), ("rtx-5090", "nvfp4", False)],
)
def test_experts_in_4_bits_on_data_center_blackwell_take_fewer_kernels(gpu: str, form: str, fused: bool) -> None:
    assert has_fused_experts(get_gpu(gpu, where="test"), form) is fused


@pytest.mark.parametrize(
    ("gpu", "form", "version", "is_slow"),
    [
        ("h100-sxm", "fp8-block", VllmVersion(0, 16), True),
        ("h100-sxm", "fp8-block", VllmVersion(0, 14, 1), False),
        ("h100-sxm", "fp8-block", VllmVersion(0, 17), False),
        ("h100-sxm", "", VllmVersion(0, 16), False),
        ("b200", "fp8-block", VllmVersion(0, 16), False),
    ],
)
def test_two_versions_had_slow_experts_on_hopper(gpu: str, form: str, version: VllmVersion, *, is_slow: bool) -> None:
    """Source: vLLM pull requests 33490 and 34260."""
    assert has_slow_experts(get_gpu(gpu, where="test"), form, version) is is_slow


def test_slow_experts_take_longer_as_upstream_says() -> None:
    """Source: vLLM pull request 33490: DeepSeek-R1 on 8 H200 with 16 requests is `about 30 %` slower; 17 % here."""
    cluster = Cluster(get_gpu("h200-sxm", where="test"), 8, 8, get_node("dgx-h200", where="test"))
    counts = engine_counts(find_model("deepseek-ai/DeepSeek-R1"), EngineCut(tp=8, scheme=Quantization(FP8_BLOCK)))
    slow, usual = (
        EngineRates(counts, cluster, kv_element_bytes=2, version=version).seconds(StepLoad(16, 32_000))
        for version in (VllmVersion(0, 16), VllmVersion(0, 18))
    )
    assert slow / usual == pytest.approx(1.3, abs=0.15)


def test_releases_that_schedule_in_series_keep_the_gpu_waiting() -> None:
    """Source: vLLM pull request 27614 schedules asynchronously by default, from 0.14."""
    counts, load = engine_counts(LLAMA, EngineCut()), StepLoad(64, 64_000)
    older, newer = (
        EngineRates(counts, HOST, kv_element_bytes=2, version=VllmVersion(0, minor)).seconds(load) for minor in (13, 14)
    )
    assert older - newer == pytest.approx(SERIAL + 64 * SERIAL_SEQUENCE)


@pytest.mark.parametrize(("tp", "waits"), [(1, False), (2, True)])
def test_ray_s_executor_schedules_in_series_in_every_release(tp: int, waits: bool) -> None:
    """Source: vLLM pull request 25887. An engine of one rank has no executor to wait for."""
    counts, load = engine_counts(LLAMA, EngineCut(tp=tp)), StepLoad(64, 64_000)
    on_ray, alone = (
        EngineRates(counts, HOST, kv_element_bytes=2, has_ray_executor=has_ray).seconds(load)
        for has_ray in (True, False)
    )
    assert on_ray - alone == pytest.approx(SERIAL + 64 * SERIAL_SEQUENCE if waits else 0.0)


STEPS = {
    1: ((1, 4_096, 0, 13.5), (14, 57_386, 0, 16.3), (0, 0, 1_024, 52.5), (0, 0, 4_096, 205.0)),
    2: ((1, 4_096, 0, 9.0), (14, 57_386, 0, 10.1), (0, 0, 1_024, 33.4), (0, 0, 4_096, 114.5)),
    4: ((1, 4_096, 0, 6.05), (14, 57_386, 0, 6.78), (0, 0, 4_096, 72.8)),
    8: ((1, 4_096, 0, 4.5), (14, 57_386, 0, 5.0), (0, 0, 4_096, 50.9)),
}


@pytest.mark.parametrize("tp", STEPS)
def test_steps_of_a_gpu_without_a_published_sweep_are_met(tp: int) -> None:
    """Measured: Qwen3-32B on 1 to 8 B300, vLLM 0.20.1, medians of milliseconds. Source: AIConfigurator's forward-pass
    metrics, fpm_golden_runs/fpm_upfront_qwen32_full_once_20260613_194007 (fpm_metrics_phase.csv). No constant but
    SUSTAINED and the share of the memory's bandwidth has seen them.
    """
    cluster = Cluster(get_gpu("b300", where="test"), 8, 8, get_node("dgx-b300", where="test"))
    counts = engine_counts(find_model("Qwen/Qwen3-32B"), EngineCut(tp=tp))
    engine = EngineRates(counts, cluster, kv_element_bytes=2, version=VllmVersion(0, 20))
    for num_seqs, context, tokens, measured_ms in STEPS[tp]:
        load = StepLoad(num_seqs, context, tokens, tokens**2 / 2, min(1, tokens))
        assert engine.seconds(load) * 1e3 == pytest.approx(measured_ms, rel=0.08)


def test_attention_of_a_short_prompt_reaches_less_of_the_peak() -> None:
    """Source: AIConfigurator's kernel tables of vLLM 0.24, FlashAttention-3 on H100: 0.32 of the 16-bit peak at 1,024
    tokens, 0.61 at 8,192."""
    counts = engine_counts(LLAMA, EngineCut())
    cache, peak = counts.caches[0], H100.dense_flops_per_s[ComputeDtype.BFLOAT16].value / SUSTAINED
    for length, share in ((1_024, 0.32), (8_192, 0.61)):
        pairs = length**2 / 2
        seconds = cache.prefill_flops * (pairs + ATTENTION_RAMP * length) / (peak * PREFILL_ATTENTION)
        assert cache.prefill_flops * pairs / peak / seconds == pytest.approx(share, abs=0.05)


def drafting(tokens: int, acceptance_rate: float) -> EngineRates:
    counts = engine_counts(LLAMA, EngineCut())
    return EngineRates(counts, HOST, kv_element_bytes=2, drafts=(tokens, acceptance_rate))


def test_drafts_gain_what_is_taken_where_the_weights_are_read_anyway() -> None:
    """Three drafts taken at 0.5: 1 + 0.5 + 0.25 + 0.125 tokens a step, whose bytes are those of one."""
    assert expected_tokens(3, 0.5) == 1.875
    alone = StepLoad(1, 1000)
    assert drafting(3, 0.5).seconds(alone) == pytest.approx(rates().seconds(alone) / 1.875, rel=0.01)


def test_drafts_lose_where_the_gpu_computes_all_the_time() -> None:
    """1,024 sequences: four tokens each are four times the FLOPs for 1.3 times the tokens."""
    full = StepLoad(1024, 1024)
    assert drafting(3, 0.25).seconds(full) > 1.5 * rates().seconds(full)


def test_without_drafts_and_in_a_prefill_nothing_changes() -> None:
    assert drafting(0, 0.5).parts(StepLoad(8, 800)) == rates().parts(StepLoad(8, 800))
    assert drafting(3, 0.5).parts(StepLoad(0, 0, 512, 512 * 256, 1)) == rates().parts(StepLoad(0, 0, 512, 512 * 256, 1))


def test_the_gpu_waits_for_the_host_for_log_probs_of_each_sequence() -> None:
    """Published: 13,583 and 18,645 tokens per second for 64 sequences with and without log-probs (vLLM pull 57442)."""
    counts, load = engine_counts(LLAMA, EngineCut()), StepLoad(64, 64_000)

    def step_s(minor: int, *, returns_log_probs: bool) -> float:
        version = VllmVersion(0, minor)
        rates = EngineRates(counts, HOST, kv_element_bytes=2, version=version, returns_log_probs=returns_log_probs)
        return rates.seconds(load)

    plain = step_s(14, returns_log_probs=False)
    assert step_s(14, returns_log_probs=True) - plain == pytest.approx(64 / 13_583 - 64 / 18_645, rel=0.15)
