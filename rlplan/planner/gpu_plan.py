"""GpuPlan: the answer to a job on GPUs: what was chosen, its ledger, a verdict and the risks that lengths bring.

In: results of gpu/search.py. Out: frozen, JSON-able values. Left out: drawing (the command line).
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, Literal

from pydantic import TypeAdapter

from rlplan.dataflow.choice import Choice
from rlplan.dataflow.schedule import Action, Schedule
from rlplan.memory.gpu.kv_demand import ENOUGH, KvDemand
from rlplan.memory.gpu.states import fixed_parts, zero_settings
from rlplan.memory.host import checkpoint_bytes
from rlplan.memory.ledger import LedgerRow, MemoryLedger, Peak
from rlplan.memory.nvme import on_disk_bytes
from rlplan.planner import rules
from rlplan.planner.setting import GpuSetting
from rlplan.spec.job import JobSpec
from rlplan.spec.models.adapters import lora_parameters
from rlplan.spec.models.catalogue import bundled_id, model_path
from rlplan.spec.resolved import SettledJob
from rlplan.timing.cost import Cost
from rlplan.timing.job import JobTiming
from rlplan.timing.step import StepTiming
from rlplan.vocabulary import Placement, Role

ESTIMATE_SCHEMA_VERSION = 2


class Verdict(Enum):
    """Whether it fits: at the high end of every interval, as expected only, or not."""

    FITS = "fits"
    IN_EXPECTATION = "fits in expectation only"
    DOES_NOT_FIT = "does not fit"

    @property
    def rank(self) -> int:
        """0 is best."""
        return list(Verdict).index(self)

    @staticmethod
    def of(ledger: MemoryLedger, host_capacity: int | None, *, at_least: int, shares_memory: bool) -> "Verdict":
        """The verdict on a ledger. at_least: the rank that the KV cache alone leads to.

        shares_memory: the GPU's memory is the host's, so that both must fit into it together.
        """
        taken = ledger.host_peak().num_bytes if shares_memory else 0

        def fits(bound: Literal["expected", "high"]) -> bool:
            peaks = (ledger.device_peak(device, bound) for device in ledger.devices)
            return all(peak.num_bytes + taken <= ledger.capacity_of(peak.scope) for peak in peaks)

        rank = max(at_least, 0 if fits("high") else 1 if fits("expected") else 2)
        peaks = map(ledger.host_peak, ledger.hosts)
        if host_capacity is not None and any(peak.num_bytes > ledger.host_capacity_of(peak.scope) for peak in peaks):
            rank = 2
        return list(Verdict)[rank]


@dataclass(frozen=True)
class KvReport:
    """The KV cache of one engine of `tp` GPUs. Bytes are of one GPU; tokens and sequences of the engine.

    least_bytes: that one longest sequence takes. num_tokens: that the cache holds. expected_bytes, enough_bytes: what
    the rollouts ask for at the median and at the 99th percentile. preemption_risk: probability that they need more than
    there is.
    """

    kv_cache_memory_bytes: int
    least_bytes: int
    num_blocks: int
    num_tokens: int
    max_num_seqs: int
    expected_bytes: int
    enough_bytes: int
    preemption_risk: float
    tp: int

    @staticmethod
    def of(demand: KvDemand, kv_cache: int, tp: int) -> "KvReport":
        """The report on a cache of so many bytes."""
        blocks = demand.pool.num_blocks(kv_cache)
        longest = demand.max_prompt_len + demand.lengths.longest
        return KvReport(
            kv_cache_memory_bytes=kv_cache,
            least_bytes=demand.least_bytes,
            num_blocks=blocks,
            num_tokens=demand.pool.num_tokens(blocks, longest),
            max_num_seqs=demand.num_seqs,
            expected_bytes=demand.bytes_at(0.5),
            enough_bytes=demand.bytes_at(ENOUGH),
            preemption_risk=demand.preemption_risk(kv_cache),
            tp=tp,
        )


@dataclass(frozen=True)
class Considered:
    """A placement that was not chosen, and why. rated: what it needs, None where it cannot be built."""

    placement: Placement
    rated: Any
    reason: str


@dataclass(frozen=True)
class Alternative:
    """Another candidate that was rated. kv_cache: bytes a GPU. peak_bytes: of the fullest GPU at the high end."""

    choice: Choice
    timing: StepTiming
    kv_cache: int
    peak_bytes: int
    headroom_bytes: int
    verdict: Verdict


@dataclass(frozen=True)
class SearchStats:
    """How much was looked at. num_candidates: that there are; num_rated: whose bytes and seconds were worked out."""

    num_candidates: int
    num_rated: int


@dataclass(frozen=True)
class Remedy:
    """A change that by itself leads to a better verdict, as it is typed, with the peak and the verdict it leads to.

    seconds: of a step then, on num_gpus. dollars: that a step costs then, None without a price.
    """

    change: str
    peak_bytes: int
    verdict: Verdict
    seconds: float
    num_gpus: int
    dollars: float | None = None

    @property
    def order(self) -> tuple[object, ...]:
        """What surely fits first, then what leaves alone what is trained, then what costs fewer GPU-seconds."""
        return self.verdict.rank, "lora" in self.change, self.seconds * self.num_gpus


@dataclass(frozen=True)
class GpuPlan:
    """The answer. oom_risk: probability that a step meets a micro-batch too long to fit."""

    asked: JobSpec
    job: SettledJob
    setting: GpuSetting
    choice: Choice
    schedule: Schedule
    ledger: MemoryLedger
    verdict: Verdict
    kv: KvReport | None
    oom_risk: float
    timing: JobTiming
    considered: tuple[Considered, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    runners_up: tuple[Alternative, ...] = ()
    pareto: tuple[Alternative, ...] = ()
    stats: SearchStats = SearchStats(0, 0)

    @property
    def model_name(self) -> str:
        """The policy as people name it: its id where its folder is not there, else its path."""
        path = self.asked.policy.path
        return path if model_path(path) is not None else bundled_id(path) or path

    @cached_property
    def shown_schedule(self) -> Schedule:
        """The schedule with the processes that the ledger counts: one for all ranks of a role that are alike."""
        shown, schedule = {row.process for row in self.ledger.rows}, self.schedule

        def kept(actions: tuple[Action, ...]) -> tuple[Action, ...]:
            return tuple(
                replace(one, processes=tuple(name for name in one.processes if name in shown)) for one in actions
            )

        layouts = tuple(replace(one, devices=one.devices[:1]) for one in schedule.layouts)
        start, step, finish = map(kept, (schedule.start, schedule.step, schedule.finish))
        return replace(schedule, layouts=layouts, start=start, step=step, finish=finish)

    @cached_property
    def refusals(self) -> tuple[str, ...]:
        """Why rlplan's own runtime does not run it; empty where it does."""
        return (*rules.of_job(self.job), *rules.of_choice(self.job, self.choice))

    @property
    def seconds(self) -> float:
        """Of a usual step."""
        return self.timing.step.seconds

    @property
    def costs(self) -> dict[str, Cost]:
        """Of every action of a step its cost."""
        return {action.action_id: action.cost for action in self.timing.step.actions}

    @property
    def tokens_per_s(self) -> float:
        """Tokens that are trained on, prompts and responses, per second of wall clock."""
        workload = self.job.workload
        tokens = workload.num_rollouts_per_step * (workload.usual_prompt_len + workload.lengths.mean)
        return tokens / self.seconds

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """What a million trained tokens cost; None without a price."""
        price = self.job.hardware.price_per_gpu_hour
        return None if price is None else price * self.gpu_hours_per_million_tokens

    @property
    def gpu_hours_per_million_tokens(self) -> float:
        """GPU-hours that a million trained tokens take."""
        return self.setting.num_gpus / 3600 * 1e6 / self.tokens_per_s

    def with_alternatives(
        self, runners_up: tuple[Alternative, ...], pareto: tuple[Alternative, ...], stats: SearchStats
    ) -> "GpuPlan":
        """The same with what else was rated."""
        return replace(self, runners_up=runners_up, pareto=pareto, stats=stats)

    def with_considered(self, considered: tuple[Considered, ...]) -> "GpuPlan":
        """The same with the placements that were not chosen."""
        return replace(self, considered=considered)

    def with_remedies(self, remedies: tuple[Remedy, ...]) -> "GpuPlan":
        """The same with what would make it fit."""
        return replace(self, remedies=remedies)

    @property
    def binding(self) -> Peak:
        """The worst moment of the device with the least room, as expected; of equal ones that of every step."""
        return self.ledger.fullest_device()

    @property
    def binding_capacity(self) -> int:
        """Bytes of the device with the least room."""
        return self.ledger.capacity_of(self.binding.scope)

    def interval(self) -> tuple[int, int]:
        """The peak of the device with the least room at the low and at the high end, in bytes: of all like it."""
        ledger, capacity = self.ledger, self.binding_capacity
        devices = [device for device in ledger.devices if ledger.capacity_of(device) == capacity]
        low = max(self.ledger.device_peak(device, "low").num_bytes for device in devices)
        return low, max(self.ledger.device_peak(device, "high").num_bytes for device in devices)

    @property
    def shortage(self) -> tuple[str, int, int] | None:
        """What is too small, what is needed and what there is; None where it fits at the high end of every interval.

        In this order: the GPU, a host's memory, the room for one longest sequence in the KV cache, the GPU at the high
        end.
        """
        peak, capacity, ledger = self.binding.num_bytes, self.binding_capacity, self.ledger
        if peak > capacity:
            return self._one_gpu, peak, capacity
        for host in ledger.hosts if self.setting.host_capacity is not None else ():
            if (needed := ledger.host_peak(host).num_bytes) > (room := ledger.host_capacity_of(host)):
                return "a host's memory", needed, room
        if self.kv is not None and self.kv.kv_cache_memory_bytes < self.kv.least_bytes:
            return (
                "the KV cache, which must hold one longest sequence",
                self.kv.least_bytes,
                (self.kv.kv_cache_memory_bytes),
            )
        highs = [self.ledger.device_peak(device, "high") for device in ledger.devices]
        most = max(highs, key=lambda peak: peak.num_bytes - ledger.capacity_of(peak.scope))
        if most.num_bytes <= ledger.capacity_of(most.scope):
            return None
        return f"{self._one_gpu} with the longest lengths", most.num_bytes, ledger.capacity_of(most.scope)

    @property
    def _one_gpu(self) -> str:
        """The GPU with the least room, named where there are two kinds."""
        if not self.setting.has_pools:
            return "a GPU"
        groups = (group.name for group in self.schedule.groups if self.binding.scope in group.devices)
        return f"a {self.setting.pool(next(groups)).gpu.name}"

    @property
    def oom_risk_of_run(self) -> float:
        """Probability that some step of the run meets a micro-batch too long to fit."""
        return 1.0 - (1.0 - self.oom_risk) ** self.job.workload.num_steps

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes on disk of one checkpoint to resume from, of every trained role."""
        lora = self.job.training.lora
        trained = 0
        for role in self.job.trained_roles:
            model = self.setting.model_of(role)
            adapters = lora_parameters(model, lora.rank, lora.target_modules) if lora and role is Role.POLICY else ()
            trained += sum(tensor.numel for tensor in adapters) or model.num_parameters
        return checkpoint_bytes(trained, self.job.training.dtype.num_bytes)

    @property
    def swap_bytes(self) -> int:
        """Bytes on the disks of one host of states that are swapped; 0 without NVMe offload."""
        if self.job.training.offload_device != "nvme" or not self.choice.trainer.offloads_optimizer:
            return 0
        step, setting, training = self.choice.arrangement, self.setting, self.job.training
        settings = zero_settings(training, self.choice.trainer, step.num_training)
        ranks = min(step.num_training, setting.gpus_per_host)
        lora = {Role.POLICY: training.lora}
        tp = self.choice.trainer.tp
        models = {role: setting.model_of(role) for role in self.job.trained_roles}
        parts = (fixed_parts(model, role, lora.get(role), settings, tp) for role, model in models.items())
        return ranks * sum(on_disk_bytes(part.after_step.host) for part in parts)

    def as_json(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        low, high = self.interval()
        step, trainer = self.choice.arrangement, self.choice.trainer
        peaks = [self.ledger.host_peak(), *map(self.ledger.device_peak, self.ledger.devices)]
        peaks += map(self.ledger.process_peak, self.ledger.processes)
        return {
            "schema_version": ESTIMATE_SCHEMA_VERSION,
            "verdict": self.verdict.value,
            "shortage": self.shortage
            and dict(zip(("of", "needed_bytes", "available_bytes"), self.shortage, strict=True)),
            "peak_bytes": {"low": low, "expected": self.binding.num_bytes, "high": high},
            "binding": {
                "device": self.binding.scope,
                "moment": self.binding.moment,
                "action_id": self.binding.action_id,
            },
            "capacity_bytes": self.binding_capacity,
            "host_capacity_bytes": self.setting.host_capacity,
            "oom_risk_per_step": self.oom_risk,
            "oom_risk_of_run": self.oom_risk_of_run,
            "gpu": " + ".join(pool.gpu.name for pool in self.setting.pools),
            "num_gpus": self.setting.num_gpus,
            "chosen": {
                "placement": step.placement.value,
                "num_training_gpus": step.num_training,
                "num_generation_gpus": step.num_generation,
                "zero_stage": trainer.zero_stage,
                "gradient_checkpointing": trainer.gradient_checkpointing,
                "offloads_optimizer": trainer.offloads_optimizer,
                "offloads_parameters": trainer.offloads_parameters,
                "micro_batch_size_per_gpu": trainer.micro_batch,
                "tp": self.choice.engine.tp,
                "sleep_level": self.choice.engine.sleep_level,
                "offload": step.offloaded,
            },
            "kv_cache": None if self.kv is None else vars(self.kv),
            "checkpoint_bytes": self.checkpoint_bytes,
            "swap_bytes_per_host": self.swap_bytes,
            "considered": [{"placement": c.placement.value, "reason": c.reason} for c in self.considered],
            "remedies": [{**vars(remedy), "verdict": remedy.verdict.value} for remedy in self.remedies],
            "job": self.asked.model_dump(mode="json"),
            "peaks": TypeAdapter(list[Peak]).dump_python(peaks, mode="json"),
            "rows": TypeAdapter(tuple[LedgerRow, ...]).dump_python(self.ledger.rows, mode="json"),
        }
