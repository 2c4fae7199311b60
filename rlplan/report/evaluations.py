"""Evaluations: metrics of runs on held-out prompts, before and after training.

In: runs and their metrics. Out: Evaluations, values before and after, and a sentence where there are none.
Left out: drawing (curves.py), tiles and tables (html.py).
"""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from rlplan.report import dataframes, style
from rlplan.report.run_folder import RunFolder
from rlplan.spec.parts.rewards import EVALUATION_PREFIX, Evaluation


def evaluations(runs: Sequence[RunFolder]) -> tuple[Evaluation, ...]:
    """Collect the evaluations that runs recorded: those of their jobs, then all others that begin with `evaluate/`."""
    recorded = {
        name: None
        for run in runs
        for row in run.metrics
        for name, value in row.items()
        if name.startswith(EVALUATION_PREFIX) and value is not None
    }
    known = {evaluation.metric: evaluation for run in runs for evaluation in run.plan.job.evaluations}
    others = (name.removeprefix(EVALUATION_PREFIX) for name in recorded if name not in known)
    return (
        *(evaluation for metric, evaluation in known.items() if metric in recorded),
        *(Evaluation(name, name, name, is_share=False) for name in others),
    )


def outcome(run: RunFolder, evaluation: Evaluation) -> dict[str, Any]:
    """One metric of one run, before the first and after the last evaluated step; unknown values are None."""
    frame = dataframes.metrics(run)
    rows = known_values(frame, evaluation.metric) if evaluation.metric in frame else frame.iloc[:0]
    before = float(rows[evaluation.metric].iloc[0]) if len(rows) and rows["step"].iloc[0] == 0 else None
    after = float(rows[evaluation.metric].iloc[-1]) if len(rows) and rows["step"].iloc[-1] > 0 else None
    return {
        "metric": evaluation.metric,
        "title": evaluation.title,
        "is_share": evaluation.is_share,
        "before": before,
        "after": after,
        "change": None if before is None or after is None else after - before,
    }


def known_values(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Steps and values with a finite number, because others have no place on an axis or in JSON."""
    return frame[["step", metric]].replace([math.inf, -math.inf], math.nan).dropna()


def missing(run: RunFolder) -> str:
    """Explain why a run has no recorded evaluation: the missing metrics, and when a run writes them."""
    job = run.plan.job
    names = ", ".join(evaluation.metric for evaluation in job.evaluations)
    if not names:
        return (
            "No evaluation on held-out prompts: the job has neither a rule nor an environment that judges responses, "
            "and learned rewards are not evaluated."
        )
    every = job.workload.evaluate_every
    return (
        f"No evaluation on held-out prompts was recorded. Missing: {names}. A run writes these before the first step, "
        f"after every {every} steps and at the end, unless all rewards of an evaluation fail."
    )


def value_text(value: float, *, is_share: bool) -> str:
    """Format a value: shares in percent, other numbers with four digits.

    >>> value_text(0.957, is_share=True), value_text(-12.34567, is_share=False)
    ('95.7 %', '\u221212.35')
    """
    return style.format_percent(value) if is_share else f"{value:.4g}".replace("-", "\u2212")


def change_text(change: float, *, is_share: bool) -> str:
    """Format a change; changes of a share are in percentage points.

    >>> change_text(0.707, is_share=True), change_text(-2.5, is_share=False)
    ('+70.7 points', '\u22122.5')
    """
    return (f"{100 * change:+.1f} points" if is_share else f"{change:+.4g}").replace("-", "\u2212")
