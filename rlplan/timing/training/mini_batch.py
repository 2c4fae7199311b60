"""Training: seconds of forward and backward passes over a mini-batch, on all ranks of a role.

In: TrainSetting, MiniBatchShape, a Cluster. Out: a Cost of the slowest rank. Left out: the optimizer's step
(optimizer.py), loading of data, advantages, logging.

Symbols: m micro-batches of a group of ranks, p pipeline stages, v virtual stages of each, D groups.
"""

from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist

from rlplan.spec.models.shards import trained_stages
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.training.exchanges import stage_transfer_cost
from rlplan.timing.training.flops import Lengths
from rlplan.timing.training.modules import computed_again
from rlplan.timing.training.passes import least_pass_seconds, pass_cost, stage_costs
from rlplan.timing.training.settings import FORWARD, MicroBatch, StagePart, Times, TrainSetting, training_times
from rlplan.timing.training.shards import overlap, pass_traffic, step_traffic
from rlplan.vocabulary import Role

__all__ = ["MiniBatchShape", "TrainSetting", "train_cost"]


def largest_normal(count: float) -> float:
    """The largest of `count` standard normal numbers, as a mean.

    Counts: the quantile at (n - 3/8) / (n + 1/4). Source: Blom 1958, chapter 6; exact: 1.424 of 8, 2.069 of 32.

    >>> [round(largest_normal(count), 2) for count in (1, 8, 32)]
    [0.0, 1.43, 2.07]
    """
    many = max(1.0, count)
    return NormalDist().inv_cdf((many - 0.375) / (many + 0.25))


@dataclass(frozen=True)
class MiniBatchShape:
    """A mini-batch of all ranks. Lengths are of whole sequences, prompt and response, in tokens."""

    num_rollouts: int
    mean_len: float
    mean_square_len: float
    max_len: float
    """Of the longest sequence that is allowed."""
    num_head_tokens_per_rollout: float
    """Tokens with logits."""
    tokens_per_pass: int = 0
    """Of a packed pass; 0 pads a pass to its longest sequence."""

    @property
    def deviation(self) -> float:
        """Standard deviation of the lengths."""
        return sqrt(max(0.0, self.mean_square_len - self.mean_len**2))

    def longest_of(self, count: float) -> float:
        """Tokens of the longest of `count` sequences, as a mean.

        Counts: mean + deviation * `largest_normal`, no longer than is allowed.
        Assumes: nothing else is known of the distribution.

        >>> MiniBatchShape(8, 100.0, 100.0**2 + 10.0**2, 1000.0, 100.0).longest_of(1)
        100.0
        """
        return min(self.max_len, self.mean_len + self.deviation * largest_normal(count))

    def shortest_of_all(self, count: int) -> float:
        """Tokens of the `count` shortest sequences together, as a mean.

        Counts: a share p of a normal distribution, cut above its quantile z, has the mean m - deviation phi(z) / p.
        Source: inverse Mills ratio (Greene, Econometric Analysis, theorem 19.2). Assumes: as `longest_of`.

        >>> MiniBatchShape(8, 100.0, 100.0**2, 100.0, 100.0).shortest_of_all(2)
        200.0
        """
        share = min(1.0, count / self.num_rollouts)
        below = NormalDist().pdf(NormalDist().inv_cdf(share)) / share if share < 1 else 0.0
        return count * max(0.0, self.mean_len - self.deviation * below)


def train_cost(setting: TrainSetting, mini_batch: MiniBatchShape, cluster: Cluster) -> Cost:
    """Seconds of a mini-batch, forward and backward, with its gathers and reductions.

    Counts: m passes of the slowest group's slowest stage, each beside its ZeRO traffic; what a pipeline takes to fill
    and drain; and the reduction of a step, beside the last pass. Source: Narayanan et al. 2021, section 2.2.
    Assumes: every group has as many passes (DeepSpeed and FSDP wait for each other in each).
    """
    narrow = setting.runs.has_fp8 or setting.runs.has_fp4
    times = training_times(setting.recompute, is_frozen=setting.training.lora is not None, has_narrow=narrow)
    times = times.with_again(computed_again(setting.model, setting.modules))
    times = times.with_ahead(setting.runs.tokens_ahead, setting.layers_ahead / setting.model.num_layers)
    num_passes, one, bubble = one_pass(setting, mini_batch, times, cluster)
    step = step_traffic(setting, cluster)
    last = overlap(one, step, _layers(setting)) if setting.runs.hides_step else one + step
    passes = one.times(num_passes - 1) + last
    return passes + bubble + _imbalance(setting, mini_batch, passes)


def one_pass(
    setting: TrainSetting, mini_batch: MiniBatchShape, times: Times, cluster: Cluster
) -> tuple[int, Cost, Cost]:
    """How many passes a group of ranks makes, what one costs a rank of the slowest stage, with its ZeRO traffic, and
    how long a pipeline takes to fill and drain.

    Counts: the last stage has the head; every stage hands hidden states on and gradients back, beside its passes only
    in an interleaved pipeline. To fill and drain: each other stage once, a v-th of it where stages are v virtual ones.
    Source: Narayanan et al. 2021, section 2.2; Megatron-Core 0.14 (`overlap_p2p_comm`, interleaved only).
    """
    num_passes, batch = micro_batches(setting, mini_batch)
    traffic = pass_traffic(setting, cluster, is_training=times.is_training)
    if setting.choice.pp == 1:
        computing = pass_cost(setting, batch, times, cluster)
        return num_passes, overlap(computing, traffic, _layers(setting)), NOTHING
    stages, virtual = stages_of(setting), setting.runs.virtual_stages
    handed = stage_transfer_cost(setting, batch, cluster).times(2 if times.is_training else 1)
    _, *costs = stage_costs(setting, batch, times, cluster, stages)
    costs = [overlap(one + handed if virtual == 1 else one, traffic, _layers(setting)) for one in costs]
    slowest = max(costs, key=lambda one: one.seconds)
    others = sum(one.seconds * stage.number for one, stage in zip(costs, stages, strict=True)) - slowest.seconds
    handed_s = handed.seconds * (setting.choice.pp - 1) if virtual > 1 else 0.0
    return num_passes, slowest, Cost({Resource.IDLE: others / virtual + handed_s})


def stages_of(setting: TrainSetting) -> tuple[StagePart, ...]:
    """The kinds of pipeline stages: by layers, and with or without the head."""
    has_head = setting.role not in (Role.VALUE, Role.REWARD)
    stages = trained_stages(setting.model, setting.choice.pp, has_head=has_head)
    *inner, last = (len(layers) for layers in stages)
    kinds = {size: inner.count(size) for size in inner}
    return (*(StagePart(size, has_head=False, number=number) for size, number in kinds.items()), StagePart(last, True))


def _layers(setting: TrainSetting) -> float:
    return setting.model.num_layers / setting.choice.pp


def micro_batches(setting: TrainSetting, mini_batch: MiniBatchShape) -> tuple[int, MicroBatch]:
    """Passes of a group of ranks, and one of them.

    Counts: padded: rollouts over micro_batch, each as long as the longest of a pass; packed: tokens over those of a
    pass, at least one. Source: the batch ladder of DESIGN.md.
    """
    each = mini_batch.num_rollouts / setting.num_groups
    if mini_batch.tokens_per_pass:
        num = max(1, min(ceil(each), ceil(each * mini_batch.mean_len / mini_batch.tokens_per_pass)))
        num_sequences, lengths = each / num, Lengths(mini_batch.mean_len, mini_batch.mean_square_len)
    else:
        size = min(float(setting.choice.micro_batch), max(1.0, each))
        num = max(1, ceil(each / size))
        num_sequences = min(size, max(1.0, each / num))
        longest = mini_batch.longest_of(num_sequences)
        lengths = Lengths(longest, longest**2 if num_sequences > 1 else mini_batch.mean_square_len)
    return num, MicroBatch(num_sequences, lengths, num_sequences * mini_batch.num_head_tokens_per_rollout)


def _imbalance(setting: TrainSetting, mini_batch: MiniBatchShape, passes: Cost) -> Cost:
    """Seconds that ranks wait for the one with the most tokens.

    Counts: some rank has n = rollouts/D of them, rounded up. Balanced over ranks by their lengths, one has no less than
    the longest sequence, and one no less than the n shortest. Source: order statistics, pigeonhole.
    """
    groups = setting.num_groups
    each, most_rollouts = mini_batch.num_rollouts / groups, ceil(mini_batch.num_rollouts / groups)
    if groups == 1 or not (mini_batch.deviation or most_rollouts > each):
        return NOTHING
    mean = each * mini_batch.mean_len
    most = max(mean, mini_batch.longest_of(mini_batch.num_rollouts), mini_batch.shortest_of_all(most_rollouts))
    return Cost({Resource.IDLE: passes.seconds * (most / mean - 1)})


def least_seconds(setting: TrainSetting, mini_batch: MiniBatchShape, times: Times, cluster: Cluster) -> float:
    """A lower bound of `train_cost` and `score_cost`, whatever the passes and ZeRO's stage, for searches.

    Counts: every rank has its share of the tokens, without padding, imbalance or ZeRO's traffic; a pipeline's bubble
    where a pass has one rollout. One rank a sequence bounds every layout.
    Source: `least_pass_seconds`; a test compares it with the layouts of a few jobs.
    """
    choice = setting.choice
    each = mini_batch.num_rollouts * choice.ranks_per_sequence / setting.num_ranks
    batch = MicroBatch(
        each, Lengths(mini_batch.mean_len, mini_batch.mean_len**2), each * mini_batch.num_head_tokens_per_rollout
    )
    seconds = least_pass_seconds(setting, batch, times, cluster)
    return seconds * (1 + (choice.pp - 1) / setting.runs.virtual_stages / max(1, ceil(each)))


def score_cost(setting: TrainSetting, mini_batch: MiniBatchShape, cluster: Cluster) -> Cost:
    """Seconds of a forward pass alone over all rollouts, which gives log-probs, values or rewards.

    Counts: a third of training's matmuls without recomputation, attention 1 of 3.5, one gather a pass under ZeRO-3.
    Source: Kaplan et al. 2020, section 2.1 (a backward pass is twice a forward pass).
    Assumes: micro-batches of the trainer's size; the policy's old log-probs, a reference, a value, a reward cost alike
    but for the head.
    """
    num_passes, one, bubble = one_pass(setting, mini_batch, FORWARD, cluster)
    passes = one.times(num_passes)
    return passes + bubble + _imbalance(setting, mini_batch, passes)
