"""Plan: the schedule that was chosen, its memory ledger, its seconds, and what was rejected and why.

In: a ResolvedJob. Out: a frozen, JSON-able Plan. On disk its paths stand relative to its own folder.
Left out: how candidates are made (candidates.py) and compared (search.py).
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from rlplan import __version__
from rlplan.dataflow.schedule import Schedule
from rlplan.errors import SpecError
from rlplan.memory.ledger import LedgerRow, MemoryLedger, Peak
from rlplan.spec.base import Spec, read_json, validate, writing
from rlplan.spec.fingerprints import Fingerprints
from rlplan.spec.resolved import ResolvedJob
from rlplan.timing.job import JobTiming
from rlplan.vocabulary import Placement

PLAN_SCHEMA_VERSION = 2
MAX_PLAN_BYTES = 1 << 28


class Rejection(Spec):
    """A candidate that was not chosen. needed_bytes against available_bytes on `scope`, or a reason alone."""

    placement: Placement
    zero_stage: int
    reason: str
    scope: str = ""
    needed_bytes: int = 0
    available_bytes: int = 0


class Plan(Spec):
    """What will run and how much memory it is predicted to need.

    The prediction uses the job, the model's config and the hardware profile, and nothing that runs.
    timing: seconds of every action; None where the profile has no rates.
    fingerprints: of the model and the profile that it was made from, so that a run can tell others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    schema_version: Literal[2] = 2
    rlplan_version: str = __version__
    job: ResolvedJob
    schedule: Schedule
    ledger: MemoryLedger
    rejected: tuple[Rejection, ...] = ()
    timing: JobTiming | None = None
    fingerprints: Fingerprints | None = None

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the trained policy."""
        return self.schedule.layout("policy_trainer").zero_stage

    def estimate(self) -> dict[str, Any]:
        """The ledger with its totals, JSON-able: every row, and the peak of the host, each device and each process."""
        ledger = self.ledger
        peaks = [
            ledger.host_peak(),
            *map(ledger.device_peak, ledger.devices),
            *map(ledger.process_peak, ledger.processes),
        ]
        adapter = TypeAdapter(list[Peak])
        return {
            "schema_version": PLAN_SCHEMA_VERSION,
            "job": self.job.name,
            "placement": self.schedule.placement.value,
            "zero_stage": self.zero_stage,
            "verdict": "fits",
            "host_capacity_bytes": ledger.host_capacity,
            "peaks": adapter.dump_python(peaks, mode="json"),
            "rows": TypeAdapter(tuple[LedgerRow, ...]).dump_python(ledger.rows, mode="json"),
        }


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as JSON; its paths become relative to the file's folder. Raises: SpecError when it cannot."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_plan(plan, path.parent) + "\n", encoding="utf-8")


def dump_plan(plan: Plan, folder: Path) -> str:
    """JSON of a plan whose paths are relative to `folder`."""
    return plan.model_copy(update={"job": plan.job.relative_to(folder)}).model_dump_json(indent=1)


def read_plan(path: Path) -> Plan:
    """The plan in a JSON file. Raises: SpecError for another schema version or anything that is no plan."""
    data = read_json(path, "the plan", limit=MAX_PLAN_BYTES)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(data, dict) and data.get("kind") == "gpu_plan":
        raise SpecError(
            f"{path} is a plan for GPUs, not a job's plan",
            where=f"{path}: kind",
            rule="a bundle or a run folder holds a job's plan, which `rlplan emit` makes of a plan for GPUs",
            way_out=f"rlplan emit {path} -o bundle, or rlplan explain {path}",
        )
    if version != PLAN_SCHEMA_VERSION:
        raise SpecError(
            f"plan schema version is {json.dumps(version)}",
            where=f"{path}: schema_version",
            rule=f"this rlplan ({__version__}) reads version {PLAN_SCHEMA_VERSION}",
            way_out="make the plan again with `rlplan plan JOB -o plan.json`",
        )
    plan = validate(Plan, data, file=str(path), way_out="make the plan again with `rlplan plan JOB -o plan.json`")
    return plan.model_copy(update={"job": plan.job.resolved(path.parent)})
