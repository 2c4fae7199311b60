"""Experts and pipeline stages of Megatron: import and export agree with the plan."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import EmitError, SpecError
from rlplan.foreign.check import Asked, check, import_job
from rlplan.foreign.export.backwards import export_plan
from rlplan.foreign.export.folders import write_export
from rlplan.foreign.source import read_source
from rlplan.planner.executable import check_fits
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from
from tests.foreign.export.plans import ASKED, STARTED, make_plan

MIXTURE = "Qwen/Qwen3-30B-A3B"
MEGATRON = "actor_rollout_ref.actor.megatron."
EXPERTS = {
    "verl": f"{MEGATRON}expert_tensor_parallel_size",
    "slime": "expert_tensor_parallel_size",
    "nemo_rl": "policy.megatron_cfg.expert_tensor_parallel_size",
}
DEFAULT = {"verl": None, "slime": None, "nemo_rl": 1}
"""Upstream's own, where None is tensor_model_parallel_size (Megatron-Core's parallel_state.py)."""
LAST = {
    "verl": f"{MEGATRON}override_transformer_config.num_layers_in_last_pipeline_stage",
    "slime": "decoder_last_pipeline_num_layers",
    "nemo_rl": "policy.megatron_cfg.num_layers_in_last_pipeline_stage",
}
OFFLOADED = ("training.backend=megatron", "training.offloads_optimizer=true")


@pytest.mark.parametrize("stack", EXPERTS)
@pytest.mark.parametrize(("tp", "ep", "etp"), [(4, 1, 4), (2, 4, 1), (2, 2, 2), (1, 8, 1)])
def test_a_stack_cuts_experts_as_the_plan_counts_them(stack: str, tp: int, ep: int, etp: int, tmp_path: Path) -> None:
    overrides = (f"training.etp={etp}",) if etp != (1 if ep > 1 else tp) else ()
    plan = make_plan(*ASKED[stack], *OFFLOADED, f"training.tp={tp}", f"training.ep={ep}", *overrides, model=MIXTURE)
    written = export_plan(plan, stack).settings
    assert (written.get(EXPERTS[stack], DEFAULT[stack]) or tp) == plan.choice.trainer.expert_tp == etp
    write_export(plan, stack, tmp_path)
    _, job = import_job(read_source(tmp_path / STARTED[stack], None), Asked("8xH100"))
    assert (job.training.tp, job.training.ep, job.training.etp) == (tp, ep, etp)


def verl_script(folder: Path, model: str, more: dict[str, Any]) -> Path:
    words = {
        "actor_rollout_ref.actor.strategy": "megatron",
        "actor_rollout_ref.model.path": model,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        **more,
    }
    path = folder / "train.sh"
    text = " ".join(f"++{key}={value}" if "override" in key else f"{key}={value}" for key, value in words.items())
    path.write_text(f"python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer {text}\n")
    return path


def test_whole_experts_on_every_rank_take_their_bytes(tmp_path: Path) -> None:
    """128 experts of 3 x 2048 x 768 in 48 layers are 29.0e9 parameters: 4 ranks that share them hold a quarter each."""
    peaks = []
    for etp in (4, 1):
        cut = {f"{MEGATRON}tensor_model_parallel_size": 4, f"{MEGATRON}expert_tensor_parallel_size": etp}
        script = verl_script(tmp_path, MIXTURE, {"trainer.n_gpus_per_node": 8, **cut})
        answer = check(read_source(script, None), Asked("8xH200"))
        assert answer.plan is not None
        peaks.append(answer.plan.binding.num_bytes)
    experts = 48 * 128 * 3 * 2048 * 768
    assert peaks[1] - peaks[0] > 2 * experts * 3 // 4


@pytest.mark.parametrize("stack", LAST)
@pytest.mark.parametrize(("model", "last"), [("Qwen/Qwen3-235B-A22B", 4), ("deepseek-ai/DeepSeek-V3", 1)])
def test_layers_that_do_not_divide_are_said_with_the_last_stage(stack: str, model: str, last: int) -> None:
    """94 = 15 x 6 + 4 and 61 = 15 x 4 + 1 layers on 16 stages."""
    assert export_plan(plan_stages(stack, model), stack).settings[LAST[stack]] == last


def plan_stages(stack: str, model: str, *more: str) -> Plan:
    words = (*ASKED[stack], "training.backend=megatron", "training.pp=16", "workload.num_prompts_per_step=512")
    job = job_from({"policy": model, "hardware": "256xH200", "algorithm": "grpo"}, (*words, *more))
    return find_best_plan(job, with_others=False)


def test_a_plan_with_stages_that_no_key_says_is_refused_with_a_number_that_is_taken() -> None:
    plan = plan_stages("slime", "Qwen/Qwen2.5-7B")
    assert plan.verdict is Verdict.REFUSED
    with pytest.raises(EmitError, match="28 layers do not divide evenly over 16 stages") as caught:
        check_fits(plan)
    assert caught.value.way_out == "training.pp=4"
    assert plan_stages("slime", "Qwen/Qwen2.5-7B", "training.pp=4").verdict is not Verdict.REFUSED


def test_an_uneven_split_without_keys_is_refused_as_megatron_refuses_it(tmp_path: Path) -> None:
    cut: dict[str, Any] = {
        f"{MEGATRON}pipeline_model_parallel_size": 8,
        "trainer.n_gpus_per_node": 8,
        "trainer.nnodes": 32,
    }
    cut |= {f"{MEGATRON}expert_model_parallel_size": 8, "actor_rollout_ref.rollout.tensor_model_parallel_size": 8}
    script = verl_script(tmp_path, "Qwen/Qwen3-235B-A22B", cut)
    with pytest.raises(SpecError, match="94 layers do not divide over 8") as caught:
        check(read_source(script, None), Asked("H200"))
    assert f"{LAST['verl']}=10" in caught.value.way_out
    settings = read_source(script, None).replace_values({LAST["verl"]: 10})
    assert not any("layers are counted" in note for note in import_job(settings, Asked("H200"))[0].notes)
    other = {LAST["verl"]: 4, LAST["verl"].replace("last", "first"): 6}
    notes = import_job(read_source(script, None).replace_values(other), Asked("H200"))[0].notes
    assert any("6, 6 x 14, 4 layers are counted as 7 x 12, 10" in note for note in notes)
