"""The look of the figures that benchmarks draw with matplotlib. Pages draw theirs in the browser (rlplan/report)."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

INK, MUTED, FAINT, PAPER = "#1c2630", "#66727f", "#e3e8ed", "#ffffff"
ACCENT, BAD = "#33508f", "#b3261e"

RC: Any = mpl.rc_params_from_file(Path(__file__).with_suffix(".mplstyle"), use_default_template=False)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, width and height in inches. Draw and save inside `mpl.rc_context(RC)`."""
    return Figure(figsize=(width, height))


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG, the same bytes for the same figure."""
    with mpl.rc_context(RC):
        figure.savefig(path, dpi=170, metadata={"Software": None})
