"""Rehearsal: before step 1, the largest micro-batch that the plan allows for, measured against the plan.

In: a plan's ledger, what each process held at most while it rehearsed, what the others hold. Out: a comparison, and a
MisfitError where a host has too little memory for it. Left out: how a trainer rehearses
(workers/trainer/policy_trainer.py).

The first weight sync happens before, while starting, so that trainer, engine and staging memory are all there.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlplan.errors import HostError
from rlplan.memory.ledger import MemoryLedger
from rlplan.units import format_bytes


class MisfitError(HostError):
    """A host's memory is too small for what was rehearsed: another plan may fit."""

    def add_changes(self, changes: list[str]) -> "MisfitError":
        tried = f"; tried without success: {', '.join(changes)}" if changes else ""
        return MisfitError(self.what + tried, where=self.where, rule=self.rule, way_out=self.way_out)


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One process, while it trains on the longest sequences."""

    process: str
    host: str
    predicted_bytes: int
    """Its largest predicted peak over the rehearsed actions."""

    measured_bytes: int


def compare(ledger: MemoryLedger, peaks: Mapping[str, int], actions: tuple[str, ...]) -> tuple[Rehearsed, ...]:
    """Each process that rehearsed beside its largest prediction over the actions that were rehearsed."""
    hosts = _map_processes_to_hosts(ledger)
    return tuple(
        Rehearsed(process, hosts.get(process, "host"), _find_predicted_peak(ledger, process, actions), peak)
        for process, peak in peaks.items()
    )


def check_fits(ledger: MemoryLedger, rehearsed: tuple[Rehearsed, ...], resident: Mapping[str, int]) -> None:
    """What all processes of a host hold, those that rehearsed at their peak, against the host's capacity.

    On GPUs nothing is left to check: what does not fit there has failed already.

    resident: bytes of each process that waits. Raises: MisfitError with both numbers.
    """
    if not ledger.shares_host_memory:
        return
    hosts = _map_processes_to_hosts(ledger)
    peaks = {one.process: one.measured_bytes for one in rehearsed}
    needed: Counter[str] = Counter()
    for process, size in {**resident, **peaks}.items():
        needed[hosts.get(process, ledger.hosts[0])] += size
    for host, size in needed.items():
        available = ledger.host_capacity_of(host)
        if size > available:
            largest = max(rehearsed, key=lambda one: one.measured_bytes - one.predicted_bytes)
            raise MisfitError(
                f"{host} needs {format_bytes(size)} for one micro-batch of the longest sequences, "
                f"{format_bytes(available)} available",
                where=f"furthest from its plan: {largest.process}, {format_bytes(largest.measured_bytes)} measured, "
                f"{format_bytes(largest.predicted_bytes)} predicted",
                rule="the rehearsed micro-batch must fit into hardware.memory, or the profile's memory, of each host",
                way_out="give it more memory, or measure this machine's profile (`rlplan profiles measure`)",
            )


def rehearsal_as_json(rehearsed: tuple[Rehearsed, ...], changes: list[str], reason: str = "") -> dict[str, Any]:
    """preflight.json. reason: why nothing was rehearsed."""
    return {
        "schema_version": 1,
        "rehearsed": [asdict(one) for one in rehearsed],
        "not_rehearsed": reason,
        "changes": changes,
    }


def _find_predicted_peak(ledger: MemoryLedger, process: str, actions: tuple[str, ...]) -> int:
    totals: Counter[tuple[str, str]] = Counter()
    for row in ledger.rows_of(process):
        if row.action_id in actions and row.space == "device":
            totals[(row.run_phase, row.action_id)] += row.peak_bytes
    return max(totals.values(), default=0)


def _map_processes_to_hosts(ledger: MemoryLedger) -> dict[str, str]:
    named = dict(ledger.host_of_device)
    return {row.process: named.get(row.device, "host") for row in ledger.rows}
