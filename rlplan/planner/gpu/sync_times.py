"""Weight sync of a candidate: possible modes, and the cost within a cluster or over a slow link.

In: a SettledJob, its setting, clusters by group. Out: modes; Cost, LinkedSync. Left out: the formulas
(timing/transfer).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import cast

from rlplan.dataflow.choice import Arrangement, Choice, EngineChoice, TrainerChoice, WeightSyncMode
from rlplan.dataflow.placements import GENERATION, TRAINING
from rlplan.planner.gpu.roles import GpuRoles
from rlplan.planner.memo import Memo, memoize
from rlplan.planner.setting import GpuSetting
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.spec.resolved import SettledJob
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.transfer.over_links import LinkedSync, sync_over_link
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
        self.job, self.policy, self.link, self.roles, self.cluster = job, setting.policy, setting.link, roles, cluster
        self.known = roles.memo.get_table(SyncTimes, self.policy, self.link)

    def predict_cost(
        self, arrangement: Arrangement, trainer: TrainerChoice, engine: EngineChoice, transport: str
    ) -> Cost:
        """Predict the cost of a weight sync, including its verification if each sync is verified."""
        if not transport:
            return NOTHING
        setup = self._build_setup(arrangement, trainer, engine, transport)
        is_ahead = self.link is not None and self.roles.count_versions_ahead(arrangement) > 0
        compares = self.job.placement.sync_verification == "every"
        return self._sum_cost(setup, *self._get_clusters(arrangement), is_ahead, compares)

    def predict_link(self, candidate: Choice) -> LinkedSync | None:
        """Predict the weight sync over a slow link; None without one."""
        if self.link is None or not candidate.sync_mode:
            return None
        arrangement = candidate.arrangement
        setup = self._build_setup(arrangement, candidate.trainer, candidate.engine, candidate.sync_mode)
        return sync_over_link(self.policy, setup, self.link, *self._get_clusters(arrangement))

    @memoize
    def _sum_cost(
        self, setup: SyncSetup, training: Cluster, generation: Cluster, is_ahead: bool, compares: bool
    ) -> Cost:
        cost = self._cost_sync(setup, training, generation, is_ahead)
        return cost + self._cost_comparison(setup, training, generation, is_ahead) if compares else cost

    def _cost_sync(self, setup: SyncSetup, training: Cluster, generation: Cluster, is_ahead: bool) -> Cost:
        if self.link is None:
            return sync_cost(self.policy, setup, training, generation)
        linked = sync_over_link(self.policy, setup, self.link, training, generation)
        return linked.stops if is_ahead else linked.stops + linked.travels

    def _cost_comparison(self, setup: SyncSetup, training: Cluster, generation: Cluster, is_ahead: bool) -> Cost:
        """Cost of comparing the engines' parameters with the trainer's; for adapters, vLLM's LoRA slots.

        Counts: the complete update once more, even after a delta sync, and an engine rank's weights read before and
        after it (2 B s / M). Source: runtime/weight_sync/engine_state.py, adapter_state.py.
        """
        if setup.transport == "delta":
            # a comparison reads everything, so it travels like a full sync
            setup = replace(setup, transport="nccl" if self.link is None else "disk")
        num_bytes = setup.adapter_bytes or setup.element_bytes * self.policy.num_parameters
        read_s = 2 * num_bytes * held_share(self.policy, setup) / generation.reached_memory_bytes_per_s
        return self._cost_sync(setup, training, generation, is_ahead) + Cost({Resource.MEMORY: read_s})

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

    def _get_clusters(self, arrangement: Arrangement) -> tuple[Cluster, Cluster]:
        return self.cluster(arrangement, TRAINING), self.cluster(arrangement, GENERATION)

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

        Over a slow link it always may. Within a cluster it requires rlplan's runtime (no export supports it), elements
        of at most 16 bits, and a wire slower than one thread's coding rate. Otherwise all weights arrive before the
        changes are found: both ways gather and load alike, and overlapping stages take no less time if one takes more.
        """
        job, setting = self.job, self.setting
        if setting.link is not None:
            return True
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
        if self.job.hardware.link is not None:
            usual = ("disk",)  # over a slow link, places forward files
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
