"""`rlplan explain`: explains the bottleneck of a plan, or of a measured step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlplan.errors import SpecError
from rlplan_cli.options import AsJson, JobArguments, flatten_options

NAME = "explain"

WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Try a change; several are tried alone and together.", show_default=False
    ),
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--field", metavar="MEANING=NAME:UNIT", help="Name a field of your log: rollout=gen_ms:ms.", show_default=False
    ),
]
MoreDevices = Annotated[bool, typer.Option("--more-gpus", help="Also try 2, 4, 8 and 16 times the devices.")]


@flatten_options
def command(
    job: JobArguments,
    changes: WhatIf = None,
    more_devices: MoreDevices = False,
    fields: Fields = None,
    as_json: AsJson = False,
) -> None:
    """Explain the bottleneck of a plan and what would improve it. For a RUN or a LOG, explain why its step is slow.

    RUN is a run folder. LOG is JSONL, CSV, trainer_state.json or verl's console output (.log), followed by its job:
    rlplan explain metrics.jsonl job.yaml.
    """
    if _is_measured(job.source):
        _explain_measured(job, fields or (), as_json=as_json)
        return
    from rlplan.planner.answers.changes import check_changes
    from rlplan.planner.answers.explain import explain
    from rlplan_cli.render.explain import show_explanation
    from rlplan_cli.render.terminal import print_json
    from rlplan_cli.render.waiting import waiting
    from rlplan_cli.sources import read_question

    question = read_question(NAME, job)
    with waiting("planning") as listen:
        plan = question.answer()
        explanation = explain(plan, check_changes(plan.asked, changes or ()), more_devices=more_devices, listen=listen)
    if as_json:
        print_json(explanation.as_json())
    else:
        show_explanation(plan, explanation)


def _is_measured(source: str | None) -> bool:
    """Whether the first word is a run folder or a log, rather than a job, a plan or a bundle."""
    from rlplan.foreign.logs.read import is_log
    from rlplan.planner.plan import is_run_folder

    return source is not None and "=" not in source and (is_run_folder(Path(source)) or is_log(Path(source)))


def _explain_measured(asked: JobArguments, fields: Sequence[str], *, as_json: bool) -> None:
    """Explain a measured step. Raises: SpecError for a log without its job, or a run with a job."""
    from rlplan.api import explain_step
    from rlplan.sources import split_words
    from rlplan_cli.render.measured import show_step
    from rlplan_cli.render.terminal import print_json
    from rlplan_cli.render.waiting import waiting

    source = Path(asked.source or "")
    jobs, overrides = split_words(asked.overrides or [])
    named = (asked.model, asked.algorithm, asked.gpus)
    if source.is_dir() and (jobs or any(named)):
        raise SpecError(
            f"{source} is a run, but a job is given too",
            where="command line",
            rule="a run folder contains its own job",
            way_out=f"rlplan explain {source}",
        )
    if not source.is_dir() and (len(jobs) > 1 or not (jobs or any(named))):
        raise SpecError(
            f"the log {source} comes with {len(jobs)} jobs",
            where="command line",
            rule="one job after the log, or --model and --gpus; `rlplan import` converts other frameworks' jobs",
            way_out=f"rlplan explain {source} job.yaml",
        )
    with waiting("planning"):
        result = explain_step(
            source,
            jobs[0] if jobs else None,
            overrides,
            model=asked.model,
            algorithm=asked.algorithm,
            gpus=asked.gpus,
            fields=fields,
        )
    if as_json:
        print_json(result.as_json())
    else:
        show_step(result.report)
