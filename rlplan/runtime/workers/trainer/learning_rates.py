"""The learning rate of each RL step, computed with torch's schedulers.

In: a job, the peak rate, a step. Out: the step's rate, which depends on nothing else. A resumed run replays the
schedulers up to its step, so it gets the same rate bit for bit, and checkpoints hold no scheduler state.
Left out: setting the rate (policy_trainer.py).

transformers' get_scheduler gives the same curves, but its warm-up starts with a rate of 0. The rollouts of the first
RL step would then train nothing. Importing it also costs each rank 55 MiB and 3.6 s (transformers 5.19).
"""

import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, PolynomialLR, SequentialLR

from rlplan.spec.resolved import ResolvedJob


class LearningRates:
    """Learning rates of one role. highest: the peak rate, which the schedule lowers."""

    def __init__(self, job: ResolvedJob, highest: float) -> None:
        self.job, self.highest = job, highest
        self._restart()

    def _restart(self) -> None:
        algorithm = self.job.algorithm
        self._warmup, self._end = algorithm.schedule_steps(self.job.workload.num_steps)
        self._stand_in = torch.optim.SGD([torch.zeros(1)], lr=self.highest)
        self._scheduler = self._build_scheduler(self._end - self._warmup)
        self._step = 1

    def _build_scheduler(self, num_steps: int) -> LRScheduler:
        """Scheduler of the warm-up and of the `num_steps` steps after it."""
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

    def find_rate(self, step: int) -> float:
        """Rate of an RL step, counted from 1. After the schedule's end the last rate stays."""
        if step < self._step:
            self._restart()
        self._stand_in.step()  # a scheduler warns if it steps before its optimizer
        # The schedulers never pass the end, because torch's cosine would rise again.
        for _ in range(self._step, min(step, self._end + 1)):
            self._scheduler.step()
        self._step = step
        return float(self._stand_in.param_groups[0]["lr"])
