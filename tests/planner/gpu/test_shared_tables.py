"""Results that one search reuses from another change no answer, whatever was asked before."""

from random import Random

import pytest

from rlplan.errors import RlplanError
from rlplan.planner.checks.gpus import check_job
from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.memo import Memo
from rlplan.planner.search import find_best_plan
from rlplan.planner.setting import read_setting
from rlplan.spec.files.job_file import load_job
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import settle
from tests.factories import EXAMPLES, gpu_job
from tests.planner.gpu.test_search_oracle import _draw
from tests.repository.at_night import mark_nightly

CHANGES = (
    ("rollout.quantization=none", "rollout.quantization=fp8", "rollout.quantization=auto"),
    ("rollout.tp=2", "rollout.tp=1", "rollout.tp=auto"),
    ("training.zero_stage=3", "training.zero_stage=auto"),
    ("placement.placement=disaggregated", "placement.placement=hybrid", "placement.placement=auto"),
    ("placement.transport=disk", "placement.transport=auto"),
    ("rollout.max_num_seqs=64", "rollout.max_num_seqs=auto"),
    ("hardware.profile=h100-sxm", "hardware.profile=h200-sxm", "hardware.profile=b200", "hardware.profile=l40s"),
    tuple(f"hardware.num_devices={count}" for count in (1, 4, 6, 8, 12, 16)),
    ("training.lora={rank: 16}", "training.optimizer=adamw_8bit"),
)
"""Changes of one key each, in the order in which tables of the former would be wrong for the latter."""


EXAMPLE_JOBS = ("grpo-lora-8b-1xrtx4090", "dpo-8b-8xa100", "grpo-7b-8xh100", "ppo-70b-64xh100", "grpo-671b-1024xh200")
"""Searches without a memo take 0.4, 0.3, 5, 7 and 18 seconds."""


def found(job: JobSpec, memo: Memo) -> tuple[object, ...]:
    settled = settle(job)
    setting = read_setting(settled)
    check_job(settled, setting)
    plan = GpuSearch(settled, setting, job, memo).run(with_others=False)
    return plan.choice, plan.fit, plan.seconds, plan.headroom_bytes, plan.kv


def found_alone(job: JobSpec) -> tuple[object, ...]:
    return found(job, Memo())


def found_after(*jobs: JobSpec) -> tuple[object, ...]:
    memo = Memo()
    return [found(job, memo) for job in jobs][-1]


@pytest.mark.parametrize("name", mark_nightly(EXAMPLE_JOBS, but=3))
def test_without_a_memo_the_plan_of_an_example_is_the_same(name: str) -> None:
    job = load_job(EXAMPLES / f"{name}.yaml")
    assert find_best_plan(job) == find_best_plan(job, memo=Memo(is_on=False))


@pytest.mark.parametrize("seed", mark_nightly(range(30), but=4))
def test_without_a_memo_the_plan_of_a_small_job_is_the_same(seed: int) -> None:
    random = Random(seed)
    models, gpus = ("Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B"), ("1xRTX4090", "2xL40S", "4xA100")
    algorithm = random.choice(("grpo", "ppo", "dapo"))
    top = {"policy": random.choice(models), "algorithm": algorithm, "hardware": random.choice(gpus)}
    few = [f"workload.num_prompts_per_step={random.choice((8, 12, 16))}", "workload.max_response_len=512"]
    changes = [random.choice(kind) for kind in random.sample(CHANGES[:6], 2)]
    backend = random.choice(("deepspeed", "fsdp2", "megatron"))
    words = [*few, f"training.backend={backend}", *(changes if backend == "deepspeed" else ())]
    try:
        job = gpu_job(top, words)
        expected = find_best_plan(job)
    except RlplanError:
        return  # a change that this job refuses
    assert find_best_plan(job, memo=Memo(is_on=False)) == expected


def test_the_fastest_weight_sync_is_that_of_the_engines_that_are_open() -> None:
    path = EXAMPLES / "exercises" / "grpo-70b.yaml"
    jobs = [load_job(path, (f"rollout.quantization={word}",)) for word in ("none", "fp8")]
    alone = found_alone(jobs[1])
    assert found_after(*jobs) == alone


@pytest.mark.parametrize("counts", [(4, 16, 12), (6, 12, 16)])
def test_hosts_of_other_sizes_have_tables_of_their_own(counts: tuple[int, ...]) -> None:
    path = EXAMPLES / "grpo-7b-8xh100.yaml"
    jobs = [load_job(path, ("hardware.profile=h100-sxm", f"hardware.num_devices={count}")) for count in counts]
    alone = found_alone(jobs[-1])
    assert found_after(*jobs) == alone


def test_a_group_has_as_many_gpus_beside_it_as_its_host_has() -> None:
    """GPUs without NVLink: one trains on a host of two, then one on a host of four, where three generate."""
    top = {"policy": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo"}
    apart = ("placement.placement=disaggregated", "placement.max_staleness=1", "rollout.tp=1", "training.zero_stage=2")
    few = gpu_job(top | {"hardware": "2xRTX4090"}, apart)
    more = gpu_job(top | {"hardware": "4xRTX4090"}, (*apart, "placement.num_generation_devices=3"))
    alone = found_alone(more)
    assert found_after(few, more) == alone


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(40))
def test_an_answer_does_not_depend_on_what_was_asked_before(seed: int) -> None:
    random = Random(seed)
    keys = dict(_draw(random))
    top = {key: keys.pop(key) for key in ("policy", "algorithm", "hardware")}
    alone = []
    for change in (change for kind in random.sample(CHANGES, 4) for change in kind):
        try:
            job = gpu_job(top, [*(f"{key}={value}" for key, value in keys.items()), change])
            alone.append((job, found_alone(job)))
        except RlplanError:
            continue  # a change that this job refuses
    memo = Memo()
    for job, expected in alone:
        assert found(job, memo) == expected
