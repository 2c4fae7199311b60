"""What NeMo-RL's recipes set that its tables of step times do not say, and what it moves between GPUs and hosts.

In: a point's words, the policy's setting. Out: a Recipe; Costs of a step's moves. Left out: rewards, tokens that travel
through its driver. Source: NeMo-RL 0.4 to 0.6, examples/configs (grpo_math_1B.yaml, recipes/llm/performance) and
models/policy/workers/megatron_policy_worker.py.
"""

import re
from dataclasses import replace

from rlplan.accuracy.training.throughput import PAGEABLE
from rlplan.records import dataclass
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.training.kernels import Kernels, kernels_of
from rlplan.timing.training.optimizer import num_stepped
from rlplan.timing.training.settings import TrainSetting
from rlplan.timing.training.shards import held_parts

RECOMPUTED = re.compile(r"llama-?3\.1-8b|qwen3-235b|deepseek-(v3|r1)|nemotron-?3-super", re.IGNORECASE)
"""Models whose recipes set `activation_checkpointing`; those of Qwen3-30B-A3B and Qwen3-32B leave it off."""
SCORED_SEQUENCES = 2
"""`logprob_batch_size`, sequences of the greatest length in a pass without gradients: 1 to 4, by model and version."""
ADDED_GRADIENT = 6
"""Bytes of a weight in every pass: a gradient in 16 bits read and added to its buffer, read and written
(`gradient_accumulation_fusion` and `grad_reduce_in_fp32` are off)."""
SHARED_MEMORY, OWN_MEMORY = 0.6, 0.8
"""`gpu_memory_utilization` of engines beside trainers, and of those with GPUs of their own."""
STATE_BYTES = 12
"""Of a parameter in the optimizer: master weight and two moments in fp32."""
PAGEABLE_UP = 8e9
"""Bytes a second from pageable memory that is there into a GPU. Assumed: one core copies it into a pinned buffer with 8
to 12 GB/s; the way down writes pages that are new, which `PAGEABLE` was fitted to elsewhere."""


@dataclass(frozen=True)
class Recipe:
    """What the recipes set."""

    tokens_per_pass: int
    """`train_micro_batch_size` 1: packed passes of the greatest length."""
    scored_tokens_per_pass: int
    recomputes: bool
    memory_share: float
    """Of a GPU, for its engine."""
    kernels: Kernels


def read_recipe(text: str, model: str, max_len: int, *, is_async: bool) -> Recipe | None:
    """The recipe of a point; None where it is not NeMo-RL's on Megatron.

    >>> read_recipe("grpo verl megatron", "Qwen/Qwen3-32B", 4096, is_async=False) is None
    True
    """
    if not re.search(r"nemo.?rl|nvidia-nemo/rl", text) or not re.search(r"megatron|mcore", text):
        return None
    added = replace(kernels_of("megatron"), main_gradient_bytes=ADDED_GRADIENT, dense_gradient_bytes=ADDED_GRADIENT)
    return Recipe(
        tokens_per_pass=max_len,
        scored_tokens_per_pass=SCORED_SEQUENCES * max_len,
        recomputes=RECOMPUTED.search(model) is not None,
        memory_share=OWN_MEMORY if is_async else SHARED_MEMORY,
        kernels=added,
    )


def reference_swap(setting: TrainSetting) -> Cost:
    """Seconds in which the reference takes the policy's place for its log-probs, and gives it back.

    Counts: a rank's weights down once and up twice, unpinned (`use_reference_model`).
    """
    weights = setting.training.dtype.num_bytes * sum(part.numel for part in held_parts(setting))
    return Cost({Resource.HOST_LINK: weights / PAGEABLE + 2 * weights / PAGEABLE_UP})


def shared_device_moves(setting: TrainSetting, cluster: Cluster) -> Cost:
    """Seconds in which a trainer makes room for the engine on its GPU, and comes back.

    Counts: the optimizer's states down and up, unpinned (`move_optimizer`); weights down and up, pinned (Megatron
    Core's `offload_to_cpu`).
    """
    states = STATE_BYTES * num_stepped(setting)
    weights = setting.training.dtype.num_bytes * sum(part.numel for part in held_parts(setting))
    link = cluster.gpu.host_link
    pinned = NOTHING
    if link is not None:
        rate = link.bytes_per_s.value * cluster.efficiencies.host_link.value
        pinned = Cost({Resource.HOST_LINK: 2 * weights / rate})
    return Cost({Resource.HOST_LINK: states / PAGEABLE + states / PAGEABLE_UP}) + pinned
