"""The model card (README.md) of a policy that a run writes, as the Hugging Face Hub shows it.

The card has names of files and models but no paths, because cards are published.
In: a run's plan and folder, the step. Out: a text on job, data, metrics and plan.
Left out: facts that only the user knows (the licence, the model's purpose).
"""

import json
from pathlib import Path

from rlplan.planner.plan import Plan
from rlplan.units import format_bytes, format_seconds

CARD = "README.md"
LIBRARY = "transformers"


def model_card(plan: Plan, run_folder: Path, step: int) -> str:
    """Write the card's text. step: the step whose weights it describes; -1 is the end of the run."""
    job, declared = plan.job, plan.job.algorithm.declaration
    pipeline = "text-classification" if declared.trains_scalar else "text-generation"
    when = "the end of its run" if step < 0 else f"step {step} of {job.workload.num_steps}"
    return f"""\
---
library_name: {LIBRARY}
pipeline_tag: {pipeline}
tags: [rlplan, {job.algorithm.name}]
---

# {job.name}

Trained with rlplan {plan.rlplan_version}. The weights are those at {when}.

## Job

{_table(_job(plan))}

## Data

{_table(_data(plan, run_folder))}

## Metrics

{_table(_metrics(run_folder, plan.job.progress_metric)) or "None yet."}

## Plan

{_table(_plan(plan))}
"""


def _job(plan: Plan) -> dict[str, object]:
    job = plan.job
    return {
        "algorithm": f"{job.algorithm.name} ({job.algorithm.declaration.source})",
        "base model": Path(job.policy.path).name,
        "learning rate": job.algorithm.learning_rate,
        "steps": job.workload.num_steps,
        "prompts x samples per step": f"{job.workload.num_prompts_per_step} x {job.workload.num_samples_per_prompt}",
        "seed": job.seed,
        "rewards": ", ".join(reward.label for reward in job.rewards) or "none",
        **{f"{role} model": Path(path).name for role, path in job.roles.paths.items()},
    }


def _data(plan: Plan, run_folder: Path) -> dict[str, object]:
    data, file = plan.job.data, run_folder / "data.json"
    rows: dict[str, object] = {}
    if data is not None:
        rows["prompts"] = ", ".join(source.label for source in data.sources)
        rows["held out"] = ", ".join(Path(place).name for place in data.heldout_sets.values()) or "a part of them"
    if file.is_file():
        facts = json.loads(file.read_text("utf-8"))
        rows |= {"training prompts": facts["num_prompts"], "held-out prompts": facts["num_heldout_prompts"]}
    return rows


def _metrics(run_folder: Path, metric: str) -> dict[str, object]:
    """The latest value of a metric and of every evaluation metric, with its step."""
    file, latest = run_folder / "metrics.jsonl", dict[str, object]()
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        row = json.loads(line)
        for name, value in row.items():
            if name == metric or name.startswith("evaluate/"):
                latest[name] = f"{value:.6g} (step {row['step']})"
    return latest


def _plan(plan: Plan) -> dict[str, object]:
    arrangement, trainer = plan.choice.arrangement, plan.choice.trainer
    step_s = plan.timing.step.seconds if plan.timing is not None else None
    return {
        "hardware": f"{plan.job.hardware.num_devices} x {plan.job.hardware.profile}",
        "placement": arrangement.placement.value,
        "ZeRO stage": trainer.zero_stage,
        "type": plan.job.training.dtype.value,
        "predicted peak memory": format_bytes(plan.ledger.fullest.num_bytes),
        **({"predicted step": format_seconds(step_s)} if step_s is not None else {}),
    }


def _table(rows: dict[str, object]) -> str:
    if not rows:
        return ""
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])
