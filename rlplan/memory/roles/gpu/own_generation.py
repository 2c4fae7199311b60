"""What generation by the trainer itself holds on its GPU: transformers' `generate`, with the weights that it trains.

In: as for an engine (engine.py). Out: bytes by kind, while rollouts are generated; nothing else is held, for there is
no process, no copy of the weights and no pool of a KV cache beside the trainer. Left out: continuous batching.
Source: TRL 1.16 trainer/grpo_trainer.py (`unwrap_model_for_generation`), transformers 5.19 cache_utils.py.
"""

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.roles.gpu.engine import EngineOnGpu
from rlplan.memory.roles.gpu.process import Bytes
from rlplan.spec.resolved import SettledJob
from rlplan.vocabulary import ActionKind, MemoryKind


def engine_class(job: SettledJob, num_training: int) -> type[EngineOnGpu]:
    """What generates: an engine, or the trainer, which gathers weights that lie in parts on its GPUs or on the host."""
    if not job.rollout.generates_in_trainer:
        return EngineOnGpu
    is_cut = num_training > 1 and (job.backend == "fsdp2" or job.training.zero_stage == 3)
    return GatheredGeneration if is_cut or job.training.offloads_parameters is True else GenerationInTrainer


class GenerationInTrainer(EngineOnGpu):
    """Generation of one rank."""

    gathers = False

    def resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU when the action has ended."""
        return {}

    def peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU at the peak inside the action."""
        if action.kind not in (ActionKind.GENERATE, ActionKind.EVALUATE):
            return {}
        held = {MemoryKind.KV_CACHE: self.kv_cache, MemoryKind.ACTIVATIONS: self.activation_bytes}
        return held | ({MemoryKind.WEIGHTS: self.weight_bytes} if self.gathers else {})

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Nothing."""
        return {}


class GatheredGeneration(GenerationInTrainer):
    """The same of sharded weights, which each rank gathers whole for it (`ds3_gather_for_generation`)."""

    gathers = True
