"""Exercise 1: a model of 70B with PPO, on 8 GPUs that are shared and on 32 that are not.

In: the planner. Out: parts of docs/exercises.md. Left out: the prose around them.
"""

from benchmarks.exercises.plans import EIGHT, SEVENTY, WORKLOAD, choice, decimal, peak_of, plan, table, typed
from rlplan.planner.budget import Budget, Verdict
from rlplan.spec.models.catalogue import resolve_model
from rlplan.spec.profiles import get_gpu
from rlplan.units import format_bytes, format_seconds

FOUR_LARGE = (f"reward_model={SEVENTY}", *WORKLOAD)
SMALL_OTHERS = (f"value_model={EIGHT}", f"reward_model={EIGHT}", *WORKLOAD)
PLACED = {
    "four of 70B, 8 GPUs, colocated": ("8xA100-80GB", (*FOUR_LARGE, "placement.placement=colocated")),
    "four of 70B, 32 GPUs, disaggregated": ("32xA100-80GB", (*FOUR_LARGE, "placement.placement=disaggregated")),
    "four of 70B, 32 GPUs, colocated": ("32xA100-80GB", (*FOUR_LARGE, "placement.placement=colocated")),
    "value and reward of 8B, 8 GPUs, colocated": ("8xA100-80GB", (*SMALL_OTHERS, "placement.placement=colocated")),
    "value and reward of 8B, 32 GPUs, disaggregated": (
        "32xA100-80GB",
        (*SMALL_OTHERS, "placement.placement=disaggregated"),
    ),
    "value and reward of 8B, 32 GPUs, colocated": ("32xA100-80GB", (*SMALL_OTHERS, "placement.placement=colocated")),
}


def states() -> str:
    """What four models hold before anything runs."""
    policy = resolve_model(SEVENTY)
    value = policy.num_parameters - policy.vocab_size * policy.hidden_size + policy.hidden_size
    weights = 2 * (2 * policy.num_parameters + 2 * value)
    trained = 14 * (policy.num_parameters + value)
    total = weights + trained
    card = get_gpu("a100-sxm-80gb", where="gpu").memory.value
    rows = [
        ("bf16 weights of policy, reference, reward and value", decimal(weights)),
        (
            "of what is trained (policy, value): gradients 2, fp32 master weights 4, Adam 8 bytes a parameter",
            decimal(trained),
        ),
        ("together, before activations, KV cache and what each process takes", decimal(total)),
        (f"a share of 8 GPUs, each of {decimal(card)}", f"{decimal(total / 8)} ({total / 8 / card:.0%})"),
        ("a share of 32 GPUs", f"{decimal(total / 32)} ({total / 32 / card:.0%})"),
    ]
    return table(("what", "bytes"), rows)


def placed() -> str:
    """A row a setting: what a GPU of each group holds, whether it fits, how long a step takes."""
    rows = []
    for name, (gpus, overrides) in PLACED.items():
        found = plan(SEVENTY, gpus, "ppo", overrides)
        if isinstance(found, str):
            rows.append((name, found, "", "", "", ""))
            continue
        peaks = [
            f"{group.name} {format_bytes(peak_of(found, group.devices[0]).num_bytes)}"
            for group in found.schedule.groups
            if group.devices[0] in found.ledger.devices
        ]
        step = format_seconds(found.timing.seconds) if found.verdict.rank < 2 else "-"
        host = found.ledger.host_peak().num_bytes
        rows.append((name, choice(found), ", ".join(peaks), format_bytes(host), found.verdict.value, step))
    return table(("setting", "nearest plan", "fullest GPU", "fullest host", "verdict", "a step"), rows)


def placed_answer() -> str:
    """Which fits, and what it costs."""
    found = {name: plan(SEVENTY, gpus, "ppo", overrides) for name, (gpus, overrides) in PLACED.items()}
    fits = [name for name, one in found.items() if isinstance(one, Budget) and one.verdict is Verdict.FITS]
    lines = [f"Fits: {'; '.join(fits) if fits else 'none of these'}."]
    for size in ("four of 70B", "value and reward of 8B"):
        pair = [found[f"{size}, 32 GPUs, {place}"] for place in ("disaggregated", "colocated")]
        times = [one.timing.seconds for one in pair if isinstance(one, Budget) and one.verdict is Verdict.FITS]
        if len(times) == 2:
            faster = "colocated" if times[1] < times[0] else "disaggregated"
            lines.append(
                f"With {size} on 32 GPUs the {faster} plan is {max(times) / min(times):.2f} times as fast: "
                "a disaggregated synchronous step leaves one of its groups idle, a colocated one pays for switches."
            )
    return "\n".join(lines)


def placed_commands() -> str:
    """How to get the rows."""
    lines = [typed(SEVENTY, gpus, "ppo", overrides) for gpus, overrides in PLACED.values()]
    return "```\n" + "\n".join(lines) + "\n```"
