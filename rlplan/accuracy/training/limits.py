"""Predictor of the largest model that trains on a machine, for DeepSpeed-Chat's claims about OPT.

In: a point of kind `max_model_size`. Out: the size of the largest OPT policy whose job fits. Left out: other families.
"""

import re

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import plan_point_job
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.settings import find_gpu
from rlplan.accuracy.training.job import make_hardware
from rlplan.accuracy.training.settings import RunSettings, num_ranks
from rlplan.spec.base import shorten_value
from rlplan.spec.models.catalogue import find_model, load_catalogue

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
