"""Predictors of `train_peak` and `train_steady`: peaks and steady states of published training runs.

In: a point. Out: memory of the policy trainer in the plan of its job, by the measured statistic, in the point's unit.
Left out: reading settings (job.py), an engine that sleeps in the same process (colocated.py).
"""

import re

from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.accuracy.predict import held_between_steps, peak_in_training, plan_point_job, predict_bytes
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.settings import find_gpu
from rlplan.accuracy.training.colocated import predict_update
from rlplan.accuracy.training.job import training_job
from rlplan.accuracy.training.trainers import AGILERL, find_trainer
from rlplan.vocabulary import MemoryKind

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
