"""Predictors of RL steps: `rl_step_time`, `rl_fits` of published runs; `phase_time`, `role_peak` of measured jobs.

In: a point. Out: time of a step or a stage of its job's plan, and of each phase; the plan's verdict; a worker's peak.
Left out: checkpoints, evaluation, rewards, the driver's time between phases.
"""

import re
from typing import Any

from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.accuracy.predict import (
    device_peak,
    phase_seconds,
    plan_point_job,
    predict_bytes,
    predict_seconds,
    worker_peak,
)
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.rl_steps.job import LENGTH_SPREAD, count_steps, rl_job
from rlplan.accuracy.settings_read import list_assumed
from rlplan.planner.measured_errors import find_stratum
from rlplan.vocabulary import Phase

PHASES: dict[str, tuple[Phase | str, ...]] = {
    "generate": (Phase.ROLLOUT,),
    "score": (Phase.SCORE, "reload_role/reference", "offload_role/reference"),
    "train": (Phase.TRAIN,),
    "sync": (Phase.SYNC,),
    "switch": (Phase.SWITCH,),
    "refit": (Phase.SYNC, "offload_role/policy", "wake_weights", "wake_kv_cache"),
}
"""Phases and actions of a step by the words of a file. Source: NeMo-RL 0.5, algorithms/grpo.py: `refit` is its timer
`prepare_for_generation`, and the timer of log-probs includes the copies of the reference's weights."""


def predict_rl_step(point: MeasuredPoint) -> Prediction:
    """The time of a step or of a stage."""
    plan = plan_point_job(rl_job(point))
    scale = count_steps(point, plan.job.workload.num_rollouts_per_step) / parse_seconds(point.measured.unit)
    parts = {phase.value: seconds * scale for phase, seconds in phase_seconds(plan).items()}
    spread = LENGTH_SPREAD if "mean_response" in list_assumed(point) else 1.0
    stratum = find_stratum(plan, point.quantity)
    return Prediction(predict_seconds(plan) * scale, parts=parts, stratum=stratum, spread=spread)


def predict_fit(point: MeasuredPoint) -> Prediction:
    """Whether the job fits with its published layout, also with responses of maximum length.

    `memory_fits` is used, because a plan's verdict also covers exports, of which a run says nothing.
    """
    if not isinstance(point.measured.value, bool):
        raise CannotPredict(f"measured is {point.measured.value!r}; a point of kind rl_fits says true or false")
    plan = plan_point_job(rl_job(point))
    return Prediction(plan.fit.value, is_right=plan.memory_fits == point.measured.value)


def predict_phase(point: MeasuredPoint) -> Prediction:
    """Seconds of a phase of a steady-state step, or of the whole step."""
    plan, phase = plan_point_job(_get_job(point)), str(point.settings.get("of"))
    if phase == "step":
        return Prediction(predict_seconds(plan), stratum=find_stratum(plan, point.quantity))
    if phase not in PHASES:
        raise CannotPredict(f"phase {phase!r} is none of {', '.join(PHASES)}, step")
    predict_seconds(plan)
    assert plan.timing is not None, "a plan with seconds has a timing"
    actions = (a for a in plan.timing.step.actions if a.phase in PHASES[phase] or a.action_id in PHASES[phase])
    return Prediction(sum(a.cost.seconds for a in actions), stratum=find_stratum(plan, point.quantity))


def predict_role_peak(point: MeasuredPoint) -> Prediction:
    """Peak bytes of a worker on one GPU, or of all workers together."""
    plan, worker, statistic = plan_point_job(_get_job(point)), str(point.settings.get("of")), point.measured.statistic
    if worker == "device":
        return predict_bytes(point, device_peak(plan), plan)
    counted = Statistic.ALLOCATED if statistic is Statistic.UNSTATED else statistic
    return predict_bytes(point, worker_peak(plan, worker, counted), plan)


def _get_job(point: MeasuredPoint) -> dict[str, Any]:
    job = point.settings.get("job")
    if not isinstance(job, dict):
        raise CannotPredict("a point of this kind carries its job; rlplan/accuracy/points/ has such files")
    return job


def parse_seconds(unit: str) -> float:
    """Seconds of one unit. Raises: CannotPredict.

    >>> parse_seconds("hours for full stage"), parse_seconds("s/step"), parse_seconds("min")
    (3600.0, 1.0, 60.0)
    """
    word = unit.strip().lower()
    for pattern, seconds in ((r"h(ours?|r)?\b", 3600.0), (r"min", 60.0), (r"ms\b", 1e-3), (r"days?\b", 86400.0)):
        if re.match(pattern, word):
            return seconds
    if re.match(r"s(ec(onds?)?)?\b", word):
        return 1.0
    raise CannotPredict(f"unit {unit!r} is no time")
