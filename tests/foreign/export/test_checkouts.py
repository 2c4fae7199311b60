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
from tests.foreign.export.learned import learning_plans, wanted_of
from tests.foreign.export.test_own_parsers import within

CHECKOUTS = os.environ.get("CHECKOUTS", "")
RECORDED = YAML(typ="safe").load(Path(__file__).parent / "recorded.yaml")
BATCH_NORMALIZED = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def learned_by_slime(found: dict[str, Any], *, is_megatron: bool) -> dict[str, Any]:
    """What slime learns with, of the names of its arguments and Megatron's."""
    fraction, takes_reward = found["lr_warmup_fraction"], found["advantage_estimator"] in BATCH_NORMALIZED
    has_loss = found["use_kl_loss"]
    assert found["normalize_advantages"] == takes_reward
    assert is_megatron
    return {
        "learning_rate": found["lr"],
        "lr_scheduler_type": found["lr_decay_style"],
        "lr_warmup_steps": found["lr_warmup_iters"] if fraction is None else 0,
        "lr_warmup_ratio": fraction or 0,
        "lr_decay_steps": found["lr_decay_iters"],
        "min_lr_ratio": found["min_lr"] / found["lr"],
        "weight_decay": found["weight_decay"],
        "adam_beta1": found["adam_beta1"],
        "adam_beta2": found["adam_beta2"],
        "gradient_clipping": found["clip_grad"],
        "clip_low": found["eps_clip"],
        "clip_high": found["eps_clip"] if found["eps_clip_high"] is None else found["eps_clip_high"],
        "entropy_coef": found["entropy_coef"],
        "kl_coef": found["kl_loss_coef"] if has_loss else found["kl_coef"] if takes_reward else 0,
        "kl_in": "loss" if has_loss else "reward",
        "kl_estimator": {"low_var_kl": "k3"}.get(found["kl_loss_type"], found["kl_loss_type"]),
        "token_weights": "token" if found["calculate_per_token_loss"] else "sequence",
        "importance": "truncate" if found["use_tis"] else "none",
        "importance_low": found["tis_clip_low"],
        "importance_high": found["tis_clip"],
        "masks_truncated": False,
        "overlong_buffer": 0,
        "max_refills": 0,
        "gamma": found["gamma"],
        "gae_lambda": found["lambd"],
        "value_clip": found["value_clip"],
        "value_learning_rate": found["lr"],
        "value_warmup_steps": found["num_critic_only_steps"],
        "temperature": found["rollout_temperature"],
        "num_epochs_per_step": 1,
        "fixed": [
            [found["rollout_top_p"], found["rollout_top_k"]],
            [found["attention_dropout"], found["hidden_dropout"]],
            found["eps_clip_c"],
        ],
    }


def learned_by_nemo_rl(found: dict[str, Any], *, is_megatron: bool) -> dict[str, Any]:
    """What NeMo-RL learns with, of the keys of its configuration."""
    loss, adam = "loss_fn.", "policy.megatron_cfg.optimizer." if is_megatron else "policy.optimizer.kwargs."
    kinds = {"tis": "truncate", "icepop": "mask", None: "truncate"}
    kind = found[f"{loss}truncated_importance_sampling_type"]
    return {
        "learning_rate": found[f"{adam}lr"],
        "lr_scheduler_type": found["policy.megatron_cfg.scheduler.lr_decay_style"] if is_megatron else "constant",
        "lr_warmup_steps": found["policy.megatron_cfg.scheduler.lr_warmup_iters"] if is_megatron else 0,
        "lr_warmup_ratio": 0,
        "weight_decay": found[f"{adam}weight_decay"],
        "adam_beta1": found[f"{adam}adam_beta1"] if is_megatron else found[f"{adam}betas"][0],
        "adam_beta2": found[f"{adam}adam_beta2"] if is_megatron else found[f"{adam}betas"][1],
        "gradient_clipping": found["policy.max_grad_norm"],
        "clip_low": found[f"{loss}ratio_clip_min"],
        "clip_high": found[f"{loss}ratio_clip_max"],
        "entropy_coef": 0,
        "kl_coef": found[f"{loss}reference_policy_kl_penalty"],
        "kl_in": "reward" if found.get(f"{loss}use_kl_in_reward") else "loss",
        "kl_estimator": found[f"{loss}reference_policy_kl_type"],
        "token_weights": "token" if found[f"{loss}token_level_loss"] else "sequence",
        "importance": kinds[kind] if found[f"{loss}use_importance_sampling_correction"] else "none",
        "importance_low": found.get(f"{loss}truncated_importance_sampling_ratio_min") or 0,
        "importance_high": found[f"{loss}truncated_importance_sampling_ratio"],
        "masks_truncated": found["grpo.overlong_filtering"],
        "overlong_buffer": 0,
        "max_refills": 0,
        "gamma": 1,
        "temperature": found["policy.generation.temperature"],
        "num_epochs_per_step": 1,
        "fixed": [
            [found["policy.generation.top_p"], found["policy.generation.top_k"]],
            found[f"{loss}ratio_clip_c"],
            found["grpo.use_dynamic_sampling"],
            found["grpo.reward_shaping.enabled"],
        ],
    }


LEARNED = {"slime": learned_by_slime, "nemo_rl": learned_by_nemo_rl}
FIXED = {"slime": [[1.0, -1], [0.0, 0.0], None], "nemo_rl": [[1.0, None], None, False, False]}
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
    for plan, found in zip(plans, json.loads(text.splitlines()[-1]), strict=True):
        learned = LEARNED[stack](found, is_megatron=plan.job.backend == "megatron")
        assert learned.pop("fixed") == FIXED[stack]
        wanted = wanted_of(plan)
        assert {name: learned[name] for name in wanted} == wanted
    assert len(plans) == RECORDED[stack]["resolved"]["folders"]
