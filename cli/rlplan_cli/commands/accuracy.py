"""`rlplan accuracy [FILE]`: measured points against what the formulas say of them."""

from pathlib import Path
from typing import Annotated

import typer

from rlplan.accuracy.compare import PREDICTED, AccuracyReport, Comparison, KindSummary, compare
from rlplan.accuracy.files.reading import published_points, read_points
from rlplan_cli.options import AsJson
from rlplan_cli.render.terminal import NARROW, new_table, note, print_json, stdout

DASH = "-"
SHOWN_OF_A_KIND = 5
"""Points of a kind that are shown, those with the largest errors, unless all are asked for."""


def command(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Points as JSON, a latency CSV, measured jobs, a vLLM start-up log or AgileRL's fixtures; "
            "without one: the bundled published measurements.",
            show_default=False,
        ),
    ] = None,
    shows_all: Annotated[
        bool, typer.Option("--all", help=f"Every point, not the {SHOWN_OF_A_KIND} largest errors of a kind.")
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
    every = [point for point in report.points if point.status == PREDICTED]
    predicted = every if shows_all else _largest_errors(every)
    if not predicted:
        return
    title = "Points" if len(predicted) == len(every) else f"Points: the {SHOWN_OF_A_KIND} largest errors of each kind"
    wide = stdout.width >= NARROW
    names = ["point", "predicted", "measured", "error", *(["kind", "unit"] if wide else [])]
    table = new_table(*names, title=title, left=("point", "kind", "unit"))
    for point in sorted(predicted, key=lambda point: point.kind):
        cells = [point.id, _number(point.predicted), _measured(point), _percent(point.relative_error)]
        table.add_row(*cells, *([point.kind, point.unit] if wide else []))
    stdout.print(table)


def _largest_errors(points: list[Comparison]) -> list[Comparison]:
    """Of each kind those with the largest errors, in the order in which they stand."""
    kept: set[str] = set()
    for kind in {point.kind for point in points}:
        mine = [point for point in points if point.kind == kind]
        kept |= {
            point.id for point in sorted(mine, key=lambda point: -abs(point.relative_error or 0.0))[:SHOWN_OF_A_KIND]
        }
    return [point for point in points if point.id in kept]


def _show_refusals(report: AccuracyReport) -> None:
    """Why points were not predicted, a line for each reason of a kind."""
    reasons: dict[tuple[str, str], list[Comparison]] = {}
    for point in report.points:
        if point.status != PREDICTED:
            reasons.setdefault((point.kind, point.reason or ""), []).append(point)
    if not reasons:
        return
    table = new_table("kind", "points", "why not predicted", title="Refused", left=("kind", "why not predicted"))
    for (kind, reason), points in sorted(reasons.items()):
        table.add_row(kind, str(len(points)), reason)
    stdout.print(table)


def _show_without_effect(report: AccuracyReport) -> None:
    """Settings of predicted points that no formula needed; any other that is not read refuses its point."""
    if not report.without_effect:
        return
    table = new_table("kind", "settings", "why", title="Settings without effect", left=("kind", "settings", "why"))
    for (kind, why), names in sorted(report.without_effect.items()):
        table.add_row(kind, ", ".join(names), why)
    stdout.print(table)


def _show_assumed(report: AccuracyReport) -> None:
    """What predictions took for settings that points do not state, and of how many points."""
    if not report.assumed:
        return
    left = ("kind", "setting", "taken")
    table = new_table("kind", "setting", "taken", "points", title="Assumed where nothing is stated", left=left)
    for (kind, name, value), number in sorted(report.assumed.items()):
        table.add_row(kind, name, value, str(number))
    stdout.print(table)


def _show_pairs(report: AccuracyReport) -> None:
    """Serving latencies: the mean error of each pair of model and GPU."""
    if not report.pairs:
        return
    table = new_table("pair", "kind", "points", "mean", "bias", title="Serving latency", left=("pair", "kind"))
    for pair in sorted(report.pairs, key=lambda pair: (pair.kind, pair.pair)):
        table.add_row(pair.pair, pair.kind, str(pair.n), _percent(pair.mean_abs, sign=False), _percent(pair.bias))
    stdout.print(table)


def _show_summary(report: AccuracyReport) -> None:
    names = ("kind", "points", "predicted", "median", "largest", "bias", "inside")
    table = new_table(*names, title="Absolute error by kind; inside: share of the points within their intervals")
    for kind, summary in sorted(report.summary.items()):
        table.add_row(kind, *_summary_cells(summary))
    stdout.print(table)
    total, done = len(report.points), sum(point.status == PREDICTED for point in report.points)
    note(f"{done} of {total} points predicted; --all shows every point, --json every digit")


def _summary_cells(summary: KindSummary) -> list[str]:
    errors = [_percent(value, sign=False) for value in (summary.median_abs, summary.max_abs)]
    inside = DASH if summary.inside is None else f"{summary.inside:.0%}"
    return [str(summary.n), str(summary.predicted), *errors, _percent(summary.bias), inside]


def _measured(point: Comparison) -> str:
    if isinstance(point.measured, tuple):
        return " to ".join(_number(value) for value in point.measured)
    return _number(point.measured)


def _number(value: float | str | None) -> str:
    """Five figures, thousands apart; words as they are.

    >>> _number(163184.0), _number(14.95948), _number("exhausted")
    ('163,184', '14.959', 'exhausted')
    """
    if value is None or isinstance(value, str):
        return value or DASH
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.5g}"


def _percent(value: float | None, *, sign: bool = True) -> str:
    """
    >>> _percent(-0.0123), _percent(0.5, sign=False), _percent(None)
    ('-1.23 %', '50.00 %', '-')
    """
    if value is None:
        return DASH
    return f"{value * 100:+.2f} %" if sign else f"{value * 100:.2f} %"
