"""The look of the figures that benchmarks draw with matplotlib. Pages draw theirs in the browser (rlplan/report)."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

INK, MUTED, FAINT, PAPER = "#1c2630", "#66727f", "#e3e8ed", "#ffffff"
ACCENT, BAD = "#33508f", "#b3261e"

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


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, width and height in inches. Draw and save inside `mpl.rc_context(RC)`."""
    return Figure(figsize=(width, height))


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG, the same bytes for the same figure."""
    with mpl.rc_context(RC):
        figure.savefig(path, dpi=170, metadata={"Software": None})
