"""`rlplan accuracy [FILE]`: compares predictions of the formulas with measured points."""

from pathlib import Path
from typing import Annotated

import typer

from rlplan.accuracy.compare import PREDICTED, AccuracyReport, Comparison, KindSummary, compare
from rlplan.accuracy.files.reading import published_points, read_points
from rlplan_cli.options import AsJson
from rlplan_cli.render.terminal import NARROW, note, print_json, show_table, stdout

DASH = "-"
NUM_SHOWN = 5
"""Points of each kind that are shown without --all: those with the largest errors."""


def command(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Measured points: JSON, a latency CSV, measured jobs, a vLLM start-up log or AgileRL's fixtures. "
            "Default: the bundled published measurements."
        ),
    ] = None,
    shows_all: Annotated[
        bool, typer.Option("--all", help=f"Show every point, not only the {NUM_SHOWN} largest errors of each kind.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the formulas with published or your own measurements."""
    report = compare(published_points() if file is None else read_points(file))
    if as_json:
        print_json(report.as_json())
        return
    _show_points(report, shows_all=shows_all or file is not None)
    _show_refusals(report)
    if shows_all or file is not None:
        _show_without_effect(report)
        _show_assumed(report)
    _show_pairs(report)
    _show_summary(report)


def _show_points(report: AccuracyReport, *, shows_all: bool) -> None:
    predicted = [point for point in report.points if point.status == PREDICTED]
    shown = predicted if shows_all else _largest_errors(predicted)
    title = "Points" if len(shown) == len(predicted) else f"Points: the {NUM_SHOWN} largest errors of each kind"
    wide = stdout.width >= NARROW
    names = ["point", "predicted", "measured", "error", *(["kind", "unit"] if wide else [])]
    rows = [
        [point.id, _format_number(point.predicted), _format_measured(point), _format_percent(point.relative_error)]
        + ([point.kind, point.unit] if wide else [])
        for point in sorted(shown, key=lambda point: point.kind)
    ]
    show_table(names, rows, title, ("point", "kind", "unit"))


def _largest_errors(points: list[Comparison]) -> list[Comparison]:
    """The points of each kind with the largest errors, in their original order."""
    ids: set[str] = set()
    for kind in {point.kind for point in points}:
        of_kind = [point for point in points if point.kind == kind]
        ids |= {point.id for point in sorted(of_kind, key=lambda point: -abs(point.relative_error or 0.0))[:NUM_SHOWN]}
    return [point for point in points if point.id in ids]


def _show_refusals(report: AccuracyReport) -> None:
    """Show why points were not predicted, one row per kind and reason."""
    reasons: dict[tuple[str, str], list[Comparison]] = {}
    for point in report.points:
        if point.status != PREDICTED:
            reasons.setdefault((point.kind, point.reason or ""), []).append(point)
    rows = [(kind, str(len(points)), reason) for (kind, reason), points in sorted(reasons.items())]
    show_table(("kind", "points", "reason"), rows, "Not predicted", ("kind", "reason"))


def _show_without_effect(report: AccuracyReport) -> None:
    """Show settings of predicted points that no formula uses. Any other unused setting would refuse its point."""
    rows = [(kind, ", ".join(names), why) for (kind, why), names in sorted(report.without_effect.items())]
    columns = ("kind", "settings", "reason")
    show_table(columns, rows, "Settings without effect", columns)


def _show_assumed(report: AccuracyReport) -> None:
    """Show the values that were assumed for missing settings, with the number of points."""
    rows = [(*taken, str(number)) for taken, number in sorted(report.assumed.items())]
    left = ("kind", "setting", "value")
    show_table((*left, "points"), rows, "Assumed values of missing settings", left)


def _show_pairs(report: AccuracyReport) -> None:
    """Show the mean error of serving latencies for each pair of model and GPU."""
    rows = [
        (pair.pair, pair.kind, str(pair.n), _format_percent(pair.mean_abs, sign=False), _format_percent(pair.bias))
        for pair in sorted(report.pairs, key=lambda pair: (pair.kind, pair.pair))
    ]
    show_table(("pair", "kind", "points", "mean", "bias"), rows, "Serving latency", ("pair", "kind"))


def _show_summary(report: AccuracyReport) -> None:
    names = ("kind", "points", "predicted", "median", "largest", "bias", "inside")
    rows = [(kind, *_summary_cells(summary)) for kind, summary in sorted(report.summary.items())]
    show_table(names, rows, "Absolute error by kind (inside: share of points within their intervals)")
    total, done = len(report.points), sum(point.status == PREDICTED for point in report.points)
    note(f"{done} of {total} points predicted; --all shows every point, --json the full data")


def _summary_cells(summary: KindSummary) -> list[str]:
    errors = [_format_percent(value, sign=False) for value in (summary.median_abs, summary.max_abs)]
    inside = DASH if summary.inside is None else f"{summary.inside:.0%}"
    return [str(summary.n), str(summary.predicted), *errors, _format_percent(summary.bias), inside]


def _format_measured(point: Comparison) -> str:
    if isinstance(point.measured, tuple):
        return " to ".join(_format_number(value) for value in point.measured)
    return _format_number(point.measured)


def _format_number(value: float | str | None) -> str:
    """Format a number with five significant digits and thousands separators; words stay as they are.

    >>> _format_number(163184.0), _format_number(14.95948), _format_number("exhausted")
    ('163,184', '14.959', 'exhausted')
    """
    if value is None or isinstance(value, str):
        return value or DASH
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.5g}"


def _format_percent(value: float | None, *, sign: bool = True) -> str:
    """Format a share as a percentage.

    >>> _format_percent(-0.0123), _format_percent(0.5, sign=False), _format_percent(None)
    ('-1.23 %', '50.00 %', '-')
    """
    if value is None:
        return DASH
    return f"{value * 100:+.2f} %" if sign else f"{value * 100:.2f} %"
