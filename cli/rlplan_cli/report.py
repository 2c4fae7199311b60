"""`rlplan report RUN_DIR|PLAN`: draw and tabulate what happened against what was predicted, or what is predicted."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rlplan.errors import SpecError
from rlplan_cli.options import AsJson
from rlplan_cli.render import note

NAME = "report"


def command(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|PLAN", help="A run folder, or a plan (.json).", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the report; by default RUN_DIR/report, or PLAN-report."),
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option("--compare", help="Another run to draw beside it: a seed or a control; repeat.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page with charts and tables of a run or a plan. A run: predicted against measured. A plan: predicted."""
    is_plan = source.suffix == ".json" or source.is_file()
    page, summary = (_write_plan if is_plan else _write_run)(source, out, compare)
    if as_json:
        print(json.dumps(json.loads(summary.read_text(encoding="utf-8"))))
    else:
        print(page)
        note(f"{len(list(page.parent.iterdir()))} files in {page.parent}")


def _write_run(run_dir: Path, out: Path | None, compare: list[Path] | None) -> tuple[Path, Path]:
    """(page, summary) of a run's report."""
    from rlplan.report.write import write_report

    files = write_report(run_dir, out or run_dir / "report", tuple(compare or ()))
    return files.page, files.summary


def _write_plan(plan: Path, out: Path | None, compare: list[Path] | None) -> tuple[Path, Path]:
    """(page, summary) of a plan's report."""
    from rlplan.report.plans.write import write_plan_report

    if compare:
        raise SpecError(
            f"--compare goes with a run folder, {plan} is a plan",
            where="command line",
            rule="runs are laid beside runs: their learning is compared",
            way_out=f"rlplan report {plan}",
        )
    files = write_plan_report(plan, out or plan.with_name(f"{plan.stem}-report"))
    return files.page, files.summary
