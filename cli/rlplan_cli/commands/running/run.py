"""`rlplan run JOB|plan.json|BUNDLE_DIR`: executes a plan and compares it with its own prediction."""

import importlib.util
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlplan.errors import RlplanError, SpecError
from rlplan_cli.options import AsJson, JobArguments, Overrides, flatten_options
from rlplan_cli.render.terminal import note, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlplan.planner.plan import Plan
    from rlplan.runtime.driver.player import Task

NAME = "run"

What = Annotated[Path | None, typer.Argument(metavar="JOB", help="A job file, a plan or a bundle folder.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The run folder. Default: runs/NAME/TIME.")]
WithReport = Annotated[bool, typer.Option("--report", help="Also write the report into the run folder.")]
Address = Annotated[
    str | None, typer.Option(help="HOST:PORT of a running Ray cluster. Default: start Ray on this host.")
]
SandboxName = Annotated[
    str,
    typer.Option(help="Sandbox for programs in responses: auto, bubblewrap, sandlock; none runs them unprotected."),
]
Resume = Annotated[
    str | None, typer.Option(help="Resume from the last checkpoint of this run folder, or of the `latest` run.")
]


DryRun = Annotated[bool, typer.Option("--dry-run", help="Run all checks that precede a run, then exit.")]


@dataclass(frozen=True)
class RunArguments:
    """The job to run, and the cluster and sandbox to run it in."""

    what: What = None
    overrides: Overrides = None
    address: Address = None
    sandbox: SandboxName = "auto"
    resume: Resume = None
    dry_run: DryRun = False


@flatten_options
def command(asked: RunArguments, out: Out = None, with_report: WithReport = False, as_json: AsJson = False) -> None:
    """Run a job, plan or bundle on vLLM, DeepSpeed and Ray.

    Writes metrics, a memory trace and the trained policy into a run folder.
    """
    if with_report:
        _check_report_extra()
    if _run_stages(asked, out, with_report=with_report, as_json=as_json):
        return

    from rlplan.runtime.driver.launch import prepare_run_folder, prepare_task
    from rlplan.runtime.fault_tolerance.resuming import find_own_bundle, find_run_to_resume

    earlier = None if asked.resume is None else find_run_to_resume(asked.resume)
    source: Plan | Path
    if asked.what is None:
        source, folder = _resume_in_place(earlier, out, find_own_bundle)
    else:
        source, name = _read(asked.what, asked)
        folder = out or _default_folder(name)
    if asked.dry_run and not as_json:
        _show_plan(source)  # before the checks: the plan needs none of a run's packages
    ready = prepare_task(source, asked.address, asked.sandbox, earlier)
    if asked.dry_run:
        with ready as task:
            _show_dry_run(task, folder, as_json=as_json)
        return
    from rlplan.runtime.run_folder.run_lock import lock_run_folder  # imports a package that a dry run does not need

    with lock_run_folder(folder, is_resumed=asked.what is None), ready as task:
        if asked.what is not None:
            task = prepare_run_folder(task, folder, writes_bundle=not isinstance(source, Path))
        note(f"run folder: {folder}")
        _run(task, folder, with_report=with_report)
    _show_ending(folder, with_report=with_report, as_json=as_json)


def _run(task: "Task", folder: Path, *, with_report: bool) -> None:
    from rlplan.runtime.driver.launch import run_task
    from rlplan_cli.render.running.watching import RunDisplay

    try:
        with RunDisplay(task.plan, folder) as display:
            run_task(task, folder, display.show_event)
    except RlplanError:
        if with_report and (folder / "trace.jsonl").exists():
            _report_failure(folder)
        raise


def _show_ending(folder: Path, *, with_report: bool, as_json: bool) -> None:
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    if status["message"]:
        note(status["message"])
    if with_report:
        status["report"] = _report(folder)
    if as_json:
        print(json.dumps({"schema_version": 1, "run_folder": str(folder), **status}))
    else:
        from rlplan_cli.render.running.run_summary import show_summary

        show_summary(folder)


def _run_stages(asked: RunArguments, out: Path | None, *, with_report: bool, as_json: bool) -> bool:
    """Run all stages of a job file. Returns whether it has stages. Exits with the code of a stage that fails."""
    from rlplan_cli.commands.running.stages import StagesRun, choose_folder
    from rlplan_cli.sources import read_stages

    stages = read_stages(asked.what, asked.overrides or ())
    if not stages or asked.what is None:
        return False
    folder = choose_folder(str(stages[0].data["name"]).removesuffix(f"-{stages[0].name}"), out, asked.resume)
    options = [*(["--report"] * with_report), *(["--json"] * as_json), "--sandbox", asked.sandbox]
    options += ["--address", asked.address] if asked.address else []
    stages_run = StagesRun(asked.what, tuple(asked.overrides or ()), folder, stages, tuple(options))
    code = stages_run.rehearse() if asked.dry_run else stages_run.run()
    if as_json:
        print_json({"schema_version": 1, "stages": stages_run.outputs})
    if code:
        raise typer.Exit(code)
    return True


def _show_plan(source: "Plan | Path") -> None:
    from rlplan.planner.plan import read_plan
    from rlplan_cli.render.plan import show_speed

    show_speed(read_plan(source / "plan.json") if isinstance(source, Path) else source)


def _show_dry_run(task: "Task", folder: Path, *, as_json: bool) -> None:
    if as_json:
        facts = {
            "run_folder": str(folder),
            "read": list(task.prompts.log_lines),
            "num_steps": task.spec.job.workload.num_steps,
        }
        print(json.dumps({"schema_version": 1, "state": "ready", **facts}))
        return
    for line in task.prompts.log_lines:
        print(f"  {line}")
    print(f"ready: a run of {task.spec.job.workload.num_steps} steps would write to {folder}; nothing was started")


def _resume_in_place(earlier: Path | None, out: Path | None, bundle_of: "Callable[[Path], Path]") -> tuple[Path, Path]:
    """Return (bundle, run folder) of a run that is resumed in its own folder. Raises: SpecError."""
    if earlier is None:
        raise SpecError(
            "nothing to run",
            where="command line",
            rule="a job file, a plan or a bundle folder, or --resume with a run folder",
            way_out="`rlplan init job.yaml --gpus cpu` writes a job; then rlplan run job.yaml",
        )
    if out is not None:
        raise SpecError(
            f"--out {out} needs a job, a plan or a bundle",
            where="command line",
            rule="without one, --resume continues in the run's own folder",
            way_out=f"rlplan run JOB --resume {earlier} --out {out}",
        )
    return bundle_of(earlier), earlier


def _read(what: Path, asked: RunArguments) -> "tuple[Plan | Path, str]":
    """Return (plan or bundle folder, name). A bundle runs as it is; a job or plan is emitted into the run folder."""
    from rlplan.emit.bundle import read_bundle
    from rlplan_cli.sources import plan_with_models, read_question

    overrides = tuple(asked.overrides or ())
    if not what.is_dir():
        plan = plan_with_models(NAME, what, overrides, asked.address, downloads=not asked.dry_run)
        return plan, plan.job.name
    if overrides:
        read_question(NAME, JobArguments(str(what), [*overrides]))  # raises: a bundle takes no overrides
    return what, read_bundle(what).job.name


def _default_folder(name: str) -> Path:
    return Path("runs") / name / time.strftime("%Y%m%d-%H%M%S")


def _check_report_extra() -> None:
    """Check before the run that the report's packages are installed, without an import that would enlarge the driver.

    Raises: ModuleNotFoundError.
    """
    for name in ("pandas", "jinja2"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"no module named {name}", name=name)


def _report_failure(folder: Path) -> None:
    """Try to write the report of a failed run. Its own errors become notes, because the run's error is printed next."""
    try:
        _report(folder)
    except RlplanError as error:
        note(f"no report: {error.what}")


def _report(folder: Path) -> str:
    from rlplan_cli.commands.running.report import write_run_report

    page = write_run_report(folder, folder / "report").page
    note(f"report: {page}")
    return str(page)
