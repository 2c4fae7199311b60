"""The learning rate of each RL step, by torch's own schedulers.

In: a job, the rate at its full height, a step. Out: a number that follows from these alone: a resumed run plays the
schedulers up to its step, so that it has the same rate bit for bit and no state of theirs is kept.
Left out: who sets it (policy_trainer.py).

transformers' get_scheduler gives the same curves but for a warm-up whose first step has a rate of 0, which in RL is a
step of generation for nothing; it costs each rank 55 MiB and 3.6 s to import (transformers 5.19).
"""

import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, PolynomialLR, SequentialLR

from rlplan.spec.resolved import ResolvedJob


class LearningRates:
    """Of one role, whose rate is `highest` where its schedule does not lower it."""

    def __init__(self, job: ResolvedJob, highest: float) -> None:
        self.job, self.highest = job, highest
        self._begin()

    def _begin(self) -> None:
        algorithm = self.job.algorithm
        self._warmup, self._end = algorithm.schedule_steps(self.job.workload.num_steps)
        self._stand_in = torch.optim.SGD([torch.zeros(1)], lr=self.highest)
        self._scheduler = self._scheduled(self._end - self._warmup)
        self._step = 1

    def _scheduled(self, num_steps: int) -> LRScheduler:
        """Warm-up, and behind it the `num_steps` steps in which the rate changes."""
        algorithm, stand_in, warmup = self.job.algorithm, self._stand_in, self._warmup
        rising = LinearLR(stand_in, 1 / (warmup + 1), total_iters=warmup) if warmup else None
        after: LRScheduler
        if algorithm.lr_scheduler_type == "cosine":
            after = CosineAnnealingLR(stand_in, num_steps, eta_min=self.highest * algorithm.min_lr_ratio)
        elif algorithm.lr_scheduler_type == "linear":
            after = PolynomialLR(stand_in, num_steps)
        else:
            after = ConstantLR(stand_in, factor=1.0)
        return after if rising is None else SequentialLR(stand_in, [rising, after], [warmup])

    def at(self, step: int) -> float:
        """In an RL step, from 1. What lies behind the schedule's end is as its end."""
        if step < self._step:
            self._begin()
        self._stand_in.step()  # a scheduler warns where none comes before it
        for _ in range(self._step, min(step, self._end + 1)):
            self._scheduler.step()
        self._step = step
        return float(self._stand_in.param_groups[0]["lr"])
