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
from benchmarks.texts import format_table, read_texts
from rlplan.planner.search import find_plan
from rlplan.spec.files.job_file import load_job
from rlplan.units import format_bytes

TEXTS = read_texts(__file__)
ALGORITHMS_PAGE = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- reached: written by benchmarks/learning/page.py -->\n", "<!-- end of reached -->\n"


def write_page() -> None:
    """README.md and the charts, from what there is."""
    from benchmarks.learning.charts import draw_comparison, draw_curves  # matplotlib, which nothing else here needs

    curves, in_process, beside = read_curves(CURVES), read_curves(IN_PROCESS), read_comparison()
    parts = [TEXTS["head"].format(target=TARGET, drift=DRIFT, num_heldout=NUM_HELDOUT)]
    if curves:
        parts.append(TEXTS["runs"] + _table(curves))
        draw_curves(curves, REPORTS / "curves.png")
    if in_process:
        parts.append(TEXTS["in_process"] + _milestones(in_process))
        draw_curves(in_process, REPORTS / "in_process.png")
    if examples := read_examples():
        parts.append(examples_section(examples))
    if beside is not None:
        parts.append(_write_comparison(beside))
        draw_comparison(beside, REPORTS / "trl.png")
    (REPORTS / "README.md").write_text("\n".join([*parts, TEXTS["foot"]]), "utf-8")
    before, rest = ALGORITHMS_PAGE.read_text("utf-8").split(BEGIN)
    ALGORITHMS_PAGE.write_text(f"{before}{BEGIN}{list_reached()}{END}{rest.split(END)[1]}", "utf-8")


def list_reached() -> str:
    """Each algorithm's job, its memory, and the lowest accuracy of its seeds: in one process, and on the runtime."""
    rows = []
    files = [read_curves(IN_PROCESS), read_curves(CURVES)]
    for name, path in JOBS.items():
        job = load_job(path)
        load = job.workload
        cells = [_lowest([curve for curve in curves if curve.algorithm == name]) for curves in files]
        batch = f"{load.num_prompts_per_step} x {load.num_samples_per_prompt}"
        rate = f"{job.algorithm.learning_rate:g}".replace("e-0", "e-")
        peak = format_bytes(find_plan(job).ledger.host_peak().num_bytes)
        rows.append((f"`{name}`", batch, rate, str(load.num_steps), peak, *cells))
    head = ("algorithm", "prompts x rollouts", "learning rate", "steps", "memory", "in one process", "on the runtime")
    return format_table(head, rows) + "\n"


def _lowest(curves: Sequence[Curve]) -> str:
    seeds = [curve.accuracy[-1] for curve in curves if curve.case not in CONTROLS]
    return f"{min(seeds):.1%} of {len(seeds)}" if seeds else "-"


MILESTONES = (0, 5, 10, 15, 20, 30, 40)


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
    rows = []
    for name in dict.fromkeys(curve.algorithm for curve in curves):
        seeds = [curve for curve in curves if curve.algorithm == name and curve.case not in CONTROLS]
        if not seeds:
            continue
        ends = {curve.case: f"{curve.accuracy[-1]:.1%}" for curve in curves if curve.algorithm == name}
        lowest = {step: min(each) for step, *each in zip(seeds[0].steps, *(s.accuracy for s in seeds), strict=True)}
        cells = [f"{lowest[step]:.1%}" if step in lowest else "" for step in MILESTONES]
        cells += [ends.get(case, "") for case in CONTROLS]
        rows.append((name, *cells))
    table = format_table(("algorithm", *map(str, MILESTONES), *CONTROLS), rows)
    return f"{table}\n\n![accuracy of each algorithm in one process](in_process.png)\n"


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
    return TEXTS["beside"].format(
        ours=ours, num_heldout=NUM_HELDOUT, agreeing=agreeing, all=len(rows), rows="\n".join(rows)
    )
