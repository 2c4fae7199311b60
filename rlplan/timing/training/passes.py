"""One pass of one rank over a micro-batch: matmuls, attention, elementwise operators, and communication.

In: a TrainSetting, a micro-batch, how often each part is computed (Times). Out: a Cost.
Left out: gathers and reductions of ZeRO (shards.py), the sequence of passes (mini_batch.py), dropout, casts of adapters
that are kept in fp32, scales of 4-bit weights.

Symbols: T tokens, h hidden, e bytes per element, L layers, r rank of adapters.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import hypot

from rlplan.memory.model.quantization import NF4_DOUBLE
from rlplan.spec.model import Component, ModelSpec, Parameter
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.spec.models.parts import LINEAR, NONE
from rlplan.spec.parts.training import LoraSpec
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.training.elementwise import (
    ELEMENT_BYTES,
    PERMUTED,
    SCORES,
    between_bytes,
    cast_bytes,
    layers_bytes,
    loss_bytes,
)
from rlplan.timing.training.flops import (
    attention_flops,
    head_flops,
    kinds_of_layers,
    layer_parameters,
    matmul_parameters,
)
from rlplan.timing.training.kernels import (
    EXPERTS_LAUNCHED,
    LAYER_LAUNCHED,
    attention_flops_per_s,
    matmul_flops_per_s,
    tile_share,
    wave_share,
)
from rlplan.timing.training.settings import MicroBatch, StagePart, Times, TrainSetting
from rlplan.timing.training.shards import exchange_cost, expert_exchange_cost, ordered_bytes, overlap

DEQUANTIZED = NF4_DOUBLE.bits / 8 + ELEMENT_BYTES
"""Bytes per weight to dequantize it to 16 bits, read and written, before every matmul with it."""


@lru_cache(maxsize=256)
def adapter_flops(model: ModelSpec, lora: LoraSpec) -> float:
    """FLOPs per token of the matmuls of all adapters, forward.

    Counts: 2 r (in + out) per layer. Source: LoRA, arXiv 2106.09685, section 4.1.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> llama = find_model("meta-llama/Llama-3.2-3B")
    >>> adapter_flops(llama, LoraSpec(rank=32, target_modules=("q_proj",)))  # 28 layers * 2 * 32 * (3072 + 3072)
    11010048.0
    """
    tensors = list_lora_parameters(model, lora.rank, lora.target_modules)
    return 2.0 * sum(tensor.numel * _compute_active_share(model, tensor) for tensor in tensors)


def _compute_active_share(model: ModelSpec, tensor: Parameter) -> float:
    """Share of a tensor that each token is multiplied with: the active experts' share, or all of it."""
    experts = model.experts if tensor.component is Component.EXPERTS else None
    return experts.num_active / experts.num_experts if experts else 1.0


@lru_cache(maxsize=256)
def adapter_bytes(model: ModelSpec, lora: LoraSpec) -> float:
    """Bytes per token that adapters read and write, forward; thin matmuls are limited by memory bandwidth.

    Counts: e (in + 2 r + 6 out) per layer: the input read, r written and read, the output written, scaled (2) and
    added (3). Source: PEFT 0.18 tuners/lora/layer.py, `result + lora_B(lora_A(x)) * scaling`, one kernel per operator.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> llama = find_model("meta-llama/Llama-3.2-3B")
    >>> adapter_bytes(llama, LoraSpec(rank=32, target_modules=("q_proj",)))  # 28 layers * 2 * (3072 + 64 + 6 * 3072)
    1207808.0
    """
    total = 0.0
    for tensor in list_lora_parameters(model, lora.rank, lora.target_modules):
        out, into = tensor.shape
        if tensor.component is Component.EXPERTS and model.experts is not None:
            out = out // model.experts.num_experts
            total += model.experts.num_active * (into + out if "lora_A" in tensor.name else into + 6 * out)
            continue
        total += into + out if "lora_A" in tensor.name else into + 6 * out
    return ELEMENT_BYTES * total


READ_BACK = 18e-6
"""Seconds in which a host reads one value back from the GPU and compares it.

Fitted to LoRA steps of prime-rl 0.5 on H100, of a 0.6B and a 4B model. Their mean errors are 10.0 and 7.8 %, and 42 and
20 % without the constant. The difference between steps of 65,536 and 16,384 tokens gives 22.6e-6 and 18.8e-6. Fitted to
the whole steps of one model it is 25.9e-6 or 31.5e-6, and then the other model errs by 3.7 or 5.5 %.
"""
LAUNCH = 5e-6
"""Seconds that a host takes to launch a kernel. Assumed: CUDA's own 2 to 3 us, and torch's dispatcher."""
NUM_KERNELS, NUM_FUSED_KERNELS = 45, 20
"""Kernels of a layer, forward. transformers' Llama: two norms of 7, rotary positions 12, 7 matmuls, attention with its
copies 8, MLP 2, sums 2."""


def pass_cost(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> Cost:
    """Seconds of one rank's part of a micro-batch without ZeRO traffic; for a pipeline, of a mean stage.

    Counts: the sum of matmuls, attention, elementwise bytes and communication, which follow each other on one stream.
    LATENCY holds the time by which the host is slower to launch them. Source: traces of eager trainers have one stream.
    """
    return stage_costs(setting, batch, times, cluster, ())[0]


def stage_costs(
    setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster, stages: Sequence[StagePart]
) -> tuple[Cost, ...]:
    """`pass_cost` of a mean stage, followed by that of each of `stages`. The last stage has the whole head.

    Assumes: all layers are alike (a few dense layers among expert layers are not distinguished).
    """
    pp = setting.choice.pp
    device = (
        matmul_cost(setting, batch, times, cluster)
        + elementwise_cost(setting, batch, times, cluster)
        + adapter_cost(setting, batch, times, cluster)
        + exchange_cost(setting, batch, times.exchanges, cluster)
    )
    sent = expert_exchange_cost(setting, batch, times.exchanges + times.expert_exchanges_again, cluster)
    if setting.hides_experts:
        hidden = _hidden_share(sent)
        device = overlap(device + sent.times(1 - hidden), sent.times(hidden), setting.model.num_layers / pp)
    else:
        device += sent
    head = head_cost(setting, batch, times, cluster) if stages else NOTHING
    layers = device.times(pp) + head.times(-1) if stages else NOTHING
    launched, waits = _launch_seconds(setting, times)
    exposed = _exposed_seconds(setting, batch, times)
    moved = _offloaded_activations_s(setting, batch, times, cluster) * pp

    def add_host(stage: Cost, share: float) -> Cost:
        # Host waits overlap partly with device work: the root of squares lies between the larger and the sum. Work of
        # another micro-batch fills them.
        busy = stage.seconds if setting.hides_experts else hypot(stage.seconds, waits * share)
        late = {
            Resource.LATENCY: max(busy, (launched + waits) * share) - stage.seconds + exposed * share,
            Resource.HOST_LINK: max(0.0, moved * share - stage.seconds),
        }
        return stage + Cost({resource: seconds for resource, seconds in late.items() if seconds})

    costs = [add_host(device, 1 / pp)]
    for stage in stages:
        share = stage.num_layers / setting.model.num_layers
        costs.append(add_host(layers.times(share) + head.times(float(stage.has_head)), share))
    return tuple(costs)


HIDDEN_BETWEEN_HOSTS = 0.3655
"""Share of expert communication between hosts that another micro-batch's work hides; inside a link domain all of it.
Source: measured on 16 H100 (Megatron-Bridge, skills/nemo-mbridge-perf-moe-comm-overlap)."""


def _hidden_share(sent: Cost) -> float:
    """Share of expert communication that can be hidden."""
    between = sent.parts.get(Resource.NETWORK, 0.0) / sent.seconds if sent.seconds else 0.0
    return 1 - between * (1 - HIDDEN_BETWEEN_HOSTS)


def _launch_seconds(setting: TrainSetting, times: Times) -> tuple[float, float]:
    """Seconds in which the host launches all dense layers, and those that all expert layers wait for it.

    Counts: a third of a layer's seconds for each pass and each exchange: forward 1, with a backward pass 3, with full
    recomputation 4. In a hybrid model a layer is half of one: it has attention or experts.
    """
    model, runs = setting.model, setting.runs
    num_experts = len(model.experts.layers) if model.experts else 0
    thirds = (times.exchanges + times.is_training) / 3
    if setting.backend != "megatron":
        kernels = NUM_FUSED_KERNELS if runs.is_fused else NUM_KERNELS
        return LAUNCH * kernels * times.elementwise * model.num_layers, 0.0
    num_dense = max(0.0, model.num_layers / setting.layers_ahead - num_experts)
    return runs.layer_launch_s * num_dense * thirds, runs.expert_launch_s * num_experts * thirds


def _exposed_seconds(setting: TrainSetting, batch: MicroBatch, times: Times) -> float:
    """Seconds of a training pass in which GPU and host wait for each other (`FrameworkRelease.host_waits`).

    Counts: the launches of every layer, as long as Megatron's; and `READ_BACK` for each token of a rollout.
    Source: prime-rl v0.5.0 trainer/utils.py (`get_response_lengths`).
    """
    if setting.host_waits == "none" or not times.is_training:
        return 0.0
    num_experts = len(setting.model.experts.layers) if setting.model.experts else 0
    launches = LAYER_LAUNCHED * (setting.model.num_layers - num_experts) + EXPERTS_LAUNCHED * num_experts
    reads = READ_BACK * batch.num_tokens if setting.host_waits == "tokens" else 0.0
    return launches * (times.exchanges + 1) / 3 + reads


def _offloaded_activations_s(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> float:
    """Seconds to offload the layers' inputs to the host and back, which overlaps with compute. Source: save_on_cpu."""
    link = cluster.gpu.host_link
    if not (setting.training.offloads_activations and times.is_training and link):
        return 0.0
    rows = batch.num_tokens / setting.ranks_of_tokens * setting.model.num_layers / setting.choice.pp
    moved = 2.0 * setting.training.dtype.num_bytes * setting.model.hidden_size * rows
    return moved / (link.bytes_per_s.value * cluster.efficiencies.host_link.value)


def matmul_cost(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> Cost:
    """Seconds of matmuls and attention of one rank.

    Counts: FLOPs over the rates of kernels.py, sharded over tp, cp, Ulysses and pp. Matmuls are no faster than their
    weights (of all experts) can be read. Source: Narayanan et al. 2021, appendix; Williams et al. 2009 (roofline).
    """
    model, choice, runs = setting.model, setting.choice, setting.runs
    ranks = choice.ranks_per_sequence
    rows = batch.num_tokens / setting.ranks_of_tokens
    share = _matmul_share(setting, rows)
    flops = 2.0 * layer_parameters(model) * batch.num_tokens * times.matmuls / ranks
    matmuls = flops / (matmul_flops_per_s(cluster, has_fp8=runs.has_fp8, has_fp4=runs.has_fp4) * share)
    reads = sum(_rank_matmuls(setting).values()) * setting.training.dtype.num_bytes
    # small micro-batches are limited by reading weights
    matmuls = max(matmuls, reads * times.matmuls / cluster.reached_memory_bytes_per_s)
    head = _head_flops(setting, batch, times) / ranks
    scores = attention_flops(model, batch.lengths) * batch.num_sequences * times.attention / ranks
    total = (
        matmuls
        + head / matmul_flops_per_s(cluster)
        + scores / attention_flops_per_s(cluster, runs, batch.lengths.mean, model.head_dim)
    )
    return Cost({Resource.COMPUTE: total})


def _head_flops(setting: TrainSetting, batch: MicroBatch, times: Times) -> float:
    return (
        head_flops(setting.model, setting.role) * batch.num_head_tokens * setting.head_times(times) * times.num_losses
    )


def _loss_bytes(setting: TrainSetting, batch: MicroBatch, times: Times) -> float:
    words = loss_bytes(setting.loss, setting.model.vocab_size, is_backward=False)
    words += loss_bytes(setting.loss, setting.model.vocab_size, is_backward=True) * times.is_training
    return words * batch.num_head_tokens * times.num_losses


def head_cost(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> Cost:
    """Seconds of the head and the loss on one rank of the stage that has them. Source: as `matmul_cost`."""
    ranks = setting.choice.ranks_per_sequence / setting.choice.pp
    memory = _loss_bytes(setting, batch, times) / ranks / cluster.reached_memory_bytes_per_s
    compute = _head_flops(setting, batch, times) / ranks / matmul_flops_per_s(cluster)
    return Cost({Resource.COMPUTE: compute, Resource.MEMORY: memory})


def least_pass_seconds(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> float:
    """Lower bound of `pass_cost` over all divisions of a micro-batch.

    Counts: FLOPs at rates with full tiles and free weight reads, attention of equally long sequences (which have the
    least sum of squares), elementwise bytes, communication of all rows at once. Source: the terms of `pass_cost`.
    """
    model, runs, ranks = setting.model, setting.runs, setting.choice.ranks_per_sequence
    matmuls = 2.0 * layer_parameters(model) * batch.num_tokens * times.matmuls
    matmuls /= matmul_flops_per_s(cluster, has_fp8=runs.has_fp8, has_fp4=runs.has_fp4)
    head = _head_flops(setting, batch, times) / matmul_flops_per_s(cluster)
    scores = attention_flops(model, batch.lengths) * batch.num_sequences * times.attention
    scores /= attention_flops_per_s(cluster, runs, batch.lengths.mean, model.head_dim)
    others = elementwise_cost(setting, batch, times, cluster) + exchange_cost(setting, batch, times.exchanges, cluster)
    if not setting.hides_experts:
        others += expert_exchange_cost(setting, batch, times.exchanges + times.expert_exchanges_again, cluster)
    return (matmuls + head + scores) / ranks + others.seconds


def _rank_matmuls(setting: TrainSetting) -> dict[Component, float]:
    """Matmul parameters of the layers that one rank holds, by component."""
    choice = setting.choice
    return {
        component: numel / (choice.pp * (choice.expert_ranks if component is Component.EXPERTS else choice.tp))
        for component, numel in matmul_parameters(setting.model).items()
    }


def _matmul_share(setting: TrainSetting, rows: float) -> float:
    """Tile efficiency of the layers' matmuls: dense ones by waves, experts by tiles, weighted by their FLOPs.

    Counts: tensor parallelism splits the columns of a block's first matmul; its second one keeps all h columns. Experts
    are sharded over etp ranks, which gather their rows, and each receives the rows that the ep ranks send it.
    """
    model, tp = setting.model, setting.choice.tp
    experts, h = model.experts, model.hidden_size
    matmuls = _dense_matmuls(model, tp)
    weight = sum(size for size, _ in matmuls)
    slowed = sum(size / wave_share(rows, columns) for size, columns in matmuls if size)
    if experts:
        ep, etp = setting.choice.ep, setting.choice.expert_tp
        own = rows * etp / tp
        expert_rows = own * experts.num_active / experts.num_experts * ep
        row = experts.latent_size or h
        active = len(experts.layers) * row * experts.num_matrices * experts.num_active * experts.intermediate_size
        weight += active
        slowed += (
            setting.expert_imbalance
            * active
            / (tile_share(expert_rows) * wave_share(own * experts.num_active, row / etp))
        )
    return weight / slowed


def _dense_matmuls(model: ModelSpec, tp: int) -> list[tuple[float, float]]:
    """Parameters of the dense matmuls of all layers, by kind, and the columns of one such matmul on a rank."""
    h, width, kinds = model.hidden_size, model.intermediate_size, kinds_of_layers(model)
    up = 1 if NONE in kinds else 2
    mlps = model.num_dense_mlps
    matmuls = [(up * h * width * mlps, up * width / tp), (h * width * mlps, h)]
    mamba, attention = model.linear_attention, model.num_layers - kinds.get(NONE, 0)
    if mamba is not None and mamba.is_mamba:
        count, values = kinds.get(LINEAR, 0), mamba.num_value_heads * mamba.value_head_dim
        inputs = 2 * values + 2 * mamba.num_key_heads * mamba.key_head_dim + mamba.num_value_heads
        matmuls += [(h * inputs * count, inputs / tp), (h * values * count, h)]
        attention -= count
    inputs = model.q_size + 2 * model.kv_size
    matmuls += [(h * inputs * attention, inputs / tp), (h * model.q_size * attention, h)]
    return [(float(size), float(columns)) for size, columns in matmuls if size]


def elementwise_cost(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> Cost:
    """Seconds of the memory-bound elementwise operators of one rank.

    Counts: `elementwise.layers_bytes` (sharded over tp; norms and sums only under sequence parallelism), casts, logits,
    stored scores; over the memory's rate. Source: Ivanov et al. 2021 (data movement is all you need): these operators
    take a third of the time of a layer on a V100.
    """
    model, runs, ranks = setting.model, setting.runs, setting.choice.ranks_per_sequence
    tokens = batch.num_tokens / ranks
    moved = layers_bytes(model, is_fused=runs.is_fused)
    moved += between_bytes(model, is_fused=runs.is_fused) * (setting.choice.tp / setting.row_shards - 1)
    moved *= times.elementwise * tokens
    if runs.has_fp8 or runs.has_fp4:
        moved += _cast_bytes(setting, batch, times)
    moved += _sorted_bytes(setting) * times.elementwise * tokens
    moved += ordered_bytes(setting, batch, times.exchanges)
    if runs.stores_scores:
        rows = batch.lengths.mean_square * batch.num_sequences / ranks
        moved += SCORES * model.num_heads * rows * model.num_layers * (times.elementwise + times.is_training)
    moved += _loss_bytes(setting, batch, times) / ranks
    moved += _gradient_bytes(setting) * times.is_training
    return Cost({Resource.MEMORY: moved / cluster.reached_memory_bytes_per_s})


def _cast_bytes(setting: TrainSetting, batch: MicroBatch, times: Times) -> float:
    """Bytes of casts to 8 bits on one rank: rows, and weights where each rank casts the gathered ones."""
    runs, tp = setting.runs, setting.choice.tp
    tokens, computed = batch.num_tokens / setting.choice.ranks_per_sequence, times.matmuls - 2 * times.is_training
    forward = cast_bytes(setting.model, is_backward=False, tp=tp, scales_rows=runs.scales_rows)
    backward = cast_bytes(
        setting.model, is_backward=True, tp=tp, scales_rows=runs.scales_rows, transposes_gradients=runs.gathers_8bit
    )
    weights = runs.weight_casts * sum(_rank_matmuls(setting).values())
    return (forward * tokens + weights) * computed + (backward * tokens + weights) * times.is_training


def _gradient_bytes(setting: TrainSetting) -> float:
    """Bytes of expert gradients that a pass accumulates into those of earlier passes."""
    return setting.runs.main_gradient_bytes * _rank_matmuls(setting).get(Component.EXPERTS, 0.0)


def _sorted_bytes(setting: TrainSetting) -> float:
    """Bytes per token of sorting received rows by a rank's experts, and back.

    Counts: 8 h per active expert. Source: Megatron-Core 0.14 moe/token_dispatcher.py (`sort_chunks_by_idxs`); DeepEP
    and HybridEP deliver rows in order.
    """
    experts, ep = setting.model.experts, setting.choice.ep
    if experts is None or ep == 1 or experts.num_experts <= ep or setting.runs.sends_once:
        return 0.0
    row = experts.latent_size or setting.model.hidden_size
    return 2.0 * PERMUTED * row * experts.num_active * len(experts.layers)


def adapter_cost(setting: TrainSetting, batch: MicroBatch, times: Times, cluster: Cluster) -> Cost:
    """Seconds of LoRA adapters, and of dequantizing a frozen 4-bit base, on one rank.

    Counts: adapters' bytes as often as elementwise operators, and their FLOPs with both gradients in the backward pass;
    `DEQUANTIZED` bytes per 4-bit weight before each matmul. Source: timing/training/passes.py; bitsandbytes 0.45
    MatMul4Bit, which keeps the 4-bit weight and dequantizes it again in the backward pass.
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
    seconds = moved / cluster.reached_memory_bytes_per_s
    return Cost({Resource.MEMORY: seconds, Resource.COMPUTE: flops / matmul_flops_per_s(cluster)})
