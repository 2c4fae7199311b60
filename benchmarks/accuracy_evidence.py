"""Regenerates reports/accuracy: every bundled point, its prediction, and a picture of the two by kind.

In: the bundled points, benchmarks/accuracy_misses.json (why points are missed, written by hand). Out: accuracy.json,
README.md with the tables, scatter.png. `make accuracy` calls it; it takes seconds and needs no network and no GPU.
"""

import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from benchmarks.constants.left_out import read_left_out
from benchmarks.constants.rules_of_thumb import rule_of_thumb
from benchmarks.constants.trainers import HEAD, left_out
from benchmarks.figures import FAINT, INK, MUTED, RC
from rlplan.accuracy.compare import PREDICTED, AccuracyReport, Comparison, compare, relative_error
from rlplan.accuracy.files.reading import published_points
from rlplan.accuracy.intervals import list_residuals, write_errors
from rlplan.accuracy.points import Measured
from rlplan.planner.measured_errors import LEAST_POINTS, NOMINAL, all_errors
from rlplan.units import GIB

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "reports" / "accuracy"
LARGE = 0.05
"""Errors beyond it are listed with an explanation, and so is what is refused one by one."""
COLUMNS = 4
INTRODUCTION = """What the formulas say of published measurements, point by point. Regenerate with `make accuracy`; the
same numbers: `rlplan accuracy`. The constants that were fitted, each with the error that remains when the source that
it was fitted to is left out, stand [below](#fitted-constants).

Every point was measured by others. No GPU was to be had so far, so that none is our own: `benchmarks/gpu` measures one
against predictions made before, and its points are read by `rlplan accuracy`. The formulas were written with these
points at hand: expect somewhat more on points that they never saw."""

SERVING = """vLLM under a fixed concurrency: mean absolute error of each pair of model and GPU. A pair that is the only
mixture of experts of its generation is predicted with the experts' constants of the other generation when it is left
out: kernels for experts differ more between generations than anything else does."""

BEFORE = """Every prediction of training, RL steps and weight sync is that of a plan: a point is a job with a forced
layout, and `rlplan plan` of that job says the same. `was` is what this page said on 2026-11-28
(`benchmarks/accuracy_before.json`), by formulas and a model of one rig that no plan uses. Where a figure is worse now,
it is what a plan is worth."""
WAS = ("was predicted", "was median", "was largest")

RULE = "rule of thumb"
RULES = """`rule of thumb`, in the tables below, is the median error of rules that people calculate with
(`benchmarks/constants/rules_of_thumb.py`), on the same points: 16 bytes a trained parameter and 34 a token, layer and
element; 6 FLOPs a parameter and token at 0.4 of the peak; weights and cache over the bandwidth. An engine asleep, taken
for a CUDA context of 0.5 GiB, is missed by {asleep} at the median."""
BY_ERROR = ("source", "points", "predicted", "median", "mean", "largest", "bias", RULE)
BY_SOURCE = """`its own` is what the source says of its own estimator: AgileRL's closed form over 203 measurements of
eight models, SimuMax's simulator with operators measured on the machine."""
SOURCES = (
    ("AgileRL, colocated GRPO with LoRA", "agilerl-", "mean 4.14 %, worst 13.52 %"),
    ("prime-rl", "primerl-", "-"),
    ("Megatron-LM, SimuMax's tables", "simumax-", "mean 0.33 %"),
    ("all others", "", "-"),
)
"""A source, how its points begin, what it says of itself."""

INTERVALS = f"""The interval of a prediction is the prediction divided by a factor to the prediction times it. It
holds {NOMINAL:.0%} of the measurements of a source that was left out (a repository with all of its pages; of tables of
many machines, a model on a GPU), by strata: kind, dense models or mixtures of experts, who trains (RL steps: the
framework). A stratum of fewer than {LEAST_POINTS} points takes the interval of all trainers, else of all models. A kind
of fewer has none, nor one of which hardly a point remains without its largest source: *unknown, take a factor of 2*.
`inside, left out` is the share of the points that have a stratum's interval which lie inside the one that is made
without their source. Constants that were fitted to points are refitted without them there
(`benchmarks/constants/left_out.py`); elsewhere the residual is left out by itself. A source weighs as the root of its
points. The bias of other sources is not corrected: it makes the error of a source that is left out larger. Points of
reliability C have no part. `rlplan.planner.measured_errors` gives every command its intervals."""
TRAINERS = (
    ("Megatron-Bridge", ("mb-",)),
    ("prime-rl", ("primerl-",)),
    ("NeMo AutoModel", ("automodel-",)),
    ("Megatron-LM on B200, SimuMax's tables", ("simumax-",)),
    ("torchtitan", ("titan-",)),
    ("llm-foundry", ("foundry-",)),
    ("Megatron-LM's papers", ("mcore-",)),
)
"""A trainer, and how its points begin."""

LEFT_OUT = """Time per token with constants fitted without the pair (`benchmarks/constants/serving.py`; settings
that were measured more than once count once):"""

CONSTANTS = """Constants of trainers: what a value that one model or version alone says gives for all points that it was
not fitted to, beside the same points without the constant (`benchmarks/constants/trainers.py`; a test refuses one that
is worse than none). `now` is the value in use, over all. Constants of serving are held to pairs above, those of weight
syncs to sources in [the seconds](../runtime/seconds.md), TensorRT-LLM's to GPUs and models beside its formula."""


def main() -> int:
    """Write the three files, and the intervals that the library reads."""
    report = compare(published_points())
    write_errors(list_residuals(published_points(), report.points, read_left_out()))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "accuracy.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
    (FOLDER / "README.md").write_text(page(report))
    draw(report, FOLDER / "scatter.png")
    print(f"{FOLDER.relative_to(ROOT)}: {sum(point.status == PREDICTED for point in report.points)} points predicted")
    return 0


def page(report: AccuracyReport) -> str:
    """The page as Markdown."""
    parts = [
        "# Accuracy",
        INTRODUCTION,
        "![Predicted against measured, a panel for each kind](scatter.png)",
        "## By kind",
        "Absolute relative errors; the bias is their signed mean. A verdict is right (0 %) or wrong (100 %).",
        BEFORE,
        _table(("kind", "points", "predicted", "median", "largest", "bias", *WAS), _summaries(report)),
        "## Intervals",
        INTERVALS,
        _table(("kind", "of", "points", "sources", "factor", "inside, left out"), _intervals()),
        RULES.format(asleep=_rule_error(p.id for p in report.points if p.kind == "sleeping_engine_residual")),
        "## Training throughput by source",
        _table(BY_ERROR, _trainers(report)),
        "## Training peaks by source",
        BY_SOURCE,
        _table((*BY_ERROR, "its own"), _sources(report)),
        "## Serving latency by pair",
        SERVING,
        _table(("pair", "kind", "points", "mean error", "bias", RULE), _pairs(report)),
        LEFT_OUT,
        _table(("model", "GPU", "format", "settings", "mean error", "left out", "bias left out"), _left_out()),
        "## Fitted constants",
        CONSTANTS,
        _table(HEAD, [row.cells() for row in left_out()]),
        "## Misses",
        f"Predictions more than {LARGE:.0%} off, others worth a word, and single points that are refused.",
        _table(("point", "error", "why"), _misses(report)),
        "## Points",
        _table(("point", "kind", "predicted", "measured", "unit", "error"), _points(report)),
        "## Refused",
        _table(("kind", "points", "why"), _refusals(report)),
    ]
    return "\n\n".join(parts) + "\n"


def _table(names: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def _summaries(report: AccuracyReport) -> list[list[str]]:
    before: dict[str, dict[str, Any]] = json.loads((ROOT / "benchmarks" / "accuracy_before.json").read_text())["kinds"]
    rows = []
    for kind, summary in sorted(report.summary.items()):
        was = before.get(kind, {})
        now = (*map(_size, (summary.median_abs, summary.max_abs)), _percent(summary.bias))
        then = (str(was.get("predicted", 0)), *map(_size, (was.get("median_abs"), was.get("max_abs"))))
        rows.append([f"`{kind}`", str(summary.n), str(summary.predicted), *now, *then])
    return rows


def _intervals() -> list[list[str]]:
    return [
        [
            *(f"`{error.kind}`", error.of or "all", str(error.num_points), str(error.num_sources)),
            f"{error.factor:.2f}" if error.is_known else "unknown: 2",
            "-" if error.inside_left_out is None else f"{error.inside_left_out:.0%}",
        ]
        for error in all_errors()
    ]


def _trainers(report: AccuracyReport) -> list[list[str]]:
    points = [point for point in report.points if point.kind == "throughput_train"]
    return [
        _errors_of(name, [point for point in points if point.id.startswith(prefixes)]) for name, prefixes in TRAINERS
    ]


def _pairs(report: AccuracyReport) -> list[list[str]]:
    names: dict[tuple[str, str], list[str]] = {}
    for point in report.points:
        names.setdefault((point.kind, point.pair), []).append(point.id)
    return [
        [
            *(pair.pair, f"`{pair.kind}`", str(pair.n), _size(pair.mean_abs), _percent(pair.bias)),
            _rule_error(names[pair.kind, pair.pair]),
        ]
        for pair in sorted(report.pairs, key=lambda pair: (pair.kind, pair.pair))
    ]


def _sources(report: AccuracyReport) -> list[list[str]]:
    chosen = {point.id: point for point in report.points if point.kind == "train_peak"}
    rows = []
    for name, prefix, own in SOURCES:
        points = [chosen.pop(key) for key in list(chosen) if key.startswith(prefix)]
        rows.append([*_errors_of(name, points), own])
    return rows


def _errors_of(name: str, points: list[Comparison]) -> list[str]:
    """A row of a source: how many points, how many predicted, and their errors."""
    errors = [point.relative_error for point in points if point.relative_error is not None]
    if not errors:
        return [name, str(len(points)), "0", *["—"] * 5]
    sizes = [abs(error) for error in errors]
    found = (*map(_size, (median(sizes), fmean(sizes), max(sizes))), _percent(fmean(errors)))
    return [name, str(len(points)), str(len(errors)), *found, _rule_error(point.id for point in points)]


@cache
def _rule_errors() -> dict[str, float]:
    """By point, what a rule of thumb errs by."""
    answers = ((point, rule_of_thumb(point)) for point in published_points())
    errors = {point.id: relative_error(point, answer) for point, answer in answers if answer is not None}
    return {name: abs(error) for name, error in errors.items() if error is not None}


def _rule_error(names: Iterable[str]) -> str:
    errors = [_rule_errors()[name] for name in names if name in _rule_errors()]
    return _size(median(errors)) if errors else "-"


def _left_out() -> list[list[str]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / "serving.json").read_text())["pairs"]
    return [
        [
            *(pair["model"], pair["gpu"], pair["format"], str(pair["settings"])),
            *(_size(pair["mean_error"]), _size(pair["mean_error_left_out"]), _percent(pair["bias_left_out"])),
        ]
        for pair in found
    ]


def _misses(report: AccuracyReport) -> list[list[str]]:
    why: dict[str, str] = json.loads((ROOT / "benchmarks" / "accuracy_misses.json").read_text())
    return [
        [f"`{point.id}`", _percent(point.relative_error), why.get(point.id, "not explained yet")]
        for point in report.points
        if point.id in why or (point.relative_error is not None and abs(point.relative_error) > LARGE)
    ]


def _points(report: AccuracyReport) -> list[list[str]]:
    chosen = sorted((point for point in report.points if point.status == PREDICTED), key=lambda point: point.kind)
    return [
        [
            f"`{point.id}`",
            f"`{point.kind}`",
            _value(point.predicted),
            _value(point.measured),
            point.unit,
            _percent(point.relative_error),
        ]
        for point in chosen
    ]


def _refusals(report: AccuracyReport) -> list[list[str]]:
    counts: dict[tuple[str, str], int] = {}
    for point in report.points:
        if point.status != PREDICTED:
            key = (point.kind, point.reason or "")
            counts[key] = counts.get(key, 0) + 1
    return [[f"`{kind}`", str(count), reason] for (kind, reason), count in sorted(counts.items())]


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return " to ".join(_value(part) for part in value)
    if isinstance(value, str) or value is None:
        return value or "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.5g}"


def _size(error: float | None) -> str:
    return _percent(error).removeprefix("+")


def _percent(value: float | None) -> str:
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
