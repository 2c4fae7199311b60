"""An export is held to everything that changes what is learned, upstream's defaults included."""

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import EmitError, SpecError
from rlplan.foreign.export.backwards import export_plan
from rlplan.foreign.export.experiment import list_learning_keys
from rlplan.foreign.export.folders import write_export
from rlplan.foreign.table import load_table
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from, load_job
from rlplan.spec.parts.algorithm import AlgorithmSpec
from tests.factories import EXAMPLES
from tests.foreign.export.plans import ASKED, make_plan, plan_stack
from tests.repository.at_night import mark_nightly

STACKS = ("verl", "trl", "openrlhf", "slime", "nemo_rl")
ALGORITHMS = ("grpo", "ppo", "gspo", "cispo", "dr_grpo", "reinforce++", "reinforce++_baseline", "rloo", "remax")
CHANGES: dict[str, Any] = {
    "learning_rate": 3e-6,
    "lr_scheduler_type": "cosine",
    "lr_warmup_steps": 7,
    "lr_warmup_ratio": 0.1,
    "weight_decay": 0.07,
    "adam_beta1": 0.8,
    "adam_beta2": 0.97,
    "gradient_clipping": 0.3,
    "clip_low": 0.15,
    "clip_high": 0.37,
    "dual_clip": 3.0,
    "kl_coef": 0.005,
    "kl_in": {"loss": "reward", "reward": "loss"},
    "kl_estimator": {"k1": "k2", "k2": "k3", "k3": "k1"},
    "has_unbiased_kl": True,
    "entropy_coef": 0.01,
    "token_weights": {"sequence": "token", "token": "constant", "constant": "sequence"},
    "masks_truncated": True,
    "overlong_buffer": 128,
    "max_refills": 2,
    "importance": "truncate",
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "value_clip": 0.33,
    "value_learning_rate": 2e-5,
    "value_warmup_steps": 4,
}
"""Another value of each key; by the value that it has, where it has few."""


@cache
def base(stack: str, algorithm: str) -> Plan | None:
    """A plan that a stack can say; None where it lacks the algorithm."""
    for more in ((), ("algorithm.token_weights=token",), ("algorithm.token_weights=sequence",)):
        for kl in ((), ("algorithm.kl_in=loss", "algorithm.kl_estimator=k3"), ("algorithm.kl_estimator=k3",)):
            for target in ((), ("training.backend=megatron",)):
                words = (f"algorithm.name={algorithm}", "algorithm.kl_coef=0.001", *more, *kl)
                try:
                    plan = change_algorithm(make_plan(*ASKED[stack], *words, *target), {"importance": "none"})
                    export_plan(plan, stack)
                except (EmitError, SpecError):
                    continue
                return plan
    return None


def change_algorithm(plan: Plan, values: dict[str, Any]) -> Plan:
    """The plan with another algorithm; bytes stay, of which exports take none from it."""
    algorithm = {**plan.job.algorithm.model_dump(mode="json"), **values}
    job = plan.job.model_copy(update={"algorithm": AlgorithmSpec.model_validate(algorithm)})
    return plan.model_copy(update={"job": job})


def test_every_stack_says_or_refuses_every_key_that_changes_what_is_learned() -> None:
    """None is without a row, or without a fixed setting: what is left out would be whatever upstream has."""
    for name in set(AlgorithmSpec.model_fields) & set(CHANGES):
        lacking = [
            stack
            for stack in STACKS
            if f"algorithm.{name}" not in load_table(stack).rows
            and not any(f"algorithm.{name}" in fixed.says for fixed in load_table(stack).fixed)
        ]
        of_a_critic = {"value_clip", "value_learning_rate", "value_warmup_steps", "gae_lambda", "gamma"}
        assert not lacking or (name in of_a_critic and set(lacking) <= {"trl", "nemo_rl"}), (name, lacking)


@pytest.mark.parametrize(("stack", "algorithm"), mark_nightly([*product(STACKS, ALGORITHMS)], but=6))
def test_another_value_changes_what_is_written_or_is_refused(stack: str, algorithm: str) -> None:
    plan = base(stack, algorithm)
    if plan is None:
        pytest.skip(f"{stack} has no {algorithm}")
    before = export_plan(plan, stack).settings
    spec = plan.job.algorithm
    for key in list_learning_keys(plan.job):
        part, _, name = key.partition(".")
        if part != "algorithm" or name not in CHANGES:
            continue
        value = CHANGES[name]
        value = value[getattr(spec, name)] if isinstance(value, dict) else value
        after = settings_or_refusal(change_algorithm(plan, {name: value}), stack)
        assert after not in (before, ""), (key, value)


LEVELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "verl's weights of sequences": (
        "verl",
        {"importance": "truncate", "importance_level": "sequence"},
        "'algorithm.rollout_correction.rollout_is': 'sequence'",
    ),
    "verl's dual clip": (
        "verl",
        {"importance": "none", "dual_clip": 5.0},
        "'actor_rollout_ref.actor.clip_ratio_c': 5.0",
    ),
    "TRL's masked sequences, its default": (
        "trl",
        {"importance": "mask", "importance_level": "sequence"},
        "'vllm_importance_sampling_mode': 'sequence_mask'",
    ),
    "TRL's truncated sequences": (
        "trl",
        {"importance": "truncate", "importance_level": "sequence"},
        "'vllm_importance_sampling_mode': 'sequence_truncate'",
    ),
    "TRL's delta": ("trl", {"importance": "none", "dual_clip": 3.0}, "'delta': 3.0"),
    "slime's dual clip": ("slime", {"importance": "none", "dual_clip": 3.0}, "'eps_clip_c': 3.0"),
    "slime's unbiased KL": ("slime", {"importance": "none", "has_unbiased_kl": True}, "'use_unbiased_kl': True"),
}


@pytest.mark.parametrize("case", LEVELS)
def test_weights_of_responses_and_limits_of_ratios_are_written_in_the_stack_s_words(case: str) -> None:
    stack, values, expected = LEVELS[case]
    plan = base(stack, "grpo")
    assert plan is not None
    changed = change_algorithm(plan, {"importance_high": 2.0, **values})
    written = export_plan(changed, stack).settings
    usual = load_table(stack).defaults
    key, _, value = expected.strip("'").partition("': ")
    assert str(written.get(key, usual.get(key))) == value.strip("'")


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("values", [{"importance_level": "geometric"}, {"importance_veto": 1e-4}])
def test_what_no_stack_does_to_responses_is_refused(stack: str, values: dict[str, Any]) -> None:
    plan = base(stack, "grpo")
    assert plan is not None
    with pytest.raises(EmitError, match=next(iter(values))):
        export_plan(change_algorithm(plan, {"importance": "truncate", **values}), stack)


def settings_or_refusal(plan: Plan, stack: str) -> Any:
    """The exported settings, or the way out of the refusal."""
    try:
        return export_plan(plan, stack).settings
    except EmitError as error:
        return error.way_out


def test_a_kl_in_the_reward_is_one_in_verl_s_reward() -> None:
    """verl's apply_kl_penalty takes `kl_ctrl.kl_coef` times `kl_penalty` off rewards; `use_kl_loss` adds to a loss."""
    for name, estimator in product(("grpo", "ppo", "rloo", "reinforce++", "remax"), ("k1", "k2", "k3")):
        words = (f"algorithm.name={name}", "algorithm.kl_in=reward", f"algorithm.kl_estimator={estimator}")
        written = export_plan(make_plan(*ASKED["verl"], *words, "algorithm.kl_coef=0.003"), "verl").settings
        assert written["algorithm.use_kl_in_reward"] is True
        assert written["algorithm.kl_ctrl.kl_coef"] == 0.003
        assert "actor_rollout_ref.actor.use_kl_loss" not in written  # false by default
        kinds = {"k1": ("kl", "k1"), "k2": ("mse", "k2"), "k3": ("low_var_kl", "k3")}
        assert written.get("algorithm.kl_penalty", "kl") in kinds[estimator]
    job = load_job(EXAMPLES / "grpo-7b-8xh100.yaml", ["algorithm.kl_in=reward"])
    plan = plan_stack(job, "verl")
    assert export_plan(plan, "verl").settings["algorithm.use_kl_in_reward"] is True


def test_slime_trains_without_dropout_and_with_the_plan_s_lambda(tmp_path: Path) -> None:
    """Megatron's arguments.py has attention_dropout 0.1, hidden_dropout 0.1; slime's --lambd is 1.0."""
    plan = make_plan(*ASKED["slime"], "algorithm.name=ppo")
    write_export(plan, "slime", tmp_path)
    text = (tmp_path / "train.sh").read_text()
    flags = ("--attention-dropout 0.0 ", "--hidden-dropout 0.0 ", "--lambd 0.95 ", "--normalize-advantages ")
    assert all(flag in text for flag in flags)
    assert "--attention-dropout 0.0 " in slime_text(tmp_path, "algorithm.name=grpo")


def slime_text(folder: Path, *overrides: str) -> str:
    write_export(make_plan(*ASKED["slime"], *overrides), "slime", folder)
    return (folder / "train.sh").read_text()


def test_what_a_stack_has_by_itself_is_not_what_a_plan_says() -> None:
    """Defaults of the tables' versions: clip_ratio_low and _high hide verl's clip_ratio; OpenRLHF has betas of 0.9
    and 0.95 and clips rewards to 10; TRL masks sequences by importance; NeMo-RL leaves an answer out of its baseline.
    """
    verl = export_plan(make_plan(*ASKED["verl"], "algorithm.clip_low=0.1", "algorithm.clip_high=0.1"), "verl").settings
    assert [verl[f"actor_rollout_ref.actor.clip_ratio_{end}"] for end in ("low", "high")] == [0.1, 0.1]
    openrlhf = export_plan(make_plan(*ASKED["openrlhf"]), "openrlhf").settings
    assert openrlhf["actor.adam.betas"] == [0.9, 0.999]
    assert openrlhf["reward.clip_range"] == [-1000000000, 1000000000]
    trl = export_plan(change_algorithm(make_plan(*ASKED["trl"]), {"importance": "none"}), "trl").settings
    assert trl["vllm_importance_sampling_correction"] is False
    nemo = export_plan(make_plan(*ASKED["nemo_rl"]), "nemo_rl").settings
    assert nemo["grpo.use_leave_one_out_baseline"] is False
    assert nemo["policy.scheduler"][0]["name"] == "torch.optim.lr_scheduler.ConstantLR"


def test_a_stack_that_lacks_a_key_refuses_the_plan_with_what_it_has() -> None:
    with pytest.raises(SpecError, match=r"no algorithm\.token_weights = constant") as caught:
        make_plan(*ASKED["openrlhf"], "algorithm.token_weights=constant")
    assert "algorithm.token_weights=token" in caught.value.way_out
    job = job_from(
        {"policy": "Qwen/Qwen2.5-1.5B-Instruct", "hardware": "8xH100", "algorithm": "grpo"}, ["training.backend=fsdp2"]
    )
    masked = change_algorithm(find_best_plan(job, with_others=False), {"masks_truncated": True})
    with pytest.raises(EmitError, match="masks_truncated = True"):
        export_plan(masked, "verl")
