"""The page of a job's plan: bytes and seconds by action.

In: a Plan. Out: a Page. Left out: what a run measured.
"""

from rlplan.planner.plan import Plan
from rlplan.report.plans.page import OtherRow, Page, Tile, action_rows, phase_rows, place_of
from rlplan.units import format_bytes, format_seconds


def job_page(plan: Plan) -> Page:
    """What the page of a job's plan says."""
    job, ledger, schedule = plan.job, plan.ledger, plan.schedule
    work, host = job.workload, plan.ledger.host_peak()
    timing = plan.timing.step if plan.timing else None
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
            *_time_tiles(plan),
            Tile("ZeRO stage", str(plan.zero_stage), f"{schedule.placement.value} placement"),
        ),
        choices=(("Placement", f"{schedule.placement.value}: {groups}"), ("Roles", roles)),
        phases=phase_rows(timing),
        actions=action_rows([(action.id, str(action.phase)) for action in schedule.step], ledger, timing),
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


def _time_tiles(plan: Plan) -> tuple[Tile, ...]:
    work = plan.job.workload
    if plan.timing is None:
        return ()
    note = f"responses of {work.usual_response_len} tokens"
    return (Tile("A step", format_seconds(plan.timing.step.seconds), note),)


def _why(reason: str, needed: int, available: int) -> str:
    return f"{reason}: {format_bytes(needed)} needed, {format_bytes(available)} available" if needed else reason
