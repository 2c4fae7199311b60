"""Launch: run a bundle from the first process to the last, and leave a readable run folder however it ends.

In: a plan or a bundle, and a run folder. Out: the run folder; RunError, HostError or InterruptedRunError when it
failed. What can be refused is refused before anything is written (`ready_to_run`).
Events for a display go to a listener; this module prints nothing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from rlplan.emit.bundle import read_bundle, write_bundle
from rlplan.emit.execution import ExecutionSpec, execution_spec
from rlplan.errors import EXIT_BUG, InterruptedRunError, RlplanError, RunError
from rlplan.planner.fallbacks import MAX_FALLBACKS, next_plan
from rlplan.planner.plan import Plan, dump_plan, read_plan
from rlplan.runtime.admission.proofs import check_admission
from rlplan.runtime.checkpoints.finding import find_checkpoint
from rlplan.runtime.checkpoints.identity import identity_of
from rlplan.runtime.checkpoints.manifest import checkpoints_of
from rlplan.runtime.cluster.ray_cluster import Cluster
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.data.facts import data_facts, lengths_as_json
from rlplan.runtime.data.prompt_sets import load_prompts
from rlplan.runtime.driver.controller import Controller
from rlplan.runtime.driver.events import Listener, RunEvent
from rlplan.runtime.driver.player import STOPPED_EARLY, Player, Task
from rlplan.runtime.driver.preflight import check_host, check_plan
from rlplan.runtime.driver.rehearsal import MisfitError
from rlplan.runtime.driver.steps import ActionRunner
from rlplan.runtime.fault_tolerance.resuming import (
    check_resumable,
    go_back,
    has_checkpoint,
    lost_group,
    prepare_resume,
    resumable,
    take_along,
)
from rlplan.runtime.fault_tolerance.supervision import LostGroupError
from rlplan.runtime.host.devices import check_devices
from rlplan.runtime.processes.interrupts import interruptible, listen_for_signals, uninterrupted
from rlplan.runtime.processes.safe_path import module_command
from rlplan.runtime.rewards.reward_pool import RewardPool
from rlplan.runtime.run_folder.disk_errors import disk_error, reporting_disk_errors
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.runtime.run_folder.run_files import replace_atomically
from rlplan.runtime.sandbox.choice import AUTO, NONE
from rlplan.runtime.sinks.followers import Followers
from rlplan.spec.base import writing
from rlplan.spec.model import has_vision_tower


@contextmanager
def ready_to_run(
    what: Plan | Path, address: str | None = None, sandbox: str = AUTO, earlier: Path | None = None
) -> Iterator[Task]:
    """A run that nothing speaks against, for the block, with its rewards' processes up: nothing is written yet.

    what: a plan, or a bundle's folder. address: of a running Ray cluster, None to start Ray here. sandbox: for programs
    in responses. earlier: the run folder from whose last checkpoint it goes on.
    Raises: SpecError, EmitError, HostError.
    """
    if isinstance(what, Plan):
        spec, plan = execution_spec(what), what
    else:
        spec, plan = read_bundle(what), read_plan(what / "plan.json")
    job = spec.job
    check_devices(job, address)
    check_plan(plan)
    check_host(spec, plan.ledger)
    prompts = load_prompts(job)
    check_admission(job)
    identity = identity_of(job) if earlier or job.checkpoints.every else None
    found = None
    if earlier is not None:
        found = find_checkpoint(earlier, identity)
        check_resumable(job, found, is_async=spec.schedule.async_rollouts is not None)
    reward_pool = RewardPool(job, sandbox)
    try:
        reward_pool.start(prompts.columns)
        yield Task(spec, plan, prompts, address, reward_pool, resumption=found, identity=identity)
    finally:
        reward_pool.close()


def prepare_run_folder(task: Task, run_folder: Path, *, keeps_bundle: bool) -> Task:
    """Write what a run begins with into a run folder of its own (run_lock.py): the checkpoint that it goes on from, and
    its bundle where none stands elsewhere (keeps_bundle).

    Returns: the task as it was written. Raises: SpecError, EmitError; then nothing of it stays.
    """
    bundle = run_folder / "bundle"
    try:
        if keeps_bundle:
            write_bundle(task.plan, bundle)
            task = replace(task, spec=read_bundle(bundle), plan=read_plan(bundle / "plan.json"))
        if task.resumption is not None:
            task = replace(task, resumption=take_along(task.resumption, run_folder))
    except BaseException:
        for written in (bundle, checkpoints_of(run_folder)):
            shutil.rmtree(written, ignore_errors=True)
        raise
    return task


def run_task(task: Task, run_folder: Path, listener: Listener) -> None:
    """Run, and leave how it ended in the run folder. Raises: RlplanError; the folder's status.json says the same."""
    recorder, followers = _open_records(task, run_folder), None
    recorder.show_alarm = lambda step, text: listener(RunEvent("alarm", step, text))
    try:
        with reporting_disk_errors(run_folder):
            with interruptible():
                followers = _begin(task, recorder, listener)
                _run_to_the_end(replace(task, followers=followers), recorder, listener)
            recorder.sync()
            recorder.write_status("finished", 0, recorder.facts.get(STOPPED_EARLY, ""))
    except RlplanError as failure:
        error = resumable(failure, run_folder)
        state = "interrupted" if isinstance(error, InterruptedRunError) else "failed"
        recorder.write_status(state, error.exit_code, str(error))
        if error is failure:
            raise
        raise error from failure
    except BaseException as error:
        recorder.write_status("failed", EXIT_BUG, f"{type(error).__name__}: {error}")
        raise
    finally:
        recorder.close()
        if followers is not None:
            followers.close()


def _open_records(task: Task, run_folder: Path) -> Recorder:
    """The run folder's files, open. Raises: SpecError, RunError; that of a run that is resumed says how to do so."""
    after = task.resumption.step if task.resumption else None
    try:
        with writing(run_folder), reporting_disk_errors(run_folder):
            (run_folder / "logs").mkdir(parents=True, exist_ok=True)
            replace_atomically(run_folder / "plan.json", _encode_plan(task.plan, run_folder))
            return Recorder(run_folder, dict(task.spec.schedule.processes), after)
    except RunError as error:
        raise resumable(error, run_folder) from error


def _begin(task: Task, recorder: Recorder, listener: Listener) -> Followers:
    """Put on record what is known before any process starts."""
    job, resumption = task.spec.job, task.resumption
    _announce_sandbox(task.reward_pool, recorder)
    recorder.write_status("running", None)
    for line in task.prompts.said:
        listener(RunEvent("phase", 0, line))
    recorder.write_file("data.json", data_facts(task.prompts))
    if resumption is not None:
        prepare_resume(resumption, recorder)
    return Followers(job.metrics.sinks, recorder.folder, job.name, resumption.step if resumption else -1)


def _announce_sandbox(reward_pool: RewardPool, recorder: Recorder) -> None:
    """Where programs of responses run; that nothing protects from them does not go unseen."""
    if reward_pool.sandbox is None:
        return
    recorder.facts["sandbox"] = reward_pool.sandbox.name
    if reward_pool.sandbox.name == NONE:
        text = "programs in responses run without a sandbox (--sandbox none): with all rights of this user"
        recorder.write_alarm(0, "sandbox", text)


def _run_to_the_end(task: Task, recorder: Recorder, listener: Listener) -> None:
    """Run; where the rehearsal does not fit, change one thing, where ranks are lost, go back to the last checkpoint."""
    num_losses, cluster = 0, Cluster(task.address, task.spec.job.limits.stall_timeout_s)
    try:
        while True:
            try:
                return _run(task, cluster, recorder, listener)
            except MisfitError as error:
                task = _next_fallback(task, error, recorder)
            except LostGroupError as error:
                if num_losses >= task.spec.job.limits.max_restarts or not has_checkpoint(recorder.folder):
                    raise
                num_losses += 1
                task = replace(task, resumption=go_back(error, task.identity, recorder))
            with uninterrupted():
                cluster.keep_for(task.spec.ray)
    finally:
        with uninterrupted():
            cluster.close()


def _next_fallback(task: Task, error: MisfitError, recorder: Recorder) -> Task:
    """The task with one thing changed, which is said. Raises: MisfitError when nothing is left to change."""
    step = next_plan(task.plan) if len(task.changes) < MAX_FALLBACKS else None
    if step is None:
        raise error.add_changes(list(task.changes)) from None
    change, plan = step
    text = f"{error.what}; going on with {change}"
    recorder.write_alarm(0, "change", text, change=change)
    write_bundle(plan, recorder.folder / "bundle")
    replace_atomically(recorder.folder / "plan.json", _encode_plan(plan, recorder.folder))
    recorder.begin_again()
    return replace(task, plan=plan, spec=execution_spec(plan), changes=(*task.changes, change))


def _encode_plan(plan: Plan, folder: Path) -> bytes:
    return (dump_plan(plan, folder) + "\n").encode()


def _run(task: Task, cluster: Cluster, recorder: Recorder, listener: Listener) -> None:
    spec = task.spec
    listener(RunEvent("phase", 0, "starting Ray"))
    runner: ActionRunner | None = None
    worker_group = WorkerGroup(spec, recorder.folder / "logs", cluster)
    try:
        with _start_weights(spec, recorder.folder) as start_weights:
            worker_group.start()
            listen_for_signals()  # Ray has put its own handler in place, or swallowed what ours raised
            model_folder = start_weights()
        play = Player(recorder, worker_group, listener, task)
        resumption = task.resumption
        runner = play.runner = ActionRunner(
            spec, worker_group, recorder, task.prompts, model_folder, play.announce, task.reward_pool, resumption
        )
        if resumption is not None and runner.resumed:
            recorder.write_alarm(resumption.step, "resume", runner.resumed)
        first_step = resumption.step + 1 if resumption else 1
        controller = Controller(spec.schedule, play.perform, runner.deadline_s)
        controller.run(play.last_step(), play.finish_step, first_step=first_step)
    except (RunError, InterruptedRunError) as error:
        if runner is not None:
            with uninterrupted():
                runner.checkpoints.settle()
        lost = lost_group(error, worker_group)
        if lost is error:
            raise
        raise lost from error
    finally:
        with uninterrupted():
            worker_group.close()
            if runner is not None:
                runner.close()
                # What ends the run is told, not that the lengths could not be written either.
                with nullcontext() if sys.exception() is None else suppress(RunError):
                    if lengths := runner.collector.lengths:
                        recorder.write_file("lengths.json", lengths_as_json(lengths))


def _has_own_start(spec: ExecutionSpec) -> bool:
    """Whether the run begins from weights that lie in its own folder."""
    return spec.job.policy.init == "random" or has_vision_tower(Path(spec.job.policy.path))


@contextmanager
def _start_weights(spec: ExecutionSpec, run_folder: Path) -> Iterator[Callable[[], Path]]:
    """Inside, what waits for the folder that every process loads: the policy's own, or what a child process writes
    meanwhile.

    That is drawn start weights, or the language part of a vision-language model; a run that begins again has them.
    Raises: what is called inside, RunError.
    """
    folder, draft = run_folder / "start_policy", run_folder / "start_policy.draft"
    if not _has_own_start(spec) or folder.is_dir():
        yield lambda: folder if folder.is_dir() else Path(spec.job.policy.path)
        return
    shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
    seed = [str(spec.job.seed)] if spec.job.policy.init == "random" else []
    command = module_command("rlplan.runtime.models.start_checkpoint", spec.job.policy.path, str(draft), *seed)
    with (run_folder / "logs" / "start_checkpoint.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        try:
            yield lambda: _await_start_weights(child, draft, folder, log.name, spec.job.limits.start_timeout_s)
        finally:
            child.kill()
            child.wait()


def _await_start_weights(
    child: "subprocess.Popen[bytes]", draft: Path, folder: Path, log: str, timeout_s: float
) -> Path:
    """The folder, which has its name only when it is whole. Raises: RunError."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout_s)
    if child.returncode == 0:
        draft.rename(folder)
        return folder
    if failure := disk_error(OSError(child.returncode or 0, "", str(folder)), folder.parent):
        raise failure
    raise RunError(
        f"the start weights were not made: {_describe_exit(child)}",
        where=log,
        rule="a config that transformers can build",
        way_out="read the log",
    )


def _describe_exit(child: "subprocess.Popen[bytes]") -> str:
    return "they take too long" if child.returncode is None else f"exit status {child.returncode}"
