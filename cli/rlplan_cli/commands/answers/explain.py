"""`rlplan explain`: explains the bottleneck of a plan, or of a measured step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rlplan.errors import SpecError
from rlplan_cli.options import AsJson, ForeignArguments, JobArguments, flatten_options

NAME = "explain"

WhatIf = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Try a change; several are tried alone and together."),
]
Fields = Annotated[
    list[str] | None,
    typer.Option("--field", metavar="MEANING=NAME:UNIT", help="Name a field of your log: rollout=gen_ms:ms."),
]
With = Annotated[
    Path | None,
    typer.Option(
        "--with",
        metavar="SCRIPT",
        help="Another framework's script or file that a LOG or traceback is of; needs --gpus.",
    ),
]
MoreDevices = Annotated[bool, typer.Option("--more-gpus", help="Also try 2, 4, 8 and 16 times the devices.")]


@flatten_options
def command(
    job: JobArguments,
    changes: WhatIf = None,
    more_devices: MoreDevices = False,
    fields: Fields = None,
    script: With = None,
    as_json: AsJson = False,
) -> None:
    """Explain the bottleneck of a plan and what would improve it. For a RUN or a LOG, explain why its step is slow, or
    why it ran out of memory.

    RUN is a run folder. LOG is JSONL, CSV, trainer_state.json or console output (.log, .txt), followed by its job or
    --with its script: rlplan explain metrics.jsonl job.yaml.
    """
    if _is_measured(job.source) or script is not None:
        _explain_measured(job, script, changes or (), fields or (), as_json=as_json)
        return
    from rlplan.planner.answers.changes import check_changes
    from rlplan.planner.answers.explain import explain
    from rlplan.planner.memo import Memo
    from rlplan_cli.render.explain import show_explanation
    from rlplan_cli.render.terminal import print_json
    from rlplan_cli.render.waiting import waiting
    from rlplan_cli.sources import read_question

    question = read_question(NAME, job)
    with waiting("planning") as listen:
        memo = Memo()
        plan = question.answer(memo=memo)
        asked = check_changes(plan.asked, changes or ())
        explanation = explain(plan, asked, more_devices=more_devices, listen=listen, memo=memo)
    if as_json:
        print_json(explanation.as_json())
    else:
        show_explanation(plan, explanation)


def _is_measured(source: str | None) -> bool:
    """Whether the first word is a run folder or a log, rather than a job, a plan or a bundle."""
    from rlplan.foreign.logs.read import is_log
    from rlplan.planner.plan import is_run_folder

    return source is not None and "=" not in source and (is_run_folder(Path(source)) or is_log(Path(source)))


def _explain_measured(
    asked: JobArguments, script: Path | None, settings: Sequence[str], fields: Sequence[str], *, as_json: bool
) -> None:
    """Explain a measured step or an out-of-memory error. Raises: SpecError, NoFeasiblePlanError."""
    from rlplan.api import explain_step as explain_run
    from rlplan.foreign.check import import_job
    from rlplan.foreign.logs.read import read_log
    from rlplan.foreign.tracebacks.explain import MemoryAnswer, explain_alone, explain_job, explain_script
    from rlplan.foreign.tracebacks.read import read_out_of_memory
    from rlplan.planner.answers.measured_step import StepReport, explain_step
    from rlplan.sources import split_words
    from rlplan_cli.render.measured import show_answer, show_step
    from rlplan_cli.render.terminal import print_json
    from rlplan_cli.render.waiting import waiting
    from rlplan_cli.sources import read_foreign, read_question

    source = Path(asked.source or "")
    jobs, overrides = split_words(asked.overrides or [])
    is_run, is_table = source.is_dir(), source.suffix in (".csv", ".jsonl")
    error = None if is_run or is_table else read_out_of_memory(source)
    has_job = bool(jobs or asked.model or asked.algorithm or asked.gpus)
    _check_words(source, script, asked.gpus, len(jobs), has_job=has_job, needs_job=error is None and not is_run)
    with waiting("planning"):
        foreign = None
        job = None
        if script is not None:
            words = ForeignArguments(script, overrides, asked.gpus or "", asked.model, None, list(settings))
            foreign = read_foreign(words)
        elif has_job:
            job = read_question(NAME, replace(asked, source=next(iter(jobs), None), overrides=overrides)).job
        answer: MemoryAnswer | StepReport
        if error is not None and foreign is not None:
            answer = explain_script(error, *foreign)
        elif error is not None:
            answer = explain_alone(error) if job is None else explain_job(error, job)
        elif foreign is not None:
            answer = explain_step(import_job(*foreign)[1], read_log(source, fields))
        elif job is not None:
            answer = explain_step(job, read_log(source, fields))
        else:
            answer = explain_run(source, None, overrides).report
    if as_json:
        print_json(answer.as_json())
    elif isinstance(answer, StepReport):
        show_step(answer)
    else:
        show_answer(answer, str(source))


def _check_words(
    source: Path, script: Path | None, gpus: str | None, num_jobs: int, *, has_job: bool, needs_job: bool
) -> None:
    """Raises: SpecError for a run with a job, a log with several jobs or none, and a script without GPUs."""
    if source.is_dir() and has_job:
        what, rule, way_out = "is a run, but a job is given too", "a run folder contains its own job", ""
    elif script is not None and (num_jobs or gpus is None):
        what = f"comes with a script and {'a job' if num_jobs else 'no GPUs'}"
        rule = "a script states its job itself, but not the type of its GPUs"
        way_out = f" --with {script} --gpus {gpus or '8xH100'}"
    elif num_jobs > 1 or (script is None and needs_job and not has_job):
        what = f"comes with {num_jobs} jobs"
        rule = "one job after the log, --with its script, or --model and --gpus"
        way_out = " job.yaml"
    else:
        return
    raise SpecError(f"{source} {what}", where="command line", rule=rule, way_out=f"rlplan explain {source}{way_out}")
