"""The look of every chart: one colour for each memory kind, phase and resource; their names are `vocabulary.words_of`.

In: enums and words. Out: colours, titles. Left out: what is drawn (memory.py), the page's own colours (page.css).

The colours of kinds were searched for the largest distance between any two of them as people see them with full colour
vision and without red, green or blue cones (CIE 76 after Machado 2009): at least 14 for all, 23 for what fills a GPU.
tests/report/test_style.py holds it. Names stand in the areas all the same.
"""

import json
from pathlib import Path

from rlplan.timing.cost import Resource
from rlplan.vocabulary import MemoryKind, Phase

MUTED = "#66727f"
_COLORS = json.loads((Path(__file__).parent / "assets" / "colors.json").read_text("utf-8"))
KIND_COLORS = {MemoryKind(name): color for name, color in _COLORS["kinds"].items()}
"""From the bottom of a stack to its top: what was there before any model, what stays, what comes and goes."""

PHASE_COLORS = {Phase(name): color for name, color in _COLORS["phases"].items()}

RESOURCE_COLORS = {Resource(name): color for name, color in _COLORS["resources"].items()}


def phase_color(phase: str) -> str:
    """The colour of a phase; an unknown phase is grey."""
    return PHASE_COLORS[Phase(phase)] if phase in list(Phase) else MUTED


def sentence(name: str) -> str:
    """A name in words at the beginning of a title; a name of the user's own stays as it is.

    >>> sentence("greedy accuracy"), sentence("length_score")
    ('Greedy accuracy', 'length_score')
    """
    return name[0].upper() + name[1:] if " " in name else name


def percent(value: float, digits: int = 1, *, signed: bool = False) -> str:
    """A fraction as text.

    >>> percent(0.1234), percent(0.05, 0, signed=True), percent(-0.05, signed=True)
    ('12.3 %', '+5 %', '\u22125.0 %')
    """
    return f"{100 * value:{'+' if signed else ''}.{digits}f} %".replace("-", "\u2212")
