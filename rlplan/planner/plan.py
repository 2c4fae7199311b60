"""A plan is one chosen layout of a job with its schedule, memory ledger, timing and verdict, on a CPU host or on GPUs.

In: the result of a search. Out: a frozen `Plan` and its file plan.json, whose paths are relative to the file's folder.
Left out: how candidates are built and compared (cpu/search.py, gpu/search.py) and questions about a plan (answers/).
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from rlplan.dataflow.choice import Choice
from rlplan.dataflow.schedule import Schedule
from rlplan.errors import SpecError
from rlplan.memory.ledger import LedgerRow, MemoryLedger, Peak
from rlplan.memory.machine.host import object_store_bytes
from rlplan.planner.answers.plan_results import results_as_json
from rlplan.planner.measured_errors import predict_peak_interval
from rlplan.planner.plan_parts import Alternative, Considered, KvReport, Remedy, SearchStats, Shortage, Verdict
from rlplan.spec.base import Spec, explain_write_errors, read_json, shorten_value, validate
from rlplan.spec.fingerprints import Fingerprints
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import format_model_name
from rlplan.spec.resolved import ResolvedJob
from rlplan.timing.cost import Cost
from rlplan.timing.step import JobTiming
from rlplan.version import __version__
from rlplan.vocabulary import MemoryKind

PLAN_SCHEMA_VERSION = 3
MAX_PLAN_BYTES = 1 << 28
WITHOUT_RAY = ("trl", "deepspeed")
"""Frameworks that start no Ray."""
AGAIN = "make the plan again with `rlplan plan JOB -o plan.json`"
_APART = ("schema_version", "digest", "results")
"""Keys of a plan file that are not fields of `Plan`."""


class Plan(Spec):
    """The layout that will run, with its predicted memory and step time.

    The prediction uses the job, the models' configs and the hardware profile; it runs nothing. On a CPU host, all
    devices share the host's memory (`shares_host_memory`). On GPUs, one rank in the ledger stands for all equal ranks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    rlplan_version: str = __version__
    asked: JobSpec
    """The job as the user wrote it, with open choices still `auto`."""
    job: ResolvedJob
    """The job with every choice made."""
    choice: Choice
    """The chosen arrangement, trainer, engine and weight sync."""
    schedule: Schedule
    """Actions of the job with this choice (dataflow/build.py)."""
    ledger: MemoryLedger
    """Bytes of each process during each action."""
    fit: Verdict
    """Verdict on memory alone."""
    timing: JobTiming | None = None
    """Seconds of each action; None if the hardware profile has no rates."""
    kv: KvReport | None = None
    """The KV cache of one engine; None if nothing is generated."""
    oom_risk: float = 0.0
    """Probability that a step contains a micro-batch too long to fit."""
    checkpoint_bytes: int = 0
    """Disk bytes of one checkpoint with the states of all trained roles."""
    swap_bytes: int = 0
    """Disk bytes per host for swapped optimizer states; 0 without NVMe offload."""
    refusals: tuple[str, ...] = ()
    """Reasons why the job's framework cannot run the plan (rules.py); empty if it can."""
    not_counted: tuple[str, ...] = ()
    """Parts of the job that the prediction ignores, in words."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader: GPUs left idle and why, rollouts that do not divide evenly."""
    runners_up: tuple[Alternative, ...] = ()
    """The next best layouts."""
    pareto: tuple[Alternative, ...] = ()
    """Layouts that trade step time for headroom, if the caller asked for them."""
    considered: tuple[Considered, ...] = ()
    """Placements and ZeRO stages that were not chosen, with reasons."""
    remedies: tuple[Remedy, ...] = ()
    """Changes that would make the job fit; empty if it fits in the worst case."""
    stats: SearchStats = SearchStats()
    """Size of the search."""
    fingerprints: Fingerprints | None = None
    """Fingerprints of the model and the hardware profile, so that a run detects different ones."""

    @property
    def verdict(self) -> Verdict:
        """Verdict on memory, or `refused` if the framework cannot run the plan."""
        return Verdict.REFUSED if self.refusals else self.fit

    @property
    def fits(self) -> bool:
        """Whether the plan may be emitted and run: its memory fits and its framework accepts it.

        All exit codes, remedies and `--json` follow from this predicate.
        """
        return self.memory_fits and not self.refusals

    @property
    def memory_fits(self) -> bool:
        """Whether memory fits in the worst case, or in expectation if the job accepts that risk."""
        return self.fit is Verdict.FITS or (self.fit.may_fit and self.asked.limits.accepts_oom_risk)

    @property
    def model_name(self) -> str:
        """The policy's id, or the name of its folder."""
        return format_model_name(self.asked.policy.path)

    @property
    def devices(self) -> str:
        """The devices in words: `8x h100-sxm + 8x l40s`, `2x cpu-host`."""
        hardware, second = self.job.hardware, self.job.hardware.generation
        if self.is_on_host:
            return f"{hardware.num_devices}x {hardware.profile}"
        both = f"{hardware.num_devices}x {self.job.load_gpu().name}"
        return both if second is None else f"{both} + {second.num_devices}x {self.job.load_gpu('generation').name}"

    @property
    def is_on_host(self) -> bool:
        """Whether the devices are slices of a CPU host that share its memory."""
        return self.ledger.shares_host_memory

    @property
    def device_word(self) -> str:
        """Word for a device: `GPU`, or `device` on a CPU host."""
        return "device" if self.is_on_host else "GPU"

    @property
    def num_devices(self) -> int:
        """Number of devices the plan uses."""
        return self.job.hardware.all_devices

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the trained policy."""
        return self.choice.trainer.zero_stage

    @property
    def seconds(self) -> float:
        """Predicted seconds of a steady step; 0 if unknown."""
        return self.timing.step.seconds if self.timing else 0.0

    @property
    def costs(self) -> dict[str, Cost]:
        """Cost of each action of a step, by action id."""
        return {action.action_id: action.cost for action in self.timing.step.actions} if self.timing else {}

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens (prompts and responses) per second of wall clock; 0 if unknown."""
        workload = self.job.workload
        response = workload.usual_response_len if self.is_on_host else workload.lengths.mean
        tokens = workload.num_rollouts_per_step * (workload.usual_prompt_len + response)
        return tokens / self.seconds if self.seconds else 0.0

    @property
    def gpu_hours_per_million_tokens(self) -> float:
        """GPU-hours (device-hours on a CPU host) per million trained tokens; 0 if unknown."""
        return self.num_devices / 3600 * 1e6 / self.tokens_per_s if self.tokens_per_s else 0.0

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """Dollars per million trained tokens; None without a price."""
        price = self.job.hardware.price_per_gpu_hour
        return None if price is None else price * self.gpu_hours_per_million_tokens

    @property
    def oom_risk_of_run(self) -> float:
        """Probability that any step of the run contains a micro-batch too long to fit."""
        return 1.0 - (1.0 - self.oom_risk) ** self.job.workload.num_steps

    @property
    def binding(self) -> Peak:
        """The peak of the device with the least room, or of the host whose memory all devices share."""
        return self.ledger.fullest

    @property
    def binding_capacity(self) -> int:
        """Capacity in bytes of that device or host."""
        return self._get_capacity(self.binding)

    def _get_capacity(self, peak: Peak) -> int:
        ledger = self.ledger
        return ledger.get_host_capacity(peak.scope) if self.is_on_host else ledger.get_device_capacity(peak.scope)

    @property
    def host_capacity(self) -> int | None:
        """Bytes of a host's memory; None if unknown."""
        return self.ledger.host_capacity or None

    @property
    def host_interval(self) -> tuple[int, int]:
        """Range in bytes of a host's peak. With Ray, the high end has a full object store.

        It does not decide the verdict, because most of the store may stay empty. On a CPU host, and without a known
        size, the range is the prediction itself.
        """
        expected, job = self.ledger.host_peak().num_bytes, self.job
        uses_ray = job.is_for_rlplan or (job.has_rollouts and job.release.name not in WITHOUT_RAY)
        if self.is_on_host or not self.host_capacity or not uses_ray:
            return expected, expected
        return expected, expected + object_store_bytes(self.host_capacity)

    def interval(self) -> tuple[int, int]:
        """Range in bytes for the peak of the fullest device, from measured errors of such predictions.

        The range includes the ledger's own range for the shortest and longest responses. For a CPU host no errors were
        measured, so the range is the prediction itself.
        """
        low, high = self.row_interval()
        if self.is_on_host:
            return low, high
        least, most = predict_peak_interval(self)
        return min(low, least), max(high, most)

    def row_interval(self) -> tuple[int, int]:
        """Range of that peak with all ledger rows at their low and high ends. The high end decides the verdict."""
        if self.is_on_host:
            return self.binding.num_bytes, self.binding.num_bytes
        ledger, capacity = self.ledger, self.binding_capacity
        devices = [device for device in ledger.devices if ledger.get_device_capacity(device) == capacity]
        low = max(ledger.device_peak(device, "low").num_bytes for device in devices)
        return low, max(ledger.device_peak(device, "high").num_bytes for device in devices)

    @property
    def needed_bytes(self) -> int:
        """Worst-case bytes of the fullest device with a KV cache for one longest sequence.

        A larger KV cache only fills free memory to speed up rollouts; it is not required.
        """
        if self.kv is None or self.is_on_host:
            return self.row_interval()[1]
        optional = max(0, self.kv.kv_cache_memory_bytes - self.kv.least_bytes)
        rows = tuple(_shrink_row(row, optional) if row.kind is MemoryKind.KV_CACHE else row for row in self.ledger.rows)
        return self.model_copy(update={"ledger": replace(self.ledger, rows=rows)}).row_interval()[1]

    @property
    def headroom_bytes(self) -> int:
        """Bytes left on the fullest device in the worst case; negative if the plan does not fit."""
        ledger = self.ledger
        if self.is_on_host:
            return self.binding_capacity - self.binding.num_bytes
        return min(
            ledger.get_device_capacity(device) - ledger.device_peak(device, "high").num_bytes
            for device in ledger.devices
        )

    @property
    def shortage(self) -> Shortage | None:
        """The first of `shortages`; None if the plan fits in the worst case."""
        return next(iter(self.shortages), None)

    @property
    def shortages(self) -> tuple[Shortage, ...]:
        """Everything that is too small; empty if the plan fits in the worst case.

        The order is: the device, each host's memory, the KV cache for one longest sequence. If the device is large
        enough in expectation, its worst case is reported last.
        """
        return tuple(self._find_shortages())

    def _find_shortages(self) -> Iterator[Shortage]:
        peak, capacity, ledger = self.binding, self.binding_capacity, self.ledger
        if peak.num_bytes > capacity:
            yield Shortage(self._name_device(peak), peak.num_bytes, capacity, peak, is_of_host=self.is_on_host)
        for host in ledger.hosts if self.host_capacity is not None else ():
            if host == peak.scope:
                continue  # a CPU host is its own device, already reported above
            if (taken := ledger.host_peak(host)).num_bytes > (room := ledger.get_host_capacity(host)):
                yield Shortage("a host's memory", taken.num_bytes, room, taken, is_of_host=True)
        # vLLM refuses to start below this size, even if the GPU has room for everything else
        if self.kv is not None and self.kv.kv_cache_memory_bytes < self.kv.least_bytes:
            what = "the KV cache, which must hold one longest sequence"
            yield Shortage(what, self.kv.least_bytes, self.kv.kv_cache_memory_bytes, peak)
        # with shared memory, the worst cases of GPU and host are compared as a sum
        if not self.is_on_host and self.job.load_gpu().shares_host_memory:
            yield from self._find_shared_shortage()
            return
        is_named = self.is_on_host or peak.num_bytes > capacity
        highs = [] if is_named else [ledger.device_peak(device, "high") for device in ledger.devices]
        for most in sorted(highs, key=lambda high: ledger.get_device_capacity(high.scope) - high.num_bytes)[:1]:
            if most.num_bytes > (room := ledger.get_device_capacity(most.scope)):
                words = f"{self._name_device(most)} at the high end of its range, with the longest lengths"
                yield Shortage(words, most.num_bytes, room, most)

    def _find_shared_shortage(self) -> Iterator[Shortage]:
        """Find GPU memory shared with the host where both fit alone but not together (`Verdict.judge`)."""
        ledger, taken = self.ledger, self.ledger.host_peak().num_bytes
        peak = max(
            (ledger.device_peak(device, "high") for device in ledger.devices),
            key=lambda device_peak: device_peak.num_bytes,
        )
        needed, room = peak.num_bytes + taken, ledger.get_device_capacity(peak.scope)
        if needed > room:
            words = "the memory that a GPU shares with its host, in the worst case"
            yield Shortage(words, needed, room, peak, is_of_host=True)

    def _name_device(self, peak: Peak) -> str:
        """Name a device: `a GPU`, its model if there are two kinds, or the host's memory."""
        if self.is_on_host:
            return "a host's memory"
        if self.job.hardware.generation is None:
            return "a GPU"
        group = next(group.name for group in self.schedule.groups if peak.scope in group.devices)
        return f"a {self.job.load_gpu(group).name}"

    @property
    def shown_schedule(self) -> Schedule:
        """The schedule with the processes of the ledger: one stands for all equal ranks of a role."""
        return self.schedule.keep_processes(self.ledger.processes)


def _shrink_row(row: LedgerRow, num_bytes: int) -> LedgerRow:
    names = ("resident_bytes", "peak_bytes", "low_bytes", "high_bytes", "resident_high_bytes")
    sizes = {name: size for name in names if (size := getattr(row, name)) is not None}
    return replace(row, **{name: max(0, size - num_bytes) for name, size in sizes.items()})


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as JSON with paths relative to the file's folder. Raises: SpecError on a write error."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_plan(plan, path.parent) + "\n", encoding="utf-8")


def dump_plan(plan: Plan, folder: Path) -> str:
    """Serialize a plan with paths relative to `folder`, plus its results for readers and tools."""
    jobs = {"asked": plan.asked.make_relative(folder), "job": plan.job.make_relative(folder)}
    stored = {"results": results_as_json(plan)} | plan.model_copy(update=jobs).model_dump(mode="json")
    return json.dumps({"schema_version": PLAN_SCHEMA_VERSION, "digest": compute_digest(stored), **stored}, indent=1)


def compute_digest(stored: dict[str, Any]) -> str:
    """SHA-256 of a plan file's content without version and digest, keys sorted."""
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()


def read_plan(path: Path) -> Plan:
    """Read a plan file. Raises: SpecError for another schema version or a file that was edited."""
    data = read_json(path, "the plan", limit=MAX_PLAN_BYTES)
    version = data.get("schema_version") if isinstance(data, dict) else None
    # 3.0 == 3, so the type is checked too
    if type(version) is not int or version != PLAN_SCHEMA_VERSION:
        raise SpecError(
            f"plan schema version is {shorten_value(version)}",
            where=f"{path}: schema_version",
            rule=f"this rlplan ({__version__}) reads version {PLAN_SCHEMA_VERSION}",
            way_out=AGAIN,
        )
    fields = {key: value for key, value in data.items() if key not in _APART}
    plan = validate(Plan, fields, file=str(path), way_out=AGAIN)
    if data.get("digest") != compute_digest({key: data[key] for key in data if key not in _APART[:2]}):
        raise SpecError(
            "the plan was changed after it was made",
            where=f"{path}: digest",
            rule="plan files must not be edited; digest is the SHA-256 of the rest of the file",
            way_out=f"change the job file, and {AGAIN}",
        )
    jobs = {"asked": plan.asked.resolve_paths(path.parent), "job": plan.job.resolve_paths(path.parent)}
    return plan.model_copy(update=jobs)


def is_run_folder(folder: Path) -> bool:
    """Whether a folder belongs to a run and is not an emitted bundle."""
    return folder.is_dir() and not (folder / "execution.json").exists()


def read_run_plan(folder: Path) -> Plan:
    """Read the plan of a run folder. Raises: SpecError if the folder is not a run's."""
    if not (is_run_folder(folder) and (folder / "plan.json").is_file()):
        raise SpecError(
            f"'{folder}' is not a run folder" if folder.is_dir() else f"there is no folder '{folder}'",
            where=str(folder / "plan.json"),
            rule="a run folder holds the plan.json that `rlplan run` wrote",
            way_out="give the folder that `rlplan run` printed, such as one under runs/",
        )
    return read_plan(folder / "plan.json")
