"""Rehearsal: compares the memory of the largest micro-batch, run before step 1, with the plan.

In: a plan's ledger, each rehearsing process's peak, the other processes' memory. Out: a comparison, and a MisfitError
where a host has too little memory. Left out: how a trainer rehearses (workers/trainer/policy_trainer.py).

The first weight sync precedes the rehearsal, so that trainer, engine and staging memory are all allocated.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlplan.errors import HostError
from rlplan.memory.ledger import MemoryLedger
from rlplan.units import format_bytes


class MisfitError(HostError):
    """A host's or GPU's memory is too small for the rehearsed step; another plan may fit."""

    def add_changes(self, changes: list[str]) -> "MisfitError":
        """The same error with the fallbacks that were tried."""
        tried = f"; tried without success: {', '.join(changes)}" if changes else ""
        return MisfitError(self.what + tried, where=self.where, rule=self.rule, way_out=self.way_out)


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Predicted and measured memory of one process during the rehearsal."""

    process: str
    host: str
    predicted_bytes: int
    """Largest predicted peak over the rehearsed actions."""

    measured_bytes: int
    """Measured peak."""


def compare(ledger: MemoryLedger, peaks: Mapping[str, int], actions: tuple[str, ...]) -> tuple[Rehearsed, ...]:
    """Pair each rehearsing process's measured peak with its largest predicted peak over the rehearsed actions."""
    hosts = _map_processes_to_hosts(ledger)
    return tuple(
        Rehearsed(process, hosts.get(process, "host"), _find_predicted_peak(ledger, process, actions), peak)
        for process, peak in peaks.items()
    )


def check_fits(ledger: MemoryLedger, rehearsed: tuple[Rehearsed, ...], resident: Mapping[str, int]) -> None:
    """Compare each host's memory with its capacity, assuming that all rehearsing processes peak at once.

    On GPUs there is nothing to check: a step that does not fit has failed already.

    resident: bytes of each process, which count for those that do not rehearse. Raises: MisfitError with both numbers.
    """
    if not ledger.shares_host_memory:
        return
    hosts = _map_processes_to_hosts(ledger)
    peaks = {result.process: result.measured_bytes for result in rehearsed}
    needed: Counter[str] = Counter()
    for process, size in {**resident, **peaks}.items():
        needed[hosts.get(process, ledger.hosts[0])] += size
    for host, size in needed.items():
        available = ledger.get_host_capacity(host)
        if size > available:
            largest = max(rehearsed, key=lambda result: result.measured_bytes - result.predicted_bytes)
            raise MisfitError(
                f"{host} needs {format_bytes(size)} for one micro-batch of the longest sequences, "
                f"{format_bytes(available)} available",
                where=f"largest excess: {largest.process}, {format_bytes(largest.measured_bytes)} measured, "
                f"{format_bytes(largest.predicted_bytes)} predicted",
                rule="the rehearsed micro-batch must fit into hardware.memory, or the profile's memory, of each host",
                way_out="use a host with more memory, or measure this machine's profile (`rlplan profiles measure`)",
            )


def rehearsal_as_json(rehearsed: tuple[Rehearsed, ...], changes: list[str], reason: str = "") -> dict[str, Any]:
    """Content of preflight.json. reason: why nothing was rehearsed; empty if something was."""
    return {
        "schema_version": 1,
        "rehearsed": [asdict(result) for result in rehearsed],
        "not_rehearsed": reason,
        "changes": changes,
    }


def _find_predicted_peak(ledger: MemoryLedger, process: str, actions: tuple[str, ...]) -> int:
    totals: Counter[tuple[str, str]] = Counter()
    for row in ledger.find_rows(process):
        if row.action_id in actions and row.space == "device":
            totals[(row.run_phase, row.action_id)] += row.peak_bytes
    return max(totals.values(), default=0)


def _map_processes_to_hosts(ledger: MemoryLedger) -> dict[str, str]:
    named = dict(ledger.host_of_device)
    return {row.process: named.get(row.device, "host") for row in ledger.rows}
