"""`rlplan explain`: explains the bottleneck of a plan, or of a measured step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlplan.errors import SpecError
from rlplan.sources import split_words
from rlplan_cli.options import AsJson, ForeignArguments, JobArguments, flatten_options

if TYPE_CHECKING:
    from rlplan.planner.answers.measured_step import StepReport

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
With = Annotated[
    Path | None,
    typer.Option(
        "--with",
        metavar="SCRIPT",
        help="Another framework's script or file that a LOG or traceback is of; needs --gpus.",
        show_default=False,
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
        log = _Log(job, script, tuple(changes or ()), tuple(fields or ()), as_json)
        if not log.explain_memory():
            log.explain_steps()
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


@dataclass(frozen=True)
class _Log:
    """A measured run, and what the command line says of its job."""

    asked: JobArguments
    script: Path | None
    settings: tuple[str, ...]
    """Values of `--set` for the script."""
    fields: tuple[str, ...]
    as_json: bool

    @property
    def source(self) -> Path:
        return Path(self.asked.source or "")

    def explain_memory(self) -> bool:
        """Explain an out-of-memory error; False if the log has none. Raises: SpecError, NoFeasiblePlanError."""
        from rlplan.foreign.tracebacks.explain import explain_alone, explain_job, explain_script
        from rlplan.foreign.tracebacks.read import read_out_of_memory
        from rlplan_cli.render.terminal import print_json
        from rlplan_cli.render.traceback import show_answer
        from rlplan_cli.render.waiting import waiting
        from rlplan_cli.sources import read_foreign, read_question

        source = self.source
        error = None if source.is_dir() or source.suffix in (".csv", ".jsonl") else read_out_of_memory(source)
        if error is None:
            return False
        jobs, overrides = split_words(self.asked.overrides or [])
        with waiting("planning"):
            if self.script is not None:
                answer = explain_script(error, *read_foreign(self._find_foreign(jobs, overrides)))
            elif jobs or self.asked.model or self.asked.gpus:
                words = replace(self.asked, source=jobs[0] if jobs else None, overrides=overrides)
                answer = explain_job(error, read_question(NAME, words).job)
            else:
                answer = explain_alone(error)
        if self.as_json:
            print_json(answer.as_json())
        else:
            show_answer(answer, str(source))
        return True

    def _find_foreign(self, jobs: Sequence[str], overrides: Sequence[str]) -> ForeignArguments:
        """The script with its GPUs. Raises: SpecError without GPUs, or with a job beside it."""
        script, gpus = self.script or Path(), self.asked.gpus
        if jobs or gpus is None:
            raise SpecError(
                f"{self.source} comes with a script and {'a job' if jobs else 'no GPUs'}",
                where="command line",
                rule="a script states its job itself, but not the type of its GPUs",
                way_out=f"rlplan explain {self.source} --with {script} --gpus {gpus or '8xH100'}",
            )
        return ForeignArguments(script, list(overrides), gpus, self.asked.model, None, list(self.settings))

    def explain_steps(self) -> None:
        """Explain a measured step. Raises: SpecError for a log without its job, or a run with a job."""
        from rlplan.api import explain_step
        from rlplan_cli.render.measured import show_step
        from rlplan_cli.render.terminal import print_json
        from rlplan_cli.render.waiting import waiting

        source, asked = self.source, self.asked
        jobs, overrides = split_words(asked.overrides or [])
        options = {"model": asked.model, "algorithm": asked.algorithm, "gpus": asked.gpus}
        if source.is_dir() and (jobs or any(options.values())):
            raise SpecError(
                f"{source} is a run, but a job is given too",
                where="command line",
                rule="a run folder contains its own job",
                way_out=f"rlplan explain {source}",
            )
        if not source.is_dir() and self.script is None and (len(jobs) > 1 or not (jobs or any(options.values()))):
            raise SpecError(
                f"the log {source} comes with {len(jobs)} jobs",
                where="command line",
                rule="one job after the log, --with its script, or --model and --gpus",
                way_out=f"rlplan explain {source} job.yaml",
            )
        with waiting("planning"):
            if self.script is not None:
                report = self._explain_script(jobs, overrides)
            else:
                job = jobs[0] if jobs else None
                report = explain_step(source, job, overrides, **options, fields=self.fields).report
        if self.as_json:
            print_json(report.as_json())
        else:
            show_step(report)

    def _explain_script(self, jobs: Sequence[str], overrides: Sequence[str]) -> "StepReport":
        from rlplan.foreign.check import import_job
        from rlplan.foreign.logs.read import read_log
        from rlplan.planner.answers.measured_step import explain_step
        from rlplan_cli.sources import read_foreign

        step = read_log(self.source, self.fields)
        return explain_step(import_job(*read_foreign(self._find_foreign(jobs, overrides)))[1], step)
