"""Whole runs with every set of roles: value, reward model, teacher, adapters; their states predicted to the byte."""

import json
import shutil
from pathlib import Path

import pytest

from rlplan.runtime.learning.logprob_mismatch import FOUR_BITS, LIMITS
from tests.factories import EXAMPLES, make_adapter
from tests.runtime.conftest import Runner
from tests.runtime.live.four_bits import METHODS, quantize
from tests.runtime.runs.beside_the_plan import check_run

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

SHORT = ("workload.num_steps=2", "workload.num_heldout_prompts=16", "workload.evaluate_every=2")


def judge(folder: Path, tokenizer: Path) -> Path:
    """A small sequence classifier with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = json.loads((EXAMPLES / "models" / "sorter" / "config.json").read_text())
    config |= {"hidden_size": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"], "intermediate_size": 64}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_labels": 1}
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(Qwen3Config(**config)).save_pretrained(folder)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return folder


def test_ppo_with_a_value_model_of_its_own(run_job: Runner) -> None:
    run = run_job("examples/ppo-tiny.yaml", *SHORT)
    check_run(run, 2)
    assert all(row["value/loss"] > 0 for row in run.metrics if row["step"] > 0)


def test_ppo_with_a_value_head_on_the_policy(run_job: Runner) -> None:
    run = run_job("examples/ppo-tiny.yaml", *SHORT, "roles.value.shares_backbone=true")
    check_run(run, 2)
    assert all(row["value/loss"] > 0 for row in run.metrics if row["step"] > 0)


def test_adapters_with_the_base_as_reference(run_job: Runner) -> None:
    run = run_job("examples/lora-tiny.yaml", *SHORT)
    check_run(run, 2)
    assert not any(process.startswith("scorer") for process, _ in run.plan.schedule.processes)
    assert (run.folder / "policy" / "adapter" / "adapter_model.safetensors").is_file()


def test_adapters_of_policy_reference_and_teacher_on_one_base(run_job: Runner, tmp_path: Path) -> None:
    start = make_adapter(tmp_path / "start", rank=8, scale=0.05)
    other = make_adapter(tmp_path / "other", rank=16, targets=("q_proj", "v_proj"), scale=0.05, seed=1)
    adapters = (f"training.lora.path={start}", f"roles.teacher.adapter={other}", "workload.num_steps=3")
    run = run_job("examples/lora-tiny.yaml", *SHORT, *adapters, "placement.sync_content=adapter")
    check_run(run, 3)
    assert not any(process.startswith("scorer") for process, _ in run.plan.schedule.processes)
    first = next(row for row in run.metrics if row["step"] == 1)
    assert first["kl/mean"] < 1e-4, "the policy begins as its reference"
    assert abs(first["teacher_reverse_kl/mean"]) > first["kl/mean"]


def test_adapters_over_a_base_that_trainer_and_engine_share(run_job: Runner) -> None:
    shares = ("placement.placement=hybrid", "placement.sync_content=adapter", "rollout.shares_base=true")
    run = run_job("examples/lora-tiny.yaml", *SHORT, *shares)
    check_run(run, 2)
    kinds = {row.kind.value for row in run.plan.ledger.find_rows("rollout_engine/0") if row.resident_bytes}
    assert not {"weights", "packed_weights"} & kinds


@pytest.mark.parametrize("method", METHODS)
def test_adapters_over_an_engine_s_base_in_4_bits(run_job: Runner, tmp_path: Path, method: str) -> None:
    quantize(EXAMPLES / "models" / "sorter", tmp_path / "base", method)
    base = (f"rollout.base_path={tmp_path / 'base'}", "rollout.dtype=bfloat16", "placement.sync_content=adapter")
    run = run_job("examples/lora-tiny.yaml", *SHORT, *base, "workload.num_steps=3")
    check_run(run, 3, agree=LIMITS[FOUR_BITS].p99)
    differences = [row["sync/logprob_difference_mean"] for row in run.metrics if row["step"] > 0]
    assert all(1e-3 < difference < LIMITS[FOUR_BITS].mean for difference in differences), differences
    resident = {row.kind.value: row.resident_bytes for row in run.plan.ledger.find_rows("rollout_engine/0")}
    assert resident["weights"] < 786_432, "its linear layers, in bf16, are more"


def test_a_teacher_without_rewards(run_job: Runner) -> None:
    run = run_job("examples/distill-tiny.yaml", *SHORT)
    check_run(run, 2)
    assert all(row["teacher_reverse_kl/mean"] > 0 for row in run.metrics if row["step"] > 0)


def test_a_reward_model_with_the_policys_tokenizer(run_job: Runner, tmp_path: Path) -> None:
    folder = judge(tmp_path / "judge", EXAMPLES / "models" / "sorter" / "tokenizer.json")
    run = run_job("examples/quickstart.yaml", *SHORT, f"roles.reward.path={folder}", "rewards=[]")
    check_run(run, 2)
    assert all("reward/reward_model/mean" in row for row in run.metrics if row["step"] > 0)
