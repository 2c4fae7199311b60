"""Colours of all charts, for each memory kind, phase and resource; their names are `vocabulary.format_name`.

In: enums and words. Out: colours, titles. Left out: charts (memory.py), the page's own colours (page.css).

The colours of kinds maximize the distance between any two of them, with full colour vision and without red, green or
blue cones (CIE 76 after Machado 2009): at least 14 for all, 23 for the kinds that fill a GPU.
tests/report/test_style.py checks it. Areas are labelled with names as well.
"""

import json
from pathlib import Path

from rlplan.timing.cost import Resource
from rlplan.vocabulary import MemoryKind, Phase

MUTED = "#66727f"
_COLORS = json.loads((Path(__file__).parent / "assets" / "colors.json").read_text("utf-8"))
KIND_COLORS = {MemoryKind(name): color for name, color in _COLORS["kinds"].items()}
"""Order of a stack from the bottom: baseline of the process, persistent kinds, temporary kinds."""

PHASE_COLORS = {Phase(name): color for name, color in _COLORS["phases"].items()}

RESOURCE_COLORS = {Resource(name): color for name, color in _COLORS["resources"].items()}


def phase_color(phase: str) -> str:
    """Colour of a phase; unknown phases are grey."""
    return PHASE_COLORS[Phase(phase)] if phase in list(Phase) else MUTED


def sentence(name: str) -> str:
    """Capitalize a name in words at the beginning of a title; names with underscores stay as they are.

    >>> sentence("greedy accuracy"), sentence("length_score")
    ('Greedy accuracy', 'length_score')
    """
    return name[0].upper() + name[1:] if " " in name else name


def format_percent(value: float, digits: int = 1, *, signed: bool = False) -> str:
    """Format a fraction in percent.

    >>> format_percent(0.1234), format_percent(0.05, 0, signed=True), format_percent(-0.05, signed=True)
    ('12.3 %', '+5 %', '\u22125.0 %')
    """
    return f"{100 * value:{'+' if signed else ''}.{digits}f} %".replace("-", "\u2212")
