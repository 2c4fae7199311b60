"""`rlplan report RUN_DIR|PLAN|JOB...`: draw what happened against what was predicted, or what is predicted."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rlplan.errors import SpecError
from rlplan.spec.base import read_json
from rlplan_cli.commands.running.stages import STAGES
from rlplan_cli.options import AsJson, JobArguments
from rlplan_cli.render.terminal import note, print_stages

NAME = "report"


def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR|PLAN|JOB", help="A run folder; or a job, a plan or a bundle.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the report; by default RUN_DIR/report, or beside the plan."),
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option("--compare", help="Another run to draw beside it: a seed or a control; repeat.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page with charts and tables of a run or a plan. A run: predicted against measured. Else: predicted."""
    from rlplan.planner.plan import is_run_folder

    if not source.exists():
        raise SpecError(
            f"{source} does not exist",
            where="command line",
            rule="a run folder, a job, a plan or a bundle",
            way_out="correct the path; `rlplan run` prints the run folder",
        )
    summaries = {}
    for each in _stages_below(source):
        where = out if each == source or out is None else out / each.name
        page, summary = (_write_run if is_run_folder(source) else _write_plan)(each, where, compare)
        if as_json:
            summaries[each.name * (each != source)] = json.dumps(json.loads(summary.read_text(encoding="utf-8")))
        else:
            print(page)
            note(f"{len(list(page.parent.iterdir()))} files in {page.parent}")
    if as_json:
        print_stages(summaries)


def _stages_below(source: Path) -> list[Path]:
    """The run folders of the stages that have begun; a run or a plan is its own."""
    if not (source / STAGES).is_file():
        return [source]
    listed = read_json(source / STAGES, "the names of the stages")
    names = listed.get("stages") if isinstance(listed, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise SpecError(
            "the names of the stages are none",
            where=str(source / STAGES),
            rule="an object with `stages`, a list of the names of folders beside it",
            way_out=f"name the folder of one stage: rlplan report {source}/STAGE",
        )
    return [source / name for name in names if (source / name / "trace.jsonl").is_file()]


def _write_run(run_dir: Path, out: Path | None, compare: list[Path] | None) -> tuple[Path, Path]:
    """(page, summary) of a run's report."""
    from rlplan.report.write import write_report

    files = write_report(run_dir, out or run_dir / "report", tuple(compare or ()))
    return files.page, files.summary


def _write_plan(source: Path, out: Path | None, compare: list[Path] | None) -> tuple[Path, Path]:
    """(page, summary) of the report of a job's plan, of a plan or of a bundle."""
    from rlplan.report.plans.write import write_report_of
    from rlplan_cli.sources import read_question

    if compare:
        raise SpecError(
            f"--compare is for run folders, and {source} is not one",
            where="command line",
            rule="runs are laid beside runs: their learning is compared",
            way_out=f"rlplan report {source}",
        )
    folder = out or source.with_name(f"{source.stem}-report")
    files = write_report_of(read_question(NAME, JobArguments(str(source))).answer(), source.name, folder)
    return files.page, files.summary
