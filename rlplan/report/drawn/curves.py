"""Learning curves of one or several runs, and time against money, as data.

In: runs with labels, rows of a comparison. Out: data for assets/curves.js. Left out: memory (memory.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rlplan.report import style
from rlplan.report.dataframes import metrics, timings
from rlplan.report.evaluations import evaluations, known_values
from rlplan.report.run_folder import RunFolder

NUM_COLORS = 6
"""Number of colours for runs (--run-0 and so on in page.css), and of those for controls."""
_DASHES = ([4, 3], [1.5, 3], [7, 3, 2, 3])
"""Dash patterns of controls, in CSS pixels."""

PANELS = (
    ("KL to the reference", "kl/mean", "number"),
    ("Entropy of the policy", "policy/entropy", "number"),
    ("Clipped ratios", "policy/clip_fraction", "share"),
    ("Throughput, tokens/s", "throughput/tokens_per_sec", "number"),
    ("Largest log-prob difference, engine and trainer", "sync/logprob_difference_max", "number"),
)
"""Title, metric and format of each curve after the evaluations and the reward or the loss."""
_PROGRESS = (("Reward", "reward/mean", "number"), ("Loss", "policy/loss", "number"))
"""The panels of `progress_metric`: of jobs that generate, and of those that learn from given answers."""
LOGARITHMIC = "sync/logprob_difference_max"
"""Metric with a logarithmic axis: rounding and a stale engine differ by powers of ten."""


@dataclass(frozen=True)
class Curve:
    """A run in the learning chart."""

    label: str
    """Label that distinguishes it from the other runs."""
    frame: pd.DataFrame
    """Its metrics, one row per step."""
    color: str
    """Name of a colour in page.css."""
    dash: Sequence[float] | None
    """Dash pattern; None for a solid line."""
    note: str
    """Purpose of the run, where it is a control."""


def learning(runs: Sequence[RunFolder], labels: Sequence[str]) -> dict[str, Any]:
    """Learning chart: every evaluation that any run recorded, then six training curves; the first run's are thick."""
    curves = _curves(runs, labels)
    panels = [
        _panel(
            curves, f"{style.sentence(evaluation.title)} on held-out prompts", evaluation.metric,
            "share" if evaluation.is_share else "number", is_evaluation=True,
        )
        for evaluation in evaluations(runs)
    ]  # fmt: skip
    progress = {run.plan.job.progress_metric for run in runs}
    training = [*(panel for panel in _PROGRESS if panel[1] in progress), *PANELS]
    drawn = [_panel(curves, *panel) for panel in training]
    missing = [title for (title, *_), panel in zip(training, drawn, strict=True) if not panel]
    panels += drawn
    return {
        "type": "curves",
        "runs": [{"label": curve.label, "color": curve.color, "note": curve.note} for curve in curves],
        "panels": [panel for panel in panels if panel],
        "note": f"Not recorded: {', '.join(missing)}." if missing else "",
    }


def _curves(runs: Sequence[RunFolder], labels: Sequence[str]) -> list[Curve]:
    curves: list[Curve] = []
    num_controls = 0
    for run, label in zip(runs, labels, strict=True):
        frame = metrics(run).merge(timings(run), on="step", how="outer").sort_values("step")
        if run.is_control:
            color, dash = f"--control-{num_controls % 3}", _DASHES[num_controls % 3]
            num_controls += 1
        else:
            color, dash = f"--run-{(len(curves) - num_controls) % NUM_COLORS}", None
        curves.append(Curve(label, frame, color, dash, "control: must not learn" if run.is_control else ""))
    return curves


def _panel(
    curves: Sequence[Curve], title: str, key: str, form: str, *, is_evaluation: bool = False
) -> dict[str, Any] | None:
    """Chart of one metric; None where no number of it was recorded."""
    drawn = [index for index, curve in enumerate(curves) if key in curve.frame and len(known_values(curve.frame, key))]
    if not drawn:
        return None
    steps = sorted({int(step) for index in drawn for step in known_values(curves[index].frame, key)["step"]})
    series = [
        _series(curves[index], index, key, steps) | {"names_end": True, "has_points": is_evaluation} for index in drawn
    ]
    panel: dict[str, Any] = {
        "title": title, "format": form, "x": steps, "series": series, "is_wide": is_evaluation,
        "names_ends": True, "is_log": key == LOGARITHMIC and _is_positive(series),
    }  # fmt: skip
    if form == "share" and is_evaluation:
        panel["range"] = [0, 1.02]
    if key == "reward/mean" and drawn[0] == 0:
        _add_spread(panel, curves[0], steps)
    return panel


def _series(curve: Curve, index: int, key: str, steps: Sequence[int], name: str = "") -> dict[str, Any]:
    known = known_values(curve.frame, key)
    values = dict(zip(known["step"].astype(int), known[key].astype(float), strict=True))
    return {
        "run": index, "name": name or curve.label, "color": curve.color, "dash": curve.dash, "is_main": index == 0,
        "values": [None if (value := values.get(step)) is None else float(f"{value:.9g}") for step in steps],
    }  # fmt: skip


def _is_positive(series: Sequence[Mapping[str, Any]]) -> bool:
    return all(value is None or value > 0 for curve in series for value in curve["values"])


def _add_spread(panel: dict[str, Any], curve: Curve, steps: Sequence[int]) -> None:
    """Add the first run's standard deviation around its mean, and its extremes."""
    known = [name for name in ("reward/std", "reward/min", "reward/max") if name in curve.frame]
    for name in ("reward/min", "reward/max"):
        if name in known:
            panel["series"].append(
                _series(curve, 0, name, steps, name) | {"color": "--muted", "dash": [2, 2], "is_main": False}
            )
    if "reward/std" not in known:
        return
    frame = curve.frame.assign(low=curve.frame["reward/mean"] - curve.frame["reward/std"],
                               high=curve.frame["reward/mean"] + curve.frame["reward/std"])  # fmt: skip
    for key, limit in (("low", "reward/min"), ("high", "reward/max")):
        if limit in known:
            frame[key] = frame[key].clip(**{"lower" if key == "low" else "upper": frame[limit]})
    spread = Curve(curve.label, frame, curve.color, None, "")
    at = len(panel["series"])
    for key, words in (("high", "one standard deviation above"), ("low", "one standard deviation below")):
        panel["series"].append(_series(spread, 0, key, steps, words) | {"is_main": False, "is_faint": True})
    panel["band"] = [at, at + 1]


def time_against_money(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Chart of the seconds of a step against its dollars; lower left is better. Empty where nothing has a price."""
    priced = [row for row in rows if row["step_s"] and row["dollars_per_step"] and not row["why"]]
    if not priced:
        return {}
    names = list({row["name"] for row in priced})
    points = [
        {
            "name": f"{row['name']}, {row['devices']}" if len(names) > 1 else row["devices"],
            "seconds": float(row["step_s"]),
            "dollars": float(row["dollars_per_step"]),
            "is_on_front": bool(row["is_on_front"]),
        }
        for row in sorted(priced, key=lambda row: float(row["step_s"]))
    ]
    title = "Time and cost of a step" if len(names) > 1 else f"{names[0]}: time and cost of a step"
    return {"type": "money", "title": title, "points": points, "note": ""}
