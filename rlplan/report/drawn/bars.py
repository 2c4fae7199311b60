"""Bars as data: rows of segments on one scale. templates/macros.html.j2 draws them without a script.

In: plans, peaks, phases. Out: frozen rows. Left out: charts over time (memory.py) and over steps (curves.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from rlplan.memory.ledger import MemoryLedger, Peak
from rlplan.planner.answers.plan_results import sum_phase_costs
from rlplan.report import style
from rlplan.report.dataframes import is_fine_peak, predicted_memory
from rlplan.report.run_folder import RunFolder
from rlplan.timing.cost import Resource
from rlplan.timing.step import StepTiming
from rlplan.units import format_bytes, format_seconds
from rlplan.vocabulary import MemoryKind, format_name

MAX_ROWS = 24


@dataclass(frozen=True)
class Segment:
    """A part of a bar."""

    name: str
    """Name of a memory kind or a resource."""
    color: str
    """`#rrggbb`."""
    size: float
    """Size in the unit of the bars."""
    words: str
    """The exact value."""


@dataclass(frozen=True)
class Bar:
    """One row."""

    label: str
    """Name of the row."""
    segments: tuple[Segment, ...]
    """Segments from left to right."""
    words: str
    """Text beside the bar."""
    mark: float | None = None
    """Measured value, in the unit of the bars."""
    mark_words: str = ""
    """Measured value in words."""
    is_bad: bool = False
    """Whether the text is a warning."""


@dataclass(frozen=True)
class Bars:
    """Bars on one scale."""

    title: str
    """Title for the reader."""
    rows: tuple[Bar, ...]
    """Rows from the top."""
    mark: str = ""
    """Meaning of the marks."""

    @property
    def top(self) -> float:
        """End of the scale."""
        ends = (max(sum(segment.size for segment in row.segments), row.mark or 0) for row in self.rows)
        return max(ends, default=0) or 1.0

    @property
    def legend(self) -> dict[str, str]:
        """Colours by name, for all segments."""
        return {segment.name: segment.color for row in self.rows for segment in row.segments}


def exact_words(num_bytes: float) -> str:
    """Format bytes for people, followed by the exact number.

    >>> exact_words(2048)
    '2.00 KiB (2,048 B)'
    """
    return f"{format_bytes(num_bytes)} ({int(num_bytes):,} B)"


def prediction(run: RunFolder, peaks: pd.DataFrame, *, with_baselines: bool = True) -> Bars:
    """Bars with one row per process: the predicted peak stacked by kind, the measured peak as a mark."""
    prefix = "" if with_baselines else "net_"
    title = "Peak of each process, and the prediction's error"
    if peaks.empty:
        return Bars(title, ())
    peaks = peaks.sort_values("predicted_bytes", ascending=False, na_position="last").head(MAX_ROWS)
    predicted = predicted_memory(run.plan.ledger)
    rows = []
    for _, peak in peaks.iterrows():
        at = (predicted["run_phase"] == peak["run_phase"]) & (predicted["action_id"] == peak["action_id"])
        sizes = predicted[at & (predicted["process"] == peak["process"])].groupby("kind")["peak_bytes"].sum()
        kinds = {kind: int(size) for kind, size in sizes.items() if with_baselines or kind != MemoryKind.PROCESS}
        measured, (words, is_bad) = peak[f"{prefix}measured_bytes"], _error_words(peak, prefix)
        mark = None if pd.isna(measured) else float(measured)
        mark_words = "" if mark is None else exact_words(mark)
        rows.append(Bar(str(peak["process"]), make_kind_segments(kinds), words, mark, mark_words, is_bad))
    return Bars(title if with_baselines else "Peaks without process baselines", tuple(rows), "measured peak")


def _error_words(peak: "pd.Series[object]", prefix: str) -> tuple[str, bool]:
    """Text with the prediction and its error, and whether it is out of tolerance."""
    error, predicted = peak[f"{prefix}error_fraction"], peak[f"{prefix}predicted_bytes"]
    if prefix and not pd.isna(predicted) and predicted == 0:
        return "baseline only", False
    if not pd.isna(error):
        is_fine = is_fine_peak(error, 1.0 if not prefix else peak["modelled_share"])
        return f"{format_bytes(predicted)}, {style.format_percent(error, signed=True)}", is_fine is False
    return ("not predicted" if pd.isna(predicted) else f"{format_bytes(predicted)}, not measured"), False


def make_kind_segments(sizes: Mapping[str, int]) -> tuple[Segment, ...]:
    """Segments in stacking order."""
    return tuple(
        Segment(format_name(kind), color, sizes[kind], exact_words(sizes[kind]))
        # the order of KIND_COLORS is the order of the stack
        for kind, color in style.KIND_COLORS.items()
        if sizes.get(kind)
    )


def waits(timing: StepTiming | None) -> Bars:
    """Bars with one row per phase of a steady step, split by the resource that its seconds wait for."""
    costs = sum_phase_costs(timing) if timing else {}
    total = sum(cost.seconds for cost in costs.values())
    return Bars(
        "What limits a steady step",
        tuple(
            Bar(
                str(phase),
                make_resource_segments(cost.parts),
                f"{format_seconds(cost.seconds)}, {_share(cost.seconds / total)}",
            )
            for phase, cost in costs.items()
        ),
    )


def make_resource_segments(parts: Mapping[Resource, float]) -> tuple[Segment, ...]:
    """Segments in the order of the resources."""
    return tuple(
        Segment(
            format_name(resource.value), style.RESOURCE_COLORS[resource], parts[resource], f"{parts[resource]:.6g} s"
        )
        for resource in Resource
        if parts.get(resource)
    )


def _share(part: float) -> str:
    return style.format_percent(part, 0) if part >= 0.01 else "below 1 %"


def staleness(tokens: Mapping[int, int], rollouts: Mapping[int, int]) -> Bars:
    """Bars with one row per age: the share of trained tokens, and of rollouts by their oldest token."""
    rows = []
    for name, counts, color in (("tokens", tokens, "#6d8dd8"), ("rollouts", rollouts, "#f0ad36")):
        total = sum(counts.values()) or 1
        for age in sorted(counts):
            segment = Segment(name, color, counts[age] / total, f"{counts[age]:,} of {total:,}")
            label = f"{name}, {age} version{'s' * (age != 1)} old"
            rows.append(Bar(label, (segment,), style.format_percent(counts[age] / total)))
    return Bars("Staleness of trained tokens, and of rollouts by their oldest token", tuple(rows))


def compare_peaks(places: Iterable[tuple[str, MemoryLedger, int | None]]) -> Bars:
    """Bars with one row per plan: its fullest GPU (or host on a CPU) by kind, with the capacity as a mark."""
    rows = []
    for name, ledger, capacity in places:
        peak = fullest(ledger)
        sizes: dict[str, int] = {}
        for _, _, kind, size in peak.rows:
            sizes[str(kind)] = sizes.get(str(kind), 0) + size
        words = format_bytes(peak.num_bytes) + (f" of {format_bytes(capacity)}" if capacity else "")
        is_bad = bool(capacity and peak.num_bytes > capacity)
        mark_words = f"capacity {exact_words(capacity)}" if capacity else ""
        rows.append(
            Bar(name, make_kind_segments(sizes), f"{words}, in {peak.action_id}", capacity or None, mark_words, is_bad)
        )
    return Bars("Peak memory, by kind", tuple(rows), "capacity")


def fullest(ledger: MemoryLedger) -> Peak:
    """The largest peak of all GPUs, or of the host where devices share its memory."""
    places: Sequence[Peak] = [ledger.device_peak(device) for device in ledger.devices]
    if ledger.shares_host_memory or not places:
        return ledger.host_peak()
    return max(places, key=lambda peak: peak.num_bytes)
