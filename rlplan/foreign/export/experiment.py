"""The job keys that change what is learned, and the check that an export keeps them.

A stack's file sets part of an experiment, and its defaults set the rest: a dropout of 0.1, a lambda of 1. Comparing
only the written keys would miss the defaults. So this module lists the plan's keys, and each is compared with the value
after import, upstream's defaults included.

In: a Plan, Settings. Out: job keys that count, and upstream's settings that match rlplan's losses and optimizers.
Left out: details of a stack's loss that have no key.
"""

from collections.abc import Iterator
from typing import Any

from rlplan.errors import EmitError
from rlplan.foreign.settings import Settings
from rlplan.foreign.table import Fixed
from rlplan.planner.plan import Plan
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Role

_ALWAYS = (
    *("learning_rate", "lr_scheduler_type", "lr_warmup_steps", "lr_warmup_ratio", "weight_decay"),
    *("adam_beta1", "adam_beta2", "gradient_clipping", "kl_coef"),
)
_OF_ROLLOUTS = ("entropy_coef", "token_weights", "masks_truncated", "overlong_buffer", "max_refills", "importance")
_OF_LOSS = {
    **dict.fromkeys(("clipped_ratio", "sequence_ratio", "answer_ratio"), ("clip_low", "clip_high", "dual_clip")),
    "clipped_weight": ("clip_high",),
}
_OF_ADVANTAGE = {"generalized": ("gamma", "gae_lambda"), "batch_normalized": ("gamma",)}


def list_learning_keys(job: JobSpec) -> tuple[str, ...]:
    """Job keys that change what is learned; without those that have no effect, such as lambda with GRPO.

    >>> from rlplan.spec.files.job_file import job_from
    >>> job = job_from({"policy": "Qwen/Qwen2.5-7B", "hardware": "8xH100", "algorithm": "grpo"}, [])
    >>> "algorithm.gae_lambda" in list_learning_keys(job), "algorithm.kl_estimator" in list_learning_keys(job)
    (False, True)
    """
    return tuple(f"algorithm.{name}" for name in _list_learning_names(job)) + (
        ("workload.temperature", "workload.num_epochs_per_step") if job.has_rollouts else ()
    )


def _list_learning_names(job: JobSpec) -> Iterator[str]:
    spec = job.algorithm
    declared = spec.declaration
    yield from _ALWAYS
    if spec.lr_decay_steps is not None:
        yield "lr_decay_steps"
    if spec.lr_scheduler_type == "cosine":
        yield "min_lr_ratio"
    if not job.has_rollouts:
        return
    yield from _OF_ROLLOUTS
    yield from _OF_LOSS.get(declared.loss, ())
    yield from _OF_ADVANTAGE.get(declared.advantage, ())
    if spec.kl_coef:
        yield from ("kl_in", "kl_estimator", *["has_unbiased_kl"] * (spec.kl_in == "loss"))
    if spec.overlong_buffer:
        yield "overlong_penalty"
    if spec.importance in ("truncate", "mask"):
        yield from ("importance_level", "importance_low", "importance_high", "importance_veto")
    if declared.has_value:
        yield from ("value_clip", "value_learning_rate", "value_warmup_steps")
    if Role.TEACHER in job.scored_roles:
        yield from ("teacher_coef", "teacher_top_k")


def apply_fixed(settings: Settings, wanted: dict[str, Any]) -> Settings:
    """The settings with the values that match rlplan's losses and optimizers, where the stack's defaults differ."""
    changes: dict[str, Any] = {}
    for fixed in _find_fixed(settings, wanted):
        for key, value in _fill(fixed, wanted).items():
            if settings.value(key) != value:
                changes[key] = value
    return settings.replace_values(changes) if changes else settings


def list_fixed_keys(settings: Settings, wanted: dict[str, Any]) -> frozenset[str]:
    """Job keys that fixed settings express, rather than rows."""
    return frozenset(key for fixed in _find_fixed(settings, wanted) for key in fixed.says)


def check_fixed(settings: Settings, plan: Plan, wanted: dict[str, Any]) -> None:
    """Raises: EmitError where the final settings contradict a fixed setting."""
    table = settings.table
    for fixed in _find_fixed(settings, wanted):
        for key, value in _fill(fixed, wanted).items():
            if settings.value(key) != value:
                raise EmitError(
                    f"{key} is {settings.value(key)} in the settings for {table.title}, but the plan needs {value}",
                    where=f"plan of {plan.job.name}, target {table.title} {table.version}",
                    rule="an export does not change what is learned",
                    way_out=f"emit the plan for another target, or run it there with {key}={value}",
                )


def _find_fixed(settings: Settings, wanted: dict[str, Any]) -> Iterator[Fixed]:
    settings.ours.update(wanted)
    return (fixed for fixed in settings.table.fixed if settings.holds(fixed.when))


def _fill(fixed: Fixed, wanted: dict[str, Any]) -> dict[str, Any]:
    """Values with job keys replaced by the plan's values."""

    def fill(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [fill(each) for each in value]
        return wanted.get(value, value) if isinstance(value, str) else value

    return {key: fill(value) for key, value in fixed.keys.items()}
