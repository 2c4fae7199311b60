"""slime's and NeMo-RL's own code resolves what is written for them to what the plan learns with.

No index has these packages. The proof runs where $CHECKOUTS names a folder with `slime/`, `megatron/` (Megatron-LM) and
`nemo_rl/` at the commits in recorded.yaml, which also has the result of the last run; `requirements/upstream.txt` has
what NeMo-RL's loader needs.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlplan.foreign.export.folders import write_export
from tests.foreign.export import own_parsers
from tests.foreign.export.learned import learning_plans, list_wanted
from tests.foreign.export.test_own_parsers import within

CHECKOUTS = os.environ.get("CHECKOUTS", "")
RECORDED = YAML(typ="safe").load(Path(__file__).parent / "recorded.yaml")
BATCH_NORMALIZED = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def learned_by_slime(configuration: dict[str, Any], *, is_megatron: bool) -> dict[str, Any]:
    """slime's learning settings, from its arguments and Megatron's."""
    fraction, takes_reward = (
        configuration["lr_warmup_fraction"],
        configuration["advantage_estimator"] in BATCH_NORMALIZED,
    )
    has_loss = configuration["use_kl_loss"]
    assert configuration["normalize_advantages"] == takes_reward
    assert is_megatron
    return {
        "learning_rate": configuration["lr"],
        "lr_scheduler_type": configuration["lr_decay_style"],
        "lr_warmup_steps": configuration["lr_warmup_iters"] if fraction is None else 0,
        "lr_warmup_ratio": fraction or 0,
        "lr_decay_steps": configuration["lr_decay_iters"],
        "min_lr_ratio": configuration["min_lr"] / configuration["lr"],
        "weight_decay": configuration["weight_decay"],
        "adam_beta1": configuration["adam_beta1"],
        "adam_beta2": configuration["adam_beta2"],
        "gradient_clipping": configuration["clip_grad"],
        "clip_low": configuration["eps_clip"],
        "clip_high": configuration["eps_clip"]
        if configuration["eps_clip_high"] is None
        else configuration["eps_clip_high"],
        "entropy_coef": configuration["entropy_coef"],
        "kl_coef": configuration["kl_loss_coef"] if has_loss else configuration["kl_coef"] if takes_reward else 0,
        "kl_in": "loss" if has_loss else "reward",
        "kl_estimator": {"low_var_kl": "k3"}.get(configuration["kl_loss_type"], configuration["kl_loss_type"]),
        "token_weights": "token" if configuration["calculate_per_token_loss"] else "sequence",
        "dual_clip": configuration["eps_clip_c"] or 0,
        "has_unbiased_kl": configuration["use_unbiased_kl"],
        "importance": "truncate" if configuration["use_tis"] else "none",
        "importance_level": "token",
        "importance_veto": 0,
        "importance_low": configuration["tis_clip_low"],
        "importance_high": configuration["tis_clip"],
        "masks_truncated": False,
        "overlong_buffer": 0,
        "max_refills": 0,
        "gamma": configuration["gamma"],
        "gae_lambda": configuration["lambd"],
        "value_clip": configuration["value_clip"],
        "value_learning_rate": configuration["lr"],
        "value_warmup_steps": configuration["num_critic_only_steps"],
        "temperature": configuration["rollout_temperature"],
        "num_epochs_per_step": 1,
        "fixed": [
            [configuration["rollout_top_p"], configuration["rollout_top_k"]],
            [configuration["attention_dropout"], configuration["hidden_dropout"]],
        ],
    }


def learned_by_nemo_rl(configuration: dict[str, Any], *, is_megatron: bool) -> dict[str, Any]:
    """NeMo-RL's learning settings, from the keys of its configuration."""
    loss, adam = "loss_fn.", "policy.megatron_cfg.optimizer." if is_megatron else "policy.optimizer.kwargs."
    kinds = {"tis": "truncate", "icepop": "mask", None: "truncate"}
    kind = configuration[f"{loss}truncated_importance_sampling_type"]
    return {
        "learning_rate": configuration[f"{adam}lr"],
        "lr_scheduler_type": configuration["policy.megatron_cfg.scheduler.lr_decay_style"]
        if is_megatron
        else "constant",
        "lr_warmup_steps": configuration["policy.megatron_cfg.scheduler.lr_warmup_iters"] if is_megatron else 0,
        "lr_warmup_ratio": 0,
        "weight_decay": configuration[f"{adam}weight_decay"],
        "adam_beta1": configuration[f"{adam}adam_beta1"] if is_megatron else configuration[f"{adam}betas"][0],
        "adam_beta2": configuration[f"{adam}adam_beta2"] if is_megatron else configuration[f"{adam}betas"][1],
        "gradient_clipping": configuration["policy.max_grad_norm"],
        "clip_low": configuration[f"{loss}ratio_clip_min"],
        "clip_high": configuration[f"{loss}ratio_clip_max"],
        "entropy_coef": 0,
        "kl_coef": configuration[f"{loss}reference_policy_kl_penalty"],
        "kl_in": "reward" if configuration.get(f"{loss}use_kl_in_reward") else "loss",
        "kl_estimator": configuration[f"{loss}reference_policy_kl_type"],
        "token_weights": "token" if configuration[f"{loss}token_level_loss"] else "sequence",
        "dual_clip": configuration[f"{loss}ratio_clip_c"] or 0,
        "has_unbiased_kl": False,
        "importance_level": "token",
        "importance_veto": 0,
        "importance": kinds[kind] if configuration[f"{loss}use_importance_sampling_correction"] else "none",
        "importance_low": configuration.get(f"{loss}truncated_importance_sampling_ratio_min") or 0,
        "importance_high": configuration[f"{loss}truncated_importance_sampling_ratio"],
        "masks_truncated": configuration["grpo.overlong_filtering"],
        "overlong_buffer": 0,
        "max_refills": 0,
        "gamma": 1,
        "temperature": configuration["policy.generation.temperature"],
        "num_epochs_per_step": 1,
        "fixed": [
            [configuration["policy.generation.top_p"], configuration["policy.generation.top_k"]],
            configuration["grpo.use_dynamic_sampling"],
            configuration["grpo.reward_shaping.enabled"],
        ],
    }


LEARNED = {"slime": learned_by_slime, "nemo_rl": learned_by_nemo_rl}
FIXED = {"slime": [[1.0, -1], [0.0, 0.0]], "nemo_rl": [[1.0, None], False, False]}
BACKENDS = {"slime": ((),), "nemo_rl": ((), ("training.backend=megatron",))}


@pytest.mark.skipif(not CHECKOUTS, reason="$CHECKOUTS names no folder with upstream's sources")
@pytest.mark.nightly
@pytest.mark.parametrize("stack", LEARNED)
def test_what_a_checkout_resolves_is_what_the_plan_learns_with(stack: str, tmp_path: Path) -> None:
    plans = learning_plans(stack, BACKENDS[stack])
    folders = [tmp_path / str(index) for index in range(len(plans))]
    for plan, folder in zip(plans, folders, strict=True):
        write_export(plan, stack, folder)
    command = [sys.executable, own_parsers.__file__, "--resolve", stack, *map(str, folders)]
    text = within(300, f"{stack}'s own parser on {len(folders)} folders", command)
    for plan, configuration in zip(plans, json.loads(text.splitlines()[-1]), strict=True):
        learned = LEARNED[stack](configuration, is_megatron=plan.job.backend == "megatron")
        assert learned.pop("fixed") == FIXED[stack]
        wanted = list_wanted(plan)
        assert {name: learned[name] for name in wanted} == wanted
    assert len(plans) == RECORDED[stack]["resolved"]["folders"]
