"""Weight sync of a candidate: possible modes, and its cost.

In: a SettledJob, its setting, clusters by group. Out: modes; Cost. Left out: the formulas (timing/transfer).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import cast

from rlplan.dataflow.choice import Arrangement, EngineChoice, TrainerChoice, WeightSyncMode
from rlplan.dataflow.placements import GENERATION, TRAINING
from rlplan.planner.gpu.roles import GpuRoles
from rlplan.planner.memo import Memo, memoize
from rlplan.planner.setting import GpuSetting
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.spec.resolved import SettledJob
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.transfer.weight_sync import (
    CODED_BYTES_PER_S,
    GATHERED_ELEMENT_BYTES,
    Loader,
    SyncSetup,
    SyncTransport,
    held_share,
    sync_cost,
)
from rlplan.timing.transfer.wires import find_sender_wire
from rlplan.vocabulary import SyncContent, Transport


class SyncTimes:
    """Costs of weight syncs, shared by candidates with equal inputs."""

    def __init__(
        self, job: SettledJob, setting: GpuSetting, roles: GpuRoles, cluster: Callable[[Arrangement, str], Cluster]
    ) -> None:
        """cluster: returns a device group's GPUs, aware of others on the same hosts."""
        self.job, self.policy, self.cluster = job, setting.policy, cluster
        self.known = roles.memo.get_table(SyncTimes, self.policy)

    def predict_cost(
        self, arrangement: Arrangement, trainer: TrainerChoice, engine: EngineChoice, transport: str
    ) -> Cost:
        """Predict the cost of a weight sync, including its verification if each sync is verified."""
        if not transport:
            return NOTHING
        setup = self._build_setup(arrangement, trainer, engine, transport)
        compares = self.job.placement.sync_verification == "every"
        clusters = self.cluster(arrangement, TRAINING), self.cluster(arrangement, GENERATION)
        return self._sum_cost(setup, *clusters, compares)

    @memoize
    def _sum_cost(self, setup: SyncSetup, training: Cluster, generation: Cluster, compares: bool) -> Cost:
        cost = sync_cost(self.policy, setup, training, generation)
        return cost + self._cost_comparison(setup, training, generation) if compares else cost

    def _cost_comparison(self, setup: SyncSetup, training: Cluster, generation: Cluster) -> Cost:
        """Cost of comparing the engines' parameters with the trainer's; for adapters, vLLM's LoRA slots.

        Counts: the complete update once more, even after a delta sync, and an engine rank's weights read before and
        after it (2 B s / M). Source: runtime/weight_sync/engine_state.py, adapter_state.py.
        """
        if setup.transport == "delta":
            setup = replace(setup, transport="nccl")  # a comparison reads everything, like a full sync
        num_bytes = setup.adapter_bytes or setup.element_bytes * self.policy.num_parameters
        read_s = 2 * num_bytes * held_share(self.policy, setup) / generation.reached_memory_bytes_per_s
        return sync_cost(self.policy, setup, training, generation) + Cost({Resource.MEMORY: read_s})

    def _build_setup(
        self, arrangement: Arrangement, trainer: TrainerChoice, engine: EngineChoice, transport: str
    ) -> SyncSetup:
        release, training = self.job.release, self.job.training
        is_slime = release.name == "slime"
        is_sharded = self.job.backend == "fsdp2"
        takes_handles = self.job.rollout.engine == "sglang" and not is_slime
        return SyncSetup(
            cast(SyncTransport, transport),
            1 if (engine.quantization or "").startswith("fp8") else self.job.rollout.dtype.num_bytes,
            arrangement.num_training,
            arrangement.num_generation,
            engine.tp,
            3 if trainer.zero_stage == 3 else 0,
            0 if release.sends_each_tensor else self.job.placement.sync_bucket,
            self._adapter_bytes if transport == "adapter" else 0,
            arrangement.shares_devices,
            self.job.backend,
            # SGLang receives pickled handles per tensor; slime sends bucket by bucket
            loader=Loader.PICKLED if takes_handles else Loader.IN_PLACE,
            has_two_buckets=not is_slime,
            requests_each_tensor=release.sends_each_tensor,
            gathered_element_bytes=training.master_dtype.num_bytes if is_sharded and release.gathers_masters else 2,
            stages_masters=is_sharded and trainer.offloads_parameters,
            attention_dp=engine.attention_dp,
        )

    @cached_property
    def _adapter_bytes(self) -> int:
        lora = self.job.training.lora
        if lora is None:
            return 0
        adapters = list_lora_parameters(self.policy, lora.rank, lora.target_modules)
        return sum(tensor.numel for tensor in adapters) * self.job.rollout.dtype.num_bytes


class SyncModes:
    """Weight-sync modes that a job leaves open."""

    def __init__(self, job: SettledJob, setting: GpuSetting, memo: Memo) -> None:
        self.job, self.setting, self.known = job, setting, memo.create_table()

    def list_engine_modes(self, arrangement: Arrangement, engine: EngineChoice) -> tuple[WeightSyncMode, ...]:
        """List modes to an engine. Adapters need slots, and a base that stays loaded while the engine sleeps."""
        if engine.adapter_versions:
            return ("adapter",) if self.may_send_adapters and engine.sleep_level < 2 else ()
        return self.list_weight_modes(arrangement)

    def list_weight_modes(self, arrangement: Arrangement) -> tuple[WeightSyncMode, ...]:
        """List modes that send all weights or a delta."""
        may_send_delta = not arrangement.shares_devices and self.job.placement.sync_content == "auto"
        return self._list_weight_modes(
            arrangement.shares_devices,
            may_send_delta and self.delta_may_win(arrangement.num_training, arrangement.num_generation),
        )

    @cached_property
    def may_send_adapters(self) -> bool:
        """Whether adapters may be sent alone."""
        place = self.job.placement
        is_open = place.sync_content == "auto" and place.transport == "auto"
        is_wanted = is_open or place.sync_content is SyncContent.ADAPTER
        return self.job.training.trains_adapters and self.job.has_rollouts and is_wanted

    @memoize
    def delta_may_win(self, num_training: int, num_generation: int) -> bool:
        """Whether a delta sync between separate GPU groups may be faster than sending all weights.

        It requires rlplan's runtime (no export supports it), elements
        of at most 16 bits, and a wire slower than one thread's coding rate. Otherwise all weights arrive before the
        changes are found: both ways gather and load alike, and overlapping stages take no less time if one takes more.
        """
        job, setting = self.job, self.setting
        if not job.is_for_rlplan or job.rollout.dtype.num_bytes > GATHERED_ELEMENT_BYTES:
            return False
        training = setting.get_partial_cluster(TRAINING, num_training)
        generation = setting.get_partial_cluster(GENERATION, num_generation)
        return find_sender_wire(training, generation).bytes_per_s < CODED_BYTES_PER_S

    @memoize
    def _list_weight_modes(self, shares_devices: bool, sends_changes: bool) -> tuple[WeightSyncMode, ...]:
        if not self.job.has_rollouts:
            return ("",)
        content, transport = self.job.placement.sync_content, self.job.placement.transport
        if content is SyncContent.DELTA:
            return ("delta",)
        usual: tuple[WeightSyncMode, ...] = ("cuda_ipc",) if shares_devices else ("nccl", "disk")
        if transport != "auto":
            modes: dict[Transport, WeightSyncMode] = {
                Transport.CUDA_IPC: "cuda_ipc",
                Transport.NCCL: "nccl",
                Transport.DISK: "disk",
            }
            usual = tuple(mode for name, mode in modes.items() if name == transport and mode in (*usual, "disk"))
        if content is SyncContent.ADAPTER:
            return ()
        changes: tuple[WeightSyncMode, ...] = ("delta",) if sends_changes else ()
        return (*usual, *changes) if content == "auto" and transport == "auto" else usual
