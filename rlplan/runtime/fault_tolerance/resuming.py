"""Resuming: what a run goes on from, what it says when it does, and how a run that ends names the way back.

In: a run folder, a checkpoint in it. Out: alarms, and errors that say how to go on.
Left out: what is in a checkpoint (checkpoints/), and starting processes (launch.py).
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlplan.errors import EXIT_RESUMABLE, InterruptedRunError, RlplanError, RunError, SpecError
from rlplan.runtime.checkpoints.finding import Resumption, check_run_folder, find_checkpoint
from rlplan.runtime.checkpoints.folder import sync_folder
from rlplan.runtime.checkpoints.manifest import POINTER, checkpoints_of
from rlplan.runtime.checkpoints.run_state import check_order
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.fault_tolerance.supervision import LostGroupError
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.spec.base import read_json, writing
from rlplan.spec.resolved import ResolvedJob


def has_checkpoint(run_folder: Path) -> bool:
    return (checkpoints_of(run_folder) / POINTER).is_file()


def run_to_resume(name: str) -> Path:
    """The run folder that `--resume` means: one that is named, or `latest` below runs/. Raises: SpecError."""
    folder = latest_run(Path("runs")) if name == "latest" else Path(name)
    check_run_folder(folder)
    return folder


def latest_run(root: Path) -> Path:
    """The run below a folder of runs whose checkpoint is the newest. Raises: SpecError when none has one."""
    pointers = [*root.glob(f"*/*/checkpoints/{POINTER}"), *root.glob(f"*/checkpoints/{POINTER}")]
    if not pointers:
        raise SpecError(
            f"no run below {root} has a checkpoint",
            where="--resume latest",
            rule="a run keeps checkpoints every `checkpoints.every` steps",
            way_out="name the run's folder with --resume, or run the job with checkpoints.every=1",
        )
    return max(pointers, key=lambda path: path.stat().st_mtime_ns).parent.parent


def bundle_of(run_folder: Path) -> Path:
    """The bundle with which a run goes on in its own folder. Raises: SpecError when there is none, or it is over."""
    check_run_folder(run_folder)
    if not (run_folder / "bundle" / "execution.json").is_file():
        raise SpecError(
            f"{run_folder} holds no bundle",
            where=str(run_folder / "bundle"),
            rule="a run of a job or a plan keeps its bundle; one of a bundle does not",
            way_out=f"rlplan run BUNDLE --resume {run_folder}",
        )
    status = read_json(run_folder / "status.json", "the run's status") if (run_folder / "status.json").is_file() else {}
    if isinstance(status, dict) and status.get("state") == "finished":
        raise SpecError(
            f"{run_folder} has finished, nothing is left to do",
            where=str(run_folder / "status.json"),
            rule="a run is resumed that was interrupted, failed or killed",
            way_out=f"rlplan run JOB workload.num_steps=… --resume {run_folder} continues in a new folder",
        )
    return run_folder / "bundle"


def check_resumable(job: ResolvedJob, found: Resumption, *, is_async: bool) -> None:
    """A checkpoint of this job (`find_checkpoint`) is one that it can go on from.

    is_async: generation does. Raises: SpecError when a role is not in it, nothing is left to do after it, or some
    prompts would come twice and others never.
    """
    for role in job.trained_roles:
        found.paths(role)
    if found.step > job.workload.num_steps:
        raise SpecError(
            f"the checkpoint is of step {found.step}, the job has {job.workload.num_steps} steps",
            where=str(found.folder),
            rule="a run continues after the step of its checkpoint",
            way_out=f"workload.num_steps={found.step + 1} or more, with the job file",
        )
    if not is_async:
        check_order(found, job.workload.num_prompts_per_step)


def take_along(found: Resumption, run_folder: Path) -> Resumption:
    """The same checkpoint as the first one of another run folder, so that this one can be resumed by itself.

    Files are linked where the file system can, and copied where it cannot.
    """
    root = checkpoints_of(run_folder)
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        target = root / found.folder.name
        shutil.copytree(found.folder, root / f".{target.name}", copy_function=_link_or_copy)
        (root / f".{target.name}").rename(target)
        sync_folder(root)
    return replace(found, folder=target)


def prepare_resume(found: Resumption, recorder: Recorder) -> None:
    """Say in alarms how the run goes on; drops weights of engines that are gone."""
    shutil.rmtree(recorder.folder / "weights", ignore_errors=True)  # of engines that are gone
    for problem in found.problems:
        recorder.write_alarm(found.step, "checkpoint", f"{problem}; it is passed over")
    for change in found.changes:
        recorder.write_alarm(found.step, "change", change)
    recorder.write_alarm(found.step, "resume", f"going on after step {found.step}, from {found.folder.name}")


def go_back(error: LostGroupError, identity: Mapping[str, str] | None, recorder: Recorder) -> Resumption:
    """After ranks were lost: the run's last checkpoint, and its lines up to it. identity: of its job."""
    found = replace(find_checkpoint(recorder.folder, identity), changes=())  # said when the run began
    recorder.write_alarm(found.step, "restart", f"{error.what}; all processes restart")
    prepare_resume(found, recorder)
    recorder.go_back(found.step)
    return found


def lost_group(error: RlplanError, worker_group: WorkerGroup) -> RlplanError:
    """The error itself, or that a process is gone, where another one's failure was only what it led to."""
    is_plain = isinstance(error, RunError) and not isinstance(error, LostGroupError)
    gone = worker_group.lost() if is_plain else []
    if not gone:
        return error
    return LostGroupError(
        f"{gone[0]} is gone ({error.what})", where=error.where, rule=error.rule, way_out=error.way_out
    )


def resumable(error: RlplanError, run_folder: Path) -> RlplanError:
    """An error that says how to go on, where there is a checkpoint to go on from."""
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
