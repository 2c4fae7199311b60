"""Choice: everything that a plan decides about a job, as one frozen value.

In: nothing. Out: values.
Left out: the enumeration of choices (planner/); schedules (build.py), memory (memory/) and times (timing/) of a choice.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rlplan.vocabulary import Placement

Offloaded = Literal["none", "all", "frozen"]
WeightSyncMode = Literal["", "shared_memory", "gloo", "cuda_ipc", "nccl", "disk", "adapter", "delta"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The device groups, and the roles that give up their memory while they wait."""

    placement: Placement
    num_training: int
    """Devices that train; on shared devices these are all."""
    num_generation: int
    """Devices that generate; on shared devices these are all."""
    num_scoring: int = 0
    """Devices that only the frozen roles use; 0 where these share the training devices."""
    offloaded: Offloaded = "none"
    """Roles that are offloaded to the host or the disk while they wait."""
    is_async: bool = False
    """Whether generation runs at the same time as training."""
    sleeps: bool = False
    """Whether the engine sleeps while other roles compute. A colocated engine that cannot sleep is stopped and
    started again."""

    @property
    def shares_devices(self) -> bool:
        """Whether training and generation use the same devices."""
        return self.placement is not Placement.DISAGGREGATED

    @property
    def num_frozen(self) -> int:
        """Devices that the frozen roles may use."""
        return self.num_scoring or self.num_training

    @property
    def num_devices(self) -> int:
        """Devices of all groups."""
        num_separate = 0 if self.shares_devices else self.num_generation
        return self.num_training + self.num_scoring + num_separate


def choose_expert_tp(tp: int, ep: int) -> int:
    """Expert tensor parallel size where a job does not set `training.etp`.

    >>> choose_expert_tp(8, 1), choose_expert_tp(8, 4)
    (8, 1)
    """
    return 1 if ep > 1 else tp


@dataclass(frozen=True)
class TrainerChoice:
    """Settings of the trained roles."""

    zero_stage: int
    gradient_checkpointing: bool
    offloads_optimizer: bool
    offloads_parameters: bool
    micro_batch: int
    """Rollouts per micro-batch, each at its maximum length."""
    ulysses: int = 1
    """Ulysses sequence parallel size."""
    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    cp: int = 1
    """Context parallel size."""
    ep: int = 1
    """Expert parallel size."""
    max_tokens: int = 0
    """Tokens per packed micro-batch; 0 where micro-batches are padded to their longest rollout."""
    etp: int = 0
    """Expert tensor parallel size that the job sets; 0 where it sets none."""

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that work on the same micro-batch."""
        return self.ulysses * self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert's matrices (`expert_tensor_parallel_size`).

        Without `training.etp` experts are whole under expert parallelism, and cut over tp otherwise.
        """
        return self.etp or choose_expert_tp(self.tp, self.ep)

    @property
    def expert_ranks(self) -> int:
        """Ranks of a pipeline stage over which the experts are cut."""
        return self.ep * self.expert_tp

    @property
    def num_token_shards(self) -> int:
        """Ranks over which the tokens of a sequence are cut."""
        return self.ulysses * self.cp

    @cached_property
    def without_passes(self) -> "TrainerChoice":
        """Cache key shared by choices that differ only in their micro-batches."""
        return replace(self, gradient_checkpointing=False, micro_batch=1, max_tokens=0)

    @cached_property
    def without_gradients(self) -> "TrainerChoice":
        """Cache key shared by choices whose forward-only passes cost the same."""
        stage = 3 if self.zero_stage == 3 else 0  # only stage 3 shards weights, which such a pass has to gather
        return replace(self, zero_stage=stage, gradient_checkpointing=False, offloads_optimizer=False)


@dataclass(frozen=True)
class EngineChoice:
    """Settings of the rollout engine."""

    tp: int
    """Tensor parallel size."""
    sleep_level: int
    """vLLM's sleep level; 0 for an engine that never sleeps."""
    max_num_seqs: int = 256
    """Sequences that the engine runs at once."""
    quantization: str | None = None
    """Quantization of the weights; None keeps the checkpoint's format."""
    has_expert_parallel: bool = False
    """Whether each rank holds whole experts instead of a slice of each."""
    attention_dp: int = 1
    """Data-parallel attention groups of tp ranks each. Above 1 whole experts are spread over all groups."""
    adapter_versions: int = 0
    """LoRA versions that the engine holds at once; 0 where a weight sync sends whole weights or deltas."""

    @property
    def keeps_versions(self) -> bool:
        """Whether rollouts under way at a weight sync finish under the version that they began with."""
        return self.adapter_versions > 1

    @property
    def ranks(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.attention_dp

    @property
    def expert_ranks(self) -> int:
        """Ranks over which whole experts are spread; 1 where each expert is cut over the tp ranks instead.

        Source: vLLM 0.32.0, config/parallel.py (`enable_expert_parallel`: ep = tp * dp).
        """
        return self.ranks if self.has_expert_parallel else 1

    @property
    def seqs_per_rank(self) -> int:
        """Concurrent sequences of each data-parallel attention group."""
        return -(-self.max_num_seqs // self.attention_dp)


@dataclass(frozen=True)
class Choice:
    """One candidate: arrangement, trainer, engine and weight sync."""

    arrangement: Arrangement
    trainer: TrainerChoice
    engine: EngineChoice
    sync_mode: WeightSyncMode = ""
    """Transport of the weight sync, or `adapter` or `delta` where only these are sent. Empty without an engine."""
    num_engines: int = 0
    """Engine replicas; 0 for as many as fill the generation devices."""
    senders: Literal["auto", "one", "each"] = "auto"
    """Trainer ranks that send weights: the first, or each. `auto` follows from the sync mode."""

    @property
    def engines(self) -> int:
        """Engine replicas."""
        return self.num_engines or max(1, self.arrangement.num_generation // self.engine.ranks)

    @property
    def family(self) -> "Choice":
        """Cache key shared by choices that differ only in batch sizes and in the weight sync mode."""
        trainer = replace(self.trainer, micro_batch=0, max_tokens=0)
        engine = replace(self.engine, max_num_seqs=0, adapter_versions=0)
        return Choice(self.arrangement, trainer, engine)

    @property
    def sends_changes(self) -> bool:
        """Whether a weight sync sends deltas, which requires a copy of the weights that were sent last."""
        return self.sync_mode == "delta"

    @property
    def without_ulysses(self) -> "Choice":
        """The same choice without Ulysses, as rlplan's own runtime runs a frozen role."""
        return replace(self, trainer=replace(self.trainer, ulysses=1))

    @property
    def all_ranks_send(self) -> bool:
        """Whether every trainer rank sends weights, each to the engine on its own device."""
        arrangement = self.arrangement
        on_own_device = arrangement.shares_devices and self.sync_mode in ("cuda_ipc", "adapter", "delta")
        return self.senders == "each" or (self.senders == "auto" and on_own_device and arrangement.num_training > 1)


NO_ENGINE = EngineChoice(1, 0)
NO_TRAINER = TrainerChoice(
    zero_stage=0, gradient_checkpointing=False, offloads_optimizer=False, offloads_parameters=False, micro_batch=1
)
"""Placeholders for the half of a choice that a caller does not read."""
