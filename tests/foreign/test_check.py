"""Whether a foreign configuration fits, where it breaks, and what makes it fit, in its own keys."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.foreign.check import Asked, Checked, check, check_fits, import_job
from rlplan.foreign.source import read_source
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.units import GIB
from rlplan.vocabulary import MemoryKind
from tests.foreign.scripts import verl_script

MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"


def check_settings(
    folder: Path, settings: dict[str, Any] | None = None, *overrides: str, hardware: str = "H100"
) -> Checked:
    return check(read_source(verl_script(folder, settings), None), Asked(hardware, None, overrides))


def test_what_fits_as_given_needs_no_change(tmp_path: Path) -> None:
    checked = check_settings(tmp_path)
    assert checked.fits
    assert checked.changes == ()
    check_fits(checked)


def test_what_does_not_fit_names_the_moment_and_changes_that_were_tried(tmp_path: Path) -> None:
    checked = check_settings(tmp_path, {MICRO: 64})
    assert checked.plan is not None
    assert checked.plan.binding.action_id.startswith("train_forward_backward")
    assert 1 <= len(checked.changes) <= 3
    for change in checked.changes:
        again = check_settings(tmp_path, {MICRO: 64, **change.values})
        assert again.fits, change.values
    with pytest.raises(NoFeasiblePlanError, match="way out: each of these alone helps: --set actor_rollout_ref"):
        check_fits(checked)


def test_changes_are_the_smallest_of_their_kind(tmp_path: Path) -> None:
    checked = check_settings(tmp_path, {MICRO: 64})
    sizes = [change.values[MICRO] for change in checked.changes if MICRO in change.values]
    assert len(sizes) == 1
    assert not check_settings(tmp_path, {MICRO: 2 * sizes[0]}).fits


def test_the_plan_of_an_imported_job_is_mended_by_small_changes_and_resets_nothing(tmp_path: Path) -> None:
    """Remedies that do not change learning come first, and those for the given GPUs before more GPUs."""
    _, job = import_job(read_source(verl_script(tmp_path, {MICRO: 64}), None), Asked("H100"))
    remedies = find_best_plan(job, with_others=False).remedies
    assert remedies[0].change.startswith("workload.micro_batch_size_per_gpu=")
    resets = [remedy.change.count("=auto") > 1 for remedy in remedies]
    assert resets == sorted(resets)
    free = [remedy.num_devices > 8 for remedy in remedies if remedy.verdict is Verdict.FITS and not remedy.learns_less]
    assert free == sorted(free)


def test_an_engine_that_takes_too_much_beside_a_trainer_that_stays_is_told_to_take_less(tmp_path: Path) -> None:
    stays = dict.fromkeys(
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "actor_rollout_ref.actor.fsdp_config.optimizer_offload"),
        False,
    )
    checked = check_settings(tmp_path, {**stays, UTILIZATION: 0.95})
    assert checked.plan is not None
    assert checked.plan.binding.action_id == "generate"
    assert UTILIZATION in checked.changes[0].values


def test_the_share_of_the_gpu_is_vllm_s_own(tmp_path: Path) -> None:
    settings = read_source(verl_script(tmp_path, {UTILIZATION: 0.5}), None)
    _, job = import_job(settings, Asked("H100"))
    kv = job.rollout.kv_cache_memory
    assert isinstance(kv, int)
    assert 25 * GIB < kv < 35 * GIB  # half of 79.2 GiB less half of 14.2 GiB of weights and vLLM's passes
    _, wider = import_job(settings, Asked("H100", None, ("rollout.kv_cache_memory=8GiB",)))
    assert wider.rollout.kv_cache_memory == 8 * GIB


def test_a_share_that_the_weights_alone_exceed_is_no_plan_and_says_so(tmp_path: Path) -> None:
    checked = check_settings(tmp_path, {UTILIZATION: 0.05})
    assert checked.plan is None
    with pytest.raises(NoFeasiblePlanError, match="leaves room for a KV cache"):
        check_fits(checked)


def test_lengths_below_the_limits_at_which_it_fits_are_named(tmp_path: Path) -> None:
    checked = check_settings(tmp_path, {MICRO: 64})
    assert checked.shorter is not None
    prompt, response = checked.shorter
    assert prompt < 512
    lengths = f"workload.response_lengths={{kind: constant, value: {response}}}"
    shorter = check_settings(tmp_path, {MICRO: 64}, f"workload.mean_prompt_len={prompt}", lengths).plan
    assert shorter is not None
    assert shorter.fit.may_fit


def test_a_job_of_ours_that_is_refused_is_refused_in_their_words(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"workload\.num_samples_per_prompt from actor_rollout_ref\.rollout\.n = 0"
    ) as caught:
        check_settings(tmp_path, {"actor_rollout_ref.rollout.n": 0})
    assert "VALUE" not in caught.value.way_out
    assert "--set actor_rollout_ref.rollout.n=1" in caught.value.way_out
    assert check_settings(tmp_path, {"actor_rollout_ref.rollout.n": 1}).plan is not None


def test_the_answer_as_json_holds_every_key(tmp_path: Path) -> None:
    checked = check_settings(tmp_path, {MICRO: 64, "trainer.logger": "console"}).as_json()
    assert checked["verdict"] == Verdict.DOES_NOT_FIT.value
    assert checked["source"]["name"] == "verl"
    taken = {entry["key"] for entry in checked["taken"]} | {entry["key"] for entry in checked["without_counterpart"]}
    assert {MICRO, "trainer.logger", "data.train_batch_size"} <= taken


CRITIC = {"algorithm.adv_estimator": "gae", "critic.model.path": "Qwen/Qwen2.5-7B-Instruct"}
CRITIC |= {"critic.fsdp.param_offload": True, "critic.fsdp.optimizer_offload": True}
MEGATRON = "actor_rollout_ref.actor.megatron"
OFFLOADED = {f"{MEGATRON}.param_offload": True, f"{MEGATRON}.optimizer_offload": True}
LONG = {"model_engine": "megatron", "data.max_response_length": 3584}


def test_recomputation_is_tried_for_megatron_in_verl(tmp_path: Path) -> None:
    checked = check_settings(tmp_path, {**LONG, **OFFLOADED, MICRO: 16})
    assert not checked.fits
    part = f"{MEGATRON}.override_transformer_config.recompute_"
    changes = [change.values for change in checked.changes if f"{part}granularity" in change.values]
    assert changes
    for change in changes:
        assert (change[f"{part}method"], change[f"{part}num_layers"]) == ("uniform", 1)


def test_of_two_changes_that_help_together_neither_is_larger_than_it_must_be(tmp_path: Path) -> None:
    settings = {
        **LONG,
        "actor_rollout_ref.model.path": "Qwen/Qwen3-14B",
        f"{MEGATRON}.tensor_model_parallel_size": 4,
        UTILIZATION: 0.6,
        MICRO: 8,
    }
    checked = check_settings(tmp_path, settings)
    pairs = [change.values for change in checked.changes if {UTILIZATION, MICRO} <= set(change.values)]
    assert pairs
    utilization, micro = pairs[0][UTILIZATION], pairs[0][MICRO]
    assert check_settings(tmp_path, {**settings, UTILIZATION: utilization, MICRO: micro}).fits
    assert not check_settings(tmp_path, {**settings, UTILIZATION: round(utilization + 0.1, 2), MICRO: micro}).fits
    assert not check_settings(tmp_path, {**settings, UTILIZATION: utilization, MICRO: 2 * micro}).fits


def test_a_host_whose_memory_is_only_assumed_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        "trl grpo --model_name_or_path Qwen/Qwen2.5-7B --accelerate_config zero3.yaml --num_generations 8\n"
    )
    (tmp_path / "zero3.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: cpu\n"
        "  offload_param_device: cpu\n"
    )
    plan = check(read_source(tmp_path / "train.sh", None), Asked("1x4090")).plan
    assert plan is not None
    assert any("hardware.host_memory sets another size" in note for note in plan.notes)


@pytest.mark.parametrize(("gpus", "bytes_fewer"), [("1xH100", 8), ("4xH100", 10)])
def test_trl_without_deepspeed_keeps_weights_gradients_and_moments_in_the_type_that_is_loaded(
    gpus: str, bytes_fewer: int, tmp_path: Path
) -> None:
    """One GPU: weights, gradients and moments of 4 + 4 + 8 bytes a parameter, and half of it; several: buckets too."""
    tensor_bytes = []
    for dtype in ("float32", "bfloat16"):
        (tmp_path / "train.sh").write_text(
            f"trl grpo --model_name_or_path Qwen/Qwen2.5-1.5B --num_generations 8 --dtype {dtype}\n"
        )
        plan = check(read_source(tmp_path / "train.sh", None), Asked(gpus)).plan
        assert plan is not None
        rows = plan.binding.rows
        tensor_bytes.append(sum(size for _, _, kind, size in rows if kind is not MemoryKind.FRAGMENTATION))
    assert tensor_bytes[0] - tensor_bytes[1] == pytest.approx(bytes_fewer * 1_543_714_304, rel=0.15)


def test_logits_of_prompts_are_counted_where_a_stack_takes_them(tmp_path: Path) -> None:
    """OpenRLHF casts the logits of all packed tokens and slices their log-probs afterwards."""
    (tmp_path / "train.sh").write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen2.5-7B --actor.num_gpus_per_node 8 "
        "--vllm.num_engines 8 --train.colocate_all --ds.zero_stage 3 --data.max_len 2048 --rollout.max_new_tokens 1024 "
        "--train.dynamic_batch_enable --train.max_tokens_per_gpu 16384\n"
    )
    plan = check(read_source(tmp_path / "train.sh", None), Asked("8xH100")).plan
    assert plan is not None
    rows = [row for row in plan.ledger.rows if row.process == "policy_trainer/0" and row.kind is MemoryKind.LOGITS]
    assert max(row.peak_bytes for row in rows) == 10 * 16_384 * 152_064


REPORTED = {
    "data.train_batch_size": 128,
    "data.max_prompt_length": 4096,
    "data.max_response_length": 8192,
    "actor_rollout_ref.model.path": "Qwen/Qwen3-30B-A3B",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    MICRO: 1,
    "actor_rollout_ref.actor.use_kl_loss": True,
    f"{MEGATRON}.tensor_model_parallel_size": 4,
    f"{MEGATRON}.pipeline_model_parallel_size": 2,
    f"{MEGATRON}.expert_model_parallel_size": 2,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 4,
    UTILIZATION: 0.65,
    "trainer.nnodes": 4,
}
"""verl-project/verl, issue 3364: out of memory on four hosts of eight H200. The thread does not say its micro-batch."""
EXPERT_TP = f"{MEGATRON}.expert_tensor_parallel_size"


def check_reported(folder: Path, settings: dict[str, Any] | None = None, *overrides: str) -> Checked:
    script = verl_script(folder, {**REPORTED, **(settings or {})}, preset="ppo_megatron_trainer.yaml")
    return check(read_source(script, None), Asked("32xH200", None, overrides))


def test_a_mixture_that_fits_with_one_release_s_experts_alone_is_no_fit(tmp_path: Path) -> None:
    """verl 0.6.0 keeps experts whole (pull request 3371), those before and after cut them over tp (4119)."""
    checked = check_reported(tmp_path)
    assert checked.plan is not None
    assert not checked.fits
    assert checked.plan.verdict is Verdict.IN_EXPECTATION
    assert any("verl 0.6.0" in note and EXPERT_TP in note for note in checked.plan.notes)
    assert checked.changes[0].values == {EXPERT_TP: 4}
    assert any(f"{EXPERT_TP} is not set" in note for note in checked.imported.notes)
    with pytest.raises(NoFeasiblePlanError, match=r"with verl 0\.6\.0, whose default of .* is 1"):
        check_fits(checked)
    for change in checked.changes:
        assert check_reported(tmp_path, change.values).fits, change.values


def test_experts_that_are_given_have_one_verdict(tmp_path: Path) -> None:
    assert check_reported(tmp_path, {EXPERT_TP: 4}).fits
    assert check_reported(tmp_path, None, "training.etp=4").fits
    whole = check_reported(tmp_path, {EXPERT_TP: 1}).plan
    assert whole is not None
    assert whole.verdict is Verdict.DOES_NOT_FIT


def test_the_reported_mixture_does_not_fit_with_the_micro_batch_of_the_script_that_it_stands_on(tmp_path: Path) -> None:
    """Four, in the example of verl 0.5.0 for these hosts (run_qwen3moe-30b_megatron.sh)."""
    plan = check_reported(tmp_path, {MICRO: 4}).plan
    assert plan is not None
    assert plan.verdict is Verdict.DOES_NOT_FIT


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"critic.model.enable_gradient_checkpointing": False}, 1),
        ({"critic.ppo_micro_batch_size_per_gpu": 16, "critic.fsdp.model_dtype": "bf16"}, 1),
        ({"critic.ppo_micro_batch_size_per_gpu": 2, "critic.ulysses_sequence_parallel_size": 4}, 0),
        ({"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 32}, 0),
        ({"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2}, 0),
    ],
)
def test_settings_that_can_take_more_than_is_counted_are_counted_beside_the_verdict(
    settings: dict[str, Any], count: int, tmp_path: Path
) -> None:
    checked = check_settings(tmp_path, {**CRITIC, **settings})
    assert len(checked.imported.not_counted) == count, checked.imported.not_counted
    assert checked.plan is not None
    assert set(checked.imported.not_counted) <= set(checked.plan.not_counted)
    assert len(checked.as_json()["not_counted"]) == count
