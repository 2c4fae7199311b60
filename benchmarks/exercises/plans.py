"""Plans of the exercises, each worked out once, and how they are put in words and tables.

In: what would be typed. Out: budgets, or why there is none; rows of markdown. Left out: the exercises.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rlplan.errors import RlplanError
from rlplan.memory.ledger import Peak
from rlplan.planner.machine import open_search
from rlplan.planner.plan import Plan
from rlplan.spec.files.job_file import load_job
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import MemoryKind

ROOT = Path(__file__).resolve().parents[2]
GB = 10**9


@cache
def example(name: str, *overrides: str) -> Plan | str:
    """The best plan of a file in examples/; or, in words, why there can be none."""
    return plan_or_reason(load_job(ROOT / "examples" / f"{name}.yaml", overrides))


def plan_or_reason(spec: JobSpec) -> Plan | str:
    """The best plan of a job; or, in words, why there can be none."""
    try:
        return open_search(spec).run(with_others=False)
    except RlplanError as error:
        return str(error).splitlines()[0]


def format_command(name: str, *overrides: str) -> str:
    """The command that gives the same."""
    words = [word if re.fullmatch(r"[\w.=/+-]+", word) else f"'{word}'" for word in overrides]
    return " ".join(("rlplan plan", f"examples/{name}.yaml", *words))


def commands(lines: Iterable[tuple[str, ...]]) -> str:
    """A block of them."""
    return "\n".join(("```", *(format_command(*line) for line in lines), "```"))


def find_peak(plan: Plan, device: str) -> Peak:
    """The fullest moment of a device."""
    return plan.ledger.device_peak(device)


def kinds(peak: Peak) -> dict[MemoryKind, int]:
    """Bytes of each kind at that moment, largest first."""
    sizes: dict[MemoryKind, int] = {}
    for _, _, kind, size in peak.rows:
        sizes[kind] = sizes.get(kind, 0) + size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def choice(plan: Plan) -> str:
    """The chosen layout in a few words."""
    step, trainer, engine = plan.choice.arrangement, plan.choice.trainer, plan.choice.engine
    words = [step.placement.value, f"ZeRO-{trainer.zero_stage}"]
    words += [f"training tp {trainer.tp}"] if trainer.tp > 1 else []
    words += [f"pp {trainer.pp}"] if trainer.pp > 1 else []
    words += ["optimizer on the host"] * trainer.offloads_optimizer + ["waiting roles on the host"] * (
        step.offloaded == "all"
    )
    if not step.shares_devices:
        words.append(f"{step.num_training} GPUs train, {step.num_generation} generate")
        words += [f"{step.num_scoring} score"] * bool(step.num_scoring)
    return ", ".join([*words, f"engine tp {engine.tp}"] if plan.job.has_rollouts else words)


def a_pass(plan: Plan) -> str:
    """The size of the trainer's micro-batch."""
    trainer = plan.choice.trainer
    return f"{trainer.max_tokens:,} tokens" if trainer.max_tokens else f"{trainer.micro_batch} rollouts"


def decimal(num_bytes: float) -> str:
    """Decimal gigabytes, in which the exercises are put."""
    return f"{num_bytes / GB:,.1f} GB"
