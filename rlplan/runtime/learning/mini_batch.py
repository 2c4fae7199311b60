"""Mini-batches: selection of rollouts, weights of their tokens, and assignment to ranks and passes.

In: a step's rollouts. Out: samples for each rank, pass by pass, with the weight of a token in each.
"""

import random
from collections.abc import Sequence

from rlplan.runtime.learning.packing import balance_by_length, pack_shares
from rlplan.runtime.rollout.experience import Rollout, TrainSample, add_branches
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Role

Pass = tuple[list[TrainSample], list[float]]
"""Samples of one pass, and the weight of each sample's tokens."""


def select_mini_batch(rollouts: Sequence[Rollout], index: int, job: ResolvedJob, step: int) -> list[Rollout]:
    """The rollouts of one mini-batch. index: number of the mini-batch within the step, counted over all epochs.

    The first epoch keeps the order of the prompts. Later epochs are shuffled, depending on seed, step and epoch. Groups
    stay together if the loss joins their rollouts.
    """
    work = job.workload
    epoch, place = divmod(index, work.mini_batches_per_epoch)
    order = list(rollouts)
    if epoch:
        size = work.num_samples_per_prompt if job.algorithm.declaration.joins_rollouts else 1
        units = [order[start : start + size] for start in range(0, len(order), size)]
        random.Random(f"{job.seed}/mini-batches/{step}/{epoch}").shuffle(units)
        order = [rollout for unit in units for rollout in unit]
    return order[place * work.mini_batch_size :][: work.mini_batch_size]


def make_train_sample(rollout: Rollout, *, is_first_update: bool = False) -> TrainSample:
    """The training sample of a rollout.

    is_first_update: whether it is for the step's first optimizer step. The training pass then computes the old
    log-probs itself: a separate scoring pass rounds differently, and in bf16 that alone exceeds GSPO's clip range.
    """
    return TrainSample(
        prompt_tokens=rollout.prompt.tokens,
        response_tokens=rollout.completion.tokens,
        logprobs=rollout.completion.logprobs,
        reference_logprobs=rollout.scores.get(Role.REFERENCE, ()),
        advantages=rollout.advantages,
        teacher_logprobs=rollout.scores.get(Role.TEACHER, ()),
        teacher_tokens=rollout.teacher_tokens,
        values=rollout.scores.get(Role.VALUE, ()),
        returns=rollout.returns,
        num_ignored=len(rollout.completion.logprobs) - rollout.num_learned,
        observed=rollout.completion.observed,
        old_logprobs=() if is_first_update else rollout.scores.get(Role.POLICY, ()),
        group=rollout.group,
        advantage=rollout.advantage,
        images=rollout.prompt.images,
        experts=rollout.completion.experts,
    )


def token_weights(samples: Sequence[TrainSample], job: ResolvedJob) -> list[float]:
    """Weight of each sample's tokens in the loss, by `algorithm.token_weights`.

    sequence: equal weight per sequence, 1 / (R n_i). token: equal weight per token, 1 / sum of n_i (DAPO, equation 12).
    constant: 1 / (R max_response_len) (Dr.GRPO). R: sequences of the mini-batch, n_i: tokens that the loss learns from.
    Pairs have equal weights, half for each answer.

    >>> from rlplan.spec.parts.algorithm import AlgorithmSpec
    >>> class MicroBatchShape: max_response_len = 5
    >>> class Job: workload, algorithm = MicroBatchShape, AlgorithmSpec(token_weights="token")
    >>> token_weights([TrainSample((), (1,) * n, (0.0,) * n, (), ()) for n in (1, 3)], Job)
    [0.25, 0.25]
    """
    if job.algorithm.declaration.joins_rollouts:
        num_answers = sum(sample.advantage != 0 for sample in samples)
        return [
            1 / (num_answers * max(1, sample.num_learned)) if sample.advantage and num_answers else 0.0
            for sample in samples
        ]
    if job.algorithm.token_weights == "token":
        return [1 / max(1, sum(sample.num_learned for sample in samples))] * len(samples)
    if job.algorithm.token_weights == "constant":
        return [1 / (len(samples) * job.workload.max_response_len)] * len(samples)
    return [1 / (len(samples) * max(1, sample.num_learned)) for sample in samples]


def assign_samples(samples: Sequence[TrainSample], job: ResolvedJob, num_ranks: int) -> list[list[Pass]]:
    """Passes of every rank, balanced by length and packed; the same number on each rank. Pairs share a pass."""
    weights = token_weights(samples, job)
    shares = _assign_indices(samples, _group_samples(samples, job), job, num_ranks)
    return [[([samples[i] for i in pack], [weights[i] for i in pack]) for pack in packs] for packs in shares]


def assign_rollouts(rollouts: Sequence[Rollout], job: ResolvedJob, num_ranks: int) -> list[list[list[Rollout]]]:
    """Rollouts of every rank, pass by pass, exactly as the first epoch's mini-batches will be trained.

    Equal passes give bitwise equal log-probs while the weights are unchanged, whatever the dtype.
    """
    ranks: list[list[list[Rollout]]] = [[] for _ in range(num_ranks)]
    for index in range(job.workload.mini_batches_per_epoch):
        # the first epoch is not shuffled, so any step gives the same selection
        batch = add_branches(select_mini_batch(rollouts, index, job, step=0))
        samples = [make_train_sample(rollout) for rollout in batch]
        shares = _assign_indices(samples, _group_samples(samples, job), job, num_ranks)
        for passes, packs in zip(ranks, shares, strict=True):
            passes += [[batch[i] for i in pack] for pack in packs]
    return ranks


def _assign_indices(
    samples: Sequence[TrainSample], units: list[list[int]], job: ResolvedJob, num_ranks: int
) -> list[list[list[int]]]:
    """Indices of samples by rank and pass, sorted by length within a pass."""
    lengths = [sum(samples[index].num_tokens for index in unit) for unit in units]
    shares = pack_shares(lengths, num_ranks, job.max_tokens_per_micro_batch)

    def sort_by_length(pack: list[int]) -> list[int]:
        return sorted((i for unit in pack for i in units[unit]), key=lambda i: (samples[i].num_tokens, i))

    return [[sort_by_length(pack) for pack in packs] for packs in shares]


def assign_baselines(samples: Sequence[TrainSample], job: ResolvedJob, num_ranks: int) -> list[list[TrainSample]]:
    """Answers to other prompts (KTO), balanced over the ranks by length; none for other algorithms."""
    if not job.algorithm.declaration.has_baseline_answers:
        return [[] for _ in range(num_ranks)]
    others = [sample for sample in samples if not sample.advantage]
    shares = balance_by_length([sample.num_tokens for sample in others], num_ranks)
    return [[others[index] for index in share] for share in shares]


def _group_samples(samples: Sequence[TrainSample], job: ResolvedJob) -> list[list[int]]:
    """Indices of samples that must share a pass: single samples, or the pairs of groups.

    Generated answers outside of a pair, and baseline answers, get no gradient, so they are left out.
    """
    declared = job.algorithm.declaration
    if declared.has_baseline_answers:
        return [[index] for index, sample in enumerate(samples) if sample.advantage]
    if not declared.trains_pairs:
        return [[index] for index in range(len(samples))]
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.advantage or not job.has_rollouts:
            groups.setdefault(sample.group, []).append(index)
    return list(groups.values())
