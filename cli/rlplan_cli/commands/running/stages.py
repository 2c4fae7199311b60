"""Runs the stages of a job file one after the other, each in its own process and folder.

A finished stage is not run again; an interrupted one resumes from its last checkpoint.
"""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplan.errors import EXIT_RESUMABLE, RunError, SpecError
from rlplan.runtime.processes.interrupts import SIGNALS, leave_lost_terminal, list_handled_signals
from rlplan.spec.base import explain_write_errors, read_json
from rlplan.spec.files.stages import Stage, list_open_inputs
from rlplan_cli.render.terminal import note

if TYPE_CHECKING:
    from rlplan.spec.job import JobSpec

STAGES = "stages.json"
"""File with the names of all stages, in the folder of the whole run."""
RESUMABLE_CODES = (RunError.exit_code, EXIT_RESUMABLE, *(128 + number for number in SIGNALS))
"""Exit codes after which --resume may succeed; any other code needs a change of the job."""
RUN = (sys.executable, "-m", "rlplan_cli", "run")  # the script may not be on the PATH


@dataclass(frozen=True)
class StagesRun:
    """A run of all stages of a file. more: options of `rlplan run` for each stage."""

    file: Path
    overrides: tuple[str, ...]
    folder: Path
    stages: tuple[Stage, ...]
    more: tuple[str, ...] = ()
    outputs: dict[str, Any] = field(default_factory=dict)
    """JSON output of each stage; the status of one that had already finished."""

    def run(self) -> int:
        """Run all stages. Returns the exit code of the last one. Raises: SpecError before the first stage starts."""
        for stage in self.stages:
            self._load_job([f"stage={stage.name}", *self.overrides])
        if not (self.folder / STAGES).exists():
            # In a process of its own: the data of all stages would stay in this one's memory while they train.
            asked = [str(self.file), *self.overrides, *self.more, "--dry-run", "--out", str(self.folder)]
            if code := run_child([*RUN, *asked], subprocess.DEVNULL):
                return code
        names = [stage.name for stage in self.stages]
        with explain_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"schema_version": 1, "stages": names}) + "\n"
            (self.folder / STAGES).write_text(text, encoding="utf-8")
        for stage in self.stages:
            words = self._build_words(stage)
            if words is None:
                folder = self.folder / stage.name
                note(f"stage {stage.name}: already finished in {folder}")
                status = read_json(folder / "status.json", "the stage's status")
                self.outputs[stage.name] = {"schema_version": 1, "run_folder": str(folder), **status}
                continue
            note(f"stage {stage.name}:")
            if code := self._run(stage.name, words):
                note(f"stage {stage.name}: exit code {code}{self._suggest_resume(code)}")
                return code
        return 0

    def _suggest_resume(self, code: int) -> str:
        """The command that resumes the run, if that may help after this exit code."""
        words = ["rlplan", "run", str(self.file), *self.overrides, *self.more, "--resume", str(self.folder)]
        return f"; `{shlex.join(words)}` resumes it" if code in RESUMABLE_CODES else ""

    def rehearse(self) -> int:
        """Dry-run the stages that need no other stage; plan the rest and check their data.

        A stage that starts from another one's model has the tokenizer of the model which that one starts from.
        Returns the exit code of a check that failed, or 0. Raises: RlplanError.
        """
        from rlplan.planner.executable import check_fits
        from rlplan.planner.search import find_best_plan
        from rlplan.runtime.data.prompt_sets import load_prompts

        for stage in self.stages:
            words = [f"stage={stage.name}", *self.overrides]
            needs = list(dict.fromkeys(list_open_inputs(stage, self.overrides, self.stages).values()))
            if needs:
                note(f"stage {stage.name}, after {', '.join(needs)}:")
                plan = find_best_plan(self._load_job(words))
                check_fits(plan)
                lines = load_prompts(plan.job).log_lines
                self.outputs[stage.name] = {"schema_version": 1, "state": "fits", "needs": needs, "read": [*lines]}
                note(f"stage {stage.name}: fits; {'; '.join(lines)}")
            else:
                note(f"stage {stage.name}:")
                asked = [str(self.file), *words, "--dry-run", "--out", str(self.folder / stage.name)]
                if code := self._run(stage.name, asked):
                    return code
        return 0

    def _run(self, name: str, words: Sequence[str]) -> int:
        """Run `rlplan run` with these words and return its exit code. Its JSON output goes into `outputs`."""
        command = [*RUN, *words, *self.more]
        if "--json" not in self.more:
            return run_child(command)
        # a file rather than a pipe, which someone would have to read while the stage runs
        with tempfile.TemporaryFile() as printed:
            code = run_child(command, printed.fileno())
            printed.seek(0)
            if not code:
                self.outputs[name] = json.loads(printed.read().splitlines()[-1])
        return code

    def _build_words(self, stage: Stage) -> list[str] | None:
        """Arguments of `rlplan run` for a stage; None for one that has finished. Raises: SpecError."""
        from rlplan.runtime.checkpoints.manifest import POINTER, checkpoints_folder

        folder, asked = self.folder / stage.name, self.build_overrides(stage)
        if not (folder / "plan.json").is_file():
            self._move_aside(folder)
            return [str(self.file), *asked, "--out", str(folder)]
        self._check_same(folder, asked)
        status = folder / "status.json"
        if status.is_file() and read_json(status, "the stage's status").get("state") == "finished":
            return None
        if (checkpoints_folder(folder) / POINTER).exists():
            return ["--resume", str(folder)]
        self._move_aside(folder)
        return [str(self.file), *asked, "--out", str(folder)]

    def build_overrides(self, stage: Stage) -> list[str]:
        """Overrides that select this stage's job, with the policies of earlier stages as its inputs."""
        inputs = [
            f"{key}={json.dumps(str((self.folder / name / 'policy').resolve()))}"
            for key, name in list_open_inputs(stage, self.overrides, self.stages).items()
        ]
        return [f"stage={stage.name}", *self.overrides, *inputs]

    def _load_job(self, words: Sequence[str]) -> "JobSpec":
        """Load the job with these overrides as `rlplan run` does. Raises: SpecError."""
        from rlplan.spec.files.job_file import load_job
        from rlplan_cli.sources import resolve_model

        return load_job(self.file, words, fetch=resolve_model)

    def _check_same(self, folder: Path, asked: Sequence[str]) -> None:
        """Check that a stage was started with the same job. Raises: SpecError."""
        from rlplan.planner.machine import settle_keys
        from rlplan.planner.plan import read_plan

        earlier = read_plan(folder / "plan.json").asked
        now = settle_keys(self._load_job(asked), earlier)
        if earlier != now:
            changed = [key for key in type(now).model_fields if getattr(now, key) != getattr(earlier, key)]
            raise SpecError(
                f"{folder} was started with another job: {', '.join(changed)} changed",
                where=str(self.file),
                rule="a stage can only be resumed or skipped with the job that it was started with",
                way_out="undo the change, or use another --out",
            )

    def _move_aside(self, folder: Path) -> None:
        """Move away the folder of a stage without a checkpoint. Raises: SpecError if the stage is still running."""
        from rlplan.runtime.run_folder.run_lock import lock_run_folder

        if folder.exists():
            with lock_run_folder(folder, is_resumed=True):
                pass
            aside = folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
            shutil.move(folder, aside)
            note(f"{folder} had no checkpoint: moved to {aside}")


def choose_folder(job_name: str, out: Path | None, resume: str | None) -> Path:
    """Choose the folder of all stages: a new one, or that of an earlier run. Raises: SpecError."""
    if resume is None:
        folder = out or Path("runs") / job_name / time.strftime("%Y%m%d-%H%M%S")
        if folder.exists() and any(folder.iterdir()):
            raise _refuse_folder(f"{folder} is not empty", f"--resume {folder} continues there")
        return folder
    if out is not None:
        raise _refuse_folder(f"--out {out} together with --resume {resume}", f"use --resume {resume} alone")
    known = sorted(Path("runs").glob(f"*/*/{STAGES}"), key=lambda path: path.stat().st_mtime_ns)
    if resume == "latest" and not known:
        raise _refuse_folder("no run in runs/ has stages", "run without --resume")
    folder = known[-1].parent if resume == "latest" else Path(resume)
    if not (folder / STAGES).is_file():
        raise _refuse_folder(f"{folder} has no stages", "give the folder that the run printed when it started")
    return folder


def _refuse_folder(what: str, way_out: str) -> SpecError:
    return SpecError(
        what, where="command line", rule="stages run in an empty folder, or resume in their own", way_out=way_out
    )


def run_child(command: Sequence[str], output: int | None = None) -> int:
    """Run a process and return its exit code. Signals to end are forwarded to it. output: descriptor of its stdout."""
    children: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def end(number: int, _frame: object) -> None:
        signals.append(number)
        leave_lost_terminal()
        for child in children:
            child.terminate()

    forwarded = [number for number in list_handled_signals() if number is not signal.SIGINT]
    before = [(number, signal.signal(number, end)) for number in forwarded]
    try:
        children.append(subprocess.Popen(command, stdout=output))
        if signals:  # a signal arrived before the process was in the list
            children[0].terminate()
        while True:
            try:
                code = children[0].wait()
                return RunError.exit_code if code < 0 else code
            except KeyboardInterrupt:
                continue  # the terminal sends Ctrl-C to the child as well
    finally:
        for number, handler in before:
            signal.signal(number, handler)
