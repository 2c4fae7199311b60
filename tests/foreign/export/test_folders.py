"""A plan in another stack's own keys: what is read back from its files is the plan's job."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.api import emit
from rlplan.errors import EmitError, SpecError
from rlplan.foreign.check import Asked, import_job
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.export.backwards import export_plan
from rlplan.foreign.export.folders import TARGETS, set_framework, write_export
from rlplan.foreign.source import read_source
from rlplan.foreign.table import load_table
from rlplan.planner.executable import check_fits
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from, load_job
from rlplan.spec.resolved import settle
from tests.factories import EXAMPLES
from tests.foreign.export.plans import ASKED, STARTED, list_asked, make_plan, plan_stack
from tests.repository.at_night import mark_nightly

SAME_CACHE = 1.02
"""A share of the GPU is cut into whole blocks."""
NOT_COMPARED = {"algorithm.kl_in", "algorithm.kl_estimator", "training.logits", "policy.path", "placement.sync_bucket"}


def read_back(target: str, folder: Path, plan: Plan, gpus: str = "8xH100") -> tuple[dict[str, Any], list[str]]:
    """The job of the files that were written, and keys of theirs that nobody knows."""
    settings = read_source(folder / STARTED[target], None)
    model = None if "policy.path" in settings.table.rows else plan.model_name
    imported, job = import_job(settings, Asked(gpus, model))
    unknown = [entry.key for entry in imported.left if entry.why.startswith("not known")]
    return {
        key: flatten_keys(job.model_dump(mode="json"))[key]
        for key in settings.table.rows
        if key in flatten_keys(imported.data)
    } | {
        "rollout.kv_cache_memory": job.rollout.kv_cache_memory,
        "hardware.num_devices": job.hardware.num_devices,
    }, unknown


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_read_back_of_plans_is_their_job(target: str, every: int, tmp_path: Path) -> None:
    """Each stack with three plans of the grid in which every value stands; at night all thirty."""
    for overrides in list_asked(target, every):
        plan = make_plan(*overrides)
        write_export(plan, target, tmp_path)
        back, unknown = read_back(target, tmp_path, plan)
        assert unknown == []
        wanted = flatten_keys(plan.job.model_dump(mode="json"))
        cache = int(wanted.pop("rollout.kv_cache_memory"))
        there = back.pop("rollout.kv_cache_memory")
        assert there == "auto" or cache <= int(there) <= SAME_CACHE * cache, overrides
        passes = back.pop("workload.micro_batch_size_per_gpu", 1)
        assert (wanted["workload.mini_batch_size"] // 8) % (1 if passes == "auto" else int(passes)) == 0
        own = {key for key, value in wanted.items() if value == "auto"}  # the stack's own
        differing = {key: (value, wanted[key]) for key, value in back.items() if value not in (wanted[key], "auto")}
        assumed = {key for key, rows in load_table(target).rows.items() if all(row.is_assumed for row in rows)}
        assert not set(differing) - NOT_COMPARED - own - assumed, overrides


@pytest.mark.parametrize("target", TARGETS)
def test_a_folder_says_how_it_is_started_and_what_it_leaves_out(target: str, tmp_path: Path) -> None:
    plan = make_plan(*ASKED[target])
    readme = write_export(plan, target, tmp_path)[-1].read_text()
    assert readme.startswith("# job for ")
    assert "Start it with `" in readme
    assert "- `placement.transport=" in readme


@pytest.mark.parametrize(
    ("target", "overrides", "what"),
    [
        ("verl", ("framework=rlplan",), "the plan is for rlplan, the target is verl"),
        ("slime", ("training.backend=fsdp2",), "the plan is for verl, the target is slime"),
        ("openrlhf", (*ASKED["trl"],), "the plan is for TRL, the target is OpenRLHF"),
        ("verl", (*ASKED["verl"], "placement.placement=disaggregated"), "placement.max_staleness = null"),
    ],
)
def test_a_plan_for_another_framework_is_refused(
    target: str, overrides: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    with pytest.raises(EmitError) as caught:
        write_export(make_plan(*overrides), target, tmp_path)
    assert what in caught.value.what
    assert caught.value.way_out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ((*ASKED["nemo_rl"], "training.ulysses=2"), "a plan for NeMo-RL has no training.ulysses = 2"),
        ((*ASKED["slime"], "training.lora={rank: 16}"), "a plan for slime has no training.lora = {...}"),
        ((*ASKED["slime"], "algorithm.token_weights=constant"), "no algorithm.token_weights = constant"),
    ],
)
def test_what_a_framework_lacks_is_refused_before_the_search(overrides: tuple[str, ...], what: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(*overrides)
    assert what in caught.value.what
    assert caught.value.way_out


@pytest.mark.parametrize(
    ("stack", "key", "value"),
    [
        ("openrlhf", "training.optimizer", "adamw_8bit"),
        ("trl", "rollout.quantization", "fp8"),
        ("verl", "placement.placement", "disaggregated"),
    ],
)
def test_what_a_file_may_say_and_no_export_writes_is_planned_and_refused(stack: str, key: str, value: str) -> None:
    plan = make_plan(*ASKED[stack], f"{key}={value}")
    assert plan.verdict is Verdict.REFUSED
    assert plan.binding.num_bytes
    with pytest.raises(EmitError) as caught:
        check_fits(plan)
    assert caught.value.where == key
    assert make_plan(*ASKED[stack], caught.value.way_out).verdict is Verdict.FITS


@pytest.mark.parametrize("policy", mark_nightly(["Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B"], but=1))
@pytest.mark.parametrize("target", ["verl", "trl", "openrlhf", "slime", "nemo_rl"])
def test_what_a_job_leaves_open_is_as_the_stack_has_it(target: str, policy: str) -> None:
    asked = job_from({"policy": policy, "hardware": "8xH100", "algorithm": "grpo"})
    plan = plan_stack(asked, target)
    assert export_plan(plan, target).settings
    assert plan.asked == set_framework(asked, target)


@pytest.mark.parametrize(
    ("target", "overrides"),
    [
        ("verl", ("training.lora={rank: 16, alpha: 64}",)),
        ("verl", ("rollout.quantization=fp8",)),
        ("nemo_rl", ("training.lora={rank: 16, alpha: 64}",)),
        ("nemo_rl", ("rollout.quantization=fp8",)),
        ("trl", ("training.lora={rank: 16, alpha: 64}",)),
        ("trl", ("training.optimizer=adamw_8bit",)),
        ("openrlhf", ("training.lora={rank: 16, alpha: 64}",)),
    ],
)
def test_adapters_and_low_bits_are_said_where_a_stack_has_them(
    target: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    plan = make_plan(*ASKED[target], *overrides)
    write_export(plan, target, tmp_path)
    back, unknown = read_back(target, tmp_path, plan)
    assert unknown == []
    wanted = flatten_keys(plan.job.model_dump(mode="json"))
    keys = {"training.lora.rank", "training.lora.alpha", "training.optimizer", "rollout.quantization"} & set(back)
    assert {key: back[key] for key in keys} == {key: wanted[key] for key in keys}
    assert any(key.startswith(override.partition("=")[0]) for override in overrides for key in keys)


def test_the_framework_that_a_job_names_is_never_changed_for_a_target() -> None:
    asked = job_from({"policy": "Qwen/Qwen2.5-7B", "hardware": "8xH100", "framework": "rlplan"})
    with pytest.raises(EmitError, match="the plan is for rlplan, the target is verl") as caught:
        export_plan(plan_stack(asked, "verl"), "verl")
    assert "framework=verl" in caught.value.way_out


def test_an_imported_job_is_written_for_its_stack_as_it_stands(tmp_path: Path) -> None:
    """Its loss is taken in chunks of TRL's own, as TRL's profile has it."""
    (tmp_path / "train.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 2\n"
        "num_generations: 8\nmax_completion_length: 256\nuse_vllm: true\nvllm_gpu_memory_utilization: 0.3\n"
    )
    imported, job = import_job(read_source(tmp_path / "train.yaml", "trl"), Asked("2xH100", None))
    assert settle(job).training.logits == "fused"
    (tmp_path / "job.yaml").write_text(json.dumps(imported.data))
    emit(tmp_path / "job.yaml", tmp_path / "out", target="trl")
    again, _ = import_job(read_source(tmp_path / "out" / "train.sh", None), Asked("2xH100", None))
    asked, back = flatten_keys(imported.data), flatten_keys(again.data)
    assert {key: back.get(key) for key in asked if key != "name"} == {key: asked[key] for key in asked if key != "name"}


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.1, 0.2)])
def test_two_clip_bounds_are_one_flag_of_openrlhf_also_where_one_is_usual(
    low: float, high: float, tmp_path: Path
) -> None:
    plan = make_plan(*ASKED["openrlhf"], f"algorithm.clip_low={low}", f"algorithm.clip_high={high}")
    write_export(plan, "openrlhf", tmp_path)
    assert f"--actor.eps_clip_low_high {low} {high} " in (tmp_path / "train.sh").read_text()
    back, unknown = read_back("openrlhf", tmp_path, plan)
    assert (back["algorithm.clip_low"], back["algorithm.clip_high"], unknown) == (low, high, [])


def test_an_unknown_target_is_refused_with_what_was_meant(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="Did you mean 'verl'"):
        write_export(make_plan("training.backend=fsdp2"), "verll", tmp_path)


def test_a_stack_is_known_by_every_spelling_of_its_name(tmp_path: Path) -> None:
    assert write_export(make_plan(*ASKED["nemo_rl"]), "nemo-rl", tmp_path)[0].name == "train.yaml"


@pytest.mark.parametrize("target", ["verl", pytest.param("slime", marks=pytest.mark.nightly)])
def test_the_example_that_is_planned_for_megatron_is_written_for_stacks_with_it(target: str, tmp_path: Path) -> None:
    """The other examples on GPUs are bundles of ours: tests/emit/test_gpu_bundles.py."""
    asked = load_job(EXAMPLES / "grpo-671b-1024xh200.yaml")
    plan = plan_stack(asked, target)  # slime has no hybrid placement
    write_export(plan, target, tmp_path)
    back, unknown = read_back(target, tmp_path, plan, "128xdgx-h200")
    assert unknown == []
    assert back["hardware.num_devices"] == 1024


def test_sglang_s_share_in_verl_is_of_weights_and_cache_alone(tmp_path: Path) -> None:
    """1,543,714,304 parameters of 2 bytes over 2 ranks, and 20 GiB, of the whole GPU; vLLM's has its passes too."""
    shares = {}
    for engine in ("sglang", "vllm"):
        asked = (f"rollout.engine={engine}", "rollout.tp=2", "rollout.kv_cache_memory=20GiB")
        plan = make_plan(*ASKED["verl"], *asked)
        write_export(plan, "verl", tmp_path / engine)
        back, unknown = read_back("verl", tmp_path / engine, plan)
        assert (back["rollout.engine"], unknown) == (engine, [])
        text = (tmp_path / engine / "train.sh").read_text()
        shares[engine] = float(text.partition("gpu_memory_utilization=")[2].split()[0])
    whole = plan.job.load_gpu().memory.value
    assert shares["sglang"] == pytest.approx((20 * 2**30 + 1_543_714_304) / whole, abs=0.002)
    assert shares["vllm"] > shares["sglang"] + 0.005


def test_verl_loads_no_reference_for_a_coefficient_of_zero_however_it_is_written(tmp_path: Path) -> None:
    for coefficient in ("0", "0.0"):
        write_export(make_plan(*ASKED["verl"], f"algorithm.kl_coef={coefficient}"), "verl", tmp_path / coefficient)
        assert "use_kl" not in (tmp_path / coefficient / "train.sh").read_text()


def test_what_verl_requires_is_written_also_where_it_is_as_usual(tmp_path: Path) -> None:
    write_export(make_plan(*ASKED["verl"]), "verl", tmp_path)
    assert " actor_rollout_ref.rollout.name=vllm " in (tmp_path / "train.sh").read_text()


def test_verl_loads_no_reference_for_a_job_without_one(tmp_path: Path) -> None:
    write_export(make_plan(*ASKED["verl"], "algorithm.kl_coef=0.0"), "verl", tmp_path)
    assert "kl_loss" not in (tmp_path / "train.sh").read_text()


def test_verl_is_told_of_weights_and_optimizer_that_are_offloaded_and_of_keys_that_it_does_not_have(
    tmp_path: Path,
) -> None:
    write_export(make_plan(*ASKED["verl"], "training.offloads_optimizer=true"), "verl", tmp_path)
    script = (tmp_path / "train.sh").read_text()
    for key in ("optimizer_offload", "param_offload"):
        assert f" actor_rollout_ref.actor.megatron.{key}=True" in script
    assert " ++actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True" in script


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), {"path": "Qwen/Qwen2.5-1.5B-Instruct", "lr": "1e-06"}),
        (
            ("roles.value.path=Qwen/Qwen2.5-0.5B", "algorithm.value_learning_rate=2e-6"),
            {"path": "Qwen/Qwen2.5-0.5B", "lr": "2e-06"},
        ),
    ],
)
def test_verl_s_critic_is_laid_out_as_the_policy_with_a_model_and_a_rate_of_its_own(
    more: tuple[str, ...], expected: dict[str, str], tmp_path: Path
) -> None:
    asked = ("algorithm.name=ppo", "training.gradient_checkpointing=true", "training.pp=2", *more)
    plan = make_plan(*ASKED["verl"], *asked)
    write_export(plan, "verl", tmp_path)
    script = (tmp_path / "train.sh").read_text()
    assert f" critic.model.path={expected['path']} " in script
    assert f" critic.optim.lr={expected['lr']} " in script
    for key in ("pipeline_model_parallel_size=2", "param_offload=True", "optimizer_offload=True"):
        assert f" critic.megatron.{key} " in script
    assert " critic.strategy=megatron " in script
    micro = plan.job.workload.micro_batch_size_per_gpu
    for key in ("critic.ppo_micro", "actor_rollout_ref.rollout.log_prob_micro", "actor_rollout_ref.ref.log_prob_micro"):
        assert f" {key}_batch_size_per_gpu={micro}" in script


def test_openrlhf_is_told_of_the_gpus_of_each_role_that_is_laid_out_as_the_policy(tmp_path: Path) -> None:
    asked = ("algorithm.name=ppo", "hardware=4xH100", "rollout.tp=1", "roles.reward.path=Qwen/Qwen2.5-0.5B")
    write_export(make_plan(*ASKED["openrlhf"], *asked), "openrlhf", tmp_path)
    script = (tmp_path / "train.sh").read_text()
    for role in ("actor", "critic", "ref", "reward"):  # upstream asks for equal numbers where all are colocated
        assert f" --{role}.num_gpus_per_node 4" in script
    assert " --critic.model_name_or_path Qwen/Qwen2.5-1.5B-Instruct " in script


def test_roles_of_openrlhf_take_no_gpus_that_the_plan_does_not_have(tmp_path: Path) -> None:
    apart = ("placement.placement=disaggregated", "rollout.sleep_level=auto", "placement.offload=none")
    asked = (*ASKED["openrlhf"], *apart, "algorithm.kl_coef=0.01")
    write_export(make_plan(*asked), "openrlhf", tmp_path / "grpo")
    assert " --train.colocate_actor_ref " in (tmp_path / "grpo" / "train.sh").read_text()
    critic = (*asked, "algorithm.name=ppo")
    with pytest.raises(EmitError, match=r"placement.placement = disaggregated \(hybrid is read back\)"):
        write_export(make_plan(*critic), "openrlhf", tmp_path / "ppo")
    write_export(make_plan(*critic, "placement.max_staleness=1"), "openrlhf", tmp_path / "async")
    script = (tmp_path / "async" / "train.sh").read_text()  # which colocates all but the engines
    assert " --train.colocate_all " in script
    assert " --train.async_enable " in script


SPLIT = {
    "slime": (
        "python3 train_async.py --hf-checkpoint Qwen/Qwen2.5-1.5B-Instruct --actor-num-gpus-per-node 4 "
        "--rollout-num-gpus 2 --tensor-model-parallel-size 2 --rollout-batch-size 32 --n-samples-per-prompt 8 "
        "--num-steps-per-rollout 2 "
        "--rollout-max-response-len 1024 --use-dynamic-batch-size --max-tokens-per-gpu 4096 "
        "--sglang-mem-fraction-static 0.6"
    ),
    "openrlhf": (
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen2.5-1.5B-Instruct "
        "--actor.num_gpus_per_node 4 --vllm.num_engines 2 --ds.zero_stage 3 --data.max_len 2048 "
        "--rollout.max_new_tokens 1024 --rollout.batch_size 32 --rollout.n_samples_per_prompt 8 --train.batch_size 128 "
        "--algo.advantage.estimator reinforce_baseline --train.colocate_actor_ref --train.dynamic_batch_enable "
        "--train.max_tokens_per_gpu 4096 --train.async_enable --vllm.gpu_memory_utilization 0.6"
    ),
}


@pytest.mark.parametrize("target", SPLIT)
def test_gpus_that_train_beside_others_that_generate_are_said_and_so_is_asynchrony(target: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.sh").write_text(SPLIT[target] + "\n")
    _, job = import_job(read_source(tmp_path / "theirs.sh", None), Asked("H100"))
    plan = find_best_plan(job, with_others=False)  # which may leave some of the six idle
    write_export(plan, target, tmp_path / "out")
    _, again = import_job(read_source(tmp_path / "out" / "train.sh", None), Asked("H100"))
    arrangement = plan.choice.arrangement
    assert again.hardware.num_devices == arrangement.num_training + arrangement.num_generation
    assert again.placement.num_generation_devices == arrangement.num_generation
    assert again.placement == job.placement
    assert again.placement.max_staleness == 1
