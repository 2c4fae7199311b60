"""`rlplan explain RUN|LOG`: which of its words are the run or the log, and which the job."""

from collections.abc import Sequence
from pathlib import Path

from rlplan.errors import SpecError
from rlplan_cli.options import JobArguments


def is_measured(source: str | None) -> bool:
    """Whether the first word is a run folder or a log, and no job, plan or bundle."""
    from rlplan.foreign.logs.read import is_log
    from rlplan.planner.plan import is_run_folder

    return source is not None and "=" not in source and (is_run_folder(Path(source)) or is_log(Path(source)))


def show_measured(asked: JobArguments, fields: Sequence[str], *, as_json: bool) -> None:
    """Answer, on stdout. Raises: SpecError where a log comes without its job, or a run with another one."""
    from rlplan.api import explain_step
    from rlplan.sources import split_words
    from rlplan_cli.render.measured import show_step
    from rlplan_cli.render.terminal import print_json
    from rlplan_cli.render.waiting import waiting

    source = Path(asked.source or "")
    jobs, overrides = split_words(asked.overrides or [])
    named = (asked.model, asked.algorithm, asked.gpus)
    if source.is_dir() and (jobs or any(named)):
        raise _refused(
            f"{source} is a run, and a job is named too", "a run knows its own job", f"rlplan explain {source}"
        )
    if not source.is_dir() and (len(jobs) > 1 or not (jobs or any(named))):
        raise _refused(
            f"the log {source} comes with {len(jobs)} jobs",
            "one job that wrote it, behind it, or --model and --gpus; `rlplan import` makes one of another stack's",
            f"rlplan explain {source} job.yaml",
        )
    with waiting("asking"):
        found = explain_step(
            source,
            jobs[0] if jobs else None,
            overrides,
            model=asked.model,
            algorithm=asked.algorithm,
            gpus=asked.gpus,
            fields=fields,
        )
    if as_json:
        print_json(found.as_json())
    else:
        show_step(found.report)


def _refused(what: str, rule: str, way_out: str) -> SpecError:
    return SpecError(what, where="command line", rule=rule, way_out=way_out)
