"""Learning settings of other stacks, from the configuration that their own code resolves, under rlplan's job keys.

Left out: resolving it (own_parsers.py).
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.export.experiment import list_learning_keys
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from tests.foreign.export.plans import ASKED, make_plan


def learned_by_verl(configuration: dict[str, Any], *, is_megatron: bool) -> dict[str, Any]:
    """verl's learning settings, from its own keys."""
    actor, optim = "actor_rollout_ref.actor.", "actor_rollout_ref.actor.optim."
    has_loss, has_reward = configuration[f"{actor}use_kl_loss"], configuration["algorithm.use_kl_in_reward"]
    kind = configuration[f"{actor}kl_loss_type"] if has_loss else configuration["algorithm.kl_penalty"]
    coefficient = configuration[f"{actor}kl_loss_coef"] if has_loss else configuration["algorithm.kl_ctrl.kl_coef"]
    dual_clip, has_dual_clip = (
        configuration[f"{actor}clip_ratio_c"],
        configuration[f"{actor}policy_loss.loss_mode"] == "vanilla",
    )
    level = configuration["algorithm.rollout_correction.rollout_is"]
    return {
        "learning_rate": configuration[f"{optim}lr"],
        "lr_scheduler_type": configuration[f"{optim}lr_decay_style" if is_megatron else f"{optim}lr_scheduler_type"],
        "lr_warmup_steps": max(0, configuration[f"{optim}lr_warmup_steps"] or 0),
        "lr_warmup_ratio": 0
        if (configuration[f"{optim}lr_warmup_steps"] or 0) > 0
        else configuration[f"{optim}lr_warmup_steps_ratio"],
        "lr_decay_steps": configuration.get(f"{optim}lr_decay_steps"),
        "min_lr_ratio": configuration.get(f"{optim}min_lr_ratio", 0) or 0,
        "weight_decay": configuration[f"{optim}weight_decay"],
        "adam_beta1": configuration[f"{optim}betas"][0],
        "adam_beta2": configuration[f"{optim}betas"][1],
        "gradient_clipping": configuration[f"{optim}clip_grad"],
        "clip_low": configuration[f"{actor}clip_ratio_low"],
        "clip_high": configuration[f"{actor}clip_ratio_high"],
        "dual_clip": dual_clip if has_dual_clip and dual_clip <= 1e6 else 0,
        "has_unbiased_kl": False,
        "entropy_coef": configuration[f"{actor}entropy_coeff"],
        "kl_coef": coefficient if has_loss or has_reward else 0,
        "kl_in": "loss" if has_loss else "reward" if has_reward else "",
        "importance": {"token": "truncate", "sequence": "truncate", None: "none"}[level],
        "importance_level": level,
        "importance_veto": 0,
        "importance_low": 0,
        "importance_high": configuration["algorithm.rollout_correction.rollout_is_threshold"],
        "overlong_buffer": configuration.get(f"{OVERLONG}len", 0) if configuration.get(f"{OVERLONG}enable") else 0,
        "overlong_penalty": configuration.get(f"{OVERLONG}penalty_factor", 1.0),
        "masks_truncated": False,
        "max_refills": 100 if configuration["algorithm.filter_groups.enable"] else 0,
        "kl_estimator": {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}[kind],
        "token_weights": "sequence"  # core_algos.py, compute_policy_loss_gspo
        if configuration[f"{actor}policy_loss.loss_mode"] == "gspo"
        else {
            "token-mean": "token",
            "seq-mean-token-mean": "sequence",
            "seq-mean-token-sum-norm": "constant",
        }[configuration[f"{actor}loss_agg_mode"]],
        "gae_lambda": configuration["algorithm.lam"],
        "gamma": configuration["algorithm.gamma"],
        "value_clip": configuration["critic.cliprange_value"],
        "value_learning_rate": configuration["critic.optim.lr"],
        "value_warmup_steps": configuration["trainer.critic_warmup"],
        "temperature": configuration["actor_rollout_ref.rollout.temperature"],
        "num_epochs_per_step": configuration[f"{actor}ppo_epochs"],
        "fixed": [
            [configuration["actor_rollout_ref.rollout.top_p"], configuration["actor_rollout_ref.rollout.top_k"]],
            [
                configuration["algorithm.rollout_correction.rollout_rs"],
                configuration["algorithm.rollout_correction.bypass_mode"],
            ],
            configuration["algorithm.kl_ctrl.type"],
        ],
    }


OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."
FIXED = {
    "verl": [[1, -1], [None, False], "fixed"],
    "openrlhf": [1.0, None, False, True],
    "trl": [[1.0, 0, None, 1.0], [None, 1.0], [True, False, False]],
}
"""Top-p and top-k that cut nothing, no second clip, no adaptive coefficient, no clipped or normalized rewards."""


CORRECTION = "algo.advantage.is_correction_"


def learned_by_openrlhf(configuration: dict[str, Any]) -> dict[str, Any]:
    """OpenRLHF's learning settings, from its arguments."""
    low, high = configuration["actor.eps_clip_low_high"] or [configuration["actor.eps_clip"]] * 2
    scheduler = configuration["actor.lr_scheduler"]
    importance = {"clip": "truncate", "mask": "mask"}[configuration[f"{CORRECTION}mode"]]
    importance = "none" if configuration[f"{CORRECTION}level"] == "off" else importance
    return {
        "learning_rate": configuration["actor.adam.lr"],
        "lr_scheduler_type": "cosine" if "cosine" in scheduler else scheduler.removesuffix("_with_warmup"),
        "lr_warmup_ratio": 0 if scheduler == "constant" else configuration["actor.lr_warmup_ratio"],
        "lr_warmup_steps": 0,
        "min_lr_ratio": 0 if scheduler == "cosine" else configuration["actor.min_lr_ratio"],
        "importance": importance,
        "importance_level": configuration[f"{CORRECTION}level"],
        "importance_veto": 0,
        "importance_low": configuration[f"{CORRECTION}threshold"][0],
        "importance_high": configuration[f"{CORRECTION}threshold"][1],
        "overlong_buffer": configuration["reward.overlong_buffer_len"] or 0,
        "overlong_penalty": configuration["reward.overlong_penalty_factor"],
        "masks_truncated": False,
        "max_refills": 0,
        "weight_decay": configuration["actor.adam.weight_decay"],
        "adam_beta1": configuration["actor.adam.betas"][0],
        "adam_beta2": configuration["actor.adam.betas"][1],
        "gradient_clipping": configuration["actor.max_norm"],
        "clip_low": low,
        "clip_high": high,
        "dual_clip": configuration["actor.dual_clip"] or 0,
        "has_unbiased_kl": False,
        "entropy_coef": configuration["actor.entropy_coef"] or 0,
        "kl_coef": configuration["algo.kl.init_coef"],
        "kl_in": "loss" if configuration["algo.kl.use_loss"] else "reward",
        "kl_estimator": configuration["algo.kl.estimator"],
        "token_weights": {"token-mean": "token", "seq-mean-token-mean": "sequence"}[
            configuration["actor.loss_agg_mode"]
        ],
        "gae_lambda": configuration["algo.advantage.lambd"],
        "gamma": configuration["algo.advantage.gamma"],
        "value_clip": configuration["critic.value_clip"],
        "value_learning_rate": configuration["critic.adam.lr"],
        "value_warmup_steps": max(0, configuration["critic.freezing_steps"]),
        "temperature": configuration["rollout.temperature"],
        "num_epochs_per_step": configuration["train.max_epochs"],
        "fixed": [
            configuration["rollout.top_p"],
            configuration["algo.kl.target"],
            configuration["reward.normalize_enable"],
            configuration["reward.clip_range"][1] > 1e6,
        ],
    }


TRL_CONSTANT = ("constant", "constant_with_warmup")
TRL_TOKENS = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant", "cispo": "token"}


def learned_by_trl(configuration: Any) -> dict[str, Any]:
    """TRL's learning settings, from the attributes of its GRPOConfig."""
    is_corrected = configuration.use_vllm and configuration.vllm_importance_sampling_correction
    level, _, mode = configuration.vllm_importance_sampling_mode.partition("_")
    return trained_by_trl(configuration) | {
        "kl_coef": configuration.beta,
        "clip_low": configuration.epsilon,
        "clip_high": configuration.epsilon if configuration.epsilon_high is None else configuration.epsilon_high,
        "entropy_coef": configuration.entropy_coef,
        "kl_in": "loss",
        "kl_estimator": "k3",
        "token_weights": TRL_TOKENS[configuration.loss_type],
        "dual_clip": configuration.delta or 0,
        "has_unbiased_kl": configuration.use_bias_correction_kl,
        "importance": mode if is_corrected else "none",
        "importance_level": level,
        "importance_veto": 0,
        "importance_low": configuration.vllm_importance_sampling_clip_min or 0,
        "importance_high": configuration.vllm_importance_sampling_clip_max,
        "overlong_buffer": 0,
        "masks_truncated": configuration.mask_truncated_completions,
        "max_refills": 0,
        "temperature": configuration.temperature,
        "num_epochs_per_step": configuration.num_iterations,
        "fixed": [
            [configuration.top_p, configuration.top_k, configuration.min_p, configuration.repetition_penalty],
            [configuration.off_policy_mask_threshold, configuration.top_entropy_quantile],
            [configuration.disable_dropout, configuration.sync_ref_model, configuration.use_adaptive_entropy],
        ],
    }


def trained_by_trl(configuration: Any) -> dict[str, Any]:
    """Settings that every trainer of TRL takes from its configuration."""
    scheduler = configuration.lr_scheduler_type.value
    has_warmup = scheduler != "constant"
    assert (configuration.adam_epsilon, configuration.label_smoothing_factor, configuration.neftune_noise_alpha) == (
        1e-8,
        0,
        None,
    )
    return {
        "learning_rate": configuration.learning_rate,
        "lr_scheduler_type": "constant" if scheduler in TRL_CONSTANT else scheduler,
        "lr_warmup_steps": configuration.warmup_steps if has_warmup and configuration.warmup_steps >= 1 else 0,
        "lr_warmup_ratio": configuration.warmup_steps if has_warmup and configuration.warmup_steps < 1 else 0,
        "min_lr_ratio": 0,
        "weight_decay": configuration.weight_decay,
        "adam_beta1": configuration.adam_beta1,
        "adam_beta2": configuration.adam_beta2,
        "gradient_clipping": configuration.max_grad_norm,
        "kl_coef": getattr(configuration, "beta", 0),
    }


def list_wanted(plan: Plan) -> dict[str, Any]:
    """The plan's values, by names of ours, of keys that have an effect."""
    spec, work = plan.job.algorithm, plan.job.workload
    names = [key.rpartition(".")[2] for key in list_learning_keys(plan.job)]
    values = {name: getattr(spec, name, getattr(work, name, None)) for name in names}
    if "value_learning_rate" in values:
        values["value_learning_rate"] = spec.value_learning_rate or spec.learning_rate
    return values


LEARNING = (
    (),
    ("algorithm.kl_in=reward", "algorithm.kl_estimator=k2", "algorithm.kl_coef=0.004"),
    ("algorithm.adam_beta1=0.8", "algorithm.adam_beta2=0.97", "algorithm.weight_decay=0.03", "algorithm.clip_low=0.11"),
    (
        "algorithm.clip_high=0.31",
        "algorithm.token_weights=token",
        "algorithm.entropy_coef=0.002",
        "workload.temperature=0.9",
    ),
    ("algorithm.gradient_clipping=0.4", "algorithm.learning_rate=2e-6", "algorithm.kl_estimator=k1"),
    ("algorithm.name=ppo", "algorithm.gae_lambda=0.9", "algorithm.value_clip=0.3", "algorithm.value_warmup_steps=3"),
    ("algorithm.name=ppo", "algorithm.kl_in=loss", "algorithm.value_learning_rate=4e-6"),
    ("algorithm.name=rloo",),
    ("algorithm.name=reinforce++", "algorithm.gamma=0.99"),
    ("algorithm.name=reinforce++_baseline",),
    ("algorithm.name=gspo", "algorithm.clip_low=0.0003", "algorithm.clip_high=0.0004"),
    ("algorithm.lr_scheduler_type=cosine", "algorithm.lr_warmup_ratio=0.1"),
    ("algorithm.overlong_buffer=256", "algorithm.overlong_penalty=0.7"),
    ("algorithm.importance=truncate", "algorithm.importance_high=3.5"),
    ("algorithm.importance=none",),
    ("algorithm.importance=none", "algorithm.dual_clip=3.5"),
    ("algorithm.importance=truncate", "algorithm.importance_level=sequence"),
    ("algorithm.importance=none", "algorithm.has_unbiased_kl=true", "algorithm.kl_coef=0.004"),
)
AHEAD = (
    *("placement.placement=disaggregated", "placement.max_staleness=1", "placement.partial_rollouts=false"),
    *("placement.offload=auto", "placement.offload_roles=auto"),
)
"""verl's trainer that generates one step ahead."""
OWN_LEARNING = {
    "verl": (
        ("algorithm.name=remax",),
        ("algorithm.name=dr_grpo",),
        ("algorithm.name=cispo",),
        ("algorithm.lr_warmup_steps=5",),
        ("algorithm.lr_scheduler_type=cosine", "algorithm.min_lr_ratio=0.2", "training.backend=fsdp2"),
        ("algorithm.name=dapo", "algorithm.max_refills=100"),
        (*AHEAD, "algorithm.clip_high=0.29"),
        (*AHEAD, "algorithm.importance=none"),
    ),
    "trl": (
        ("algorithm.importance=mask", "algorithm.importance_low=0.4", "algorithm.importance_high=3.5"),
        ("algorithm.name=cispo",),
        ("algorithm.name=dr_grpo",),
        ("algorithm.masks_truncated=true",),
        ("algorithm.lr_scheduler_type=linear", "algorithm.lr_warmup_steps=5"),
        ("algorithm.lr_warmup_steps=5",),
        ("algorithm.kl_coef=0.004",),
    ),
    "openrlhf": (
        ("algorithm.importance=mask", "algorithm.importance_low=0.4", "algorithm.importance_high=3.5"),
        ("algorithm.lr_scheduler_type=cosine", "algorithm.min_lr_ratio=0.2"),
        ("algorithm.lr_scheduler_type=linear",),
    ),
}
"""Settings that only one of the stacks has."""


def learning_plans(stack: str, backends: Sequence[tuple[str, ...]] = ((),)) -> list[Plan]:
    """Plans that differ in every key of the algorithm that a stack has."""
    plans: list[Plan] = []
    for words, backend in product((*LEARNING, *OWN_LEARNING.get(stack, ())), backends):
        try:
            plan = make_plan(*ASKED[stack], *words, *backend)
        except SpecError:  # which the stack lacks
            continue
        plans += [plan] * (plan.verdict is not Verdict.REFUSED)
    return plans
