"""Learner: trains on a step's rollouts: scores, advantages, gradients and optimizer steps.

In: rollouts with rewards. Out: measurements; training statistics, to the step's metrics.
Left out: generating rollouts (collector.py).
"""

import math
from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.errors import RunError
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.data.role_tokenizers import RoleReaders
from rlplan.runtime.learning.logprob_mismatch import check_logprob_mismatch, merge_differences
from rlplan.runtime.learning.mini_batch import (
    assign_baselines,
    assign_rollouts,
    assign_samples,
    make_train_sample,
    select_mini_batch,
)
from rlplan.runtime.losses.registry import find_advantage
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.measure.step_metrics import StepMetrics
from rlplan.runtime.rollout.experience import Rollout, TeacherTokens, add_branches
from rlplan.runtime.workers.typed_calls import TRAINER, bind_call
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Role


class Learner:
    """See the module docstring."""

    def __init__(self, spec: ExecutionSpec, worker_group: WorkerGroup, metrics: StepMetrics) -> None:
        self.job, self.worker_group, self.metrics = spec.job, worker_group, metrics
        self._layouts, self._accepts_mismatch = spec.schedule.layouts, spec.accepts_mismatch
        self._readers = RoleReaders(spec.job)
        self._alarm: str | None = None

    def score(self, action: Action, wanted: list[Rollout]) -> list[Measurement]:
        """Score rollouts with a role; its processes get contiguous shares."""
        ranks_per_pass = self._ranks_per_pass(action)
        wanted = wanted if action.role is Role.REWARD else add_branches(wanted)
        shares = _split_contiguously(wanted, len(action.processes) // ranks_per_pass)
        sequences = [[self._readers.make_sequence(action.role, rollout) for rollout in share] for share in shares]
        results, measurements = self.worker_group.everywhere(
            action, lambda rank: bind_call(TRAINER.score, sequences[rank // ranks_per_pass], action.role.value)
        )
        for share, scores in zip(shares, results[::ranks_per_pass], strict=True):
            for rollout, score in zip(share, scores, strict=True):
                if isinstance(score, TeacherTokens):
                    rollout.teacher_tokens = score
                else:
                    rollout.scores[action.role] = score
        return measurements

    def score_policy(self, action: Action, rollouts: list[Rollout]) -> list[Measurement]:
        """Compute the policy's log-probs before the step, in the same passes as the training."""
        ranks_per_pass = self._ranks_per_pass(action)
        shares = assign_rollouts(rollouts, self.job, len(action.processes) // ranks_per_pass)
        passes = [[[self._readers.make_sequence(action.role, r) for r in pack] for pack in packs] for packs in shares]
        results, measurements = self.worker_group.everywhere(
            action, lambda rank: bind_call(TRAINER.score_passes, passes[rank // ranks_per_pass])
        )
        for packs, scored in zip(shares, results[::ranks_per_pass], strict=True):
            for rollout, score in zip((r for pack in packs for r in pack), scored, strict=True):
                rollout.scores[action.role] = score
        return measurements

    def compute_advantages(self, rollouts: list[Rollout], step: int) -> None:
        """Set the rollouts' advantages and returns. Raises: RunError when no rollout has a reward."""
        _check_any(rollouts, self.job, step)
        self.metrics.add_cut_sequences(self._readers.take_num_cut(), len(rollouts))
        compute = find_advantage(self.job.algorithm)
        for rollout, judged in zip(rollouts, compute(rollouts, self.job.algorithm), strict=True):
            rollout.advantage, rollout.advantages, rollout.returns = judged.whole, judged.advantages, judged.returns
            share_advantage(rollout)
        self.metrics.add_rewards(rollouts)

    def train_forward_backward(
        self, action: Action, step: int, rollouts: list[Rollout], is_on_policy: bool
    ) -> list[Measurement]:
        """Accumulate the gradient of a mini-batch, balanced over the ranks by length and packed into passes.

        is_on_policy: whether the rollouts were sampled from the weights that the first mini-batch trains.
        """
        index = action.mini_batch or 0
        trained = add_branches(select_mini_batch(rollouts, index, self.job, step))
        batch = [make_train_sample(rollout, is_first_update=not index) for rollout in trained]
        ranks_per_pass = self._ranks_per_pass(action)
        num_shares = len(action.processes) // ranks_per_pass
        shares, baselines = assign_samples(batch, self.job, num_shares), assign_baselines(batch, self.job, num_shares)

        def call(rank: int) -> tuple[Any, ...]:
            passes, baseline = shares[rank // ranks_per_pass], baselines[rank // ranks_per_pass]
            micro_batches, weights = [samples for samples, _ in passes], [weights for _, weights in passes]
            return bind_call(TRAINER.forward_backward, micro_batches, weights, baseline)

        results, measurements = self.worker_group.everywhere(action, call)
        results = results[::ranks_per_pass]  # ranks that share a pass all return the sums of the full pass
        if action.role is not Role.POLICY:
            self.metrics.add_value_training(results)
            return measurements
        _check_finite([result["loss"] for result in results], step)
        self.metrics.add_training(results, is_first=not action.mini_batch)
        if not action.mini_batch and is_on_policy:
            self._alarm = check_logprob_mismatch(
                merge_differences(results), self.job, step, is_accepted=self._accepts_mismatch
            )
        return measurements

    def take_alarm(self) -> str | None:
        """Return, once, the log-prob mismatch of the last mini-batch if it exceeds the limits and is corrected for."""
        alarm, self._alarm = self._alarm, None
        return alarm

    def optimizer_step(self, action: Action, step: int) -> list[Measurement]:
        results, measurements = self.worker_group.everywhere(
            action, lambda rank: bind_call(TRAINER.optimizer_step, step)
        )
        if not results[0].get("is_skipped"):  # loss scaling skips steps whose gradient overflows
            _check_finite([results[0]["grad_norm"]], step)
        self.metrics.add_optimizer_step(results[0], action.role)
        return measurements

    def _ranks_per_pass(self, action: Action) -> int:
        """Number of consecutive processes of an action that compute each pass together."""
        return max(la.num_ranks_per_pass if action.processes[0] == la.processes[0][0] else 1 for la in self._layouts)


def share_advantage(rollout: Rollout) -> None:
    """Give a rollout's branches its advantage, which is the same for all of its tokens (spec/job.py)."""
    for branch in rollout.branches:
        branch.advantage, branch.has_failed = rollout.advantage, rollout.has_failed
        branch.advantages = (next(iter(rollout.advantages), 0.0),) * len(branch.completion.logprobs)


def _check_any(rollouts: list[Rollout], job: ResolvedJob, step: int) -> None:
    """Raises: RunError when all rewards have failed."""
    failed = [rollout.failure for rollout in rollouts if rollout.has_failed]
    if len(failed) == len(rollouts):
        raise RunError(
            f"none of the step's {len(failed)} rollouts has a reward: {failed[0] or 'all rewards are None'}",
            where=f"step {step}, " + ("rollout.environment" if job.has_turns else "rewards"),
            rule="a step needs at least one rollout with an environment answer and a reward",
            way_out="read logs/environment.log and failures.jsonl in the run folder",
        )


def _check_finite(values: list[float], step: int) -> None:
    """Raises: RunError for a loss or gradient that is NaN or infinite, which would make the policy NaN."""
    for value in values:
        if not math.isfinite(value):
            raise RunError(
                f"the loss or its gradient is {value}",
                where=f"step {step}, training",
                rule="losses and gradients are finite numbers",
                way_out="lower algorithm.learning_rate, or train in float32; then resume from an earlier checkpoint",
            )


def _split_contiguously(rollouts: list[Rollout], num_shares: int) -> list[list[Rollout]]:
    size = -(-len(rollouts) // num_shares)
    return [rollouts[index * size : (index + 1) * size] for index in range(num_shares)]
