"""Weight sync of adapters: the versions that an engine holds at once, and their memory.

In: a model, an adapter's rank and layers, versions. Out: bytes of vLLM's slots and of the host copies that fill them.
Left out: the packets in which adapters arrive (packets.py); adapters of experts, which rlplan's trainer does not
support.

Symbols: r rank of the adapter, R the next one that vLLM has slots for, h hidden_size, V vocab_size, e bytes an element.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from rlplan.memory.serving.weights import build_engine_layout
from rlplan.memory.weight_sync.packets import plan_buckets, staging_bytes
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.spec.models.shards import list_stage_tensors
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import ResolvedJob, SettledJob
from rlplan.vocabulary import SyncContent

ENGINE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def round_lora_rank(rank: int) -> int:
    """Round an adapter's rank up to one that vLLM has slots for. Ranks above all of them (planner/rules.py) stay.

    Source: vLLM 0.32.0, config/lora.py, `MaxLoRARanks`.

    >>> round_lora_rank(8), round_lora_rank(9)
    (8, 16)
    """
    return min((size for size in ENGINE_LORA_RANKS if size >= rank), default=rank)


def num_adapter_versions(max_staleness: int) -> int:
    """Maximum number of adapter versions in an engine: those of rollouts under way, and the newest.

    Counts: s + 1. A rollout finishes under the version that it began with. Before version v + 1 arrives, step v has
    taken its rollouts, including all that began before v + 1 - s (simulate/staleness.py, `must_wait`). So the
    rollouts under way began with one of the s versions up to v.

    >>> num_adapter_versions(0), num_adapter_versions(2)
    (1, 3)
    """
    return max_staleness + 1


@dataclass(frozen=True, slots=True)
class EngineAdapters:
    """Adapter versions in an engine that serves the base's weights."""

    lora: LoraSpec
    num_versions: int
    element_bytes: int

    @lru_cache(maxsize=64)  # noqa: B019  # small values; a model has up to 100,000 tensors
    def slot_bytes(self, model: ModelSpec, tp: int = 1) -> int:
        """Bytes of the GPU slots that a rank of an engine allocates at its start.

        Counts: for each version A and B of rank R for every linear layer of the rank, and R (V + h) each for embedding
        and head, trained or not. Column-parallel layers have a whole A, row-parallel layers a whole B, and the
        vocabulary tables both.
        Source: vLLM 0.32.0, `create_lora_weights` in lora/layers/base_linear.py, column_parallel_linear.py,
        vocab_parallel_embedding.py and logits_processor.py, with `max_loras`. Measured on a live engine: the same.
        """
        rank = round_lora_rank(self.lora.rank)
        tensors = list_stage_tensors(model, build_engine_layout(tp), 0)
        linear = sum(rank * sum(tensor.shape) for tensor in tensors if tensor.is_linear)
        tables = 2 * rank * (model.vocab_size + model.hidden_size)
        return self.num_versions * (linear + tables) * self.element_bytes

    @lru_cache(maxsize=64)  # noqa: B019
    def copy_bytes(self, model: ModelSpec, tensor_bytes: Callable[[int], int] = int) -> int:
        """Bytes of the adapter copies in host memory that fill vLLM's slots, on every rank.

        tensor_bytes: turns a tensor's size in bytes into the bytes that are allocated for it.
        Counts: for each version A and B of rank r for every trained layer, whole.
        Source: vLLM 0.32.0, lora/model_manager.py, `max_cpu_loras`, by default `max_loras`. Measured: the same.
        Assumes: the maximum number of versions; none before the first arrives.
        """
        pairs = list_lora_parameters(model, self.lora.rank, self.lora.target_modules)
        return self.num_versions * sum(tensor_bytes(tensor.numel * self.element_bytes) for tensor in pairs)

    @lru_cache(maxsize=64)  # noqa: B019
    def staging_bytes(self, model: ModelSpec, bucket_bytes: int) -> int:
        """Bytes of the bucket in which one version arrives."""
        pairs = list_lora_parameters(model, self.lora.rank, self.lora.target_modules)
        return staging_bytes(plan_buckets(pairs, self.element_bytes, bucket_bytes))


def count_adapter_versions(job: SettledJob) -> int:
    """Adapter versions in a job's engines: `num_adapter_versions` with partial rollouts, otherwise 1.

    Without partial rollouts a weight sync waits for all rollouts. Engines of other frameworks replace an adapter in
    place.
    """
    keeps_versions = job.is_for_rlplan and job.placement.partial_rollouts
    return num_adapter_versions(job.placement.max_staleness) if keeps_versions else 1


def find_engine_adapters(job: ResolvedJob) -> EngineAdapters | None:
    """The adapters in a job's engines if a weight sync sends only adapters; otherwise None."""
    lora = job.training.lora
    if lora is None or job.placement.sync_content is not SyncContent.ADAPTER:
        return None
    return EngineAdapters(lora, count_adapter_versions(job), job.rollout.dtype.num_bytes)
