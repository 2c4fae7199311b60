"""Predictors of published RL steps: `rl_step_time`, and `rl_fits` for recipes that ran.

In: a point. Out: time of a step or a stage of its job's plan, and of each phase; the plan's verdict.
Left out: checkpoints, evaluation, rewards, the driver's time between phases.
"""

import re

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import phase_seconds, plan_point_job, predict_seconds
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.rl_steps.job import LENGTH_SPREAD, count_steps, rl_job
from rlplan.accuracy.settings_read import list_assumed
from rlplan.planner.measured_errors import find_stratum


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
