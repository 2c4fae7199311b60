"""Exercise 1: a model of 70B with PPO, on 8 GPUs that are shared and on 32 that are not.

In: the planner. Out: parts of docs/exercises.md. Left out: the prose around them.
"""

from benchmarks.exercises.plans import choice, commands, decimal, example, find_peak
from benchmarks.texts import format_table
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.spec.models.catalogue import resolve_model
from rlplan.units import format_bytes, format_seconds

FOUR = "exercises/ppo-70b"
EIGHT = "meta-llama/Llama-3.1-8B-Instruct"
SMALL = (f"roles.value.path={EIGHT}", f"roles.reward.path={EIGHT}")
SIZES: dict[str, tuple[str, ...]] = {"four of 70B": (), "value and reward of 8B": SMALL}
PLACES = (("8xA100-80GB", "colocated"), ("32xA100-80GB", "disaggregated"), ("32xA100-80GB", "colocated"))
PLACED = {
    f"{size}, {gpus.partition('x')[0]} GPUs, {place}": (
        FOUR,
        f"hardware={gpus}",
        f"placement.placement={place}",
        *small,
    )
    for size, small in SIZES.items()
    for gpus, place in PLACES
}


def states() -> str:
    """Resident bytes of four models before anything runs."""
    policy = resolve_model("meta-llama/Llama-3.1-70B-Instruct")
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
    return format_table(("what", "bytes"), rows)


def write_placed() -> str:
    """A row a setting: what a GPU of each group holds, whether it fits, how long a step takes."""
    rows = []
    for name, question in PLACED.items():
        plan = example(*question)
        if isinstance(plan, str):
            rows.append((name, plan, "", "", "", ""))
            continue
        peaks = [
            f"{group.name} {format_bytes(find_peak(plan, group.devices[0]).num_bytes)}"
            for group in plan.schedule.groups
            if group.devices[0] in plan.ledger.devices
        ]
        step = format_seconds(plan.seconds) if plan.verdict.rank < 2 else "-"
        host = plan.ledger.host_peak().num_bytes
        rows.append((name, choice(plan), ", ".join(peaks), format_bytes(host), plan.verdict.value, step))
    return format_table(("setting", "nearest plan", "fullest GPU", "fullest host", "verdict", "a step"), rows)


def placed_answer() -> str:
    """The placements that fit, and their cost."""
    plans = {name: example(*question) for name, question in PLACED.items()}
    fits = [name for name, plan in plans.items() if isinstance(plan, Plan) and plan.verdict is Verdict.FITS]
    lines = [f"Fits: {'; '.join(fits) if fits else 'none of these'}."]
    for size in SIZES:
        pair = [plans[f"{size}, 32 GPUs, {place}"] for place in ("disaggregated", "colocated")]
        times = [plan.seconds for plan in pair if isinstance(plan, Plan) and plan.verdict is Verdict.FITS]
        if len(times) == 2:
            faster = "colocated" if times[1] < times[0] else "disaggregated"
            lines.append(
                f"With {size} on 32 GPUs the {faster} plan is {max(times) / min(times):.2f} times as fast: "
                "a disaggregated synchronous step leaves one of its groups idle, a colocated one pays for switches."
            )
    return "\n".join(lines)


def placed_commands() -> str:
    """How to get the rows."""
    return commands(PLACED.values())
