"""The page of a job's plan: bytes by action, and no seconds.

In: a Plan. Out: a Page. Left out: times, which a job's plan does not have.
"""

from rlplan.planner.plan import Plan
from rlplan.report.plans.page import OtherRow, Page, Tile, action_rows, place_of
from rlplan.units import format_bytes


def job_page(plan: Plan) -> Page:
    """What the page of a job's plan says."""
    job, ledger, schedule = plan.job, plan.ledger, plan.schedule
    work, host = job.workload, plan.ledger.host_peak()
    groups = "; ".join(f"{group.name} on {', '.join(group.devices)}" for group in schedule.groups)
    roles = ", ".join(f"{layout.role} ({layout.worker}) on {layout.group}" for layout in schedule.layouts)
    fullest = max((ledger.process_peak(name) for name in ledger.processes), key=lambda peak: peak.num_bytes)
    return Page(
        title=job.name,
        subtitle=f"{job.algorithm.name}, {work.num_steps} steps of {work.num_rollouts_per_step} rollouts on "
        f"{job.hardware.num_devices} devices of {job.hardware.profile}. Predicted; nothing on this page was measured.",
        state=("good", "Fits."),
        tiles=(
            Tile("Host memory, peak", format_bytes(host.num_bytes), f"of {format_bytes(ledger.host_capacity)}", "good"),
            Tile("Fullest process", format_bytes(fullest.num_bytes), f"{fullest.scope} in {fullest.action_id}"),
            Tile("ZeRO stage", str(plan.zero_stage), f"{schedule.placement.value} placement"),
        ),
        choices=(("Placement", f"{schedule.placement.value}: {groups}"), ("Roles", roles)),
        phases=(),
        actions=action_rows([(action.id, str(action.phase)) for action in schedule.step], ledger, None),
        places=(
            place_of("The host", host, ledger, ledger.host_capacity),
            *(place_of(name, ledger.process_peak(name), ledger, None) for name in ledger.processes),
        ),
        others=tuple(
            OtherRow(f"{one.placement.value}, ZeRO-{one.zero_stage}", "", None, _why(one.reason, one.needed_bytes,
                                                                                    one.available_bytes))
            for one in plan.rejected
        ),
    )  # fmt: skip


def _why(reason: str, needed: int, available: int) -> str:
    return f"{reason}: {format_bytes(needed)} needed, {format_bytes(available)} available" if needed else reason
