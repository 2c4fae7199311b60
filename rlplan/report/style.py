"""The look of every chart: one colour for each memory kind and phase, quiet axes, bytes on ticks.

In: enums and axes. Out: colours, matplotlib settings, dressed axes, and figures as PNG files or SVG bytes.
Left out: what is drawn. Hue and lightness both differ, so that kinds stay apart for colour-blind readers and in grey;
weights and what is made of them are shades of one blue, and a thin white line parts neighbours in a stack.
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from rlplan.units import format_bytes
from rlplan.vocabulary import MemoryKind, Phase

INK, MUTED, FAINT, PAPER = "#1c2630", "#66727f", "#e3e8ed", "#ffffff"
MEASURED = INK
ACCENT, GOOD, BAD = "#33508f", "#1b7a43", "#b3261e"

MAX_SVG_BYTES = 160_000
"""Four pictures of this size, as base64, stay under a megabyte."""

KIND_COLORS = {
    MemoryKind.PROCESS: "#dbe0e6",
    MemoryKind.CONTEXT: "#b4bec8",
    MemoryKind.FRAGMENTATION: "#8793a0",
    MemoryKind.WEIGHTS: "#3b5ba5",
    MemoryKind.PACKED_WEIGHTS: "#9fcbed",
    MemoryKind.MASTER_WEIGHTS: "#6e96d6",
    MemoryKind.OPTIMIZER: "#d76a5b",
    MemoryKind.GRADIENTS: "#f0ae68",
    MemoryKind.KV_CACHE: "#ad7bc4",
    MemoryKind.COMM_BUFFERS: "#58b3a3",
    MemoryKind.SYNC_STAGING: "#a3a245",
    MemoryKind.CHECKPOINT_STAGING: "#c3a98f",
    MemoryKind.CUDA_GRAPHS: "#8a3d62",
    MemoryKind.ACTIVATIONS: "#4b9a5c",
    MemoryKind.LOGITS: "#e8d57c",
}
"""From the bottom of a stack to its top: what was there before any model, what stays, what comes and goes."""

PHASE_COLORS = {
    Phase.START: "#e4e7eb",
    Phase.ROLLOUT: "#cfe3f7",
    Phase.SCORE: "#f6ecc4",
    Phase.TRAIN: "#f9d9c6",
    Phase.SYNC: "#cfe9dc",
    Phase.SWITCH: "#e2d9f0",
    Phase.EVALUATE: "#d9e2d0",
    Phase.CHECKPOINT: "#eadfd6",
}

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 7.8,
    "ytick.labelsize": 7.8,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.major.width": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "rlplan",
    "svg.fonttype": "path",
}


def phase_color(phase: str) -> str:
    """The shade of a phase; a phase that nobody knows is faint."""
    return PHASE_COLORS[Phase(phase)] if phase in list(Phase) else FAINT


def name_of(word: str) -> str:
    """A word of the vocabulary as people read it.

    >>> name_of("kv_cache"), name_of("sync_weights")
    ('KV cache', 'sync weights')
    """
    return {"kv_cache": "KV cache", "cuda_graphs": "CUDA graphs"}.get(word, word.replace("_", " "))


def sentence(name: str) -> str:
    """A name in words at the beginning of a title; a name of the user's own stays as it is.

    >>> sentence("greedy accuracy"), sentence("length_score")
    ('Greedy accuracy', 'length_score')
    """
    return name[0].upper() + name[1:] if " " in name else name


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, width and height in inches. Draw and save inside `mpl.rc_context(RC)`."""
    return Figure(figsize=(width, height))


def bytes_axis(axes: Axes, top: float, most: int = 5) -> None:
    """A y axis from 0 to `top` bytes with at most so many round binary ticks and faint lines."""
    axes.set_ylim(0, max(top, 1))
    step = tick_step(max(top, 1), most)
    axes.yaxis.set_major_locator(MultipleLocator(step))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    axes.grid(axis="y")


def tick_step(top: float, most: int = 5) -> int:
    """The smallest power of two bytes that needs at most `most` ticks up to `top`.

    >>> tick_step(9 << 30) == 2 << 30, tick_step(900 << 20) == 256 << 20
    (True, True)
    """
    step = 1
    while top > most * step:
        step *= 2
    return step


def tick_text(value: float) -> str:
    """Bytes on a tick, without zeros that say nothing.

    >>> tick_text(2 << 30), tick_text(0)
    ('2 GiB', '0')
    """
    number, unit = format_bytes(value).split(" ")
    return f"{float(number):g} {unit}" if value else "0"


def seconds_axis(axes: Axes, start_s: float, end_s: float, num_ticks: int = 4) -> None:
    """An x axis of seconds since the run began; ticks keep off the edges, where the next panel's are."""
    end_s = max(end_s, start_s + 1e-3)
    ticks = MaxNLocator(num_ticks, steps=[1, 2, 5, 10], min_n_ticks=2).tick_values(start_s, end_s)
    edge = 0.06 * (end_s - start_s)
    axes.set_xticks([tick for tick in ticks if start_s + edge <= tick <= end_s - edge])
    axes.set_xlim(start_s, end_s)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))


def names_axis(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    """An x axis whose places have names and no measure."""
    axes.set_xticks(list(places), list(names), rotation=90, fontsize=6.8)
    axes.tick_params(axis="x", length=0)


def percent(value: float, digits: int = 1, *, signed: bool = False) -> str:
    """A fraction as text.

    >>> percent(0.1234), percent(0.05, 0, signed=True), percent(-0.05, signed=True)
    ('12.3 %', '+5 %', '\u22125.0 %')
    """
    return f"{100 * value:{'+' if signed else ''}.{digits}f} %".replace("-", "\u2212")


def say(axes: Axes, text: str) -> None:
    """Words in the middle of an empty chart, instead of axes that promise data."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED)


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG, the same bytes for the same figure."""
    with mpl.rc_context(RC):
        figure.savefig(path, dpi=170, metadata={"Software": None})


def data_uri(figure: Figure) -> str:
    """The figure as a data URI: an SVG, sharp at any size, or a PNG where that would be much smaller.

    As an image of its own its ids cannot clash with another figure's.
    """
    svg, png = io.BytesIO(), io.BytesIO()
    with mpl.rc_context(RC):
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        if len(svg.getvalue()) <= MAX_SVG_BYTES:
            return "data:image/svg+xml;base64," + base64.b64encode(svg.getvalue()).decode("ascii")
        figure.savefig(png, format="png", dpi=130, metadata={"Software": None})
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode("ascii")
