"""Weight sync of a candidate: the modes that may be chosen, and the seconds of one, in a cluster or over a slow link.

In: a SettledJob, its setting, who the clusters are. Out: modes; Cost, LinkedSync.
Left out: how seconds are computed (timing/transfer).
"""

from collections.abc import Callable
from functools import cached_property
from typing import cast

from rlplan.dataflow.choice import Arrangement, Choice, EngineChoice, TrainerChoice, WeightSyncMode
from rlplan.dataflow.placements import GENERATION, TRAINING
from rlplan.planner.gpu.roles import GpuRoles
from rlplan.planner.setting import GpuSetting
from rlplan.spec.models.adapters import lora_parameters
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
    memory_rate,
    sync_cost,
)
from rlplan.timing.transfer.wires import lone_wire
from rlplan.vocabulary import SyncContent, Transport


class SyncTimes:
    """Costs of weight syncs, one for all candidates that do not differ in what they depend on."""

    def __init__(
        self, job: SettledJob, setting: GpuSetting, roles: GpuRoles, cluster: Callable[[Arrangement, str], Cluster]
    ) -> None:
        """cluster: the GPUs of a device group."""
        self.job, self.setting, self.roles, self.cluster = job, setting, roles, cluster
        self._costs: dict[object, Cost] = {}

    def cost(self, arrangement: Arrangement, trainer: TrainerChoice, engine: EngineChoice, transport: str) -> Cost:
        """The weight sync of new weights, with the comparison after it where every one is compared."""
        if not transport:
            return NOTHING
        sizes = arrangement.num_training, arrangement.num_generation, arrangement.shares_devices
        is_ahead = self.setting.link is not None and self.roles.versions_ahead(arrangement) > 0
        cut = engine.tp, engine.attention_dp
        key = sizes, trainer.zero_stage == 3, cut, engine.quantization, transport, is_ahead
        if key not in self._costs:
            self._costs[key] = self._cost(arrangement, trainer, engine, transport)
            if self.job.placement.sync_verification == "every":
                self._costs[key] += self._comparison(arrangement, trainer, engine, transport)
        return self._costs[key]

    def over_link(self, candidate: Choice) -> LinkedSync | None:
        """The weight sync where it goes over a slow link; None without one."""
        if self.setting.link is None or not candidate.sync_mode:
            return None
        arrangement = candidate.arrangement
        setup = self._setup(arrangement, candidate.trainer, candidate.engine, candidate.sync_mode)
        return sync_over_link(self.setting.policy, setup, self.setting.link, *self._clusters(arrangement))

    def _cost(self, arrangement: Arrangement, trainer: TrainerChoice, engine: EngineChoice, transport: str) -> Cost:
        linked = self.over_link(Choice(arrangement, trainer, engine, cast(WeightSyncMode, transport)))
        if linked is not None:
            return linked.stops if self.roles.versions_ahead(arrangement) else linked.stops + linked.travels
        work = self._setup(arrangement, trainer, engine, transport)
        return sync_cost(self.setting.policy, work, *self._clusters(arrangement))

    def _comparison(
        self, arrangement: Arrangement, trainer: TrainerChoice, engine: EngineChoice, transport: str
    ) -> Cost:
        """Comparing the engines' own parameters with the trainer's; of adapters vLLM's slots.

        Counts: the whole update once more, also where a sync sends what has changed alone, and what a rank of an engine
        computes with read before and after it (2 B s / M). Source: runtime/weight_sync/engine_state.py,
        adapter_state.py.
        """
        weights: str = "nccl" if self.setting.link is None else "disk"
        whole = weights if transport == "delta" else transport
        setup, generation = self._setup(arrangement, trainer, engine, whole), self._clusters(arrangement)[1]
        num_bytes = setup.adapter_bytes or setup.element_bytes * self.setting.policy.num_parameters
        read_s = 2 * num_bytes * held_share(self.setting.policy, setup) / memory_rate(generation)
        return self._cost(arrangement, trainer, engine, whole) + Cost({Resource.MEMORY: read_s})

    def _setup(
        self, arrangement: Arrangement, trainer: TrainerChoice, engine: EngineChoice, transport: str
    ) -> SyncSetup:
        is_slime = self.job.release.name == "slime"
        takes_handles = self.job.rollout.engine == "sglang" and not is_slime
        return SyncSetup(
            cast(SyncTransport, transport),
            1 if (engine.quantization or "").startswith("fp8") else self.job.rollout.dtype.num_bytes,
            arrangement.num_training,
            arrangement.num_generation,
            engine.tp,
            trainer.zero_stage,
            self.job.placement.sync_bucket,
            self._adapter_bytes if transport == "adapter" else 0,
            arrangement.shares_devices,
            self.job.backend,
            # SGLang takes pickled handles of each tensor; slime works bucket by bucket
            loader=Loader.PICKLED if takes_handles else Loader.IN_PLACE,
            has_two_buckets=not is_slime,
            attention_dp=engine.attention_dp,
        )

    def _clusters(self, arrangement: Arrangement) -> tuple[Cluster, Cluster]:
        return self.cluster(arrangement, TRAINING), self.cluster(arrangement, GENERATION)

    @cached_property
    def _adapter_bytes(self) -> int:
        lora = self.job.training.lora
        if lora is None:
            return 0
        adapters = lora_parameters(self.setting.policy, lora.rank, lora.target_modules)
        return sum(tensor.numel for tensor in adapters) * self.job.rollout.dtype.num_bytes


class SyncModes:
    """Modes of weight sync that a job leaves open."""

    def __init__(self, job: SettledJob, setting: GpuSetting) -> None:
        self.job, self.setting = job, setting
        self._sends_changes: dict[tuple[int, int], bool] = {}
        self._known: dict[tuple[bool, bool], tuple[WeightSyncMode, ...]] = {}

    def of(self, arrangement: Arrangement, engine: EngineChoice) -> tuple[WeightSyncMode, ...]:
        """To an engine. An adapter needs a base that was not dropped while the engine slept, and an engine with slots
        for it.
        """
        if engine.adapter_versions:
            is_possible = self.job.training.trains_adapters and engine.sleep_level < 2
            return ("adapter",) if is_possible and self._may_send_adapters else ()
        key = arrangement.shares_devices, self._may_send_changes(arrangement)
        if key not in self._known:
            self._known[key] = self._of_weights(*key)
        return self._known[key]

    @cached_property
    def _may_send_adapters(self) -> bool:
        place = self.job.placement
        is_open = place.sync_content == "auto" and place.transport == "auto"
        return self.job.has_rollouts and (is_open or place.sync_content is SyncContent.ADAPTER)

    def _may_send_changes(self, arrangement: Arrangement) -> bool:
        if arrangement.shares_devices or self.job.placement.sync_content != "auto":
            return False
        sizes = arrangement.num_training, arrangement.num_generation
        if sizes not in self._sends_changes:
            self._sends_changes[sizes] = changes_may_win(self.job, self.setting, *sizes)
        return self._sends_changes[sizes]

    def _of_weights(self, shares_devices: bool, sends_changes: bool) -> tuple[WeightSyncMode, ...]:
        """Of all weights, or of what has changed of them."""
        if not self.job.has_rollouts:
            return ("",)
        content, given = self.job.placement.sync_content, self.job.placement.transport
        if content is SyncContent.DELTA:
            return ("delta",)
        usual: tuple[WeightSyncMode, ...] = ("cuda_ipc",) if shares_devices else ("nccl", "disk")
        if self.job.hardware.link is not None:
            usual = ("disk",)  # files, which places pass on
        if given != "auto":
            found: dict[Transport, WeightSyncMode] = {
                Transport.CUDA_IPC: "cuda_ipc",
                Transport.NCCL: "nccl",
                Transport.DISK: "disk",
            }
            usual = tuple(mode for name, mode in found.items() if name == given and mode in (*usual, "disk"))
        if content is SyncContent.ADAPTER:
            return ()
        changes: tuple[WeightSyncMode, ...] = ("delta",) if sends_changes else ()
        return (*usual, *changes) if content == "auto" and given == "auto" else usual


def changes_may_win(job: SettledJob, setting: GpuSetting, num_training: int, num_generation: int) -> bool:
    """Whether it may be faster to send what has changed alone, between so many GPUs of their own, than all weights.

    Over a link always. In a cluster for rlplan's own runtime (no export says it), where the wire carries less than one
    thread codes, and elements of 16 bits or fewer: else all weights are on the other side before the changes are found,
    for both ways gather and load alike, and stages that overlap take no less when one of them takes more.
    """
    if setting.link is not None:
        return True
    if not job.is_for_rlplan or job.rollout.dtype.num_bytes > GATHERED_ELEMENT_BYTES:
        return False
    wire = lone_wire(setting.part(TRAINING, num_training), setting.part(GENERATION, num_generation))
    return wire.bytes_per_s < CODED_BYTES_PER_S
