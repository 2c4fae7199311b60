"""The exact search against every combination of the raw axes (oracle.py), on random jobs of at least 10,000.

The oracle uses all GPUs, so that the search may not leave any idle here (test_never_worse.py has those plans).
"""

from collections.abc import Iterator
from random import Random
from unittest.mock import patch

import pytest

from rlplan.errors import RlplanError
from rlplan.planner.checks.gpus import check_job
from rlplan.planner.gpu.scored_candidates import rank_simplicity
from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.setting import read_setting
from rlplan.spec.resolved import SettledJob
from tests.factories import gpu_job
from tests.planner.gpu.oracle import Oracle, Tried

LEAST = 10_000
MOST, MOST_NIGHTLY = 12_000, 60_000
MODELS = (
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-1.5B",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen2.5-7B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2.5-32B",
    "Qwen/Qwen3-30B-A3B",
)
LONG = "workload.max_response_len=16384"
APART = ("placement.placement=disaggregated", "placement.num_generation_devices=4", "rollout.quantization=auto")
GPUS = ("RTX4090", "L40S", "A100", "H100", "H200", "B200")


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_the_search_finds_what_trying_everything_finds(seed: int) -> None:
    _compare(seed, MOST)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 220))
def test_the_search_finds_what_trying_everything_finds_on_more_jobs(seed: int) -> None:
    _compare(seed, MOST_NIGHTLY)


SHARED_ATTENTION = [
    ("Qwen/Qwen3-30B-A3B", "8xH100", "training.tp=2", "training.ep=auto", "placement.offload=host", LONG),
    ("Qwen/Qwen3-30B-A3B", "8xH100", "training.ep=4", "placement.max_staleness=2", *APART),
    ("Qwen/Qwen3-30B-A3B", "8xH100", "rollout.attention_dp=4", "training.tp=2", "training.ep=auto", LONG),
    ("deepseek-ai/DeepSeek-V2-Lite", "8xH100", "training.tp=2", "training.ep=auto", "training.pp=auto", LONG),
    ("Qwen/Qwen3-30B-A3B", "8xH100", "training.sequence_parallel=false", "training.tp=auto", "training.ep=auto", LONG),
]


ONE_TRAINS = ("placement.num_generation_devices=7", "training.zero_stage=auto", "rollout.max_num_seqs=auto")
SLOW_NETWORKS = [
    ("2xrtx-4090-4x", "delta", "placement.max_staleness=1"),
    ("2xrtx-4090-4x", "delta", *ONE_TRAINS),
    ("2xrtx-4090-4x", "nccl", *ONE_TRAINS, "hardware.host_memory=18GiB"),
    pytest.param(
        ("2xrtx-4090-4x", "nccl", "rollout.dtype=float32", "placement.max_staleness=1"), marks=pytest.mark.nightly
    ),
    ("1xrtx-4090-4x", "nccl", "placement.max_staleness=1"),
    ("2xrtx-4090-8x", "nccl", "placement.num_generation_devices=8", "rollout.tp=auto", "rollout.max_num_seqs=auto"),
]


@pytest.mark.parametrize(
    "asked",
    [*SHARED_ATTENTION[:2], *(pytest.param(example, marks=pytest.mark.nightly) for example in SHARED_ATTENTION[2:])],
)
def test_the_search_finds_it_where_attention_may_be_data_parallel(asked: tuple[str, ...]) -> None:
    """Jobs of fewer combinations, of which engines that share experts are a large part."""
    policy, gpus, *overrides = asked
    stated = {key.partition("=")[0] for key in overrides}
    alone = [f"training.{axis}=1" for axis in ("tp", "pp", "cp", "ep") if f"training.{axis}" not in stated]
    top = {"policy": policy, "hardware": gpus, "algorithm": "grpo", "training": {"backend": "megatron"}}
    _compare_job(gpu_job(top, [*alone, "workload.num_prompts_per_step=32", *overrides]), 500)


@pytest.mark.parametrize("asked", SLOW_NETWORKS)
def test_the_search_finds_it_where_what_has_changed_may_travel_alone(asked: tuple[str, ...]) -> None:
    """Over 10 Gbit/s, where the hosts have room for the copies and where they have none, and over 25."""
    gpus, chosen, *overrides = asked
    top = {"policy": "Qwen/Qwen2.5-0.5B", "hardware": gpus, "algorithm": "grpo"}
    fixed = ("training.tp=1", "training.ulysses=1", "training.zero_stage=2", "rollout.tp=1", "rollout.max_num_seqs=128")
    work = ("placement.placement=disaggregated", "workload.num_prompts_per_step=32", "workload.max_response_len=512")
    assert _compare_job(gpu_job(top, [*fixed, *work, *overrides]), 300) == chosen


def _compare(seed: int, most: int) -> None:
    _compare_job(_job(Random(seed), most), LEAST)


def _compare_job(spec: SettledJob, least: int) -> str:
    """The sync mode that was chosen."""
    setting = read_setting(spec)
    search = GpuSearch(spec, setting)
    with patch("rlplan.planner.gpu.search.SAME_SPEED", -1e-9):  # no simpler one that is as fast or a little slower
        answer = search.run(with_others=False, may_leave_idle=False)
    tried = list(Oracle(spec, setting).run())
    assert len(tried) >= least
    best = min(candidate.key for candidate in tried)
    if best[0] >= 2:
        assert answer.fit.rank == 2, "of memory: the verdict of what is refused besides is `refused`"
        return ""
    alike = [candidate for candidate in tried if candidate.key == best]
    chosen = search.score(answer.choice)
    own = Tried(chosen.rank, *chosen.key, answer.choice, answer.kv.kv_cache_memory_bytes if answer.kv else 0)
    assert own.key == best, f"{spec}\n{own}\n{alike[0]}"
    assert answer.refusals or answer.verdict.rank == best[0], (
        "what is refused whatever is chosen is chosen all the same"
    )
    assert answer.seconds == pytest.approx(best[1], rel=1e-9)
    assert (own.choice, own.kv_cache) in [(candidate.choice, candidate.kv_cache) for candidate in alike]
    assert own.choice == min((candidate.choice for candidate in alike), key=rank_simplicity)
    assert search.space.num_candidates <= len(tried)
    assert answer.stats.num_scored < len(tried) / 10
    return answer.choice.sync_mode


def _job(random: Random, most: int) -> SettledJob:
    """A job that can be asked for and has between LEAST and so many combinations."""
    for _ in range(10_000):
        overrides = dict(_draw(random))
        try:
            top = {key: overrides.pop(key) for key in ("policy", "algorithm", "hardware")}
            spec = gpu_job(top, [f"{key}={value}" for key, value in overrides.items()])
            setting = read_setting(spec)
            check_job(spec, setting)
            search = GpuSearch(spec, setting)
        except RlplanError:
            continue
        if LEAST <= search.space.num_candidates <= most:
            return spec
    raise AssertionError("no job that was drawn can be asked for")


def _draw(random: Random) -> Iterator[tuple[str, str]]:
    """Keys of a job; most choices are left open."""

    def sometimes(key: str, *values: object, chance: float = 0.3) -> Iterator[tuple[str, str]]:
        if random.random() < chance:
            yield key, str(random.choice(values))

    yield "policy", random.choice(MODELS)
    yield "hardware", f"{random.choice((2, 4, 4, 6, 8, 8, 16))}x{random.choice(GPUS)}"
    yield "algorithm", random.choice(("grpo", "grpo", "ppo", "rloo", "dapo"))
    backend = random.choice(("deepspeed", "deepspeed", "deepspeed", "fsdp2", "megatron"))
    yield "training.backend", backend
    prompts, samples = random.choice((8, 16, 32, 48, 128)), random.choice((2, 4, 8))
    yield "workload.num_prompts_per_step", str(prompts)
    yield "workload.num_samples_per_prompt", str(samples)
    yield from sometimes("workload.mini_batch_size", prompts * samples // 2)
    yield "workload.max_prompt_len", str(random.choice((256, 1024, 2048)))
    yield "workload.max_response_len", str(random.choice((512, 2048, 8192)))
    yield from sometimes(
        "workload.response_lengths",
        "{kind: lognormal, median: 600, sigma: 0.8}",
        "{kind: uniform, low: 100, high: 500}",
        chance=0.6,
    )
    for axis in ("ulysses", "tp", "pp", "cp", "ep"):
        yield f"training.{axis}", random.choice(("auto", "auto", "auto", "1"))
    yield "rollout.max_num_seqs", random.choice(("auto", "auto", "128"))
    yield "rollout.has_expert_parallel", random.choice(("auto", "false"))
    yield from sometimes("rollout.attention_dp", 1, 2, 4, chance=0.1)
    yield from sometimes("rollout.quantization", "auto")
    yield from sometimes("training.zero_stage", *((2, 3) if backend == "deepspeed" else ("auto",)))
    yield from sometimes("training.offloads_parameters", "auto")
    yield from sometimes("training.gradient_checkpointing", "false", "true")
    yield from sometimes("training.lora", "{rank: 16}", "{rank: 64, base_dtype: nf4}", chance=0.2)
    yield from sometimes("training.offload_device", "nvme", chance=0.1)
    yield from sometimes("placement.max_staleness", 1, 2, chance=0.4)
    yield from sometimes("placement.placement", "colocated", "hybrid", "disaggregated", chance=0.2)
    yield from sometimes("placement.offload", "host", "none", chance=0.2)
    yield from sometimes("placement.offload_roles", "all", "frozen", chance=0.2)
    yield from sometimes("placement.num_scoring_devices", 0, 1, 2, chance=0.2)
    yield from sometimes("workload.reward_latency_s", 2.5, chance=0.2)
    yield from sometimes("rollout.sleep_level", 1, 2, chance=0.2)
    yield from sometimes("roles.reward.path", "Qwen/Qwen2.5-0.5B", chance=0.2)
    yield from sometimes("hardware.memory", "16GiB", "40GiB", chance=0.3)
    yield from sometimes("hardware.host_memory", "128GiB", "256GiB", chance=0.2)
    yield from sometimes("rollout.kv_cache_memory", "2GiB", chance=0.1)
    yield from sometimes("training.sequence_parallel", "false", chance=0.2)
    yield from sometimes("training.logits", "plain", "fused", "kept", chance=0.2)
