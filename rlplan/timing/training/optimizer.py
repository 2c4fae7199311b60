"""The optimizer's step: seconds to update a rank's share of the states, on the GPU or on the host.

In: TrainSetting, a Cluster. Out: a Cost. Left out: collectives of a step (mini_batch.py overlaps them with the last
pass), learning-rate schedules, checks for infinities beyond one read of the gradients.

Symbols: p trained parameters of a rank's share, w, g, m bytes of a weight, a gradient, a master weight or moment.
"""

from rlplan.spec.model import ModelSpec
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.training.kernels import matmul_flops_per_s
from rlplan.timing.training.settings import TrainSetting
from rlplan.timing.training.shards import num_trained, trained_parts

NEWTON_SCHULZ_STEPS = 5
"""Iterations of Muon per step. Source: Jordan et al. 2024, `zeropower_via_newtonschulz5`."""
EIGHT_BIT_STATES = 4
"""Bytes per parameter of both moments in 8 bits, read and written."""


def step_bytes_per_parameter(setting: TrainSetting) -> float:
    """Bytes that an update reads and writes per parameter.

    Counts: AdamW reads and writes the master weight and both moments, 6 m; reads the gradient for its norm, scales it
    into fp32 and reads it again, 2 g + 2 m; writes the weight, w. In 8 bits the moments are 4 bytes. Muon has one
    moment.
    Source: DeepSpeed 0.19.8, FusedAdam (multi_tensor_adam.cu), stage_1_and_2.py (`unscale_and_clip_grads`).

    >>> from rlplan.memory.roles.states import TrainerChoice
    >>> from rlplan.spec.resolved import SettledTraining
    >>> from rlplan.spec.models.catalogue import find_model
    >>> from rlplan.vocabulary import Role
    >>> choice = TrainerChoice(1, True, False, False, 1)
    >>> step_bytes_per_parameter(TrainSetting(find_model("Qwen/Qwen2.5-7B"), Role.POLICY, SettledTraining(), choice, 8))
    38.0
    """
    training = setting.training
    weight, master = training.dtype.num_bytes, training.master_dtype.num_bytes
    gradients = 2 * weight + 2 * master
    if setting.backend == "megatron":
        sent = setting.runs.reduce_bytes
        gradients = 5 * master + (sent + master if sent < master else 0)
    if training.optimizer == "adamw_8bit":
        return 2 * master + EIGHT_BIT_STATES + gradients + weight
    moments = 1 if training.optimizer == "muon" else 2
    return 2.0 * master * (1 + moments) + gradients + weight


def num_stepped(setting: TrainSetting) -> float:
    """Parameters that one rank updates: all that it holds in stage 0, else its shard."""
    return sum(part.numel / (part.ranks if setting.choice.zero_stage else 1) for part in trained_parts(setting))


def optimizer_cost(setting: TrainSetting, cluster: Cluster) -> Cost:
    """Seconds of one optimizer step of one rank.

    Counts: on the GPU, `step_bytes_per_parameter` over the memory's rate. Offloaded: the update at the host's memory
    rate, which the ranks of a host share, and the weights back over the host link. On NVMe, master weights and moments
    are also read and written. Source: Ren et al. 2021 (ZeRO-Offload), section 4; Rajbhandari et al. 2021
    (ZeRO-Infinity), section 5. Assumes: gradients were sent during the backward pass, and weights return while later
    ones are updated, so the slower of the two counts.
    """
    num = num_stepped(setting)
    moved = step_bytes_per_parameter(setting) * num
    memory_rate = cluster.reached_memory_bytes_per_s
    buffers = Cost({Resource.MEMORY: _buffer_bytes(setting) / memory_rate})
    if not setting.choice.offloads_optimizer:
        return Cost({Resource.MEMORY: moved / memory_rate}) + buffers + _muon(setting, num, cluster)
    ranks_per_host = min(setting.num_ranks, cluster.gpus_per_host)
    host = moved * ranks_per_host / cluster.node_efficiencies.host_memory_bytes_per_s.value
    up = 0.0
    if cluster.gpu.host_link is not None:
        rate = cluster.gpu.host_link.bytes_per_s.value * cluster.efficiencies.host_link.value
        up = num * setting.training.dtype.num_bytes / rate
    cost = Cost({Resource.HOST: host, Resource.HOST_LINK: max(0.0, up - host)})
    if setting.training.offload_device == "nvme":
        # master weight and two moments, each read and written
        states = 6.0 * setting.training.master_dtype.num_bytes * num * ranks_per_host
        disk = states / cluster.node_efficiencies.disk_bytes_per_s.value
        cost += Cost({Resource.DISK: max(0.0, disk - cost.seconds)})
    return cost + buffers


def _buffer_bytes(setting: TrainSetting) -> float:
    """Bytes of the full gradient buffer of a Megatron rank, which each step reads and writes in addition to its shard.

    Counts: check for infinities g, division by the number of ranks 2 g, reset to zero g. Source: Megatron-Core 0.14
    distributed/param_and_grad_buffer.py (`check_grads`, `gradient_scaling_factor`, `reset`).
    """
    if setting.backend != "megatron":
        return 0.0
    return 4.0 * setting.runs.reduce_bytes * num_trained(setting)


def _muon(setting: TrainSetting, num: float, cluster: Cluster) -> Cost:
    """Seconds of Muon's iterations on a rank's shard."""
    if setting.training.optimizer != "muon":
        return Cost({})
    whole = muon_flops(setting.model)
    return Cost({Resource.COMPUTE: whole * num / setting.model.num_parameters / matmul_flops_per_s(cluster)})


def muon_flops(model: ModelSpec) -> float:
    """FLOPs of Muon's orthogonalization of all matrices.

    Counts: five times 4 a^2 b + 2 a^3 for a matrix with a <= b. Source: Jordan et al. 2024 (A = X X', B = b A + c A A,
    X = a X + B X).

    >>> from rlplan.spec.models.catalogue import find_model
    >>> qo, kv = 4 * 896**3 + 2 * 896**3, 4 * 128**2 * 896 + 2 * 128**3
    >>> mlp = 4 * 896**2 * 4864 + 2 * 896**3
    >>> muon_flops(find_model("Qwen/Qwen2.5-0.5B")) == 24 * 5 * (2 * qo + 2 * kv + 3 * mlp)
    True
    """
    total = 0.0
    for tensor in model.parameters:
        if len(tensor.shape) < 2 or not tensor.is_linear:
            continue
        short, long = sorted(tensor.shape[-2:])
        copies = tensor.numel // (short * long)
        total += copies * NEWTON_SCHULZ_STEPS * (4.0 * short * short * long + 2.0 * short**3)
    return total
