"""The page of reports/learning, and the table of docs/algorithms.md: what each algorithm reaches.

In: what the learning scripts left (record.py); any of it may be missing, and a set may be in part.
Out: README.md with its charts, and the section "What each reaches" of docs/algorithms.md.
"""

from collections.abc import Sequence
from statistics import fmean

from benchmarks.learning.example_record import examples_section, read_examples
from benchmarks.learning.record import (
    CONTROLS,
    CURVES,
    DRIFT,
    IN_PROCESS,
    JOBS,
    NUM_HELDOUT,
    REPORTS,
    ROOT,
    SEEDS,
    TARGET,
    Beside,
    Curve,
    read_comparison,
    read_curves,
)
from rlplan.planner.search import find_plan
from rlplan.spec.files.job_file import load_job
from rlplan.units import format_bytes

ALGORITHMS_PAGE = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- reached: written by benchmarks/learning/page.py -->\n", "<!-- end of reached -->\n"


def write_page() -> None:
    """README.md and the charts, from what there is."""
    from benchmarks.learning.charts import draw_comparison, draw_curves  # matplotlib, which nothing else here needs

    curves, in_process, beside = read_curves(CURVES), read_curves(IN_PROCESS), read_comparison()
    parts = [_HEAD.format(target=TARGET, drift=DRIFT, num_heldout=NUM_HELDOUT)]
    if curves:
        parts.append(_RUNS + _table(curves))
        draw_curves(curves, REPORTS / "curves.png")
    if in_process:
        parts.append(_IN_PROCESS + _milestones(in_process))
        draw_curves(in_process, REPORTS / "in_process.png")
    if examples := read_examples():
        parts.append(examples_section(examples))
    if beside is not None:
        parts.append(_write_comparison(beside))
        draw_comparison(beside, REPORTS / "trl.png")
    (REPORTS / "README.md").write_text("\n".join([*parts, _FOOT]), "utf-8")
    before, rest = ALGORITHMS_PAGE.read_text("utf-8").split(BEGIN)
    ALGORITHMS_PAGE.write_text(f"{before}{BEGIN}{list_reached()}{END}{rest.split(END)[1]}", "utf-8")


def list_reached() -> str:
    """Each algorithm's job, its memory, and the lowest accuracy of its seeds: in one process, and on the runtime."""
    lines = [
        "| algorithm | prompts x rollouts | learning rate | steps | memory | in one process | on the runtime |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    files = [read_curves(IN_PROCESS), read_curves(CURVES)]
    for name, path in JOBS.items():
        job = load_job(path)
        load = job.workload
        cells = [_lowest([curve for curve in curves if curve.algorithm == name]) for curves in files]
        batch = f"{load.num_prompts_per_step} x {load.num_samples_per_prompt}"
        rate = f"{job.algorithm.learning_rate:g}".replace("e-0", "e-")
        peak = format_bytes(find_plan(job).ledger.host_peak().num_bytes)
        lines.append(f"| `{name}` | {batch} | {rate} | {load.num_steps} | {peak} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _lowest(curves: Sequence[Curve]) -> str:
    seeds = [curve.accuracy[-1] for curve in curves if curve.case not in CONTROLS]
    return f"{min(seeds):.1%} of {len(seeds)}" if seeds else "-"


_HEAD = """\
# Learning curves

A policy of 0.8 M parameters learns to sort five digits, in each job of
[examples/algorithms](../../examples/algorithms). The start policy gets the form right and every fourth answer. Shown is
the greedy accuracy on {num_heldout} held-out prompts.

An algorithm has passed when after its job's own number of steps every seed reaches **{target:.0%}**, and neither
control, learning rate 0 or rewards shuffled at random within the step, ends more than {drift:.0%} above the start.
"""

_FOOT = """\
Made by `python -m benchmarks.learning.curves`, `python -m benchmarks.learning.curves_in_process`,
`python -m benchmarks.learning.example_runs` and `python -m benchmarks.learning.against_trl`.
"""

_RUNS = """\
## On vLLM, DeepSpeed and Ray

`rlplan run` of each job. Controls that are left out here are in the next table.

"""

_IN_PROCESS = """\
## In one process

The same jobs with everything that an algorithm is made of, but transformers' model for the engine and torch's AdamW for
DeepSpeed (`benchmarks/learning/in_process.py`), on one core: the lowest accuracy of the seeds, and where the controls
end (learning rate 0 after five steps, for one of them is as all).

"""

MILESTONES = (0, 5, 10, 15, 20, 30, 40)

_BESIDE = """\
## GRPO beside TRL's

TRL 1.16's `GRPOTrainer` on the same policy, prompts in the same order, and rewards (our own rules judge both sides),
with the same settings: 32 prompts a step, 8 rollouts each, temperature 1, at most 12 tokens, one optimizer step a step,
AdamW at a constant 3e-5, betas 0.9 and 0.999, gradients clipped at 1, clipping 0.2, no KL, every sequence counts the
same, fp32. Both sample by themselves, so no rollout is the same on both sides.
rlplan's side is {ours}.

The curves agree when **at each measured step the means over the seeds are no further apart than the larger of the two
sides' spreads (highest less lowest seed)**, or than one point, about the standard error of 98 % on {num_heldout}
prompts. They do at {agreeing} of {all} steps.

| step | rlplan, mean | lowest to highest | TRL, mean | lowest to highest | apart | allowed | |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

![GRPO, rlplan and TRL](trl.png)
"""


def _table(curves: Sequence[Curve]) -> str:
    cases = [f"seed {seed}" for seed in SEEDS] + [*CONTROLS]
    by = {(curve.algorithm, curve.case): curve for curve in curves}
    lines = [f"| algorithm | steps | {' | '.join(cases)} | passed |", "| --- | --- | " + "--- | " * (len(cases) + 1)]
    for name in dict.fromkeys(curve.algorithm for curve in curves):
        own_curves = [by[name, case] for case in cases if (name, case) in by]
        cells = [f"{by[name, case].accuracy[-1]:.1%}" if (name, case) in by else "" for case in cases]
        verdict = "yes" if all(cells[: len(SEEDS)]) else "so far"
        verdict = verdict if all(curve.has_passed for curve in own_curves) else "**no**"
        link = f"[{name}](../../examples/algorithms/{name}.yaml)"
        lines.append(f"| {link} | {own_curves[0].steps[-1]} | {' | '.join(cells)} | {verdict} |")
    return "\n".join([*lines, "", "![accuracy of each algorithm, step by step](curves.png)", ""])


def _milestones(curves: Sequence[Curve]) -> str:
    """Lowest accuracy of the seeds after some steps, and where the controls end."""
    heads = " | ".join(str(step) for step in MILESTONES)
    lines = [f"| algorithm | {heads} | {' | '.join(CONTROLS)} |"]
    lines.append("| --- |" + " --- |" * (len(MILESTONES) + len(CONTROLS)))
    for name in dict.fromkeys(curve.algorithm for curve in curves):
        seeds = [curve for curve in curves if curve.algorithm == name and curve.case not in CONTROLS]
        if not seeds:
            continue
        ends = {curve.case: f"{curve.accuracy[-1]:.1%}" for curve in curves if curve.algorithm == name}
        lowest = {step: min(each) for step, *each in zip(seeds[0].steps, *(s.accuracy for s in seeds), strict=True)}
        cells = [f"{lowest[step]:.1%}" if step in lowest else "" for step in MILESTONES]
        cells += [ends.get(case, "") for case in CONTROLS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "![accuracy of each algorithm in one process](in_process.png)", ""])


def _write_comparison(beside: Beside) -> str:
    def format_side(values: Sequence[float]) -> str:
        return f"{fmean(values):.1%} | {min(values):.1%} to {max(values):.1%}"

    rows = [
        f"| {p.step} | {format_side(p.rlplan)} | {format_side(p.trl)} | {abs(p.difference):.1%} | {p.allowed:.1%} | "
        f"{'agree' if p.agrees else '**apart**'} |"
        for p in beside.points
    ]
    agreeing = sum(point.agrees for point in beside.points)
    ours = "in one process, as above" if beside.in_process else "`rlplan run`, on vLLM, DeepSpeed and Ray"
    return _BESIDE.format(ours=ours, num_heldout=NUM_HELDOUT, agreeing=agreeing, all=len(rows), rows="\n".join(rows))
