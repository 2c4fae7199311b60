"""Rough times with the signatures of timing/, until timing/ has them: this file goes then.

In: models, choices, a cluster. Out: costs. Left out: nearly everything; only the order of magnitude is meant.
"""

from dataclasses import dataclass

from rlplan.memory.gpu.engine import EngineChoice
from rlplan.spec.budget import BudgetRollout
from rlplan.spec.lengths import Lengths
from rlplan.spec.model import ModelSpec
from rlplan.timing.cluster import Cluster
from rlplan.timing.cost import Cost, Resource
from rlplan.vocabulary import Dtype


@dataclass(frozen=True)
class EngineSpeed:
    """How fast one engine decodes."""

    model: ModelSpec
    rollout: BudgetRollout
    choice: EngineChoice
    cluster: Cluster


@dataclass(frozen=True)
class GenerationWork:
    """One engine's share of a step."""

    num_rollouts: int
    prompt_len: float
    num_samples: int
    lengths: Lengths
    max_num_seqs: int
    kv_tokens: int


def generate_cost(speed: EngineSpeed, work: GenerationWork) -> Cost:
    """Seconds of one engine's share of a step."""
    length = work.prompt_len + work.lengths.mean
    at_once = max(1.0, min(work.num_rollouts, work.max_num_seqs, work.kv_tokens / length))
    cluster, tp, weights = speed.cluster, speed.choice.tp, 2.0 * speed.model.num_parameters
    step = weights / tp / (cluster.memory_bytes_per_s * cluster.serving.memory.value)
    latency = speed.model.num_layers * (cluster.serving.layer.value + 2 * (tp > 1) * cluster.serving.collective.value)
    steps = work.lengths.mean * work.num_rollouts / at_once
    prefill = 2.0 * speed.model.num_parameters * work.prompt_len * work.num_rollouts / work.num_samples
    rate = tp * cluster.flops_per_s(Dtype.BFLOAT16) * cluster.serving.matmul.value
    parts = {Resource.MEMORY: steps * step, Resource.LATENCY: steps * latency, Resource.COMPUTE: prefill / rate}
    return Cost(parts)
