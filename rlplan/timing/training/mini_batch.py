"""Training: seconds of forward and backward passes over a mini-batch, on all ranks of a role.

In: TrainSetting, MiniBatchShape, a Cluster. Out: a Cost of the slowest rank. Left out: the optimizer's step
(optimizer.py), data loading, advantages, logging.

Symbols: m micro-batches per group of ranks, p pipeline stages, v virtual stages of each, D groups.
"""

from dataclasses import dataclass, replace
from math import ceil, sqrt
from statistics import NormalDist

from rlplan.spec.models.shards import split_training_stages
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.training.elementwise import count_recomputed
from rlplan.timing.training.flops import Lengths
from rlplan.timing.training.passes import least_pass_seconds, pass_cost, stage_costs
from rlplan.timing.training.settings import FORWARD, MicroBatch, StagePart, Times, TrainSetting, training_times
from rlplan.timing.training.shards import overlap, pass_traffic, stage_transfer_cost, step_traffic
from rlplan.vocabulary import Role

__all__ = ["MiniBatchShape", "TrainSetting", "train_cost"]


def largest_normal(count: float) -> float:
    """Expected maximum of `count` standard normal numbers.

    Counts: the quantile at (n - 3/8) / (n + 1/4). Source: Blom 1958, chapter 6; exact: 1.424 of 8, 2.069 of 32.

    >>> [round(largest_normal(count), 2) for count in (1, 8, 32)]
    [0.0, 1.43, 2.07]
    """
    number = max(1.0, count)
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


@dataclass(frozen=True)
class MiniBatchShape:
    """A mini-batch of all ranks. Lengths are in tokens, prompt and response together."""

    num_rollouts: int
    mean_len: float
    mean_square_len: float
    max_len: float
    """Longest sequence that the job allows."""
    num_head_tokens_per_rollout: float
    """Tokens with logits."""
    tokens_per_pass: int = 0
    """Tokens of a packed pass; 0 pads each pass to its longest sequence."""

    is_balanced: bool = True
    """Ranks get rollouts of about as many tokens each; otherwise as many rollouts, in random order."""

    @property
    def deviation(self) -> float:
        """Standard deviation of the lengths."""
        return sqrt(max(0.0, self.mean_square_len - self.mean_len**2))

    def expect_longest(self, count: float) -> float:
        """Expected length of the longest of `count` sequences.

        Counts: mean + deviation * `largest_normal`, at most the longest that is allowed.
        Assumes: a normal distribution.

        >>> MiniBatchShape(8, 100.0, 100.0**2 + 10.0**2, 1000.0, 100.0).expect_longest(1)
        100.0
        """
        return min(self.max_len, self.mean_len + self.deviation * largest_normal(count))

    def expect_shortest(self, count: int) -> float:
        """Expected total tokens of the `count` shortest sequences.

        Counts: the lowest share p of a normal distribution has the mean m - deviation phi(z) / p, with z its quantile.
        Source: inverse Mills ratio (Greene, Econometric Analysis, theorem 19.2). Assumes: as `expect_longest`.

        >>> MiniBatchShape(8, 100.0, 100.0**2, 100.0, 100.0).expect_shortest(2)
        200.0
        """
        share = min(1.0, count / self.num_rollouts)
        shift = NormalDist().pdf(NormalDist().inv_cdf(share)) / share if share < 1 else 0.0
        return count * max(0.0, self.mean_len - self.deviation * shift)


def train_cost(setting: TrainSetting, mini_batch: MiniBatchShape, cluster: Cluster) -> Cost:
    """Seconds of a mini-batch, forward and backward, with its gathers and reductions.

    Counts: m passes of the slowest group's slowest stage, each with its ZeRO traffic; filling and draining a pipeline;
    and the reduction of a step, which overlaps with the last pass. Source: Narayanan et al. 2021, section 2.2.
    Assumes: every group has the same number of passes (DeepSpeed and FSDP synchronize in each).
    """
    narrow = setting.runs.has_fp8 or setting.runs.has_fp4
    times = training_times(setting.recompute, is_frozen=setting.training.lora is not None, has_narrow=narrow)
    times = times.add_recomputed(count_recomputed(setting.model, setting.modules))
    times = times.add_predicted_ahead(setting.runs.tokens_ahead, setting.layers_ahead / setting.model.num_layers)
    num_passes, single_pass, bubble = time_pass(setting, mini_batch, times, cluster)
    step = step_traffic(setting, cluster)
    last = overlap(single_pass, step, _layers(setting)) if setting.runs.hides_step else single_pass + step
    passes = single_pass.times(num_passes - 1) + last
    return passes + bubble + _imbalance(setting, mini_batch, passes)


def time_pass(
    setting: TrainSetting, mini_batch: MiniBatchShape, times: Times, cluster: Cluster
) -> tuple[int, Cost, Cost]:
    """Compute the passes of a group of ranks: their number, one pass of the slowest stage with its ZeRO traffic, and
    the time to fill and drain the pipeline.

    Counts: the last stage has the head. Every stage sends hidden states on and gradients back; only an interleaved
    pipeline overlaps this with passes. Filling and draining takes each other stage once, divided by v virtual stages.
    Source: Narayanan et al. 2021, section 2.2; Megatron-Core 0.14 (`overlap_p2p_comm`, interleaved only).
    """
    num_passes, batch = micro_batches(setting, mini_batch)
    if num_passes == setting.choice.pp == 1:
        setting = replace(setting, has_other_passes=False)
    traffic = pass_traffic(setting, cluster, is_training=times.is_training)
    if setting.choice.pp == 1:
        computing = pass_cost(setting, batch, times, cluster)
        return num_passes, overlap(computing, traffic, _layers(setting)), NOTHING
    stages, virtual = group_stages(setting), setting.runs.virtual_stages
    transfer = stage_transfer_cost(setting, batch, cluster).times(2 if times.is_training else 1)
    # the first cost is that of a mean stage
    _, *computing_costs = stage_costs(setting, batch, times, cluster, stages)
    costs = [
        overlap(computing + transfer if virtual == 1 else computing, traffic, _layers(setting))
        for computing in computing_costs
    ]
    slowest = max(costs, key=lambda cost: cost.seconds)
    others = sum(cost.seconds * stage.number for cost, stage in zip(costs, stages, strict=True)) - slowest.seconds
    transfer_s = transfer.seconds * (setting.choice.pp - 1) if virtual > 1 else 0.0
    return num_passes, slowest, Cost({Resource.IDLE: others / virtual + transfer_s})


def group_stages(setting: TrainSetting) -> tuple[StagePart, ...]:
    """Group pipeline stages by their number of layers, with and without the head."""
    has_head = setting.role not in (Role.VALUE, Role.REWARD)
    stages = split_training_stages(setting.model, setting.choice.pp, has_head=has_head)
    *inner, last = (len(layers) for layers in stages)
    kinds = {size: inner.count(size) for size in inner}
    return (*(StagePart(size, has_head=False, number=number) for size, number in kinds.items()), StagePart(last, True))


def _layers(setting: TrainSetting) -> float:
    return setting.model.num_layers / setting.choice.pp


def micro_batches(setting: TrainSetting, mini_batch: MiniBatchShape) -> tuple[int, MicroBatch]:
    """Number of passes of a group of ranks, and one of them.

    Counts: padded: rollouts over micro_batch, each as long as the longest in its pass; packed: tokens over those of a
    pass, at least one. Source: the batch sizes of the job (spec/parts/workload.py).
    """
    group_rollouts = mini_batch.num_rollouts / setting.num_groups
    if mini_batch.tokens_per_pass:
        full_passes = ceil(group_rollouts * mini_batch.mean_len / mini_batch.tokens_per_pass)
        num = max(1, min(ceil(group_rollouts), full_passes))
        num_sequences, lengths = group_rollouts / num, Lengths(mini_batch.mean_len, mini_batch.mean_square_len)
    else:
        size = min(float(setting.choice.micro_batch), max(1.0, group_rollouts))
        num = max(1, ceil(group_rollouts / size))
        num_sequences = min(size, max(1.0, group_rollouts / num))
        longest = mini_batch.expect_longest(num_sequences)
        lengths = Lengths(longest, longest**2 if num_sequences > 1 else mini_batch.mean_square_len)
    return num, MicroBatch(num_sequences, lengths, num_sequences * mini_batch.num_head_tokens_per_rollout)


def _imbalance(setting: TrainSetting, mini_batch: MiniBatchShape, passes: Cost) -> Cost:
    """Seconds that ranks wait for the one with the most tokens.

    Counts: some rank has n = rollouts/D of them, rounded up. After balancing by length, one rank has at least the
    longest sequence, and one at least the n shortest. Without balancing, a rank's tokens have the deviation s sqrt(n),
    and the largest of D sums decides. Source: order statistics, pigeonhole; Blom 1958.
    """
    groups = setting.num_groups
    group_rollouts, most_rollouts = mini_batch.num_rollouts / groups, ceil(mini_batch.num_rollouts / groups)
    if groups == 1 or not (mini_batch.deviation or most_rollouts > group_rollouts):
        return NOTHING
    mean = group_rollouts * mini_batch.mean_len
    most = max(mean, mini_batch.expect_longest(mini_batch.num_rollouts), mini_batch.expect_shortest(most_rollouts))
    if not mini_batch.is_balanced:
        most = max(most, mean + largest_normal(groups) * mini_batch.deviation * sqrt(group_rollouts))
    return Cost({Resource.IDLE: passes.seconds * (most / mean - 1)})


def least_seconds(setting: TrainSetting, mini_batch: MiniBatchShape, times: Times, cluster: Cluster) -> float:
    """Lower bound of `train_cost` and `score_cost` over all numbers of passes and ZeRO stages, for searches.

    Counts: every rank has its share of the tokens, without padding, imbalance or ZeRO traffic; the pipeline bubble of
    passes with one rollout. One rank per sequence bounds every layout.
    Source: `least_pass_seconds`; a test compares it with the layouts of a few jobs.
    """
    choice = setting.choice
    group_rollouts = mini_batch.num_rollouts * choice.ranks_per_sequence / setting.num_ranks
    batch = MicroBatch(
        group_rollouts,
        Lengths(mini_batch.mean_len, mini_batch.mean_len**2),
        group_rollouts * mini_batch.num_head_tokens_per_rollout,
    )
    seconds = least_pass_seconds(setting, batch, times, cluster)
    return seconds * (1 + (choice.pp - 1) / setting.runs.virtual_stages / max(1, ceil(group_rollouts)))


def score_cost(setting: TrainSetting, mini_batch: MiniBatchShape, cluster: Cluster) -> Cost:
    """Seconds of forward passes over all rollouts, for log-probs, values or rewards.

    Counts: a third of training's matmuls without recomputation, attention 1 of 3.5, one gather per pass under ZeRO-3.
    Source: Kaplan et al. 2020, section 2.1 (a backward pass is twice a forward pass).
    Assumes: micro-batches of the trainer's size; the policy's old log-probs, a reference, a value and a reward differ
    only in the head.
    """
    num_passes, single_pass, bubble = time_pass(setting, mini_batch, FORWARD, cluster)
    passes = single_pass.times(num_passes)
    return passes + bubble + _imbalance(setting, mini_batch, passes)
