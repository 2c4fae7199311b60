"""Learning curves: each algorithm in three seeds, beside two controls that must not learn.

In: examples/algorithms/*.yaml. Out: reports/learning/: curves.json, curves.png and a page that says who passed.
`python -m benchmarks.learning_curves [--algorithms grpo ppo] [--seeds 0 1 2] [--no-controls] [--keep]`; a run takes one
to two minutes on two cores, all of them two hours. --keep takes runs that are there already.

Passed: every seed reaches TARGET of the held-out prompts greedily after the job's last step, and neither control is
more than DRIFT above the start policy.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.timed_runs import ROOT, RUNS, read_run, run_job

JOBS = {path.stem: path for path in sorted((ROOT / "examples" / "algorithms").glob("*.yaml"))}
REPORTS = ROOT / "reports" / "learning"
TARGET = 0.9
DRIFT = 0.1
EVERY = 5
INTRODUCTION = (
    "Greedy accuracy on 256 held-out prompts of the sorting task after the job's last step. Every seed has to reach "
    "{target:.0%}; a control may be {drift:.0%} above the start policy at most, which is right in {start:.1%}."
)
CONTROLS = {
    "learning rate 0": ("algorithm.learning_rate=0", "algorithm.value_learning_rate=0"),
    "shuffled rewards": ("controls.shuffle_rewards=true",),
}


@dataclass(frozen=True)
class Curve:
    """Greedy held-out accuracy before training and after every so many steps."""

    algorithm: str
    case: str
    every: int
    accuracy: tuple[float, ...]


def main() -> int:
    """Run what is asked for, then write the report of everything that there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    cases: dict[str, tuple[str, ...]] = {f"seed {seed}": (f"seed={seed}",) for seed in asked.seeds}
    cases |= {} if asked.no_controls else CONTROLS
    curves = [_curve(name, case, keys, asked.keep) for name in asked.algorithms for case, keys in cases.items()]
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / "curves.json").write_text(json.dumps([asdict(curve) for curve in curves], indent=1) + "\n", "utf-8")
    (REPORTS / "README.md").write_text(_page(curves), "utf-8")
    _draw(curves, REPORTS / "curves.png")
    return 0 if all(passed(curve) for curve in curves) else 1


def passed(curve: Curve) -> bool:
    """Whether a curve is where it must be: at the target, or where it began."""
    if curve.case in CONTROLS:
        return curve.accuracy[-1] <= curve.accuracy[0] + DRIFT
    return curve.accuracy[-1] >= TARGET


def _curve(name: str, case: str, overrides: tuple[str, ...], keep: bool) -> Curve:
    folder = f"learning-{name}-{case.replace(' ', '-')}"
    if keep and _is_finished(RUNS / folder):
        run = read_run(folder, RUNS / folder)
    else:
        run = run_job(folder, str(JOBS[name].relative_to(ROOT)), f"workload.evaluate_every={EVERY}", *overrides)
    return Curve(name, case, EVERY, tuple(run.accuracy))


def _is_finished(folder: Path) -> bool:
    status = folder / "status.json"
    return status.exists() and json.loads(status.read_text("utf-8")).get("state") == "finished"


def _page(curves: list[Curve]) -> str:
    cases = list(dict.fromkeys(curve.case for curve in curves))
    by = {(curve.algorithm, curve.case): curve for curve in curves}
    lines = [
        "# Learning curves",
        "",
        INTRODUCTION.format(target=TARGET, drift=DRIFT, start=curves[0].accuracy[0]),
        "",
        f"| algorithm | steps | {' | '.join(cases)} | passed |",
        "| --- | --- | " + "--- | " * (len(cases) + 1),
    ]
    for name in dict.fromkeys(curve.algorithm for curve in curves):
        mine = [by[name, case] for case in cases if (name, case) in by]
        steps = (len(mine[0].accuracy) - 1) * mine[0].every
        cells = " | ".join(f"{curve.accuracy[-1]:.1%}" for curve in mine)
        right = all(passed(curve) for curve in mine)
        lines.append(
            f"| [{name}](../../examples/algorithms/{name}.yaml) | {steps} | {cells} | {'yes' if right else 'no'} |"
        )
    return "\n".join([*lines, "", "![curves](curves.png)", "", "Made by `python -m benchmarks.learning_curves`.", ""])


def _draw(curves: list[Curve], path: Path) -> None:
    from rlplan.report.style import ACCENT, BAD, MUTED, new_figure, save_png

    names = list(dict.fromkeys(curve.algorithm for curve in curves))
    figure = new_figure(10, 2.2 * -(-len(names) // 4))
    colors = dict(zip(CONTROLS, (MUTED, BAD), strict=True))
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(-(-len(names) // 4), 4, place)
        for curve in curves:
            if curve.algorithm == name:
                steps = [index * curve.every for index in range(len(curve.accuracy))]
                axes.plot(steps, curve.accuracy, color=colors.get(curve.case, ACCENT), linewidth=1)
        axes.set_title(name, fontsize=8)
        axes.set_ylim(0, 1)
        axes.axhline(TARGET, color=MUTED, linewidth=0.5, linestyle=":")
    figure.tight_layout()
    save_png(figure, path)


if __name__ == "__main__":
    sys.exit(main())
