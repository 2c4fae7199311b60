"""The page of rollouts: prompts, responses and rewards to read and filter in a browser.

In: rows of a run's `rollouts/`. Out: HTML text. The texts are a model's, so the template escapes all of them.
"""

from collections.abc import Sequence
from typing import Any

from rlplan.report import html

TEMPLATE = "rollouts.html.j2"


def render_rollouts(run: str, rows: Sequence[dict[str, Any]]) -> str:
    """Render the page. run: name of the run folder. rows: with `rewards` by name, and the step's `loss` or None."""
    steps = sorted({row["step"] for row in rows})
    names = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    return html.render(TEMPLATE, run=run, rows=rows, steps=steps, names=names)
