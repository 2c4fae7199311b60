"""`rlplan doctor`: shows what this machine lacks for a run, with the fix."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from rlplan_cli.options import AsJson
from rlplan_cli.render.terminal import show_table

if TYPE_CHECKING:
    from rlplan.runtime.host.finding import Finding

_COLORS = {"ok": "green", "warning": "yellow", "missing": "red"}


def show_findings(findings: "Iterable[Finding]") -> None:
    """Show one row per finding."""
    rows = ((each.subject, Text(each.state, _COLORS[each.state]), each.found, each.fix) for each in findings)
    show_table(("check", "state", "found", "fix"), rows, left=("state", "found", "fix"))


def command(as_json: AsJson = False) -> None:
    """Check Python, packages, memory and /dev/shm. Exits with 4 if something that a run needs is missing."""
    from rlplan.runtime.host.doctor import examine

    findings = examine()
    if as_json:
        print(json.dumps({"schema_version": 1, "findings": [asdict(finding) for finding in findings]}))
    else:
        show_findings(findings)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(4)
