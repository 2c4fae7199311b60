"""More GPUs are never slower, awkward numbers cost what they are, and what is left idle is said."""

import math
import re
from functools import cache

import pytest

from rlplan.errors import SpecError
from rlplan.planner.gpu.notes import nearest_batch
from rlplan.planner.machine import open_search
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan, list_assumptions
from rlplan.spec.files.job_file import job_from, load_job
from rlplan.spec.resolved import settle
from tests.factories import EXAMPLES, gpu_job

SEVEN_B = EXAMPLES / "grpo-7b-8xh100.yaml"
FEW = (1, 8, 9, 17)
"""GPUs on one host, on two, and on more; some counts that nothing divides."""
SHARE = 2.0
"""Largest change of a step as a multiple of the change of its input."""


def make_plan(*overrides: str) -> Plan:
    return find_best_plan(load_job(SEVEN_B, overrides))


@cache
def step_s(num_gpus: int, length: float = 1.0) -> float:
    lengths = f"workload.max_response_len={int(8192 * length)}", f"workload.response_lengths.median={int(900 * length)}"
    plan = make_plan("hardware.profile=h100-sxm", f"hardware.num_devices={num_gpus}", *lengths)
    assert plan.verdict is Verdict.FITS
    assert plan.num_devices <= num_gpus
    return plan.seconds


def check_never_slower(counts: tuple[int, ...], length: float = 1.0) -> None:
    seconds = [step_s(count, length) for count in counts]
    slower = [count for place, count in enumerate(counts) if seconds[place] > min(seconds[: place + 1]) * (1 + 1e-9)]
    assert slower == [], f"slower than fewer GPUs: {slower}"


def test_a_few_numbers_of_gpus_are_none_slower_than_fewer() -> None:
    check_never_slower(FEW)


@pytest.mark.nightly
@pytest.mark.parametrize("length", [0.5, 0.75, 1.0, 1.5, 2.0])
def test_no_number_of_gpus_up_to_64_is_slower_than_fewer(length: float) -> None:
    check_never_slower(tuple(range(1, 65)), length)


def test_one_prompt_more_changes_a_step_in_proportion() -> None:
    assert make_plan("workload.num_prompts_per_step=129").seconds == pytest.approx(step_s(8), rel=SHARE / 128)


@pytest.mark.nightly
@pytest.mark.parametrize("num_gpus", [8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize(
    "change",
    [
        ("workload.num_prompts_per_step=129",),
        ("workload.num_prompts_per_step=127",),
        ("workload.response_lengths.median=909",),
        ("workload.max_response_len=8274",),
        ("workload.mean_prompt_len=303",),
    ],
)
def test_a_hundredth_more_moves_a_step_by_at_most_two(num_gpus: int, change: tuple[str, ...]) -> None:
    """Where engines get whole groups, one prompt more can be an eighth more for the fullest of them."""
    plan = make_plan("hardware.profile=h100-sxm", f"hardware.num_devices={num_gpus}", *change)
    groups, engines = plan.job.workload.num_prompts_per_step, plan.job.rollout.num_engines
    share = math.ceil(groups / engines) / math.ceil(128 / engines) - 1
    assert plan.seconds == pytest.approx(step_s(num_gpus), rel=max(SHARE / 100, share))


def test_gpus_that_are_left_idle_are_said_with_the_reason() -> None:
    plan = make_plan("hardware=9xH100")
    assert (plan.num_devices, plan.job.hardware.num_hosts) == (8, 1)
    assert plan.asked.hardware.num_devices == 9
    idle, *others = plan.notes
    assert idle == "uses 8 of 9 GPUs: 9 do not divide evenly over 2 hosts"
    assert make_plan("hardware=8xH100").notes == tuple(others)


def test_hosts_that_the_job_names_are_taken_whole() -> None:
    plan = make_plan("hardware.profile=h100-sxm", "hardware.num_devices=15", "hardware.num_hosts=3")
    assert plan.num_devices in (5, 10, 15) or plan.num_devices < 5


def test_ranks_that_get_more_rollouts_than_others_are_said_with_a_batch_that_divides() -> None:
    note, *_ = make_plan("hardware=6xH100").notes
    match = re.fullmatch(
        r"1,024 rollouts do not divide evenly over (\d+) ranks; "
        r"workload\.num_prompts_per_step=(\d+) does: .* a step, [+-][0-9.]+% rollouts a second",
        note,
    )
    assert match is not None
    assert int(match[2]) * 8 % int(match[1]) == 0


def test_a_batch_that_divides_keeps_the_answers_of_a_prompt_together_where_the_algorithm_compares_them() -> None:
    top = {"policy": "Qwen/Qwen2.5-0.5B", "algorithm": "online_dpo", "hardware": "8xH100"}
    overrides = ("num_prompts_per_step=60", "num_samples_per_prompt=4", "mini_batch_size=120")
    job = gpu_job(top, [f"workload.{override}" for override in overrides])
    for groups in (7, 8, 16):
        other = nearest_batch(job, groups)
        assert other is not None
        assert other.workload.rollouts_per_mini_batch % 4 == 0


def test_where_rows_must_divide_the_nearest_batch_that_does_is_named_with_its_step() -> None:
    asked = {"policy": "Qwen/Qwen2.5-1.5B", "hardware": "5xH100", "training": {"backend": "fsdp2"}}
    note, *_ = find_best_plan(job_from(asked)).notes
    assert note.startswith("uses 4 of 5 GPUs: ")
    assert "with workload.num_prompts_per_step=130 it fits, " in note or "=125 it fits, " in note


def test_two_pools_are_tried_in_both_orders() -> None:
    plans = [
        find_best_plan(job_from({"policy": "Qwen/Qwen2.5-7B", "hardware": pools, "placement": {"max_staleness": 2}}))
        for pools in ("8xh800 + 8xh20", "8xh20 + 8xh800")
    ]
    assert plans[0].devices == plans[1].devices == "8x h800-sxm + 8x h20"
    assert plans[0].seconds == plans[1].seconds
    assert not any("trains and" in note for note in plans[0].notes)
    assert plans[1].notes[0].startswith("h800-sxm trains and h20 generates; with 8x h20 training and 8x h800-sxm gen")


def test_a_pool_that_only_makes_a_step_longer_is_left_idle() -> None:
    alone, both = (
        find_best_plan(job_from({"policy": "Qwen/Qwen2.5-7B", "hardware": f"8xh800{more}"}))
        for more in ("", " + 8xh20")
    )
    assert both.seconds == alone.seconds
    assert both.notes[0].startswith("uses 8x h800-sxm alone, which is faster; with 8x h800-sxm training and 8x h20 gen")


def test_pools_that_no_order_can_use_are_refused() -> None:
    with pytest.raises(SpecError, match="bfloat16, which a t4 does not support"):
        find_best_plan(job_from({"policy": "Qwen/Qwen2.5-1.5B", "hardware": "8xT4 + 8xH100"}))


@pytest.mark.parametrize(("hardware", "hosts"), [("16xrtx-5080", "8x rtx-5080"), ("8xH100 + 1xL4", "1x l4")])
def test_hosts_whose_network_no_profile_states_get_an_assumed_one_that_is_named(hardware: str, hosts: str) -> None:
    job = job_from({"policy": "Qwen/Qwen2.5-7B", "hardware": hardware})
    plan = open_search(job).run(with_others=False, may_leave_idle=False)
    assert plan.seconds > 0
    assert any(f"between hosts of {hosts}: no node profile states it" in note for note in list_assumptions(plan))


def test_no_host_has_more_gpus_than_its_product() -> None:
    """NVIDIA sells the GH200 as one superchip per host; a usual server holds eight cards."""
    for hardware, num_hosts in (("8xGH200", 8), ("16xA100-PCIE-80GB", 2), ("8xL4", 1)):
        job = job_from({"policy": "Qwen/Qwen2.5-7B", "hardware": hardware})
        assert settle(job).hardware.num_hosts == num_hosts


def test_dpo_alone_gets_pairs_as_long_as_such_data_are() -> None:
    work = job_from({"policy": "Qwen/Qwen2.5-7B", "hardware": "8xH100", "algorithm": "dpo"}).workload
    assert (work.num_samples_per_prompt, work.max_seq_len, work.num_prompts_per_step) == (2, 2048, 128)
