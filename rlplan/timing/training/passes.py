"""One pass of one rank over a micro-batch: matmuls, attention, elementwise operators, and what ranks exchange.

In: what is trained and how (TrainSetting), a micro-batch, how often each part is computed (Times). Out: a Cost.
Left out: gathers and reductions of ZeRO (shards.py), how passes follow each other (mini_batch.py).

Symbols: T tokens, h hidden, e bytes an element, L layers.
"""

from dataclasses import dataclass
from functools import cached_property

from rlplan.dataflow.choice import TrainerChoice
from rlplan.memory.model.logits import Loss, loss_named
from rlplan.memory.trainers.micro_batch import Recompute
from rlplan.spec.job_parts import Target
from rlplan.spec.model import Component, ModelSpec
from rlplan.spec.resolved import SettledTraining
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.network.collectives import all_gather_cost, all_to_all_cost
from rlplan.timing.training.adapters import DEQUANTIZED, adapter_bytes, adapter_flops
from rlplan.timing.training.elementwise import BACKWARD, SCORES, cast_bytes, layers_bytes, loss_bytes, repeat_bytes
from rlplan.timing.training.flops import Lengths, attention_flops, head_flops, layer_parameters, matmul_parameters
from rlplan.timing.training.kernels import (
    Kernels,
    attention_flops_per_s,
    kernels_of,
    matmul_flops_per_s,
    tile_share,
    wave_share,
)
from rlplan.vocabulary import Role

ATTENTION_BACKWARD = 2.5
"""Matmuls of attention's backward pass for two of the forward pass: five. Source: Dao et al. 2022, algorithm 4."""
LAUNCH = 5e-6
"""Seconds that a host takes to launch a kernel. Assumed: CUDA's own 2 to 3 us, and torch's dispatcher."""
NUM_KERNELS, NUM_FUSED_KERNELS = 45, 20
"""Kernels of a layer, forward: transformers' Llama has two norms of 7, 12 of rotary positions, 7 matmuls, attention
with its copies 8, MLP 2, sums 2."""


@dataclass(frozen=True)
class TrainSetting:
    """A role that computes."""

    model: ModelSpec
    role: Role
    training: SettledTraining
    choice: TrainerChoice
    num_ranks: int
    """All of its GPUs."""
    target: Target = "rlplan"
    kernels: Kernels | None = None
    """None as the target has them."""

    @cached_property
    def runs(self) -> Kernels:
        """The kernels that run."""
        return self.kernels or kernels_of(self.target)

    @property
    def num_groups(self) -> int:
        """Micro-batches at once: ranks over those that share one."""
        return max(1, self.num_ranks // self.choice.ranks_per_sequence)

    @property
    def ranks_of_tokens(self) -> int:
        """Ranks over which a sequence's tokens are cut."""
        return self.choice.cp * self.choice.ulysses

    @cached_property
    def recompute(self) -> Recompute:
        """What the backward pass recomputes."""
        if self.runs.recompute is not None:
            return self.runs.recompute
        return Recompute.FULL if self.choice.gradient_checkpointing else Recompute.NONE

    @property
    def loss(self) -> Loss:
        """How log-probs are taken; a value has no vocabulary."""
        if self.role in (Role.VALUE, Role.REWARD):
            return Loss.NONE
        return loss_named(self.training.logits, self.target)

    def head_times(self, times: "Times") -> float:
        """How often the head's matmul is computed: once more going back where logits are recomputed, by rows."""
        return times.head + (times.is_training and self.loss is Loss.BY_ROWS)


@dataclass(frozen=True)
class MicroBatch:
    """What a group of ranks computes in one pass."""

    num_sequences: float
    lengths: Lengths
    """As computed, with padding."""
    num_head_tokens: float
    """Tokens with logits."""

    @property
    def num_tokens(self) -> float:
        """Tokens, padding too."""
        return self.num_sequences * self.lengths.mean


@dataclass(frozen=True)
class Times:
    """How often each part of a forward pass is computed in all."""

    matmuls: float
    attention: float
    elementwise: float
    """Of the operators' bytes."""
    exchanges: float
    """Between ranks."""
    head: float
    """The head's matmul."""
    is_training: bool
    """There is a backward pass."""


FORWARD = Times(1.0, 1.0, 1.0, 1.0, 1.0, is_training=False)


def training_times(recompute: Recompute, *, is_frozen: bool = False) -> Times:
    """A forward and a backward pass.

    Counts: matmuls 1 + 2, attention 1 + 2.5, bytes 1 + 2, exchanges 1 + 1; once more what is recomputed: all, every
    other layer, or (selective) every second matmul and all elementwise operators. Frozen weights have no gradient: 1 +
    1.
    Source: Kaplan et al. 2020; Dao et al. 2022, algorithm 4; torchtitan 2024-12 (`mm_count % 2`).

    >>> training_times(Recompute.FULL).matmuls, training_times(Recompute.NONE, is_frozen=True).matmuls
    (4.0, 2.0)
    """
    again = {Recompute.FULL: (1.0, 1.0, 1.0), Recompute.ALTERNATE: (0.5, 0.5, 0.5), Recompute.SELECTIVE: (0.5, 0, 1.0)}
    matmuls, attention, elementwise = again.get(recompute, (0.0, 0.0, 0.0))
    backward = 1.0 if is_frozen else 2.0
    return Times(
        matmuls=1 + backward + matmuls,
        attention=1 + ATTENTION_BACKWARD + attention,
        elementwise=1 + BACKWARD + elementwise,
        exchanges=2 + (1.0 if recompute is Recompute.FULL else 0.5 if recompute is Recompute.ALTERNATE else 0.0),
        head=1 + backward,
        is_training=True,
    )


def pass_cost(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> Cost:
    """Seconds that one rank takes for its part of a micro-batch, without ZeRO's traffic.

    Counts: the sum of matmuls, attention, elementwise bytes and exchanges, one after the other on one stream; and as
    LATENCY what the host takes longer to launch it. Source: measured traces of eager trainers have one compute stream.
    """
    device = (
        matmul_cost(setting, batch, times, cluster)
        + elementwise_cost(setting, batch, times, cluster)
        + adapter_cost(setting, batch, times, cluster)
        + exchange_cost(setting, batch, times, cluster)
    )
    kernels = NUM_FUSED_KERNELS if setting.runs.is_fused else NUM_KERNELS
    host = LAUNCH * kernels * times.elementwise * setting.model.num_layers / setting.choice.pp
    moved = _offloaded_activations_s(setting, batch, times, cluster)
    late = {Resource.LATENCY: max(0.0, host - device.seconds), Resource.HOST_LINK: max(0.0, moved - device.seconds)}
    return device + Cost({resource: seconds for resource, seconds in late.items() if seconds})


def _offloaded_activations_s(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> float:
    """Seconds of the layers' inputs to the host and back, beside computing. Source: torch's save_on_cpu."""
    link = cluster.gpu.host_link
    if not (setting.training.offloads_activations and times.is_training and link):
        return 0.0
    rows = batch.num_tokens / setting.ranks_of_tokens * setting.model.num_layers / setting.choice.pp
    moved = 2.0 * setting.training.dtype.num_bytes * setting.model.hidden_size * rows
    return moved / (link.bytes_per_s.value * cluster.efficiencies.host_link.value)


def matmul_cost(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> Cost:
    """Seconds of matmuls and attention of one rank.

    Counts: FLOPs over the rates of kernels.py, cut over tp, cp, Ulysses and pp; matmuls no faster than their weights
    are read (every expert's). Source: Narayanan et al. 2021, appendix; Williams et al. 2009 (roofline).
    """
    model, choice, runs = setting.model, setting.choice, setting.runs
    ranks = choice.ranks_per_sequence
    rows = batch.num_tokens / setting.ranks_of_tokens
    share = _matmul_share(setting, rows)
    flops = 2.0 * layer_parameters(model) * batch.num_tokens * times.matmuls / ranks
    matmuls = flops / (matmul_flops_per_s(cluster, has_fp8=runs.has_fp8) * share)
    reads = sum(_rank_matmuls(setting).values()) * setting.training.dtype.num_bytes
    matmuls = max(matmuls, reads * times.matmuls / (cluster.memory_bytes_per_s * cluster.efficiencies.memory.value))
    head = head_flops(model, setting.role) * batch.num_head_tokens * setting.head_times(times) / ranks
    scores = attention_flops(model, batch.lengths) * batch.num_sequences * times.attention / ranks
    total = matmuls + head / matmul_flops_per_s(cluster) + scores / attention_flops_per_s(cluster, runs)
    return Cost({Resource.COMPUTE: total})


def least_pass_seconds(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> float:
    """Seconds below which `pass_cost` does not go, however a micro-batch is cut into several.

    Counts: FLOPs over rates with full tiles and weights that are read for nothing, attention of equally long sequences
    (their squares add up to the least), elementwise bytes, exchanges of all rows at once. Source: the terms of
    `pass_cost`.
    """
    model, runs, ranks = setting.model, setting.runs, setting.choice.ranks_per_sequence
    matmuls = 2.0 * layer_parameters(model) * batch.num_tokens * times.matmuls
    matmuls /= matmul_flops_per_s(cluster, has_fp8=runs.has_fp8)
    head = head_flops(model, setting.role) * batch.num_head_tokens * setting.head_times(times)
    head /= matmul_flops_per_s(cluster)
    scores = attention_flops(model, batch.lengths) * batch.num_sequences * times.attention
    scores /= attention_flops_per_s(cluster, runs)
    others = elementwise_cost(setting, batch, times, cluster) + exchange_cost(setting, batch, times, cluster)
    return (matmuls + head + scores) / ranks + others.seconds


def _rank_matmuls(setting: TrainSetting) -> dict[Component, float]:
    """Parameters of the layers' matmuls that one rank holds."""
    choice = setting.choice
    return {
        component: numel / (choice.tp * choice.pp * (choice.ep if component is Component.EXPERTS else 1))
        for component, numel in matmul_parameters(setting.model).items()
    }


def _matmul_share(setting: TrainSetting, rows: float) -> float:
    """Quantisation of the layers' matmuls: of dense ones by waves, of experts by tiles, weighed by their FLOPs.

    Counts: the columns of a matmul that tensor parallelism cuts are a share, of the one behind it all of h.
    """
    model, tp = setting.model, setting.choice.tp
    experts = model.experts
    h, width = model.hidden_size, model.intermediate_size
    inputs = model.q_size + 2 * model.kv_size
    matmuls: list[tuple[float, float]] = []
    matmuls += [(float(h * inputs), inputs / tp), (float(h * model.q_size), float(h))]
    num_sparse = len(experts.layers) / model.num_layers if experts else 0.0
    matmuls += [(2 * h * width * (1 - num_sparse), 2 * width / tp), (h * width * (1 - num_sparse), h)]
    weight = sum(size for size, _ in matmuls)
    slowed = sum(size / wave_share(rows, columns) for size, columns in matmuls if size)
    if experts:
        each = rows * experts.num_active / experts.num_experts * setting.choice.ep
        active = num_sparse * h * (3 * experts.num_active * experts.intermediate_size)
        weight += active
        slowed += active / (tile_share(each) * wave_share(rows * experts.num_active, h / tp))
    return weight / slowed


def elementwise_cost(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> Cost:
    """Seconds of the memory-bound elementwise operators of one rank.

    Counts: `elementwise.layers_bytes` (norms and sums are cut over tp under sequence parallelism, which Megatron and
    torchtitan have), casts, logits, stored scores; over the memory's rate. Source: Ivanov et al. 2021 (data movement is
    all you need): these operators take a third of the time of a layer on a V100.
    """
    model, runs, ranks = setting.model, setting.runs, setting.choice.ranks_per_sequence
    tokens = batch.num_tokens / ranks
    moved = layers_bytes(model, is_fused=runs.is_fused, has_plain_rotary=runs.has_plain_rotary)
    moved += repeat_bytes(model) if runs.repeats_keys else 0.0
    moved *= times.elementwise * tokens
    if runs.has_fp8:
        moved += cast_bytes(model, is_backward=False) * (times.matmuls - 2 * times.is_training) * tokens
        moved += cast_bytes(model, is_backward=True) * times.is_training * tokens
    if runs.stores_scores:
        rows = batch.lengths.mean_square * batch.num_sequences / ranks
        moved += SCORES * model.num_heads * rows * model.num_layers * (times.elementwise + times.is_training)
    words = loss_bytes(setting.loss, model.vocab_size, is_backward=False)
    words += loss_bytes(setting.loss, model.vocab_size, is_backward=True) * times.is_training
    moved += words * batch.num_head_tokens / ranks
    return Cost({Resource.MEMORY: moved / (cluster.memory_bytes_per_s * cluster.efficiencies.memory.value)})


def adapter_cost(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> Cost:
    """Seconds of adapters beside frozen weights, and of having 4-bit weights in 16 bits again, of one rank.

    Counts: adapters' bytes as often as elementwise operators, and their FLOPs, whose backward pass has both
    gradients; a 4-bit base `DEQUANTIZED` a weight before each matmul. Source: timing/training/adapters.py; bitsandbytes
    0.45 MatMul4Bit, which keeps the 4-bit weight and dequantises it again backward.
    """
    lora = setting.training.lora
    if lora is None:
        return NOTHING
    tokens = batch.num_tokens / setting.choice.ranks_per_sequence
    passes = times.matmuls + times.is_training
    flops = adapter_flops(setting.model, lora) * tokens * passes
    moved = adapter_bytes(setting.model, lora) * tokens * times.elementwise
    if lora.base_dtype == "nf4":
        moved += DEQUANTIZED * sum(_rank_matmuls(setting).values()) * times.matmuls
    seconds = moved / (cluster.memory_bytes_per_s * cluster.efficiencies.memory.value)
    return Cost({Resource.MEMORY: seconds, Resource.COMPUTE: flops / matmul_flops_per_s(cluster)})


HIDDEN_BY_ASYNC_TP = 0.3
"""Share of tensor parallel collectives that runs beside matmuls. Source: PyTorch, "Introducing async tensor
parallelism" (2024), recalled: a step is 8 % faster, of which these collectives are a quarter."""


def exchange_cost(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> Cost:
    """Seconds of what the ranks of one micro-batch exchange, none of it hidden but where `hides_tp` says so.

    Counts: a layer forward: tensor parallelism an all-reduce of e h T after attention and after the MLP (as two halves
    under sequence parallelism: the same bytes); Ulysses an all-to-all of q, k, v and of the output; experts their rows
    there and back; context parallelism a ring of keys and values. As often backward.
    Source: Shoeybi et al. 2019, section 3; Jacobs et al. 2023 (Ulysses), section 3.2; Liu et al. 2023 (ring attention).
    """
    model, choice, e = setting.model, setting.choice, setting.training.dtype.num_bytes
    rows = batch.num_tokens / setting.ranks_of_tokens
    layers = model.num_layers / choice.pp
    total = NOTHING
    if choice.tp > 1:
        hidden = HIDDEN_BY_ASYNC_TP if setting.runs.hides_tp else 0.0
        halves = 4 * layers * times.exchanges * (1 - hidden)
        total += all_gather_cost(e * model.hidden_size * rows, choice.tp, cluster).times(halves)
    stride = choice.tp
    if choice.ulysses > 1:
        width = 2 * model.q_size + 2 * model.kv_size
        one = all_to_all_cost(e * width * rows, choice.ulysses, cluster, stride)
        total += one.times(layers * times.exchanges)
    if choice.cp > 1:
        one = all_gather_cost(e * 2 * model.kv_size * rows * choice.cp, choice.cp, cluster, stride)
        total += one.times(layers * times.exchanges)
    if choice.ep > 1 and model.experts:
        share = len(model.experts.layers) / model.num_layers
        sent = e * model.hidden_size * model.experts.num_active * rows
        one = all_to_all_cost(sent, choice.ep, cluster, stride)
        total += one.times(2 * layers * share * times.exchanges)
    return total
