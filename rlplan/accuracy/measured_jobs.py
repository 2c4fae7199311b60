"""Predictors of measured jobs: `phase_time` and `role_peak`, whose points contain the job.

In: a point with a job. Out: the plan's prediction for the phase or the worker. Left out: reading files.
"""

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
from rlplan.planner.measured_errors import find_stratum
from rlplan.vocabulary import Phase

PHASES = {
    "generate": (Phase.ROLLOUT,),
    "score": (Phase.SCORE,),
    "train": (Phase.TRAIN,),
    "sync": (Phase.SYNC,),
    "switch": (Phase.SWITCH,),
    "refit": (Phase.SYNC, Phase.SWITCH),
}
"""Phases of a step by the words of a file. `refit` is NeMo-RL's timer of everything that prepares the engines."""


def predict_phase(point: MeasuredPoint) -> Prediction:
    """Seconds of a phase of a steady-state step, or of the whole step."""
    plan, phase = plan_point_job(_get_job(point)), str(point.settings.get("of"))
    if phase == "step":
        return Prediction(predict_seconds(plan), stratum=find_stratum(plan, point.quantity))
    if phase not in PHASES:
        raise CannotPredict(f"phase {phase!r} is none of {', '.join(PHASES)}, step")
    seconds = phase_seconds(plan)
    return Prediction(sum(seconds.get(part, 0.0) for part in PHASES[phase]), stratum=find_stratum(plan, point.quantity))


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
