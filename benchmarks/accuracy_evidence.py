"""Regenerates reports/accuracy: every bundled point, its prediction, and a picture of the two by kind.

In: the bundled points, benchmarks/accuracy_misses.json (why points are missed, written by hand). Out: a short
README.md, scatter.png, accuracy.json, tables as CSV (points, intervals, pairs of serving latency, constants), and the
table of HEADLINE_PAGES. `make accuracy` calls it; it takes seconds and needs no network and no GPU.
"""

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib as mpl

from benchmarks.texts import format_table, read_texts

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from benchmarks.constants.intervals import list_residuals, write_errors
from benchmarks.constants.left_out import read_left_out
from benchmarks.constants.rules_of_thumb import rule_of_thumb
from benchmarks.constants.trainers import HEAD, left_out
from benchmarks.figures import FAINT, INK, MUTED, RC
from rlplan.accuracy.compare import PREDICTED, AccuracyReport, Comparison, compare, relative_error
from rlplan.accuracy.files.reading import published_points
from rlplan.accuracy.points import Measured
from rlplan.planner.measured_errors import LEAST_POINTS, NOMINAL, list_errors
from rlplan.units import GIB

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "reports" / "accuracy"
LARGE = 0.05
"""Errors above this count as misses."""
COLUMNS = 4
HEADLINE_PAGES = ("README.md", "docs/guides/trust.md")
"""Pages whose table of errors is written between the two marks."""
BEGIN, END = "<!-- The next table is written by `make accuracy`. -->\n\n", "\n\n<!-- End of the table. -->"
HEADLINE = {
    "train_peak": "peak of training",
    "throughput_train": "seconds of training",
    "rl_step_time": "seconds of an RL step",
    "phase_time": "seconds of its phases",
    "weight_sync_time": "seconds of a weight sync",
    "serving_tpot": "time per generated token",
    "serving_ttft": "time to the first token",
}
"""Kinds of the headline table, and their names in it."""

TRAINERS = (
    ("Megatron-Bridge", ("mb-",)),
    ("prime-rl", ("primerl-",)),
    ("NeMo AutoModel", ("automodel-",)),
    ("Megatron-LM on B200, SimuMax", ("simumax-",)),
    ("torchtitan", ("titan-",)),
    ("llm-foundry", ("foundry-",)),
    ("Megatron-LM's papers", ("mcore-",)),
)
"""Sources of training throughput: name, and how the ids of their points begin."""
PEAKS = (
    ("AgileRL, colocated GRPO with LoRA", ("agilerl-",)),
    ("prime-rl", ("primerl-",)),
    ("Megatron-LM, SimuMax", ("simumax-",)),
    ("all others", ("",)),
)
"""Sources of training peaks, in the same form. The last takes what is left."""


def main() -> int:
    """Write the files, and the intervals that the library reads."""
    report = compare(published_points())
    write_errors(list_residuals(published_points(), report.points, read_left_out()))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "accuracy.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
    (FOLDER / "README.md").write_text(write_page(report))
    write_csv("points.csv", ("point", "kind", "predicted", "measured", "unit", "error", "note"), list_points(report))
    write_csv("intervals.csv", ("kind", "stratum", "points", "sources", "factor", "inside_left_out"), list_intervals())
    write_csv("pairs.csv", ("pair", "kind", "points", "mean_error", "bias"), list_pairs(report))
    write_csv("constants.csv", HEAD, [row.cells() for row in left_out()])
    draw(report, FOLDER / "scatter.png")
    for page in HEADLINE_PAGES:
        write_headline(report, ROOT / page)
    print(f"{FOLDER.relative_to(ROOT)}: {sum(point.status == PREDICTED for point in report.points)} points predicted")
    return 0


def write_page(report: AccuracyReport) -> str:
    """The page as Markdown."""
    texts = {name: text.rstrip("\n") for name, text in read_texts(__file__).items()}
    sources = ("source", "points", "predicted", "median", "largest", "bias")
    parts = [
        "# Accuracy",
        texts["introduction"],
        "![Predicted against measured, one panel per kind](scatter.png)",
        "## By kind",
        texts["by_kind"].format(nominal=NOMINAL, least=LEAST_POINTS),
        _table(
            ("kind", "points", "predicted", "median", "largest", "bias", "range", "rule of thumb", "before"),
            list_kinds(report),
        ),
        "## Intervals",
        texts["intervals"],
        "## Training throughput by source",
        _table(sources, list_sources(report, "throughput_train", TRAINERS)),
        "## Training peaks by source",
        _table(sources, list_sources(report, "train_peak", PEAKS)),
        "## Misses and refusals",
        describe_misses(report),
    ]
    return "\n\n".join(parts) + "\n"


def write_headline(report: AccuracyReport, page: Path) -> None:
    """Replace the table of errors in a page. Raises ValueError where the page lacks the marks."""
    before, rest = page.read_text("utf-8").split(BEGIN)
    _, after = rest.split(END)
    earlier = _read_earlier_kinds()
    rows = [
        [name, *_describe_errors(vars(report.summary[kind])), *_describe_errors(earlier.get(kind))]
        for kind, name in HEADLINE.items()
    ]
    head = ("predicted by plans", "points", "median error", "largest", "before: points", "median", "largest")
    page.write_text(before + BEGIN + format_table(head, rows) + END + after, "utf-8")


def _describe_errors(summary: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Cells: the number of predictions, their median error and the largest one."""
    if summary is None:
        return "", "", ""
    percents = [summary[key] * 100 for key in ("median_abs", "max_abs")]
    return str(summary["predicted"]), *(f"{percent:.{1 if percent < 10 else 0}f} %" for percent in percents)


def _read_earlier_kinds() -> dict[str, dict[str, Any]]:
    """The figures by kind that were published before plans made the predictions."""
    kinds: dict[str, dict[str, Any]] = json.loads((ROOT / "benchmarks" / "accuracy_before.json").read_text())["kinds"]
    return kinds


def write_csv(name: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Write one table of the report."""
    with (FOLDER / name).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)


def _table(names: tuple[str, ...], rows: list[list[str]]) -> str:
    return format_table(names, ([cell.replace("|", "/") for cell in row] for row in rows))


def list_kinds(report: AccuracyReport) -> list[list[str]]:
    """One row per kind of quantity."""
    before = _read_earlier_kinds()
    factors = {error.kind: f"{error.factor:.2f}" for error in list_errors() if not error.of and error.is_known}
    rows = []
    for kind, summary in sorted(report.summary.items()):
        rule = _rule_error(point.id for point in report.points if point.kind == kind)
        now = (*map(_size, (summary.median_abs, summary.max_abs)), _format_percent(summary.bias))
        was = _size(before.get(kind, {}).get("median_abs"))
        rows.append(
            [f"`{kind}`", str(summary.n), str(summary.predicted), *now, factors.get(kind, "unknown"), rule, was]
        )
    return rows


def list_intervals() -> list[list[str]]:
    """One row per stratum: the factor of its range, and the share of left-out points inside."""
    return [
        [
            *(error.kind, error.of or "all", str(error.num_points), str(error.num_sources)),
            f"{error.factor:.2f}" if error.is_known else "unknown",
            "" if error.inside_left_out is None else f"{error.inside_left_out:.2f}",
        ]
        for error in list_errors()
    ]


def list_pairs(report: AccuracyReport) -> list[list[str]]:
    """One row per model and GPU of the serving measurements."""
    return [
        [pair.pair, pair.kind, str(pair.n), _size(pair.mean_abs), _format_percent(pair.bias)]
        for pair in sorted(report.pairs, key=lambda pair: (pair.kind, pair.pair))
    ]


def list_sources(
    report: AccuracyReport, kind: str, sources: tuple[tuple[str, tuple[str, ...]], ...]
) -> list[list[str]]:
    """One row per source of a kind; a point belongs to the first source whose prefix its id has."""
    left = [point for point in report.points if point.kind == kind]
    rows = []
    for name, prefixes in sources:
        points = [point for point in left if point.id.startswith(prefixes)]
        left = [point for point in left if point not in points]
        errors = [point.relative_error for point in points if point.relative_error is not None]
        sizes = [abs(error) for error in errors]
        figures = (_size(median(sizes)), _size(max(sizes)), _format_percent(fmean(errors))) if errors else ("-",) * 3
        rows.append([name, str(len(points)), str(len(errors)), *figures])
    return rows


@cache
def _rule_errors() -> dict[str, float]:
    """The error of a rule of thumb, by point."""
    answers = ((point, rule_of_thumb(point)) for point in published_points())
    errors = {point.id: relative_error(point, answer) for point, answer in answers if answer is not None}
    return {name: abs(error) for name, error in errors.items() if error is not None}


def _rule_error(names: Iterable[str]) -> str:
    errors = [_rule_errors()[name] for name in names if name in _rule_errors()]
    return _size(median(errors)) if errors else "-"


@cache
def _reasons() -> dict[str, str]:
    """Why a point is missed, by its id, as far as it is known."""
    reasons: dict[str, str] = json.loads((ROOT / "benchmarks" / "accuracy_misses.json").read_text())
    return reasons


def describe_misses(report: AccuracyReport) -> str:
    """How many points are missed and refused, and the largest groups of refusals."""
    missed = [point for point in report.points if point.relative_error and abs(point.relative_error) > LARGE]
    explained = sum(point.id in _reasons() for point in missed)
    refused = Counter(point.kind for point in report.points if point.status != PREDICTED)
    kinds = ", ".join(f"{count} of `{kind}`" for kind, count in refused.most_common())
    return (
        f"{len(missed):,} predictions are more than {LARGE:.0%} off. points.csv has a reason for {explained} of them;\n"
        f"the others are not explained yet. {sum(refused.values())} points are refused, with reasons in points.csv:\n"
        f"{kinds}."
    )


def list_points(report: AccuracyReport) -> list[list[str]]:
    """One row per point; the note explains a miss or a refusal."""
    return [
        [
            *(point.id, point.kind, _value(point.predicted), _value(point.measured), point.unit),
            _format_percent(point.relative_error),
            _reasons().get(point.id, "") if point.status == PREDICTED else point.reason or "",
        ]
        for point in sorted(report.points, key=lambda point: point.kind)
    ]


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return " to ".join(_value(part) for part in value)
    if isinstance(value, str) or value is None:
        return value or "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.5g}"


def _size(error: float | None) -> str:
    return _format_percent(error).removeprefix("+")


def _format_percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:+.2f} %"


WORDS = {
    "kv_per_token": "KV cache, vLLM's logs",
    "param_count": "Parameters",
    "rl_step_time": "RL step time",
    "serving_tpot": "Time per output token, ms",
    "serving_ttft": "Time to first token, ms",
    "sleeping_engine_residual": "Engine asleep",
    "throughput_infer": "Generation, ms a token",
    "throughput_train": "Training throughput",
    "train_peak": "Peak in training",
    "train_steady": "Training, between steps",
    "vllm_activation_peak": "vLLM's activations",
    "vllm_cuda_graph": "vLLM's CUDA graphs",
    "vllm_kv": "vLLM's KV cache",
    "vllm_profile_peak": "vLLM's profiled peak",
    "vllm_weights": "vLLM's weights",
    "weight_sync_time": "Weight sync, s",
    "phase_time": "Phase of an RL step, s",
}
"""Titles of panels; a kind that is missing here keeps its name."""


def draw(report: AccuracyReport, path: Path) -> None:
    """A panel a kind: predicted over measured, the diagonal between; sizes in GiB, apart from counts of tokens."""
    kinds: dict[str, list[Comparison]] = {}
    for point in report.points:
        if isinstance(point.predicted, int | float) and isinstance(point.measured, int | float | tuple):
            unit = "GiB" if _bytes_per_unit(point) else "tokens" if point.kind == "vllm_kv" else ""
            kinds.setdefault(f"{WORDS.get(point.kind, point.kind)}, {unit}".removesuffix(", "), []).append(point)
    rows = -(-len(kinds) // COLUMNS)
    with mpl.rc_context(RC):
        figure, grid = plt.subplots(rows, COLUMNS, figsize=(2.75 * COLUMNS, 2.6 * rows), squeeze=False)
        for axes in grid.flat[len(kinds) :]:
            axes.axis("off")
        for axes, (kind, points) in zip(grid.flat, sorted(kinds.items()), strict=False):
            _panel(axes, kind, points)
        figure.supxlabel("measured", color=MUTED, fontsize=9)
        figure.supylabel("predicted", color=MUTED, fontsize=9)
        figure.tight_layout()
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)


def _panel(axes: Any, kind: str, points: list[Comparison]) -> None:
    scales = [(_bytes_per_unit(point) or GIB) / GIB for point in points]
    measured = [_middle(point.measured) * scale for point, scale in zip(points, scales, strict=True)]
    predicted = [float(point.predicted or 0) * scale for point, scale in zip(points, scales, strict=True)]
    low, high = min(measured + predicted) * 0.8, max(measured + predicted) * 1.25
    axes.plot((low, high), (low, high), color=MUTED, linewidth=0.8, zorder=1)
    axes.fill_between((low, high), (low * 0.95, high * 0.95), (low * 1.05, high * 1.05), color=FAINT, zorder=0)
    axes.scatter(measured, predicted, s=14, color=INK, alpha=0.75, linewidths=0, zorder=2)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=kind)
    axes.text(0.97, 0.04, f"{len(points):,} points" if len(points) > 1 else "1 point", transform=axes.transAxes,
              ha="right", color=MUTED)  # fmt: skip
    axes.title.set_fontsize(8)
    if high < 200 * low:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(
                LogLocator(subs=(1, 2, 5)) if high > 8 * low else MaxNLocator(2 if high > 1e5 else 4)
            )
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.minorticks_off()


def _bytes_per_unit(point: Comparison) -> int | None:
    return Measured(value=1.0, unit=point.unit).bytes_per_unit


def _middle(value: Any) -> float:
    return sum(value) / len(value) if isinstance(value, tuple) else float(value)


if __name__ == "__main__":
    sys.exit(main())
