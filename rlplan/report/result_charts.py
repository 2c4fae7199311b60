"""What came out: learning curves of one or several runs, and each process's peak against its prediction.

In: runs with labels, and the dataframes of dataframes.py. Out: matplotlib figures.
Left out: memory over time (charts.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec, GridSpecFromSubplotSpec, SubplotSpec
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, PercentFormatter

from rlplan.report import style
from rlplan.report.dataframes import held_memory, is_fine_peak, metrics, process_peaks, timings
from rlplan.report.evaluations import evaluations, value_text
from rlplan.report.run_folder import RunFolder
from rlplan.spec.parts.rewards import Evaluation
from rlplan.units import format_bytes
from rlplan.vocabulary import MemoryKind

WIDTH = 10.8
MAX_EVALUATION_ROWS = 4
"""Evaluations that are drawn; the page's tables have all of them."""
MAX_PROCESS_ROWS = 24
_SEEDS = ("#33508f", "#2a9187", "#b0652b", "#8a4fa3", "#5d7a1f", "#7a5a4b")
_CONTROLS = (("#9a4a4a", (0, (4, 2))), ("#77838f", (0, (1, 1.6))), ("#b08d2e", (0, (6, 2, 1, 2))))


@dataclass(frozen=True)
class Curve:
    """A run as the learning chart draws it."""

    label: str
    """What tells it from the other runs."""
    frame: pd.DataFrame
    """Its metrics, a row a step."""
    color: str
    """`#rrggbb`."""
    dashes: Any
    """Matplotlib's line style."""
    is_main: bool
    """Whether it is the run that the report is about, which is the first one of a chart."""


def learning(runs: Sequence[RunFolder], labels: Sequence[str]) -> Figure:
    """The first evaluations of every run, and beside them six curves: the first run's bold, other runs' thin."""
    with mpl.rc_context(style.RC):
        curves, known = _curves(runs, labels), evaluations(runs)
        figure = style.new_figure(WIDTH, 5.0)
        grid = GridSpec(2, 5, figure=figure, left=0.052, right=0.988, top=0.93, bottom=0.085, wspace=0.34, hspace=0.42,
                        width_ratios=[1.4, 0.46, 1, 1, 1] if known else [0.01, 0.01, 1, 1, 1])  # fmt: skip
        last = max([1.0, *(float(curve.frame["step"].max()) for curve in curves if len(curve.frame))])
        if known:
            _draw_evaluations(figure, grid[:, 0], curves, known[:MAX_EVALUATION_ROWS], last)
        else:
            text = "no evaluation was recorded"
            figure.text(0.988, 0.985, text, ha="right", va="top", color=style.MUTED, fontsize=7.5)
        for index, (title, key, draw) in enumerate(PANELS):
            axes = figure.add_subplot(grid[index // 3, 2 + index % 3])
            axes.set_title(title, fontsize=8.4)
            drawn = [curve for curve in curves if key in curve.frame and curve.frame[key].notna().any()]
            if drawn:
                draw(axes, drawn, key)
                _steps_axis(axes, last)
            else:
                style.say(axes, "not recorded")
        return figure


def prediction(run: RunFolder, peaks: pd.DataFrame | None = None) -> Figure:
    """One row a process: the predicted peak stacked by kind, the measured as a mark; right: without baselines."""
    peaks = process_peaks(run) if peaks is None else peaks
    with mpl.rc_context(style.RC):
        if peaks.empty:
            figure = style.new_figure(WIDTH, 1.4)
            style.say(figure.subplots(), "The plan predicts nothing and nothing was measured.")
            return figure
        peaks = peaks.sort_values("predicted_bytes", ascending=False, na_position="last").head(MAX_PROCESS_ROWS)
        height = 1.28 + 0.4 * len(peaks)
        figure = style.new_figure(WIDTH, height)
        grid = GridSpec(1, 2, figure=figure, left=0.125, right=0.985, top=1 - 0.36 / height, bottom=0.78 / height,
                        wspace=0.14)  # fmt: skip
        held = held_memory(run.plan.ledger)
        whole, net = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        drawn = _draw_bars(whole, peaks, held, "")
        _draw_bars(net, peaks, held, "net_")
        whole.set_title("Peak of each process, and the prediction's error")
        net.set_title("The same without process baselines")
        net.tick_params(labelleft=False)
        handles = [
            Patch(facecolor=color, label=style.name_of(kind))
            for kind, color in style.KIND_COLORS.items()
            if kind in drawn
        ]
        handles.append(Patch(facecolor=style.MEASURED, label="measured peak"))
        figure.legend(handles=handles, loc="lower center", ncols=min(len(handles), 8), bbox_to_anchor=(0.5, 0.0),
                      handlelength=1.0, handleheight=0.9, columnspacing=1.4)  # fmt: skip
        return figure


def _curves(runs: Sequence[RunFolder], labels: Sequence[str]) -> list[Curve]:
    curves: list[Curve] = []
    dashes: Any
    num_seeds = num_controls = 0
    for run, label in zip(runs, labels, strict=True):
        frame = metrics(run).merge(timings(run), on="step", how="outer").sort_values("step")
        if run.is_control:
            color, dashes = _CONTROLS[num_controls % len(_CONTROLS)]
            num_controls += 1
        else:
            color, dashes = _SEEDS[num_seeds % len(_SEEDS)], "solid"
            num_seeds += 1
        curves.append(Curve(label, frame, color, dashes, is_main=not curves))
    return curves


def _draw_evaluations(
    figure: Figure, room: SubplotSpec, curves: list[Curve], known: Sequence[Evaluation], last: float
) -> None:
    """The first metric large, the others below it."""
    ratios = [1.0 + 0.6 * len(known[1:]), *[1.0] * len(known[1:])]
    rows = GridSpecFromSubplotSpec(len(known), 1, room, hspace=0.42, height_ratios=ratios)
    for row, evaluation in enumerate(known):
        axes = figure.add_subplot(rows[row])
        drawn = [one for one in curves if evaluation.metric in one.frame and one.frame[evaluation.metric].notna().any()]
        gap = 0.042 * sum(ratios) / ratios[row]
        _draw_evaluation(axes, drawn, evaluation, gap)
        _steps_axis(axes, last, says_unit=row == len(known) - 1)


def _draw_evaluation(axes: Axes, drawn: list[Curve], evaluation: Evaluation, gap: float) -> None:
    """One metric of every run that has it, each named at its end. gap: between two names, of the height."""
    axes.set_title(f"{style.sentence(evaluation.title)} on held-out prompts", fontsize=8.8)
    ends = []
    for curve in drawn:
        rows = curve.frame[["step", evaluation.metric]].dropna()
        width = 2.2 if curve.is_main else 1.5
        axes.plot(rows["step"], rows[evaluation.metric], color=curve.color, ls=curve.dashes, lw=width, marker="o",
                  ms=3.6 if curve.is_main else 2.8, mec=style.PAPER, mew=0.5)  # fmt: skip
        ends.append((float(rows["step"].iloc[-1]), float(rows[evaluation.metric].iloc[-1]), curve))
    axes.grid(axis="y")
    if evaluation.is_share:
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    else:
        axes.margins(y=0.12)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    heights = _spread([(value - low) / (high - low) for _, value, _ in ends], gap)
    for (step, value, curve), height in zip(ends, heights, strict=True):
        axes.annotate(
            f"{curve.label}  {value_text(value, is_share=evaluation.is_share)}", (step, value), (1.035, height),
            textcoords=axes.transAxes, va="center", fontsize=7.8,
            color=curve.color, fontweight="bold" if curve.is_main else "normal", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": curve.color, "lw": 0.5, "shrinkA": 1, "shrinkB": 3},
        )  # fmt: skip


def _spread(values: list[float], gap: float) -> list[float]:
    """Heights for labels, as near to their values as a gap between neighbours allows, and below the top."""
    order = sorted(range(len(values)), key=lambda index: -values[index])
    heights, ceiling = [0.0] * len(values), 1.0
    for index in order:
        heights[index] = min(values[index], ceiling)
        ceiling = heights[index] - gap
    shift = max(0.0, -min(heights, default=0.0))
    return [height + shift for height in heights]


def _draw_lines(axes: Axes, curves: list[Curve], key: str) -> None:
    for curve in reversed(curves):
        rows = curve.frame[["step", key]].dropna()
        width: dict[str, Any] = {"lw": 1.8, "zorder": 3} if curve.is_main else {"lw": 0.9, "alpha": 0.65}
        marker = "o" if len(rows) <= 3 else None
        axes.plot(rows["step"], rows[key], color=curve.color, ls=curve.dashes, marker=marker, ms=3.2, **width)
    axes.grid(axis="y")
    axes.yaxis.set_major_locator(MaxNLocator(4))
    values = pd.concat([curve.frame[key] for curve in curves]).dropna()
    if values.min() >= 0:
        axes.set_ylim(0, 1.12 * values.max() if values.max() > 0 else 1)


def _draw_fractions(axes: Axes, curves: list[Curve], key: str) -> None:
    _draw_lines(axes, curves, key)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def _draw_counts(axes: Axes, curves: list[Curve], key: str) -> None:
    _draw_lines(axes, curves, key)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _draw_magnitudes(axes: Axes, curves: list[Curve], key: str) -> None:
    """Rounding and a stale engine lie powers of ten apart."""
    _draw_lines(axes, curves, key)
    values = pd.concat([curve.frame[key] for curve in curves]).dropna()
    positive = values[values > 0]
    if len(positive):
        axes.set_yscale("log")
        axes.set_ylim(10 ** np.floor(np.log10(positive.min()) - 0.3), 10 ** np.ceil(np.log10(positive.max()) + 0.3))
        axes.yaxis.set_major_locator(LogLocator(numticks=5))
        axes.minorticks_off()


def _draw_reward(axes: Axes, curves: list[Curve], key: str) -> None:
    """The first run's mean inside one standard deviation, and its extremes."""
    main = curves[0]
    columns = [name for name in ("reward/std", "reward/min", "reward/max") if name in main.frame]
    rows = main.frame[["step", key, *columns]].dropna()
    if "reward/std" in columns:
        low, high = rows[key] - rows["reward/std"], rows[key] + rows["reward/std"]
        low = low.clip(lower=rows["reward/min"]) if "reward/min" in columns else low
        high = high.clip(upper=rows["reward/max"]) if "reward/max" in columns else high
        axes.fill_between(rows["step"], low, high, color=main.color, alpha=0.16, lw=0)
    _draw_lines(axes, curves, key)
    for name, side in (("reward/min", "top"), ("reward/max", "bottom")):
        if name in columns and len(rows):
            axes.plot(rows["step"], rows[name], color=style.MUTED, lw=0.8, ls=(0, (2, 2)))
            end = (rows["step"].iloc[-1], rows[name].iloc[-1])
            text: dict[str, Any] = {"ha": "right", "va": side, "fontsize": 6.8, "color": style.MUTED}
            offset = (0, 2 if side == "bottom" else -3)
            axes.annotate(name.removeprefix("reward/"), end, offset, textcoords="offset points", **text)
    axes.relim()
    axes.autoscale(axis="y")
    axes.margins(y=0.16)


def _steps_axis(axes: Axes, last: float, *, says_unit: bool = True) -> None:
    axes.set_xlim(-0.03 * last, 1.03 * last)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if says_unit:
        axes.set_xlabel("RL step", fontsize=7.6, labelpad=2)


PANELS: tuple[tuple[str, str, Callable[[Axes, list[Curve], str], None]], ...] = (
    ("Reward", "reward/mean", _draw_reward),
    ("KL to the reference", "kl/mean", _draw_lines),
    ("Entropy of the policy", "policy/entropy", _draw_lines),
    ("Clipped ratios", "policy/clip_fraction", _draw_fractions),
    ("Throughput, tokens/s", "throughput/tokens_per_sec", _draw_counts),
    ("Largest log-prob gap,\nengine against trainer", "sync/logprob_difference_max", _draw_magnitudes),
)
"""Title, metric and drawing of each curve beside the evaluations."""


def _draw_bars(axes: Axes, peaks: pd.DataFrame, held: pd.DataFrame, prefix: str) -> set[MemoryKind]:
    """Draw a bar and a mark for each process; returns the kinds that were drawn."""
    tops: list[int] = [1]
    drawn: set[MemoryKind] = set()
    for row, (_, peak) in enumerate(peaks.iterrows()):
        at = (held["run_phase"] == peak["run_phase"]) & (held["action_id"] == peak["action_id"])
        mine = held[at & (held["process"] == peak["process"])].groupby("kind")["peak_bytes"].sum()
        left = 0
        for kind, color in style.KIND_COLORS.items():
            size = int(mine.get(str(kind), 0))
            if size and not (prefix and kind is MemoryKind.PROCESS):
                axes.barh(row, size, left=left, height=0.56, color=color, ec=style.PAPER, lw=0.4)
                left, drawn = left + size, drawn | {kind}
        measured = peak[f"{prefix}measured_bytes"]
        if not pd.isna(measured):
            mark = axes.plot([measured] * 2, [row - 0.4, row + 0.4], color=style.MEASURED, lw=2.2)
            mark[0].set_solid_capstyle("butt")
            mark[0].set_path_effects([withStroke(linewidth=3.6, foreground=style.PAPER, alpha=0.8)])
        tops.append(max(left, 0 if pd.isna(measured) else int(measured)))
        _label_bar(axes, row, tops[-1], peak, prefix)
    axes.set_ylim(len(peaks) - 0.4, -0.6)
    axes.set_yticks(range(len(peaks)), peaks["process"], fontsize=8, color=style.INK)
    top = int(max(tops) * 1.42)
    axes.set_xlim(0, top)
    axes.set_xticks(range(0, top, style.tick_step(top)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.tick_text(value)))
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    return drawn


def _label_bar(axes: Axes, row: int, end: int, peak: pd.Series, prefix: str) -> None:
    error, predicted = peak[f"{prefix}error_fraction"], peak[f"{prefix}predicted_bytes"]
    text, color = "not predicted", style.MUTED
    if prefix and not pd.isna(predicted) and predicted == 0:
        text = "nothing but its baseline"
    elif not pd.isna(error):
        text = f"{format_bytes(predicted)}, {style.percent(error, signed=True)}"
        is_fine = is_fine_peak(error, 1.0 if not prefix else peak["modelled_share"])
        color = style.BAD if is_fine is False else style.INK
    elif not pd.isna(predicted):
        text = f"{format_bytes(predicted)}, not measured"
    axes.annotate(text, (end, row), (6, 0), textcoords="offset points", va="center", fontsize=7.8, color=color)
