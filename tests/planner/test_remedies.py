"""Remedies of popular models on popular GPUs: where any layout fits, one of the three that are printed first does."""

import shlex

import pytest

from rlplan.planner.combinations import Effect
from rlplan.planner.plan import Plan
from rlplan.sources import JobWords, read_question
from tests.repository.at_night import mark_nightly

PAIRS = {
    "Qwen/Qwen3-8B": ("1xRTX4090", "1xA100-40GB", "1xA100", "2xA10G", "1xL4"),
    "Qwen/Qwen2.5-7B": ("2xL4", "1xL40S", "1xRTX4090"),
    "Qwen/Qwen3-14B": ("1xH100", "2xRTX4090"),
    "Qwen/Qwen3-32B": ("8xA100", "4xH100", "2xA100", "1xH100"),
    "meta-llama/Llama-3.1-70B-Instruct": ("8xH100", "4xH100"),
    "Qwen/Qwen2.5-72B-Instruct": ("8xA100",),
    "Qwen/Qwen3-30B-A3B": ("8xH100", "2xH100"),
    "Qwen/Qwen3-4B": ("1xT4", "1xRTX4090", "1xRTX3060"),
    "Qwen/Qwen3-1.7B": ("1xRTX3060",),
    "meta-llama/Llama-3.1-8B-Instruct": ("4xL4", "1xrtx-3090"),
}
EVERY = [(model, gpus) for model, kinds in PAIRS.items() for gpus in kinds]
FAST = [("Qwen/Qwen3-8B", "1xRTX4090"), ("Qwen/Qwen3-14B", "2xRTX4090"), ("Qwen/Qwen3-4B", "1xT4")]
FLOAT16 = ["training.dtype=float16", "rollout.dtype=float16"]
"""The way out that rlplan prints for a T4, which lacks bfloat16."""


def answer(model: str, gpus: str, change: str = "") -> Plan:
    words = [*(FLOAT16 if "T4" in gpus else []), *shlex.split(change)]
    return read_question("estimate", JobWords(overrides=words, model=model, gpus=gpus)).answer()


@pytest.mark.parametrize(("model", "gpus"), mark_nightly(EVERY, but=FAST))
def test_one_of_three_remedies_fits_when_it_is_typed(model: str, gpus: str) -> None:
    plan = answer(model, gpus)
    if plan.fits:
        return
    assert plan.remedies
    for remedy in plan.remedies[:3]:
        assert answer(model, gpus, remedy.change).verdict is remedy.verdict, remedy.change
    assert any(remedy.verdict.may_fit for remedy in plan.remedies[:3])
    assert any(remedy.effect is not Effect.MORE_HARDWARE for remedy in plan.remedies[:3])
