"""`rlplan report RUN_DIR`: draw and tabulate what happened against what was predicted."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rlplan_cli.options import AsJson
from rlplan_cli.render import note

NAME = "report"


def command(
    run_dir: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the report; by default RUN_DIR/report.")
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option("--compare", help="Another run to draw beside it: a seed or a control; repeat.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page with charts and tables of a run. Predicted against measured memory, and how the policy learned."""
    from rlplan.report.write import write_report

    target = out or run_dir / "report"
    write_report(run_dir, target, tuple(compare or ()))
    if as_json:
        print(json.dumps(json.loads((target / "report.json").read_text(encoding="utf-8"))))
    else:
        print(target / "index.html")
        note(f"{len(list(target.iterdir()))} files in {target}")
