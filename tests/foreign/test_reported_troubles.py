"""Public bug reports, retyped with neutral names: what ran is said to run, and what ran out of memory is said to.

The inputs lie in `reports/`; each case names its thread. Log-prob passes, releases of a stack and redrawn groups decide
them, so that they are checked as their authors would type them.
"""

from pathlib import Path

import pytest

from rlplan.foreign.check import Asked, Checked, check, import_job
from rlplan.foreign.logs.read import read_log
from rlplan.foreign.source import read_source
from rlplan.planner.answers.measured_step import StepReport, explain_step
from rlplan.planner.machine import open_search
from rlplan.spec.files.job_file import load_job
from rlplan.spec.job import JobSpec

REPORTS = Path(__file__).parent / "reports"
SMALL_GRPO = """
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(output_dir="o", per_device_train_batch_size=8, num_generations=8, max_prompt_length=256,
                  max_completion_length=256, gradient_checkpointing=False, bf16=False)
trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=f, args=args, train_dataset=d)
trainer.train()
"""
"""A script that leaves everything but the batch to TRL."""


def answer(file: str, hardware: str, *settings: str, overrides: tuple[str, ...] = ()) -> Checked:
    return check(read_source(REPORTS / file, None, settings), Asked(hardware, None, overrides))


def import_report(file: str, hardware: str, *overrides: str) -> JobSpec:
    _, job = import_job(read_source(REPORTS / file, None), Asked(hardware, None, overrides))
    return job


@pytest.mark.parametrize(("size", "fits"), [(2, True), (32, False), (640, False)])
def test_the_log_prob_micro_batch_of_verl_decides_whether_half_a_billion_parameters_fit(size: int, fits: bool) -> None:
    """PeterGriffinJin/Search-R1 issue 62: out of memory with 32 on two A100 of 40 GB, in no training pass."""
    keys = [f"actor_rollout_ref.{part}.log_prob_micro_batch_size={size}" for part in ("rollout", "ref")]
    verdict = answer("sr62.sh", "2xA100-40GB", *keys)
    assert verdict.plan is not None
    assert verdict.plan.fit.may_fit is fits  # 2 takes 34 of 39 GiB, and one in six such peaks is above 39
    assert verdict.plan.binding.action_id.startswith("train" if fits else "score/")


@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, False)])
def test_one_sequence_of_26_thousand_tokens_runs_and_two_do_not(size: int, fits: bool) -> None:
    """OpenRLHF/OpenRLHF issue 908, on 16 H20."""
    assert answer("o908.sh", "16xH20", f"MB={size}").fits is fits


def test_eight_answers_of_a_small_model_do_not_fit_twenty_gigabytes(tmp_path: Path) -> None:
    """huggingface/trl issue 3678: 0.6B in fp32 on an A5000 of which 20 GB are free, in releases of then and today."""
    script = tmp_path / "train.py"
    script.write_text(SMALL_GRPO)
    for release in ((), ("framework=trl@0.19",)):
        asked = Asked("1xrtx-a5000", None, ("hardware.memory=20GiB", *release))
        assert not check(read_source(script, None), asked).fits


@pytest.mark.parametrize(
    ("file", "hardware", "length", "ran"),
    [
        ("or579_run.sh", "128xH100", 22528, True),
        ("or579_run.sh", "128xH100", 32768, False),
        ("or579_run8.sh", "8xH100", 10240, True),
        ("or579_run8.sh", "8xH100", 20480, False),
    ],
)
def test_a_release_in_which_it_does_not_fit_is_said_unasked(file: str, hardware: str, length: int, ran: bool) -> None:
    """huggingface/open-r1 issue 579: SFT of 32B with TRL of spring 2025, which made whole logits."""
    verdict = answer(file, hardware, f"LEN={length}")
    assert (verdict.elsewhere is None) is ran
    if verdict.elsewhere is not None:
        assert "before TRL 1.7 (plain)" in verdict.elsewhere.words
    assert answer(file, hardware, f"LEN={length}", overrides=("framework=trl@0.17",)).fits is ran


def test_a_step_of_dapo_counts_redrawn_groups_and_the_log_prob_pass() -> None:
    """verl-project/verl issue 795: 31 minutes a step of 32B on 128 A800, answers of 3,664 tokens on average."""
    lengths = (
        "workload.response_lengths={kind: lognormal, median: 2489, sigma: 0.906}",
        "workload.mean_prompt_len=180",
    )
    plan = open_search(import_report("dapo795.sh", "128xA800", *lengths)).run(with_others=False)
    assert plan.job.num_generated_per_step == 3 * plan.job.workload.num_rollouts_per_step
    assert 31 * 60 / 1.77 < plan.seconds < 31 * 60 / 0.6


def is_normal_by_phase(report: StepReport) -> bool:
    return report.is_normal and all(
        0.6 <= (gap.ratio or 0) <= 1.77 for gap in report.gaps if gap.measured_s > 0.05 * report.measured.seconds
    )


def test_a_healthy_log_of_verl_is_normal_in_every_phase() -> None:
    """rllm-org/rllm issue 29: the log-prob pass of the policy takes as long as the reference's."""
    report = explain_step(import_report("rllm29.sh", "8xA100"), read_log(REPORTS / "rllm_norm.log"))
    assert is_normal_by_phase(report)
    assert report.causes == ()


@pytest.mark.parametrize("run", ["nm959_8b", "nm959_8b_fsdp2", "nm959_70b"])
def test_the_vendor_s_own_runs_of_nemo_rl_are_normal_in_every_phase(run: str) -> None:
    """NVIDIA-NeMo/RL issue 959, "Llama 3.1 on 8 and 64 H100": its table has the mean lengths, the jobs their shape.

    The 70B on FSDP2 is not here: its training takes 1.9 and its weight sync 2.5 times the prediction.
    """
    report = explain_step(load_job(REPORTS / f"{run}.yaml"), read_log(REPORTS / f"{run}.jsonl"))
    assert is_normal_by_phase(report)
    assert report.causes == ()
    assert {gap.phase for gap in report.gaps} >= {"rollout", "score", "train", "sync", "between"}
