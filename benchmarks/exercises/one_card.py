"""Exercise 4: a model of 7B on one card of 80 GB, and what the well-known table of 92 GB leaves out.

In: the planner. Out: parts of docs/exercises.md. Left out: the prose around them.
"""

from benchmarks.exercises.plans import (
    GB,
    GROUPED,
    ONE,
    SEVEN,
    WORKLOAD,
    choice,
    decimal,
    kinds,
    peak_of,
    plan,
    table,
    typed,
)
from rlplan.planner.budget import Budget
from rlplan.spec.models.adapters import lora_parameters
from rlplan.spec.models.catalogue import resolve_model
from rlplan.units import format_bytes, format_seconds
from rlplan.vocabulary import MemoryKind

ALL_ON_THE_GPU = (
    "training.offloads_optimizer=false",
    "placement.placement=colocated",
    "placement.parks=false",
    "workload.micro_batch_size_per_gpu=4",
    "training.recompute=full",
    "rollout.sleep_level=0",
)
LARGE = (f"reward_model={SEVEN}", *WORKLOAD)
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "PPO, all on the GPU": ("ppo", (*LARGE, *ALL_ON_THE_GPU)),
    "PPO": ("ppo", LARGE),
    "PPO, 8-bit Adam": ("ppo", (*LARGE, "training.optimizer=adamw_8bit")),
    "PPO, value and reward of 1B": ("ppo", (f"value_model={ONE}", f"reward_model={ONE}", *WORKLOAD)),
    "PPO, LoRA": ("ppo", (f"value_model={ONE}", f"reward_model={ONE}", *WORKLOAD, "training.lora={rank: 64}")),
    "GRPO": ("grpo", GROUPED),
    "GRPO, 8-bit Adam": ("grpo", (*GROUPED, "training.optimizer=adamw_8bit")),
    "GRPO, reward of 1B": ("grpo", (f"reward_model={ONE}", *GROUPED)),
    "GRPO, LoRA": ("grpo", (*GROUPED, "training.lora={rank: 64}")),
    "GRPO, LoRA, 8-bit Adam, reward of 1B": (
        "grpo",
        (f"reward_model={ONE}", *GROUPED, "training.lora={rank: 64}", "training.optimizer=adamw_8bit"),
    ),
}
CARD = "1xA100-80GB"
TOLD = {
    MemoryKind.WEIGHTS: 56.0,
    MemoryKind.OPTIMIZER: 28.0,
    MemoryKind.ACTIVATIONS: 8.0,
}
"""The well-known table, in GB: four models of 14; "optimizer states (AdamW, FP32)"; "activations"."""


def left_out() -> str:
    """The well-known table beside ours, kind by kind."""
    found = plan(SEVEN, CARD, *VARIANTS["PPO, all on the GPU"])
    assert isinstance(found, Budget), found
    ours = kinds(peak_of(found, "cuda:0"))
    names = dict.fromkeys([*TOLD, *ours])
    rows = [
        (
            str(kind).replace("_", " "),
            f"{TOLD[kind]:.0f} GB" if kind in TOLD else "-",
            decimal(ours.get(kind, 0)),
            decimal(ours.get(kind, 0) - TOLD.get(kind, 0.0) * GB),
        )
        for kind in names
    ]
    total = sum(ours.values())
    rows.append(("together", f"{sum(TOLD.values()):.0f} GB", decimal(total), decimal(total - sum(TOLD.values()) * GB)))
    return table(("kind", "the table", "here", "left out"), rows)


def left_out_answer() -> str:
    """In words, with the sums that can be done by hand."""
    model = resolve_model(SEVEN)
    count = model.num_parameters
    value = count - model.vocab_size * model.hidden_size + model.hidden_size
    adapters = sum(tensor.numel for tensor in lora_parameters(model, 64, "all-linear"))
    sentences = (
        f"The model has {count:,} parameters. Adam's two fp32 moments are 8 bytes of each, {decimal(8 * count)} and not 28",
        f"GB; the fp32 master weights are {decimal(4 * count)} more, gradients in bf16 {decimal(2 * count)}. The value model",
        f"({value:,} parameters) is trained too and takes as much again, {decimal(14 * value)} beside its weights.",
        f"Adapters of rank 64 on all linear layers are {adapters:,} parameters, {adapters / count:.1%} of the model:",
        f"{decimal(16 * adapters)} with all their states.",
    )
    return "\n".join(sentences)


def variants() -> str:
    """A row a variant on one card."""
    rows = []
    for name, (algorithm, overrides) in VARIANTS.items():
        found = plan(SEVEN, CARD, algorithm, overrides)
        if isinstance(found, str):
            rows.append((name, found, "", "", "", ""))
            continue
        step = format_seconds(found.timing.seconds) if found.verdict.rank < 2 else "-"
        peak, host = found.binding.num_bytes, found.ledger.host_peak().num_bytes
        verdict = found.verdict.value
        rows.append((name, choice(found), format_bytes(peak), format_bytes(host), verdict, step))
    return table(("variant", "plan, or the nearest", "the GPU", "the host", "verdict", "a step"), rows)


def variants_commands() -> str:
    """How to get the rows."""
    lines = [typed(SEVEN, CARD, algorithm, overrides) for algorithm, overrides in VARIANTS.values()]
    return "```\n" + "\n".join(lines) + "\n```"
