"""Exercise 2: 140 GB of weights in 10 seconds.

In: the profiles, the planner. Out: parts of docs/exercises.md. Left out: the prose around them.
"""

from benchmarks.exercises.plans import GB, commands, decimal, example
from benchmarks.texts import format_table
from rlplan.spec.hardware.catalogue import get_gpu, get_node
from rlplan.units import format_seconds


def links() -> str:
    """How long 140 GB take over each link at its peak."""
    gpu, node = get_gpu("h100-sxm", where="gpu"), get_node("dgx-h100", where="node")
    assert gpu.device_link is not None, "an H100 has NVLink"
    assert gpu.host_link is not None, "and PCIe"
    peaks = {
        "NVLink, of one GPU": gpu.device_link.bytes_per_s.value,
        "PCIe, of one GPU": gpu.host_link.bytes_per_s.value,
        "the network of a node, all its adapters": node.network_bytes_per_s.value,
        "the network's adapter of one GPU": node.network_bytes_per_s.value / node.num_gpus,
    }
    rows = [("asked", decimal_rate(ASKED / SECONDS), format_seconds(SECONDS), "")]
    for name, rate in peaks.items():
        least = format_seconds(ASKED / rate)
        rows.append((name, decimal_rate(rate), least, f"{ASKED / SECONDS / rate:.1%}"))
    return format_table(("each direction", "bytes per second", "140 GB take at least", "asked, of this peak"), rows)


def decimal_rate(bytes_per_s: float) -> str:
    """Decimal gigabytes per second."""
    return f"{bytes_per_s / GB:,.1f} GB/s"


ASKED, SECONDS = 140 * GB, 10.0


HANDED = {
    "colocated": ("placement.placement=colocated",),
    "disaggregated": ("placement.placement=disaggregated",),
    "disaggregated, one version behind": ("placement.placement=disaggregated", "placement.max_staleness=1"),
    "adapters of rank 64, colocated": ("placement.placement=colocated", "training.lora={rank: 64}"),
}
SEVENTY = "exercises/grpo-70b"


def write_handed() -> str:
    """Predicted time of the weight sync, against a whole step."""
    rows = []
    for name, overrides in HANDED.items():
        plan = example(SEVENTY, *overrides)
        if isinstance(plan, str):
            rows.append((name, "-", "-", "-", plan))
            continue
        cost, step = plan.costs["sync_weights"], plan.timing.step
        rows.append(
            (
                name,
                format_seconds(cost.seconds),
                cost.bound_by.value.replace("_", " "),
                format_seconds(step.seconds),
                f"{cost.seconds / step.seconds:.1%}",
            )
        )
    return format_table(("plan", "weight sync", "mostly", "a step", "its part of the step"), rows)


def handed_answer() -> str:
    """How much of a step the ten seconds would be, and what is saved by overlapping the rest."""
    alone, behind = (example(SEVENTY, *HANDED[name]) for name in ("disaggregated", "disaggregated, one version behind"))
    if isinstance(alone, str) or isinstance(behind, str):
        return "There is no such plan."
    cost = alone.costs["sync_weights"].seconds
    moved = alone.job.load_model().num_parameters * 2
    asked = alone.seconds - cost + SECONDS
    step, overlapped = (format_seconds(plan.seconds) for plan in (alone, behind))
    sentences = (
        f"Of the disaggregated step of {step}, the weight sync of {decimal(moved)} is {format_seconds(cost)},",
        f"{decimal_rate(moved / cost)}. With the ten seconds of the question the step would take",
        f"{format_seconds(asked)}, of which they are {SECONDS / asked:.0%}. With rollouts one version behind, a step",
        f"takes {overlapped} instead of {step}: generation and training overlap, the weight sync does not, for both",
        "sides take part in it.",
    )
    return "\n".join(sentences)


def handed_commands() -> str:
    """How to get the rows."""
    return commands((SEVENTY, *overrides) for overrides in HANDED.values())
