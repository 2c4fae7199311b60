"""Results of the examples of several stages, with tools and of 62 M parameters: kept between runs, shown as a section.

In: run folders. Out: examples.json in reports/learning, a curve a line, and its part of the page.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.learning.record import CONTROLS, DRIFT, LEARNING_RATE_0, REPORTS, SHUFFLED
from benchmarks.texts import read_texts

EXAMPLES_FILE = REPORTS / "examples.json"
LIFT = 0.1
"""How far above its start each stage has to end, of every seed, or half of what is missing: three standard errors of
256 prompts."""
RESUMED = "seed 0, resumed"
"""Interrupted in its second stage by a signal, and resumed: a case that must end as seed 0 does, to the bit."""
GREEDY, PAIRS = "greedy_accuracy", "pair_accuracy"
GOALS: dict[tuple[str, str], tuple[str, float, float]] = {
    ("three-stage", "sft"): (GREEDY, 1.0, 0.0),
    ("three-stage", "reward"): (PAIRS, 1.0, 0.0),
    ("three-stage", "ppo"): (GREEDY, 1.0, 0.0),
    ("tools", ""): (GREEDY, 0.4, 0.9),
    ("from-random-weights", "sft"): (GREEDY, 1.0, 0.0),
    ("from-random-weights", "grpo"): (GREEDY, 1.0, 0.0),
}
"""The metric of each example and stage, the value its start must be below, and the value its end must be above."""


@dataclass(frozen=True)
class ExampleCurve:
    """A held-out figure before training and after some steps. calls: of tools in training, by how they ended."""

    example: str
    stage: str
    case: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def has_passed(self) -> bool:
        """Whether it got better as it must, or, of a control, did not."""
        first, last = self.values[0], self.values[-1]
        if self.case in CONTROLS:
            return last <= first + DRIFT
        _, below, above = GOALS[self.example, self.stage]
        return first < below and last > above and last >= first + min(LIFT, (1 - first) / 2)


def read_run(folder: Path, example: str, stage: str, case: str) -> ExampleCurve:
    """The held-out accuracy and the tool calls in a run's metrics."""
    metric = GOALS[example, stage][0]
    rows = [json.loads(line) for line in (folder / stage / "metrics.jsonl").read_text("utf-8").splitlines()]
    evaluated = [(row["step"], row[f"evaluate/{metric}"]) for row in rows if f"evaluate/{metric}" in row]
    steps, values = zip(*evaluated, strict=True)
    calls: Counter[str] = Counter()
    for row in rows:
        calls.update({key.removeprefix("tools/"): row[key] for key in row if key.startswith("tools/")})
    counts = {kind: count for kind, count in calls.items() if kind != "calls_mean" and count}
    return ExampleCurve(example, stage, case, steps, values, counts)


def keep_curves(curves: Sequence[ExampleCurve]) -> None:
    """Keep these, instead of earlier ones of the same case."""
    curves_by_key = {(each.example, each.stage, each.case): each for each in (*read_examples(), *curves)}
    order = [*GOALS]
    rows = sorted(curves_by_key.values(), key=lambda each: (order.index((each.example, each.stage)), _place(each.case)))
    REPORTS.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(curve)) for curve in rows)
    EXAMPLES_FILE.write_text(f"[\n{lines}\n]\n", "utf-8")


def is_as_seed_0(curve: ExampleCurve, curves: Sequence[ExampleCurve]) -> bool:
    """Whether a resumed run has the very figures of the one that nobody interrupted; true of any other case."""
    ours = (curve.example, curve.stage, "seed 0")
    return curve.case != RESUMED or any(
        (each.example, each.stage, each.case) == ours and each.values == curve.values for each in curves
    )


def _place(case: str) -> tuple[bool, str]:
    return case in CONTROLS, case


def read_examples() -> list[ExampleCurve]:
    """The kept curves; none if there is no file."""
    rows = json.loads(EXAMPLES_FILE.read_text("utf-8")) if EXAMPLES_FILE.exists() else []
    return [ExampleCurve(**row | {key: tuple(row[key]) for key in ("steps", "values")}) for row in rows]


def examples_section(curves: Sequence[ExampleCurve]) -> str:
    """A row a stage and case, and what became of calls of tools."""
    lines = ["| job | stage | case | steps | start | on the way | end | |", "| --- " * 8 + "|"]
    for curve in curves:
        link = f"[{curve.example}](../../examples/{curve.example}.yaml)"
        first, *between, last = (f"{value:.1%}" for value in curve.values)
        verdict = "as it must" if curve.has_passed and is_as_seed_0(curve, curves) else "**not as it must**"
        cells = (curve.stage, curve.case, str(curve.steps[-1]), first, ", ".join(between), last, verdict)
        lines.append(f"| {link} | {' | '.join(cells)} |")
    tools = [curve for curve in curves if curve.calls]
    call_lines = [f"- {curve.case}: {', '.join(f'{n} {kind}' for kind, n in curve.calls.items())}" for curve in tools]
    calls = [
        "",
        "Calls of tools in training, by how they ended ([kinds](../../docs/runtime/environments.md#tools)):",
        "",
    ]
    names = {"learning_rate_0": LEARNING_RATE_0, "shuffled": SHUFFLED, "resumed": RESUMED}
    head = read_texts(__file__)["head"].format(lift=LIFT, drift=DRIFT, **names)
    return head + "\n".join([*lines, *(calls + call_lines if call_lines else []), ""])
