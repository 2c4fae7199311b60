"""Plan: what was chosen for a job, on a CPU host or on GPUs: its schedule, bytes, seconds and verdict.

In: what a search found. Out: a frozen, JSON-able Plan, and plan.json, in which paths stand relative to its own folder.
Left out: how candidates are made and compared (cpu/search.py, gpu/search.py), what else a page says (answers/).
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from rlplan.dataflow.choice import Choice
from rlplan.dataflow.schedule import Schedule
from rlplan.errors import SpecError
from rlplan.memory.ledger import MemoryLedger, Peak
from rlplan.planner.answers.plan_results import results_as_json
from rlplan.planner.measured_errors import predict_peak_interval
from rlplan.planner.plan_parts import Alternative, Considered, KvReport, Remedy, SearchStats, Shortage, Verdict
from rlplan.spec.base import Spec, read_json, shorten, validate, writing
from rlplan.spec.fingerprints import Fingerprints
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import named_model
from rlplan.spec.resolved import ResolvedJob
from rlplan.timing.cost import Cost
from rlplan.timing.job import JobTiming
from rlplan.version import __version__

PLAN_SCHEMA_VERSION = 3
MAX_PLAN_BYTES = 1 << 28
AGAIN = "make the plan again with `rlplan plan JOB -o plan.json`"
_APART = ("schema_version", "digest", "results")
"""Keys of a plan file that are no fields of a Plan."""


class Plan(Spec):
    """What will run, how much memory it is predicted to need and how long a step takes.

    The prediction uses the job, the models' configs and the hardware profile, and nothing that runs. A CPU host and
    GPUs differ in what stands in the ledger (`shares_host_memory`, ranks that stand for all alike), nowhere else.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    rlplan_version: str = __version__
    asked: JobSpec
    """The job as it was asked, its open choices still `auto`."""
    job: ResolvedJob
    """The same with every choice made."""
    choice: Choice
    """What was chosen."""
    schedule: Schedule
    """The actions that the job and the choice give (dataflow/build.py)."""
    ledger: MemoryLedger
    """Bytes of every process in every action."""
    fit: Verdict
    """Whether its bytes fit."""
    timing: JobTiming | None = None
    """Seconds of every action; None where the profile has no rates."""
    kv: KvReport | None = None
    """The KV cache of one engine; None where nothing is generated."""
    oom_risk: float = 0.0
    """Probability that a step meets a micro-batch too long to fit."""
    checkpoint_bytes: int = 0
    """On disk, of one checkpoint to resume from, of every trained role."""
    swap_bytes: int = 0
    """On the disks of one host, of states that are swapped; 0 without NVMe offload."""
    refusals: tuple[str, ...] = ()
    """Why the job's framework does not run it (rules.py); empty where it does."""
    not_counted: tuple[str, ...] = ()
    """What of the job these numbers leave out, for people."""
    notes: tuple[str, ...] = ()
    """What else should be known of it, for people: GPUs that it leaves idle and why, rows that do not divide."""
    runners_up: tuple[Alternative, ...] = ()
    """The next best candidates."""
    pareto: tuple[Alternative, ...] = ()
    """Every trade of time against headroom, where it was asked for."""
    considered: tuple[Considered, ...] = ()
    """Placements and stages that were not chosen, and why."""
    remedies: tuple[Remedy, ...] = ()
    """What would make it fit, where it does not surely fit."""
    stats: SearchStats = SearchStats()
    """How much was looked at."""
    fingerprints: Fingerprints | None = None
    """Of the model and the profile that it was made from, so that a run can tell others."""

    @property
    def verdict(self) -> Verdict:
        """Of the bytes; `refused` where the framework does not run it, whatever they are."""
        return Verdict.REFUSED if self.refusals else self.fit

    @property
    def fits(self) -> bool:
        """Whether the plan may be emitted and run: its memory fits, and its framework runs it.

        Every command's exit code, every remedy and `--json` follow from this predicate.
        """
        return self.memory_fits and not self.refusals

    @property
    def memory_fits(self) -> bool:
        """Whether its bytes fit at the high end of every interval; as expected where the job accepts that risk."""
        return self.fit is Verdict.FITS or (self.fit.may_fit and self.asked.limits.accepts_oom_risk)

    @property
    def model_name(self) -> str:
        """The policy as people name it: its id, or its folder's name."""
        return named_model(self.asked.policy.path)

    @property
    def devices(self) -> str:
        """The devices as they are named: `8x h100-sxm + 8x l40s`, `2x cpu-host`."""
        hardware, second = self.job.hardware, self.job.hardware.generation
        if self.is_on_host:
            return f"{hardware.num_devices}x {hardware.profile}"
        both = f"{hardware.num_devices}x {self.job.load_gpu().name}"
        return both if second is None else f"{both} + {second.num_devices}x {self.job.load_gpu('generation').name}"

    @property
    def is_on_host(self) -> bool:
        """Whether the devices are a CPU host's, whose memory they share."""
        return self.ledger.shares_host_memory

    @property
    def device_word(self) -> str:
        """What a device is called: `GPU`, or `device` of a CPU host."""
        return "device" if self.is_on_host else "GPU"

    @property
    def num_devices(self) -> int:
        """All devices that were taken."""
        return self.job.hardware.all_devices

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the trained policy."""
        return self.choice.trainer.zero_stage

    @property
    def seconds(self) -> float:
        """Of a usual step; 0 where they are not known."""
        return self.timing.step.seconds if self.timing else 0.0

    @property
    def costs(self) -> dict[str, Cost]:
        """Of every action of a step its cost."""
        return {action.action_id: action.cost for action in self.timing.step.actions} if self.timing else {}

    @property
    def tokens_per_s(self) -> float:
        """Tokens that are trained on, prompts and responses, per second of wall clock; 0 where that is not known."""
        workload = self.job.workload
        response = workload.usual_response_len if self.is_on_host else workload.lengths.mean
        tokens = workload.num_rollouts_per_step * (workload.usual_prompt_len + response)
        return tokens / self.seconds if self.seconds else 0.0

    @property
    def gpu_hours_per_million_tokens(self) -> float:
        """GPU-hours (or hours of a host's devices) that a million trained tokens take."""
        return self.num_devices / 3600 * 1e6 / self.tokens_per_s if self.tokens_per_s else 0.0

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """What a million trained tokens cost; None without a price."""
        price = self.job.hardware.price_per_gpu_hour
        return None if price is None else price * self.gpu_hours_per_million_tokens

    @property
    def oom_risk_of_run(self) -> float:
        """Probability that some step of the run meets a micro-batch too long to fit."""
        return 1.0 - (1.0 - self.oom_risk) ** self.job.workload.num_steps

    @property
    def binding(self) -> Peak:
        """The worst moment of the device with the least room, or of the host whose memory all devices share."""
        return self.ledger.fullest

    @property
    def binding_capacity(self) -> int:
        """Bytes of that device or host."""
        return self._get_capacity(self.binding)

    def _get_capacity(self, peak: Peak) -> int:
        ledger = self.ledger
        return ledger.host_capacity_of(peak.scope) if self.is_on_host else ledger.capacity_of(peak.scope)

    @property
    def host_capacity(self) -> int | None:
        """Bytes of a host; None where they are not known."""
        return self.ledger.host_capacity or None

    def interval(self) -> tuple[int, int]:
        """Between which bytes the peak of the device with the least room lies, by what was measured of such peaks.

        At least as wide as its rows at their ends, and with them at the shortest and the longest lengths. Nothing is
        known of a CPU host's error: its peak as predicted.
        """
        low, high = self.row_interval()
        if self.is_on_host:
            return low, high
        least, most = predict_peak_interval(self)
        return min(low, least), max(high, most)

    def row_interval(self) -> tuple[int, int]:
        """That peak with every row of the ledger at its low and at its high end, which decides the verdict."""
        if self.is_on_host:
            return self.binding.num_bytes, self.binding.num_bytes
        ledger, capacity = self.ledger, self.binding_capacity
        devices = [device for device in ledger.devices if ledger.capacity_of(device) == capacity]
        low = max(ledger.device_peak(device, "low").num_bytes for device in devices)
        return low, max(ledger.device_peak(device, "high").num_bytes for device in devices)

    @property
    def headroom_bytes(self) -> int:
        """That are left where there is least room, at the high end of the interval; negative where it does not fit."""
        ledger = self.ledger
        if self.is_on_host:
            return self.binding_capacity - self.binding.num_bytes
        return min(
            ledger.capacity_of(device) - ledger.device_peak(device, "high").num_bytes for device in ledger.devices
        )

    @property
    def shortage(self) -> Shortage | None:
        """The first of `shortages`; None where the plan fits at the high end of every interval."""
        return next(iter(self.shortages), None)

    @property
    def shortages(self) -> tuple[Shortage, ...]:
        """Everything that is too small; empty where the plan fits at the high end of every interval.

        In this order: the device, each host's memory, the room for one longest sequence in the KV cache. The device at
        the high end is named where it is large enough as expected.
        """
        return tuple(self._find_shortages())

    def _find_shortages(self) -> Iterator[Shortage]:
        peak, capacity, ledger = self.binding, self.binding_capacity, self.ledger
        if peak.num_bytes > capacity:
            yield Shortage(self._name_device(peak), peak.num_bytes, capacity, peak, is_of_host=self.is_on_host)
        for host in ledger.hosts if self.host_capacity is not None else ():
            if host == peak.scope:
                continue  # a CPU host, which is its own device
            if (taken := ledger.host_peak(host)).num_bytes > (room := ledger.host_capacity_of(host)):
                yield Shortage("a host's memory", taken.num_bytes, room, taken, is_of_host=True)
        if self.kv is not None and self.kv.kv_cache_memory_bytes < self.kv.least_bytes:
            what = "the KV cache, which must hold one longest sequence"
            yield Shortage(what, self.kv.least_bytes, self.kv.kv_cache_memory_bytes, peak)
        if not self.is_on_host and self.job.load_gpu().shares_host_memory:
            yield from self._find_shared_shortage()
            return
        is_named = self.is_on_host or peak.num_bytes > capacity
        highs = [] if is_named else [ledger.device_peak(device, "high") for device in ledger.devices]
        for most in sorted(
            highs, key=lambda device_peak: ledger.capacity_of(device_peak.scope) - device_peak.num_bytes
        )[:1]:
            if most.num_bytes > (room := ledger.capacity_of(most.scope)):
                words = f"{self._name_device(most)} at the high end of its interval, with the longest lengths"
                yield Shortage(words, most.num_bytes, room, most)

    def _find_shared_shortage(self) -> Iterator[Shortage]:
        """The memory that a GPU shares with its host, where both fit alone and not together (`Verdict.of`)."""
        ledger, taken = self.ledger, self.ledger.host_peak().num_bytes
        peak = max(
            (ledger.device_peak(device, "high") for device in ledger.devices),
            key=lambda device_peak: device_peak.num_bytes,
        )
        needed, room = peak.num_bytes + taken, ledger.capacity_of(peak.scope)
        if needed > room:
            words = "the memory that a GPU shares with its host, at the high end"
            yield Shortage(words, needed, room, peak, is_of_host=True)

    def _name_device(self, peak: Peak) -> str:
        """A GPU, named where there are two kinds; or the memory of the host that all devices share."""
        if self.is_on_host:
            return "a host's memory"
        if self.job.hardware.generation is None:
            return "a GPU"
        group = next(group.name for group in self.schedule.groups if peak.scope in group.devices)
        return f"a {self.job.load_gpu(group).name}"

    @property
    def shown_schedule(self) -> Schedule:
        """The schedule with the processes that the ledger counts: one for all ranks of a role that are alike."""
        return self.schedule.with_processes(self.ledger.processes)


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as JSON; its paths become relative to the file's folder. Raises: SpecError when it cannot."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_plan(plan, path.parent) + "\n", encoding="utf-8")


def dump_plan(plan: Plan, folder: Path) -> str:
    """JSON of a plan whose paths are relative to `folder`, with its results for people and for other tools."""
    jobs = {"asked": plan.asked.relative_to(folder), "job": plan.job.relative_to(folder)}
    stored = {"results": results_as_json(plan)} | plan.model_copy(update=jobs).model_dump(mode="json")
    return json.dumps({"schema_version": PLAN_SCHEMA_VERSION, "digest": digest_of(stored), **stored}, indent=1)


def digest_of(stored: dict[str, Any]) -> str:
    """SHA-256 of everything in a plan file but its version and the digest itself, with keys in order."""
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()


def read_plan(path: Path) -> Plan:
    """The plan in a JSON file, as it was made. Raises: SpecError for another version, or where it was changed."""
    data = read_json(path, "the plan", limit=MAX_PLAN_BYTES)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int or version != PLAN_SCHEMA_VERSION:
        raise SpecError(
            f"plan schema version is {shorten(version)}",
            where=f"{path}: schema_version",
            rule=f"this rlplan ({__version__}) reads version {PLAN_SCHEMA_VERSION}",
            way_out=AGAIN,
        )
    fields = {key: value for key, value in data.items() if key not in _APART}
    plan = validate(Plan, fields, file=str(path), way_out=AGAIN)
    if data.get("digest") != digest_of({key: data[key] for key in data if key not in _APART[:2]}):
        raise SpecError(
            "the plan was changed after it was made",
            where=f"{path}: digest",
            rule="a plan is not edited; digest is the SHA-256 of everything else in it",
            way_out=f"change the job file, and {AGAIN}",
        )
    jobs = {"asked": plan.asked.resolved(path.parent), "job": plan.job.resolved(path.parent)}
    return plan.model_copy(update=jobs)


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is a run's and no bundle."""
    return folder.is_dir() and not (folder / "execution.json").exists()


def read_run_plan(folder: Path) -> Plan:
    """The plan that a run follows. Raises: SpecError where the folder is no run's."""
    if not (is_run_folder(folder) and (folder / "plan.json").is_file()):
        raise SpecError(
            f"'{folder}' is not a run folder" if folder.is_dir() else f"there is no folder '{folder}'",
            where=str(folder / "plan.json"),
            rule="a run folder holds the plan.json that `rlplan run` wrote",
            way_out="give the folder that `rlplan run` printed, such as one under runs/",
        )
    return read_plan(folder / "plan.json")
