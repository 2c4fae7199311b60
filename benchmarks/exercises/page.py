"""The parts of docs/exercises.md: each between two marks, made by a function.

In: a page with marks. Out: the page with every part made anew. Left out: the prose around the parts.
tests/docs/test_exercises.py makes the same parts and compares them with the page.
"""

import re
from collections.abc import Callable

from benchmarks.exercises import bandwidth, design, one_card, placement
from benchmarks.exercises.plans import ROOT

PAGE = ROOT / "docs" / "exercises.md"
PARTS: dict[str, Callable[[], str]] = {
    "states": placement.states,
    "placed": placement.write_placed,
    "placed-answer": placement.placed_answer,
    "placed-commands": placement.placed_commands,
    "links": bandwidth.links,
    "handed": bandwidth.write_handed,
    "handed-answer": bandwidth.handed_answer,
    "handed-commands": bandwidth.handed_commands,
    "design": design.design,
    "design-memory": design.design_memory,
    "design-time": design.design_time,
    "design-frameworks": design.design_frameworks,
    "left-out": one_card.left_out,
    "left-out-answer": one_card.left_out_answer,
    "variants": one_card.variants,
    "variants-commands": one_card.variants_commands,
}
MARKED = re.compile(r"<!-- begin ([\w-]+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)


def fill_page(page: str) -> str:
    """The page with every part made anew."""
    return MARKED.sub(lambda part: f"<!-- begin {part[1]} -->\n{PARTS[part[1]]()}\n<!-- end {part[1]} -->", page)
