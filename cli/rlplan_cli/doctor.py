"""`rlplan doctor`: what this machine lacks for a run, with the fix."""

import json
from dataclasses import asdict

import typer

from rlplan_cli.options import AsJson
from rlplan_cli.render import new_table, stdout

NAME = "doctor"
_MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "missing": "[red]missing[/red]"}


def command(as_json: AsJson = False) -> None:
    """Look at Python, packages, memory and /dev/shm. Exit 4 when something that a run needs is missing."""
    from rlplan.runtime.doctor import examine

    findings = examine()
    if as_json:
        print(json.dumps({"schema_version": 1, "findings": [asdict(finding) for finding in findings]}))
    else:
        table = new_table("what", "state", "found", "fix", left=("state", "found", "fix"))
        for finding in findings:
            table.add_row(finding.subject, _MARKS[finding.state], finding.found, finding.fix)
        stdout.print(table)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(4)
