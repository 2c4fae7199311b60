"""Resuming: finds the checkpoint that a run resumes from, records the resume, and adds a resume command to errors.

In: a run folder, a checkpoint in it. Out: alarms, and errors that state how to resume.
Left out: contents of checkpoints (checkpoints/), and starting processes (launch.py).
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlplan.errors import EXIT_RESUMABLE, InterruptedRunError, RlplanError, RunError, SpecError
from rlplan.runtime.checkpoints.finding import Resumption, check_run_folder, find_checkpoint
from rlplan.runtime.checkpoints.folder import sync_folder
from rlplan.runtime.checkpoints.manifest import POINTER, checkpoints_folder
from rlplan.runtime.checkpoints.run_state import check_order
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.fault_tolerance.supervision import LostGroupError
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.spec.base import explain_write_errors, read_json
from rlplan.spec.resolved import ResolvedJob


def has_checkpoint(run_folder: Path) -> bool:
    return (checkpoints_folder(run_folder) / POINTER).is_file()


def find_run_to_resume(name: str) -> Path:
    """The run folder that `--resume` names: a path, or `latest` for the newest one below runs/. Raises: SpecError."""
    folder = find_latest_run(Path("runs")) if name == "latest" else Path(name)
    check_run_folder(folder)
    return folder


def find_latest_run(root: Path) -> Path:
    """The run with the newest checkpoint below a folder of runs. Raises: SpecError when no run has one."""
    pointers = [*root.glob(f"*/*/checkpoints/{POINTER}"), *root.glob(f"*/checkpoints/{POINTER}")]
    if not pointers:
        raise SpecError(
            f"no run below {root} has a checkpoint",
            where="--resume latest",
            rule="a run keeps checkpoints every `checkpoints.every` steps",
            way_out="name the run's folder with --resume, or run the job with checkpoints.every=1",
        )
    return max(pointers, key=lambda path: path.stat().st_mtime_ns).parent.parent


def find_own_bundle(run_folder: Path) -> Path:
    """The bundle with which a run resumes in its own folder. Raises: SpecError without one, or for a finished run."""
    check_run_folder(run_folder)
    if not (run_folder / "bundle" / "execution.json").is_file():
        raise SpecError(
            f"{run_folder} holds no bundle",
            where=str(run_folder / "bundle"),
            rule="a run of a job or a plan stores its bundle in the run folder; a run of a bundle does not",
            way_out=f"rlplan run BUNDLE --resume {run_folder}",
        )
    status = read_json(run_folder / "status.json", "the run's status") if (run_folder / "status.json").is_file() else {}
    if isinstance(status, dict) and status.get("state") == "finished":
        raise SpecError(
            f"{run_folder} has finished, so there is nothing to resume",
            where=str(run_folder / "status.json"),
            rule="only a run that was interrupted, failed or killed can be resumed in its own folder",
            way_out=f"rlplan run JOB workload.num_steps=… --resume {run_folder} continues in a new folder",
        )
    return run_folder / "bundle"


def check_resumable(job: ResolvedJob, checkpoint: Resumption, *, is_async: bool) -> None:
    """Check that the job can resume from its checkpoint (`find_checkpoint`).

    is_async: whether generation is async. Raises: SpecError when a role is missing, no step is left, or some prompts
    would be repeated and others skipped.
    """
    for role in job.trained_roles:
        checkpoint.paths(role)
    if checkpoint.step > job.workload.num_steps:
        raise SpecError(
            f"the checkpoint is of step {checkpoint.step}, the job has {job.workload.num_steps} steps",
            where=str(checkpoint.folder),
            rule="a run continues after the step of its checkpoint",
            way_out=f"workload.num_steps={checkpoint.step + 1} or more, with the job file",
        )
    if not is_async:
        check_order(checkpoint, job.workload.num_prompts_per_step)


def copy_checkpoint(checkpoint: Resumption, run_folder: Path) -> Resumption:
    """Copy a checkpoint into another run folder as its first one, so that this folder can be resumed by itself.

    Files are hard-linked if the file system supports it.
    """
    root = checkpoints_folder(run_folder)
    with explain_write_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        target = root / checkpoint.folder.name
        shutil.copytree(checkpoint.folder, root / f".{target.name}", copy_function=_link_or_copy)
        (root / f".{target.name}").rename(target)  # only a complete checkpoint gets its name
        sync_folder(root)
    return replace(checkpoint, folder=target)


def prepare_resume(checkpoint: Resumption, recorder: Recorder) -> None:
    """Record in alarms how the run resumes, and remove weights saved for engines of the earlier run."""
    shutil.rmtree(recorder.folder / "weights", ignore_errors=True)
    for problem in checkpoint.problems:
        recorder.write_alarm(checkpoint.step, "checkpoint", f"{problem}; it is skipped")
    for change in checkpoint.changes:
        recorder.write_alarm(checkpoint.step, "change", change)
    text = f"resuming after step {checkpoint.step}, from {checkpoint.folder.name}"
    recorder.write_alarm(checkpoint.step, "resume", text)


def return_to_checkpoint(error: LostGroupError, identity: Mapping[str, str] | None, recorder: Recorder) -> Resumption:
    """Return to the run's last checkpoint after a loss of ranks, and drop later records. identity: that of the job."""
    checkpoint = replace(find_checkpoint(recorder.folder, identity), changes=())  # the run recorded them at its start
    recorder.write_alarm(checkpoint.step, "restart", f"{error.what}; all processes restart")
    prepare_resume(checkpoint, recorder)
    recorder.truncate_after(checkpoint.step)
    return checkpoint


def name_lost_process(error: RlplanError, worker_group: WorkerGroup) -> RlplanError:
    """The error itself, or a LostGroupError if a process has died and the error is only a consequence."""
    is_plain = isinstance(error, RunError) and not isinstance(error, LostGroupError)
    gone = worker_group.lost() if is_plain else []
    if not gone:
        return error
    return LostGroupError(
        f"{gone[0]} is gone ({error.what})", where=error.where, rule=error.rule, way_out=error.way_out
    )


def add_resume_command(error: RlplanError, run_folder: Path) -> RlplanError:
    """Add the resume command to an error, if the run has a checkpoint."""
    if not isinstance(error, InterruptedRunError | RunError) or not has_checkpoint(run_folder):
        return error
    what = "" if (run_folder / "bundle").is_dir() else "BUNDLE "
    way_out = f"resume with `rlplan run {what}--resume {run_folder}`"
    if isinstance(error, InterruptedRunError):
        resumed: RlplanError = InterruptedRunError(error.what, where=error.where, rule=error.rule, way_out=way_out)
        resumed.exit_code = EXIT_RESUMABLE
        return resumed
    return type(error)(error.what, where=error.where, rule=error.rule, way_out=f"{error.way_out}; {way_out}")


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
