"""`rlplan report RUN_DIR|PLAN|JOB...`: writes a page on a run (predicted against measured) or on a plan."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlplan.errors import SpecError
from rlplan.spec.base import read_json
from rlplan_cli.commands.running.rollouts import write_report_page
from rlplan_cli.commands.running.stages import STAGES
from rlplan_cli.options import AsJson, JobArguments
from rlplan_cli.render.terminal import note, print_stages

if TYPE_CHECKING:
    from rlplan.report.write import ReportFiles

NAME = "report"


def command(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR|PLAN|JOB...",
            help="A run folder, a job, a plan, a bundle or a simulation; several are shown side by side.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the report. Default: RUN_DIR/report, or beside the plan."),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option("--compare", help="Another run to compare with, such as another seed; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page with charts and tables of a run or a plan. For a run, it compares predictions with measurements."""
    from rlplan.planner.plan import is_run_folder

    for missing in (source for source in sources if not source.exists()):
        raise SpecError(
            f"{missing} does not exist",
            where="command line",
            rule="a run folder, a job, a plan or a bundle",
            way_out="correct the path; `rlplan run` prints its run folder",
        )
    source, *others = sources
    if others:
        print(_write_comparison(sources, out, as_json=as_json, compare=compare))
        return
    summaries = {}
    write = _write_run if is_run_folder(source) else _write_plan
    for part in _list_stages(source):
        page, summary = write(part, out if part == source or out is None else out / part.name, compare)
        if as_json:
            summaries[part.name * (part != source)] = json.dumps(json.loads(summary.read_text(encoding="utf-8")))
        else:
            print(page)
            note(f"{len(list(page.parent.iterdir()))} files in {page.parent}")
    if as_json:
        print_stages(summaries)


def _list_stages(source: Path) -> list[Path]:
    """List the run folders of the stages that have started; only the source itself if it has no stages."""
    if not (source / STAGES).is_file():
        return [source]
    listed = read_json(source / STAGES, "the names of the stages")
    names = listed.get("stages") if isinstance(listed, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise SpecError(
            "the names of the stages cannot be read",
            where=str(source / STAGES),
            rule="an object with `stages`, a list of the names of folders beside it",
            way_out=f"give the folder of one stage: rlplan report {source}/STAGE",
        )
    return [source / name for name in names if (source / name / "trace.jsonl").is_file()]


def _write_comparison(sources: list[Path], out: Path | None, *, as_json: bool, compare: list[Path] | None) -> Path:
    """Write the page of several plans, simulations and runs."""
    from rlplan.planner.plan import is_run_folder
    from rlplan.report.plans.comparison import Side, make_side, write_comparison
    from rlplan.report.plans.write import read_simulation
    from rlplan.report.run_folder import read_run_folder
    from rlplan.results import PlanResult, RunResult
    from rlplan_cli.sources import read_question

    if as_json or compare:
        raise SpecError(
            f"{'--json' if as_json else '--compare'} takes one source, not {len(sources)}",
            where="command line",
            rule="several sources become one page",
            way_out="use `rlplan compare --json` for several sources" if as_json else "give that run as a source too",
        )

    def build_side(source: Path) -> Side:
        if is_run_folder(source):
            run = read_run_folder(source)
            return make_side(run, RunResult(run.plan, run).build_comparison_row())
        simulated = read_simulation(source) if source.suffix == ".json" else None
        if simulated is not None:
            return make_side(simulated, {})
        plan = read_question(NAME, JobArguments(str(source))).answer()
        return make_side(plan, PlanResult(plan).build_comparison_row())

    page = (out or Path("comparison")) / "comparison.html"
    write_comparison([build_side(source) for source in sources], page)
    return page


def _write_run(run_dir: Path, out: Path | None, compare: list[Path] | None) -> tuple[Path, Path]:
    """Write a run's report. Returns (page, summary)."""
    files = write_run_report(run_dir, out or run_dir / "report", tuple(compare or ()))
    return files.page, files.summary


def write_run_report(run_dir: Path, out: Path, compare: tuple[Path, ...] = ()) -> "ReportFiles":
    """Write a run's report, and the page of its last step's rollouts."""
    from rlplan.report.write import write_report

    files = write_report(run_dir, out, compare)
    write_report_page(run_dir, out)
    return files


def _write_plan(source: Path, out: Path | None, compare: list[Path] | None) -> tuple[Path, Path]:
    """Write the report of a job, a plan, a bundle or a simulation. Returns (page, summary)."""
    from rlplan.report.plans.write import write_plan_report, write_simulation_report
    from rlplan_cli.sources import read_question

    if compare:
        raise SpecError(
            f"--compare needs a run folder, {source} is not one",
            where="command line",
            rule="--compare shows the learning curves of several runs",
            way_out=f"rlplan report {source}",
        )
    folder = out or source.with_name(f"{source.stem}-report")
    files = write_simulation_report(source, folder) if source.suffix == ".json" else None
    files = files or write_plan_report(read_question(NAME, JobArguments(str(source))).answer(), source.name, folder)
    return files.page, files.summary
