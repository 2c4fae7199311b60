"""Choice: everything that a plan has decided about a job, as one frozen value that anybody may import.

In: nothing. Out: values.
Left out: which choices there are (planner/), what follows from one (build.py, memory/, timing/).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rlplan.vocabulary import Placement

Offloaded = Literal["none", "all", "frozen"]
WeightSyncMode = Literal["", "shared_memory", "gloo", "cuda_ipc", "nccl", "disk", "adapter", "delta"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Which device groups there are, and who gives up its memory while it waits."""

    placement: Placement
    num_training: int
    """Devices that train; on shared devices these are all."""
    num_generation: int
    """Devices that generate; on shared devices these are all."""
    num_scoring: int = 0
    """Devices of the frozen roles' own; 0 where they lie with training."""
    offloaded: Offloaded = "none"
    """Roles that move to the host or the disk while they wait."""
    is_async: bool = False
    """Whether generation runs beside training."""
    sleeps: bool = False
    """Whether the engine sleeps while others compute; colocated without it, it is stopped and started again."""

    @property
    def shares_devices(self) -> bool:
        """Whether training and generation lie on the same devices."""
        return self.placement is not Placement.DISAGGREGATED

    @property
    def num_frozen(self) -> int:
        """Devices that the frozen roles may lie on."""
        return self.num_scoring or self.num_training

    @property
    def num_devices(self) -> int:
        """Devices of all groups."""
        own = 0 if self.shares_devices else self.num_generation
        return self.num_training + self.num_scoring + own


def usual_expert_tp(tp: int, ep: int) -> int:
    """Ranks that share each expert's matrices where a job leaves `training.etp` open.

    >>> usual_expert_tp(8, 1), usual_expert_tp(8, 4)
    (8, 1)
    """
    return 1 if ep > 1 else tp


@dataclass(frozen=True)
class TrainerChoice:
    """What is chosen for trained roles."""

    zero_stage: int
    gradient_checkpointing: bool
    offloads_optimizer: bool
    offloads_parameters: bool
    micro_batch: int
    """Rollouts of a pass, at their longest."""
    ulysses: int = 1
    """Ranks that share one sequence."""
    tp: int = 1
    """Ranks that share one layer."""
    pp: int = 1
    """Ranks that share the layers."""
    cp: int = 1
    """Ranks that share one sequence's attention."""
    ep: int = 1
    """Ranks that share the experts."""
    max_tokens: int = 0
    """Of a pass that is packed without padding; 0 where passes are padded to their longest rollout."""
    etp: int = 0
    """Ranks that share each expert's matrices as the job says; 0 where it leaves them open."""

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that work on the same micro-batch."""
        return self.ulysses * self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert's matrices (`expert_tensor_parallel_size`). Where the job leaves them open,
        experts are whole with ep, and cut over tp without it."""
        return self.etp or usual_expert_tp(self.tp, self.ep)

    @property
    def expert_ranks(self) -> int:
        """Ranks of a stage over which the experts are cut."""
        return self.ep * self.expert_tp

    @property
    def num_token_shards(self) -> int:
        """Shards into which the tokens of a sequence are cut."""
        return self.ulysses * self.cp

    @cached_property
    def without_passes(self) -> "TrainerChoice":
        """One that stands for all that differ in their passes alone."""
        return replace(self, gradient_checkpointing=False, micro_batch=1, max_tokens=0)

    @cached_property
    def without_gradients(self) -> "TrainerChoice":
        """One that stands for all whose passes without gradients are the same: of ZeRO, weights in shards matter."""
        stage = 3 if self.zero_stage == 3 else 0
        return replace(self, zero_stage=stage, gradient_checkpointing=False, offloads_optimizer=False)


@dataclass(frozen=True)
class EngineChoice:
    """What is chosen for the engine."""

    tp: int
    """Ranks that share one layer."""
    sleep_level: int
    """0 for one that never sleeps."""
    max_num_seqs: int = 256
    """Sequences of the engine at once."""
    quantization: str | None = None
    """Of its weights, None as loaded."""
    has_expert_parallel: bool = False
    """Whether whole experts lie on its ranks instead of a slice of each."""
    attention_dp: int = 1
    """Groups of tp ranks that attend to sequences of their own; above 1 whole experts are spread over all of them."""
    adapter_versions: int = 0
    """Versions of an adapter that it holds at once; 0 where whole weights are handed over, or what changed of them."""

    @property
    def keeps_versions(self) -> bool:
        """Whether what is under way at a weight sync ends under the version that it began with."""
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
        """Sequences at once of each group that attends by itself."""
        return -(-self.max_num_seqs // self.attention_dp)


@dataclass(frozen=True)
class Choice:
    """One combination: who lies where, how roles are trained, how rollouts are generated, how weights travel."""

    arrangement: Arrangement
    trainer: TrainerChoice
    engine: EngineChoice
    sync_mode: WeightSyncMode = ""
    """Transport of the weight sync, or `adapter` or `delta` where only these are sent; empty without an engine."""
    num_engines: int = 0
    """Replicas of the engine; 0 for as many as fill the devices that generate."""
    senders: Literal["auto", "one", "each"] = "auto"
    """Which ranks of the trainer hand weights over: the first, or each; `auto` as the sync mode needs it."""

    @property
    def engines(self) -> int:
        """Replicas of the engine."""
        return self.num_engines or max(1, self.arrangement.num_generation // self.engine.ranks)

    @property
    def family(self) -> "Choice":
        """One that stands for all that differ in sizes of batches and in their mode of weight sync alone."""
        trainer = replace(self.trainer, micro_batch=0, max_tokens=0)
        engine = replace(self.engine, max_num_seqs=0, adapter_versions=0)
        return Choice(self.arrangement, trainer, engine)

    @property
    def sends_changes(self) -> bool:
        """Whether what has changed travels alone, so that a copy of what was sent last is kept."""
        return self.sync_mode == "delta"

    @property
    def with_whole_sequences(self) -> "Choice":
        """The same with passes that no ranks share, as a frozen role of rlplan's own runtime makes them."""
        return replace(self, trainer=replace(self.trainer, ulysses=1))

    @property
    def hands_over_each(self) -> bool:
        """Whether every rank of the trainer hands weights over, to the engine on its own device."""
        arrangement = self.arrangement
        on_own_device = arrangement.shares_devices and self.sync_mode in ("cuda_ipc", "adapter", "delta")
        return self.senders == "each" or (self.senders == "auto" and on_own_device and arrangement.num_training > 1)


NO_ENGINE = EngineChoice(1, 0)
NO_TRAINER = TrainerChoice(
    zero_stage=0, gradient_checkpointing=False, offloads_optimizer=False, offloads_parameters=False, micro_batch=1
)
"""Stand in for the half of a choice that is not looked at."""
