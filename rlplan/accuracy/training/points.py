"""Predictors of training runs: peaks and steady states, passes without gradients, the largest model that fits.

In: a point of kind `train_peak` or `train_steady` (any trainer), `logprob_peak` or `logprob_steady` (one pass for
log-probs, values or rewards on one GPU), `max_model_size` (DeepSpeed-Chat's claims about OPT). Out: memory in the plan
of its job, by the measured statistic, in the point's unit; the size of the largest OPT policy whose job fits.
Left out: reading settings (job.py), an engine that sleeps in the same process (colocated.py).
"""

import re
from typing import Any

from rlplan.accuracy.named_models import make_policy
from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.accuracy.predict import held_between_steps, held_by_scorer, peak_in_training, plan_point_job, predict_bytes
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.settings import find_gpu
from rlplan.accuracy.training.colocated import predict_update
from rlplan.accuracy.training.job import make_hardware, stated_loss, training_job
from rlplan.accuracy.training.settings import RunSettings, num_ranks, read_precision, read_tokens
from rlplan.accuracy.training.trainers import AGILERL, find_trainer
from rlplan.spec.base import shorten_value
from rlplan.spec.models.catalogue import find_model, load_catalogue
from rlplan.vocabulary import MemoryKind, Role

TYPICAL_RESERVED = re.compile(r"(?=.*\breserved\b).*\b(average|avg|mean|median|p\d\d)\b")
"""Units of statistics over steps other than a peak."""


def predict_peak(point: MeasuredPoint) -> Prediction:
    """The peak of a training step on one GPU; a mean of logged values is the memory at the end of a step."""
    if TYPICAL_RESERVED.search(point.measured.unit.lower()):
        raise CannotPredict("reserved memory of typical batches depends on their lengths, which are not stated")
    statistic = find_statistic(point)
    if find_trainer(point) is AGILERL and statistic is Statistic.PROCESS:
        return predict_update(point)
    if statistic is Statistic.PROCESS and find_gpu(point) is None:
        raise CannotPredict("the GPU is not known, and with it the context that nvidia-smi counts")
    plan = plan_point_job(training_job(point))
    return predict_bytes(point, peak_in_training(plan, statistic), plan)


def predict_steady(point: MeasuredPoint) -> Prediction:
    """Bytes of a rank between two steps."""
    plan = plan_point_job(training_job(point, has_passes=False))
    sizes = held_between_steps(plan, Statistic.ALLOCATED)
    sizes = {kind: size for kind, size in sizes.items() if kind is not MemoryKind.COMM_BUFFERS}
    return predict_bytes(point, sizes, plan)


def find_statistic(point: MeasuredPoint) -> Statistic:
    """The measured statistic: from the unit, else the trainer's own."""
    stated = point.measured.statistic
    return find_trainer(point).reports if stated is Statistic.UNSTATED else stated


SCALAR_ROLES = ("value", "critic", "reward")
"""Roles with one output per token."""
ROLES = ("policy", "reference", "teacher", *SCALAR_ROLES)


def predict_score_peak(point: MeasuredPoint) -> Prediction:
    """Peak bytes of a scorer during a pass."""
    return _predict_score(point, is_resident=False)


def predict_score_steady(point: MeasuredPoint) -> Prediction:
    """Bytes of a scorer between passes: its weights."""
    return _predict_score(point, is_resident=True)


def _predict_score(point: MeasuredPoint, *, is_resident: bool) -> Prediction:
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


PROMPT = RESPONSE = 256
"""Tokens of a prompt and of a response in DeepSpeed-Chat's scripts, which use a micro-batch of one sequence."""


def predict_largest(point: MeasuredPoint) -> Prediction:
    """The size of the largest OPT whose PPO step fits on one GPU, such as `13b`."""
    settings = RunSettings(point)
    if num_ranks(settings) > 1 or find_gpu(point) is None:
        raise CannotPredict("the largest model is predicted for one known GPU")
    if "ppo" not in settings.word("algo").lower() or "zero-offload" not in settings.word("offload").lower():
        raise CannotPredict("only PPO with ZeRO-Offload is predicted")
    critic = _find_opt(settings.word("critic"))
    fitting = [name for name in _list_opts() if _fits(point, name, critic)]
    if not fitting:
        raise CannotPredict("no OPT fits")
    word = fitting[-1].rpartition("-")[2]
    return Prediction(word, is_right=word == str(point.measured.value))


def _fits(point: MeasuredPoint, actor: str, critic: str) -> bool:
    settings = RunSettings(point)
    job = {
        "policy": actor,
        "algorithm": "ppo",
        "framework": "rlplan",
        "hardware": make_hardware(point, 1),
        "workload": {
            "num_prompts_per_step": 8,
            "num_samples_per_prompt": 1,
            "micro_batch_size_per_gpu": 1,
            "max_prompt_len": PROMPT,
            "max_response_len": RESPONSE,
        },
        "training": {
            "zero_stage": 2,
            "offloads_optimizer": True,
            "gradient_checkpointing": False,
            "logits": "plain",
            **dict.fromkeys(("tp", "pp", "cp", "ep", "ulysses"), 1),
        },
        "roles": {"value": {"path": critic}, "reward": {"path": critic}},
        "rollout": {"engine": "transformers" if settings.says("hybrid_engine") else "auto"},
        "placement": {"placement": "hybrid"},
    }
    return plan_point_job(job).fit.may_fit


def _list_opts() -> list[str]:
    """OPT models, smallest first."""
    names = [name for name in load_catalogue() if name.startswith("facebook/opt-")]
    return sorted(names, key=lambda name: find_model(name).num_parameters)


def _find_opt(name: str) -> str:
    """The bundled OPT nearest to the size that a name such as `OPT-350M` states. Raises: CannotPredict."""
    match = re.search(r"(\d+(?:\.\d+)?)\s*([mb])\b", name.lower())
    if match is None:
        raise CannotPredict(f"the size of the critic is not stated: {shorten_value(name)}")
    size = float(match.group(1)) * (10**6 if match.group(2) == "m" else 10**9)
    return min(_list_opts(), key=lambda opt: abs(find_model(opt).num_parameters - size))
