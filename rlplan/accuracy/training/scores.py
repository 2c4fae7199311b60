"""Predictors of `logprob_peak` and `logprob_steady`: passes without gradients for log-probs, values or rewards.

In: a point of one pass on one GPU. Out: memory of the scorer in the plan of a GRPO job. Left out: several GPUs.
"""

from typing import Any

from rlplan.accuracy.named_models import make_policy
from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.accuracy.predict import held_by_scorer, plan_point_job, predict_bytes
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.training.job import make_hardware, stated_loss
from rlplan.accuracy.training.settings import RunSettings, num_ranks, read_precision, read_tokens
from rlplan.spec.base import shorten_value
from rlplan.vocabulary import Role

SCALAR_ROLES = ("value", "critic", "reward")
"""Roles with one output per token."""
ROLES = ("policy", "reference", "teacher", *SCALAR_ROLES)


def predict_score_peak(point: MeasuredPoint) -> Prediction:
    """Peak bytes of a scorer during a pass."""
    return _predict(point, is_resident=False)


def predict_score_steady(point: MeasuredPoint) -> Prediction:
    """Bytes of a scorer between passes: its weights."""
    return _predict(point, is_resident=True)


def _predict(point: MeasuredPoint, *, is_resident: bool) -> Prediction:
    settings = RunSettings(point)
    role = Role.REWARD if _read_role(settings) in SCALAR_ROLES else Role.REFERENCE
    stated = point.measured.statistic
    statistic = Statistic.ALLOCATED if stated is Statistic.UNSTATED else stated
    plan = plan_point_job(score_job(point, role, has_passes=not is_resident))
    return predict_bytes(point, held_by_scorer(plan, role, statistic, is_resident=is_resident), plan)


def score_job(point: MeasuredPoint, role: Role, *, has_passes: bool = True) -> dict[str, Any]:
    """A GRPO job whose scorer runs the pass. Raises: CannotPredict."""
    settings = RunSettings(point)
    sequences, length = 1, 2
    if has_passes:
        tokens = read_tokens(settings)
        sequences, length = tokens.sequences, tokens.length
    dtype = read_precision(settings, has_master=False).stored.value
    policy = make_policy(point, longest=length)
    return {
        "policy": policy,
        "algorithm": {"name": "grpo", "kl_coef": 0.001 if role is Role.REFERENCE else 0.0},
        "framework": "rlplan",
        "hardware": make_hardware(point, 1),
        "workload": {
            "num_prompts_per_step": sequences,
            "num_samples_per_prompt": 2,
            "micro_batch_size_per_gpu": sequences,
            "max_prompt_len": 1,
            "max_response_len": max(1, length - 1),
        },
        "training": {
            **dict.fromkeys(("tp", "pp", "cp", "ep", "ulysses"), 1),
            "dtype": dtype,
            "zero_stage": 0,
            "gradient_checkpointing": True,
            "offloads_optimizer": False,
            "offloads_parameters": False,
            "logits": stated_loss(settings.word("loss")) or "auto",
        },
        "roles": {"reward": {"path": policy["path"]}} if role is Role.REWARD else {},
        "rollout": {"tp": 1, "dtype": dtype},
        "placement": {"placement": "hybrid", "offload": "none"},
    }


def _read_role(settings: RunSettings) -> str:
    """The role of the pass. Raises: CannotPredict for other roles and for several GPUs."""
    role = settings.word("role", "policy").lower()
    if role not in ROLES:
        raise CannotPredict(f"role {shorten_value(role)} is none of {', '.join(ROLES)}")
    if num_ranks(settings) > 1 or settings.degree("tp") > 1:
        raise CannotPredict("only passes on one GPU are modelled")
    return role
