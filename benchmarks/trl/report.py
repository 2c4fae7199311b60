"""The report of the comparison with TRL: paired steps, medians and spreads, as a page and a chart.

In: trl.json, as comparison.py leaves it. Out: trl.md and trl.png beside it.
Step n has the same rollouts' lengths on both sides, so the two are compared step by step.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import ACCENT, MUTED, RC, new_figure, save_png

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "reports" / "runtime"
WORK = ("rollout", "score", "train", "sync")
SHAPES = {
    "long-tail": "8 prompts of 24 tokens, 8 rollouts each, lengths log-normal (median 80, sigma 0.7) up to 256 tokens.",
    "even": "8 prompts of 128 tokens, 4 rollouts each, all of 64 tokens.",
}


def read_results() -> dict[str, Any]:
    """The results in trl.json; none if there is no file."""
    path = REPORT / "trl.json"
    results: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return results


def select_timed_steps(side: Mapping[str, Any]) -> Sequence[Mapping[str, float]]:
    """The steps that are timed: all but the first, unless it is the only one."""
    steps: Sequence[Mapping[str, float]] = side["steps"]
    return steps[1:] or steps


def values(side: Mapping[str, Any], key: str) -> list[float]:
    """The key's value in each timed step."""
    return [step[key] for step in select_timed_steps(side)]


def rate(side: Mapping[str, Any]) -> float:
    """Generated tokens by seconds of the whole step: the median step's."""
    return median(step["num_tokens"] / step["step_s"] for step in select_timed_steps(side))


def speedups(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[float]:
    """TRL's seconds by ours, step by step. Raises: AssertionError where a step had other tokens on the two sides."""
    pairs = list(zip(select_timed_steps(ours), select_timed_steps(theirs), strict=True))
    assert all(our["num_tokens"] == their["num_tokens"] for our, their in pairs), "the steps are not the same"
    return [their["step_s"] / our["step_s"] for our, their in pairs]


def idle_share(ours: Mapping[str, Any]) -> float:
    """Share of our steps in which no process generates, scores, trains or takes weights."""
    return 1 - sum(values(ours, "work_s")) / sum(values(ours, "step_s"))


def write_report(results: Mapping[str, Any]) -> None:
    """The page, and its chart."""
    jobs = {name: job for name, job in results["jobs"].items() if "rlplan" in job and "trl" in job}
    text = (ROOT / "benchmarks" / "trl" / "report.md").read_text(encoding="utf-8")
    shapes = "\n".join(f"- *{name}*: {SHAPES[name]}" for name in jobs)
    for name, section in {
        "shapes": shapes,
        "tables": _tables(jobs),
        "tried": _list_tried(results),
        "verdicts": _verdicts(jobs),
    }.items():
        text = text.replace(f"<{name}>", section)
    threads = next(iter(jobs.values()))["rlplan"]["threads"]
    (REPORT / "trl.md").write_text(text.replace("<threads>", str(threads)), encoding="utf-8")
    draw(jobs, REPORT / "trl.png")


def _tables(jobs: Mapping[str, Any]) -> str:
    lines = ["| job | side | step, s | generation, s | tokens/s |", "| --- | --- | --- | --- | --- |"]
    for name, job in jobs.items():
        for title, side in _sides(job).items():
            cells = (spread(values(side, key)) for key in ("step_s", "rollout_s"))
            lines.append(f"| {name} | {title} | {' | '.join(cells)} | {rate(side):.0f} |")
    return "\n".join(lines)


def _sides(job: Mapping[str, Any]) -> dict[str, Any]:
    theirs = job["trl"]
    return {
        "rlplan, bfloat16": job["rlplan"],
        f"TRL, {theirs['dtype']}, {theirs['batch_size']} rollouts a pass": theirs,
    }


def spread(numbers: Sequence[float], digits: int = 2) -> str:
    """Median, and lowest to highest."""
    return f"{median(numbers):.{digits}f} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


def _verdicts(jobs: Mapping[str, Any]) -> str:
    lines = []
    for name, job in jobs.items():
        ours, times = job["rlplan"], speedups(job["rlplan"], job["trl"])
        parts = ", ".join(f"{phase} {median(values(ours, phase + '_s')):.2f} s" for phase in WORK)
        lines.append(
            f"- **{name}: rlplan is {median(times):.1f} times as fast as TRL's fastest setting**, the median of "
            f"{len(times)} timed steps ({min(times):.1f} to {max(times):.1f}). Medians of rlplan's step: {parts}; "
            f"outside of these {idle_share(ours):.1%}."
        )
    return "\n".join(lines)


def _list_tried(results: Mapping[str, Any]) -> str:
    tried = results.get("tried", {})
    lines = ["| setting | step, s | generation, s | tokens/s |", "| --- | --- | --- | --- |"]
    for name, side in sorted(tried.items(), key=lambda each: -rate(each[1])):
        step, rollout = (median(values(side, key)) for key in ("step_s", "rollout_s"))
        lines.append(f"| {name} | {step:.1f} | {rollout:.1f} | {rate(side):.0f} |")
    return "\n".join(lines)


def draw(jobs: Mapping[str, Any], path: Path) -> None:
    """Seconds of a median step, generation apart, a bar a side."""
    import matplotlib as mpl

    rows = [(f"{name}: {title}", side) for name, job in jobs.items() for title, side in _sides(job).items()][::-1]
    names = [name for name, _ in rows]
    rollout_s = [median(values(side, "rollout_s")) for _, side in rows]
    rest = [median(values(side, "step_s")) - each for (_, side), each in zip(rows, rollout_s, strict=True)]
    with mpl.rc_context(RC):
        figure = new_figure(7, 0.42 * len(rows) + 0.9)
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot()
        axes.barh(names, rollout_s, color=ACCENT, label="generation")
        axes.barh(names, rest, left=rollout_s, color=MUTED, label="everything else")
        axes.set_xlabel("seconds of the median step")
        axes.legend(loc="lower right")
        save_png(figure, path)
