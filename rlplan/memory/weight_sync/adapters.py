"""Weight sync of adapters: how many versions of one an engine holds, and what each takes there.

In: a model, an adapter's rank and layers, versions. Out: bytes of vLLM's slots and of the copies that they are filled
from. Left out: the packets in which adapters arrive (packets.py); experts, whose adapters no trainer of ours has.

Symbols: r rank of the adapter, R the next one that vLLM has slots for, h hidden_size, V vocab_size, e bytes an element.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rlplan.memory.serving.weights import engine_layout
from rlplan.memory.weight_sync.buckets import plan_buckets, staging_bytes
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.adapters import lora_parameters
from rlplan.spec.models.shards import stage_tensors
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import ResolvedJob, SettledJob
from rlplan.vocabulary import SyncContent

ENGINE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def engine_lora_rank(rank: int) -> int:
    """The smallest rank that vLLM has slots for; one that is too large for it (planner/rules.py) is left as it is.

    Source: vLLM 0.32.0, config/lora.py, `MaxLoRARanks`.

    >>> engine_lora_rank(8), engine_lora_rank(9)
    (8, 16)
    """
    return min((size for size in ENGINE_LORA_RANKS if size >= rank), default=rank)


def num_adapter_versions(max_staleness: int) -> int:
    """Versions of an adapter that an engine holds at most: those of rollouts under way, and the newest.

    Counts: s + 1. A rollout ends under the version that it began with. Before version v + 1 arrives a step has taken
    what it trains on under v, and left out nothing that was begun before v + 1 - s (simulate/staleness.py,
    `must_be_waited_for`): what is under way began with one of the s versions up to v.

    >>> num_adapter_versions(0), num_adapter_versions(2)
    (1, 3)
    """
    return max_staleness + 1


@dataclass(frozen=True, slots=True)
class EngineAdapters:
    """Versions of an adapter in an engine whose weights are the base."""

    lora: LoraSpec
    num_versions: int
    element_bytes: int

    def slot_bytes(self, model: ModelSpec, tp: int = 1) -> int:
        """Bytes of the slots from which a rank of an engine computes, from its start on.

        Counts: for each version A and B of rank R beside every linear layer of the rank, R (V + h) each beside
        embedding and head, whichever of them are trained. Beside a layer that is cut by its outputs A is whole, by its
        inputs B, and beside the tables both are.
        Source: vLLM 0.32.0, `create_lora_weights` in lora/layers/base_linear.py, column_parallel_linear.py,
        vocab_parallel_embedding.py and logits_processor.py, with `max_loras`. Measured on a live engine: the same.
        """
        rank = engine_lora_rank(self.lora.rank)
        held = stage_tensors(model, engine_layout(tp), 0)
        linear = sum(rank * sum(tensor.shape) for tensor in held if tensor.is_linear)
        tables = 2 * rank * (model.vocab_size + model.hidden_size)
        return self.num_versions * (linear + tables) * self.element_bytes

    def copy_bytes(self, model: ModelSpec, tensor_bytes: Callable[[int], int] = int) -> int:
        """Bytes of the adapters in the host's memory from which vLLM fills its slots, on every rank.

        Counts: for each version A and B of rank r beside every layer that is trained, whole. tensor_bytes: what a
        tensor of so many bytes takes.
        Source: vLLM 0.32.0, lora/model_manager.py, `max_cpu_loras`, by itself `max_loras`. Measured: the same.
        Assumes: as many versions as there can be; none before the first arrives.
        """
        pairs = lora_parameters(model, self.lora.rank, self.lora.target_modules)
        return self.num_versions * sum(tensor_bytes(tensor.numel * self.element_bytes) for tensor in pairs)

    def staging_bytes(self, model: ModelSpec, bucket_bytes: int) -> int:
        """Bytes of the bucket through which one version arrives."""
        pairs = lora_parameters(model, self.lora.rank, self.lora.target_modules)
        return staging_bytes(plan_buckets(pairs, self.element_bytes, bucket_bytes))


def adapter_versions(job: SettledJob) -> int:
    """Versions that a job's engines hold: `num_adapter_versions`; one where a weight sync waits until nothing is under
    way, and in the engines of other stacks, which take an adapter in the place of the one before.
    """
    keeps_versions = job.is_for_rlplan and job.placement.partial_rollouts
    return num_adapter_versions(job.placement.max_staleness) if keeps_versions else 1


def engine_adapters(job: ResolvedJob) -> EngineAdapters | None:
    """What a job's engines hold where adapters alone are handed over; else None."""
    lora = job.training.lora
    if lora is None or job.placement.sync_content is not SyncContent.ADAPTER:
        return None
    return EngineAdapters(lora, adapter_versions(job), job.rollout.dtype.num_bytes)
