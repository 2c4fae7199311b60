"""The model card beside a policy that a run writes: README.md, as the hub shows it.

In: a run's plan and folder, the step. Out: a text of job, data, metrics and plan. Names of files and models stand in
it, no paths: a card is published. Left out: what only the user knows (a licence, what the model is for).
"""

import json
from pathlib import Path

from rlplan.planner.plan import Plan
from rlplan.units import format_bytes, format_seconds

CARD = "README.md"
LIBRARY = "transformers"


def model_card(plan: Plan, run_folder: Path, step: int) -> str:
    """step: after which the weights are those of the card; -1 at the end of the run."""
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

Made by rlplan {plan.rlplan_version}; the weights are those of {when}.

## Job

{_table(_job(plan))}

## Data

{_table(_data(plan, run_folder))}

## Metrics

{_table(_metrics(run_folder)) or "None yet."}

## Plan

{_table(_plan(plan))}
"""


def _job(plan: Plan) -> dict[str, object]:
    job = plan.job
    return {
        "algorithm": f"{job.algorithm.name} ({job.algorithm.declaration.source})",
        "began from": Path(job.policy.path).name,
        "learning rate": job.algorithm.learning_rate,
        "steps": job.workload.num_steps,
        "prompts and rollouts a step": f"{job.workload.num_prompts_per_step} x {job.workload.num_samples_per_prompt}",
        "seed": job.seed,
        "rewards": ", ".join(reward.label for reward in job.rewards) or "none",
        **{f"{role} model": Path(path).name for role, path in job.roles.paths.items()},
    }


def _data(plan: Plan, run_folder: Path) -> dict[str, object]:
    data, file = plan.job.data, run_folder / "data.json"
    found: dict[str, object] = {}
    if data is not None:
        found["prompts"] = ", ".join(source.label for source in data.sources)
        found["held out"] = ", ".join(Path(place).name for place in data.heldout_sets.values()) or "a part of them"
    if file.is_file():
        facts = json.loads(file.read_text("utf-8"))
        found |= {"prompts that are trained on": facts["num_prompts"], "held-out prompts": facts["num_heldout_prompts"]}
    return found


def _metrics(run_folder: Path) -> dict[str, object]:
    """The newest value of every metric of an evaluation and of the mean reward, with the step that it is of."""
    file, found = run_folder / "metrics.jsonl", dict[str, object]()
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        row = json.loads(line)
        for name, value in row.items():
            if name == "reward/mean" or name.startswith("evaluate/"):
                found[name] = f"{value:.6g} (step {row['step']})"
    return found


def _plan(plan: Plan) -> dict[str, object]:
    arrangement, trainer = plan.choice.arrangement, plan.choice.trainer
    step_s = plan.timing.step.seconds if plan.timing is not None else None
    return {
        "hardware": f"{plan.job.hardware.num_devices} x {plan.job.hardware.profile}",
        "placement": arrangement.placement.value,
        "ZeRO stage": trainer.zero_stage,
        "type": plan.job.training.dtype.value,
        "predicted peak of memory": format_bytes(plan.ledger.fullest.num_bytes),
        **({"predicted step": format_seconds(step_s)} if step_s is not None else {}),
    }


def _table(rows: dict[str, object]) -> str:
    if not rows:
        return ""
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])
