"""Self-contained HTML pages: templates, charts drawn by an inlined script, and formats of numbers.

In: values for a template, charts as data. Out: HTML text; all values are data and pass through autoescape.
Left out: the content of pages (run_page.py, plans/).
"""

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined

from rlplan.report import style
from rlplan.report.evaluations import change_text, value_text
from rlplan.units import format_bytes, format_seconds
from rlplan.version import __version__
from rlplan.vocabulary import format_name

# uPlot first, because the other scripts use it when they load
SCRIPTS = ("uplot.min.js", "charts.js", "timeline.js", "curves.js", "page.js")


def render(template: str, **values: Any) -> str:
    """Render a page."""
    text: str = make_environment().get_template(template).render(version=__version__, **values)
    return text


def render_rollouts(run: str, rows: Sequence[dict[str, Any]]) -> str:
    """Render the page of a run's rollouts. run: name of its folder. rows: from `choose_rollouts`."""
    steps = sorted({row["step"] for row in rows})
    names = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    return render("rollouts.html.j2", run=run, rows=rows, steps=steps, names=names)


@cache
def make_environment() -> Environment:
    """The template environment of all pages: autoescaped values, formats of numbers."""
    jinja = Environment(
        loader=FunctionLoader(lambda name: _file("templates", name)), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    jinja.globals |= {
        "scripts": "\n".join(_file("assets", name) for name in SCRIPTS),
        "ui_script": _file("assets", "ui.js"),
        "licence": _file("assets", "uplot.LICENSE").replace("*/", ""),
        "styles": "\n".join(_file("assets", name) for name in ("uplot.min.css", "page.css")),
    }
    jinja.filters |= {
        "bytes": _or_dash(format_bytes),
        "exactly": _or_dash(lambda value: f"{int(value):,}"),
        "seconds": _or_dash(format_seconds),
        "percent": _or_dash(style.format_percent),
        "signed_percent": _or_dash(lambda value: style.format_percent(value, signed=True)),
        "sentence": style.sentence,
        "evaluated": lambda value, is_share: _or_dash(lambda v: value_text(v, is_share=is_share))(value),
        "changed": lambda value, is_share: _or_dash(lambda v: change_text(v, is_share=is_share))(value),
        "ratio": _or_dash(lambda value: f"{value:.2f}"),
        "name": format_name,
        "raw": lambda value: "" if value is None or pd.isna(value) else value,
    }
    return jinja


def _file(folder: str, name: str) -> str:
    return (resources.files("rlplan.report") / folder / name).read_text(encoding="utf-8")


def _or_dash(show: Any) -> Any:
    """A filter that shows unknown values as a dash."""
    return lambda value: "\u2013" if value is None or pd.isna(value) else show(value)
