"""A file with stages, run stage by stage: each in a process of its own and in a folder of its own.

A stage that has finished is not run again; one that was interrupted goes on from its last checkpoint.
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
from rlplan.runtime.processes.interrupts import SIGNALS, leave_lost_terminal, signals_to_hear
from rlplan.spec.base import read_json, writing
from rlplan.spec.files.stages import Stage, open_inputs
from rlplan_cli.render.terminal import note

if TYPE_CHECKING:
    from rlplan.spec.job import JobSpec

STAGES = "stages.json"
"""In the folder of all stages: their names."""
GOES_ON = (RunError.exit_code, EXIT_RESUMABLE, *(128 + number for number in SIGNALS))
"""Exit codes of a stage that failed or was interrupted; of others nothing changes unless the job does."""
RUN = (sys.executable, "-m", "rlplan_cli", "run")


@dataclass(frozen=True)
class StagesRun:
    """What is to run, and where. more: options of `rlplan run` for each stage."""

    file: Path
    overrides: tuple[str, ...]
    folder: Path
    stages: tuple[Stage, ...]
    more: tuple[str, ...] = ()
    said: dict[str, Any] = field(default_factory=dict)
    """By stage what it prints with --json, of one that has finished its status."""

    def run(self) -> int:
        """The exit code of the last stage that ran. Raises: SpecError of any stage before the first one begins."""
        for stage in self.stages:
            self._job([f"stage={stage.name}", *self.overrides])
        names = [stage.name for stage in self.stages]
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"schema_version": 1, "stages": names}) + "\n"
            (self.folder / STAGES).write_text(text, encoding="utf-8")
        for stage in self.stages:
            words = self._words(stage)
            if words is None:
                folder = self.folder / stage.name
                note(f"stage {stage.name}: has finished in {folder}")
                status = read_json(folder / "status.json", "the stage's status")
                self.said[stage.name] = {"schema_version": 1, "run_folder": str(folder), **status}
                continue
            note(f"stage {stage.name}:")
            if code := self._run(stage.name, words):
                note(f"stage {stage.name}: exit code {code}{self._way_on(code)}")
                return code
        return 0

    def _way_on(self, code: int) -> str:
        """What is to be typed where a run that goes on may end better."""
        words = ["rlplan", "run", str(self.file), *self.overrides, *self.more, "--resume", str(self.folder)]
        return f"; `{shlex.join(words)}` goes on" if code in GOES_ON else ""

    def rehearse(self) -> int:
        """Check what a run checks of stages that need no other, and plan those that do.

        Returns: the exit code of a check that failed, or 0. Raises: RlplanError.
        """
        from rlplan.planner.executable import check_fits
        from rlplan.planner.search import best_plan

        for stage in self.stages:
            words = [f"stage={stage.name}", *self.overrides]
            needs = list(dict.fromkeys(open_inputs(stage, self.overrides, self.stages).values()))
            if needs:
                check_fits(best_plan(self._job(words)))
                self.said[stage.name] = {"schema_version": 1, "state": "fits", "needs": needs}
                note(f"stage {stage.name}: fits; its data is checked after {', '.join(needs)}")
            else:
                asked = [str(self.file), *words, "--dry-run", "--out", str(self.folder / stage.name)]
                if code := self._run(stage.name, asked):
                    return code
        return 0

    def _run(self, name: str, words: Sequence[str]) -> int:
        """The exit code of `rlplan run` with such words. What it prints as JSON is kept for all stages' one answer."""
        command = [*RUN, *words, *self.more]
        if "--json" not in self.more:
            return wait_for(command)
        with tempfile.TemporaryFile() as printed:
            code = wait_for(command, printed.fileno())
            printed.seek(0)
            if not code:
                self.said[name] = json.loads(printed.read().splitlines()[-1])
        return code

    def _words(self, stage: Stage) -> list[str] | None:
        """What `rlplan run` is asked for; None of a stage that has finished. Raises: SpecError."""
        from rlplan.runtime.checkpoints.manifest import POINTER, checkpoints_of

        folder, asked = self.folder / stage.name, self.words_of(stage)
        if not (folder / "plan.json").is_file():
            self._put_aside(folder)
            return [str(self.file), *asked, "--out", str(folder)]
        self._check_same(folder, asked)
        status = folder / "status.json"
        if status.is_file() and read_json(status, "the stage's status").get("state") == "finished":
            return None
        if (checkpoints_of(folder) / POINTER).exists():
            return ["--resume", str(folder)]
        self._put_aside(folder)
        return [str(self.file), *asked, "--out", str(folder)]

    def words_of(self, stage: Stage) -> list[str]:
        """Overrides that make the file this stage's job, with what earlier ones have left."""
        left = [
            f"{key}={json.dumps(str((self.folder / name / 'policy').resolve()))}"
            for key, name in open_inputs(stage, self.overrides, self.stages).items()
        ]
        return [f"stage={stage.name}", *self.overrides, *left]

    def _job(self, words: Sequence[str]) -> "JobSpec":
        """The job of such overrides, as `rlplan run` reads it. Raises: SpecError."""
        from rlplan.spec.files.job_file import load_job
        from rlplan_cli.sources import as_it_runs

        return load_job(self.file, words, fetch=as_it_runs)

    def _check_same(self, folder: Path, asked: Sequence[str]) -> None:
        """Raises: SpecError where the stage that was begun there is another job."""
        from rlplan.planner.machine import settled_like
        from rlplan.planner.plan import read_plan

        begun = read_plan(folder / "plan.json").asked
        now = settled_like(self._job(asked), begun)
        if begun != now:
            changed = [key for key in type(now).model_fields if getattr(now, key) != getattr(begun, key)]
            raise SpecError(
                f"{folder} was begun as another job: {', '.join(changed)}",
                where=str(self.file),
                rule="a stage continues, or counts as finished, with the job that it was started with",
                way_out="undo the change, or run into another --out",
            )

    def _put_aside(self, folder: Path) -> None:
        """What a stage left that ended before its first checkpoint makes room. Raises: SpecError while it goes on."""
        from rlplan.runtime.run_folder.run_lock import locked_run_folder

        if folder.exists():
            with locked_run_folder(folder, is_resumed=True):
                pass
            aside = folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
            shutil.move(folder, aside)
            note(f"{folder} had no checkpoint: moved to {aside}")


def folder_of(job_name: str, out: Path | None, resume: str | None) -> Path:
    """Of all stages: a new one, or that of an earlier run. Raises: SpecError."""
    if resume is None:
        folder = out or Path("runs") / job_name / time.strftime("%Y%m%d-%H%M%S")
        if folder.exists() and any(folder.iterdir()):
            raise _no_folder(f"{folder} is not empty", f"--resume {folder} continues there")
        return folder
    if out is not None:
        raise _no_folder(f"--out {out} and --resume {resume}", f"--resume {resume} alone continues there")
    known = sorted(Path("runs").glob(f"*/*/{STAGES}"), key=lambda path: path.stat().st_mtime_ns)
    if resume == "latest" and not known:
        raise _no_folder("no run below runs has stages", "run without --resume")
    folder = known[-1].parent if resume == "latest" else Path(resume)
    if not (folder / STAGES).is_file():
        raise _no_folder(f"{folder} holds no stages", "name the folder that the run said when it began")
    return folder


def _no_folder(what: str, way_out: str) -> SpecError:
    return SpecError(
        what, where="command line", rule="stages run in an empty folder, or go on in theirs", way_out=way_out
    )


def wait_for(command: Sequence[str], output: int | None = None) -> int:
    """The exit code of a process; a signal to end goes to it, and it is waited for. output: descriptor it prints to."""
    children: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def end(number: int, _frame: object) -> None:
        signals.append(number)
        leave_lost_terminal()
        for child in children:
            child.terminate()

    forwarded = [number for number in signals_to_hear() if number is not signal.SIGINT]
    before = [(number, signal.signal(number, end)) for number in forwarded]
    try:
        children.append(subprocess.Popen(command, stdout=output))
        if signals:  # it came while the process was made
            children[0].terminate()
        while True:
            try:
                code = children[0].wait()
                return RunError.exit_code if code < 0 else code
            except KeyboardInterrupt:
                continue  # the terminal has told the child too
    finally:
        for number, handler in before:
            signal.signal(number, handler)
