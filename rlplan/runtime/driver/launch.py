"""Launch: runs a bundle from the first process to the last, and leaves a complete run folder however the run ends.

In: a plan or a bundle, and a run folder. Out: the run folder; RunError, HostError or InterruptedRunError after a
failure. All checks that need no process come first, before anything is written (`prepare_task`).
This module prints nothing: a listener receives the events for a display.
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
from rlplan.planner.plan import Plan, dump_plan, read_plan
from rlplan.planner.search import MAX_FALLBACKS, find_next_plan
from rlplan.runtime.admission.proofs import check_admission
from rlplan.runtime.checkpoints.finding import find_checkpoint
from rlplan.runtime.checkpoints.identity import describe_identity
from rlplan.runtime.checkpoints.manifest import checkpoints_folder
from rlplan.runtime.cluster.ray_cluster import Cluster
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.data.facts import collect_data_facts, summarize_lengths
from rlplan.runtime.data.prompt_sets import load_prompts
from rlplan.runtime.driver.controller import Controller
from rlplan.runtime.driver.events import Listener, RunEvent
from rlplan.runtime.driver.player import STOPPED_EARLY, Player, Task
from rlplan.runtime.driver.preflight import check_host, check_plan
from rlplan.runtime.driver.rehearsal import MisfitError
from rlplan.runtime.driver.steps import ActionRunner
from rlplan.runtime.fault_tolerance.resuming import (
    add_resume_command,
    check_resumable,
    copy_checkpoint,
    has_checkpoint,
    name_lost_process,
    prepare_resume,
    return_to_checkpoint,
)
from rlplan.runtime.fault_tolerance.supervision import LostGroupError
from rlplan.runtime.host.detect import check_devices
from rlplan.runtime.processes.interrupts import handle_signals, ignore_signals, listen_for_signals
from rlplan.runtime.processes.safe_path import make_module_command
from rlplan.runtime.rewards.reward_pool import RewardPool
from rlplan.runtime.run_folder.disk_errors import disk_error, reporting_disk_errors
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.runtime.run_folder.run_files import replace_atomically
from rlplan.runtime.sandbox.choice import AUTO, NONE
from rlplan.runtime.sinks.followers import Followers
from rlplan.spec.base import explain_write_errors
from rlplan.spec.model import has_vision_tower


@contextmanager
def prepare_task(
    what: Plan | Path, address: str | None = None, sandbox: str = AUTO, earlier: Path | None = None
) -> Iterator[Task]:
    """Context with a run that has passed all checks, with its reward processes started; nothing is written yet.

    what: a plan, or a bundle's folder. address: address of a running Ray cluster; None starts Ray here. sandbox: the
    sandbox for programs in responses. earlier: the run folder whose last checkpoint the run resumes from.
    Raises: SpecError, EmitError, HostError.
    """
    if isinstance(what, Plan):
        spec, plan = execution_spec(what), what
    else:
        spec, plan = read_bundle(what), read_plan(what / "plan.json")
    job = spec.job
    check_devices(job, address)  # cheap checks first: loading prompts and the admission probe take longer
    check_plan(plan)
    check_host(spec, plan.ledger)
    prompts = load_prompts(job)
    check_admission(job)
    identity = describe_identity(job) if earlier or job.checkpoints.every else None
    resumption = None
    if earlier is not None:
        resumption = find_checkpoint(earlier, identity)
        check_resumable(job, resumption, is_async=spec.schedule.async_rollouts is not None)
    reward_pool = RewardPool(job, sandbox)
    try:
        reward_pool.start(prompts.columns)
        yield Task(spec, plan, prompts, address, reward_pool, resumption=resumption, identity=identity)
    finally:
        reward_pool.close()


def prepare_run_folder(task: Task, run_folder: Path, *, writes_bundle: bool) -> Task:
    """Write the files that a run starts from into its locked run folder (run_lock.py).

    These are the checkpoint to resume from, and with `writes_bundle` a bundle of the plan.
    Returns: the task as read back. Raises: SpecError, EmitError, after removing what was written.
    """
    bundle = run_folder / "bundle"
    try:
        if writes_bundle:
            write_bundle(task.plan, bundle)
            task = replace(task, spec=read_bundle(bundle), plan=read_plan(bundle / "plan.json"))
        if task.resumption is not None:
            task = replace(task, resumption=copy_checkpoint(task.resumption, run_folder))
    except BaseException:
        for written in (bundle, checkpoints_folder(run_folder)):
            shutil.rmtree(written, ignore_errors=True)
        raise
    return task


def run_task(task: Task, run_folder: Path, listener: Listener) -> None:
    """Run a task and write its final status into the run folder. Raises: RlplanError, also stated in status.json."""
    recorder, followers = _open_records(task, run_folder), None
    recorder.show_alarm = lambda step, text: listener(RunEvent("alarm", step, text))
    try:
        with reporting_disk_errors(run_folder):
            with handle_signals():
                followers = _record_start(task, recorder, listener)
                _run_with_fallbacks(replace(task, followers=followers), recorder, listener)
            recorder.sync()  # before the status: `finished` promises that all lines are on disk
            recorder.write_status("finished", 0, recorder.facts.get(STOPPED_EARLY, ""))
    except RlplanError as failure:
        error = add_resume_command(failure, run_folder)
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
    """Open the run folder's files. Raises: SpecError, RunError; a resumed run's error states how to resume it."""
    after = task.resumption.step if task.resumption else None
    try:
        with explain_write_errors(run_folder), reporting_disk_errors(run_folder):
            (run_folder / "logs").mkdir(parents=True, exist_ok=True)
            replace_atomically(run_folder / "plan.json", _encode_plan(task.plan, run_folder))
            return Recorder(run_folder, dict(task.spec.schedule.processes), after)
    except RunError as error:
        raise add_resume_command(error, run_folder) from error


def _record_start(task: Task, recorder: Recorder, listener: Listener) -> Followers:
    """Record what is known before any process starts, and start the metric sinks."""
    job, resumption = task.spec.job, task.resumption
    _announce_sandbox(task.reward_pool, recorder)
    recorder.write_status("running", None)
    for line in task.prompts.log_lines:
        listener(RunEvent("phase", 0, line))
    recorder.write_file("data.json", collect_data_facts(task.prompts))
    if resumption is not None:
        prepare_resume(resumption, recorder)
    after = resumption.step if resumption else -1
    return Followers(job.metrics, recorder.folder, job.name, recorder.facts["run_id"], after)


def _announce_sandbox(reward_pool: RewardPool, recorder: Recorder) -> None:
    """Record the sandbox for programs in responses; raise an alarm if there is none."""
    if reward_pool.sandbox is None:
        return
    recorder.facts["sandbox"] = reward_pool.sandbox.name
    if reward_pool.sandbox.name == NONE:
        text = "programs in responses run without a sandbox (--sandbox none): with all rights of this user"
        recorder.write_alarm(0, "sandbox", text)


def _run_with_fallbacks(task: Task, recorder: Recorder, listener: Listener) -> None:
    """Run until the end. If the rehearsal does not fit, try a fallback. If ranks are lost, resume from a checkpoint."""
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
                task = replace(task, resumption=return_to_checkpoint(error, task.identity, recorder))
            with ignore_signals():
                cluster.keep_or_close(task.spec.ray)
    finally:
        with ignore_signals():
            cluster.close()


def _next_fallback(task: Task, error: MisfitError, recorder: Recorder) -> Task:
    """Change one setting of the task and record it. Raises: MisfitError when no fallback is left."""
    step = find_next_plan(task.plan) if len(task.changes) < MAX_FALLBACKS else None
    if step is None:
        raise error.add_changes(list(task.changes)) from None
    change, plan = step
    text = f"{error.what}; going on with {change}"
    recorder.write_alarm(0, "change", text, change=change)
    write_bundle(plan, recorder.folder / "bundle")
    replace_atomically(recorder.folder / "plan.json", _encode_plan(plan, recorder.folder))
    recorder.restart()
    return replace(task, plan=plan, spec=execution_spec(plan), changes=(*task.changes, change))


def _encode_plan(plan: Plan, folder: Path) -> bytes:
    """The plan as bytes of plan.json, with paths relative to the run folder."""
    return (dump_plan(plan, folder) + "\n").encode()


def _run(task: Task, cluster: Cluster, recorder: Recorder, listener: Listener) -> None:
    """Start the workers, run the schedule and end the workers."""
    spec = task.spec
    listener(RunEvent("phase", 0, "starting Ray"))
    runner: ActionRunner | None = None
    worker_group = WorkerGroup(spec, recorder.folder / "logs", cluster)
    try:
        with _start_weights(spec, recorder.folder) as start_weights:
            worker_group.start()
            listen_for_signals()  # Ray has replaced our handlers, or has swallowed an exception that one of them raised
            model_folder = start_weights()
        play = Player(recorder, worker_group, listener, task)
        resumption = task.resumption
        runner = play.runner = ActionRunner(
            spec, worker_group, recorder, task.prompts, model_folder, play.announce, task.reward_pool, resumption
        )
        if resumption is not None and runner.resumed:
            recorder.write_alarm(resumption.step, "resume", runner.resumed)
        first_step = resumption.step + 1 if resumption else 1
        controller = Controller(spec.schedule, play.run_action, runner.deadline_s)
        controller.run(play.last_step(), play.finish_step, first_step=first_step)
    except (RunError, InterruptedRunError) as error:
        if runner is not None:
            with ignore_signals():
                runner.checkpoints.settle()
        lost = name_lost_process(error, worker_group)
        if lost is error:
            raise
        raise lost from error
    finally:
        with ignore_signals():  # a second signal must not leave worker processes behind
            worker_group.close()
            if runner is not None:
                runner.close()
                # If the run fails, its error must not be hidden by a failure to write the lengths.
                with nullcontext() if sys.exception() is None else suppress(RunError):
                    if lengths := runner.collector.lengths:
                        recorder.write_file("lengths.json", summarize_lengths(lengths))


def _has_own_start(spec: ExecutionSpec) -> bool:
    """Whether the run starts from weights in its own folder: random ones, or a vision-language model's text part."""
    return spec.job.policy.init == "random" or has_vision_tower(Path(spec.job.policy.path))


@contextmanager
def _start_weights(spec: ExecutionSpec, run_folder: Path) -> Iterator[Callable[[], Path]]:
    """Context with a function that waits for the start weights and returns their folder. The function raises: RunError.

    The folder is the policy's own, or one that a child process writes while the workers start. The child writes random
    weights, or the language part of a vision-language model. A resumed run has that folder already.
    """
    folder, draft = run_folder / "start_policy", run_folder / "start_policy.draft"
    if not _has_own_start(spec) or folder.is_dir():
        yield lambda: folder if folder.is_dir() else Path(spec.job.policy.path)
        return
    shutil.rmtree(draft, ignore_errors=True)  # a killed run may have left it
    seed = [str(spec.job.seed)] if spec.job.policy.init == "random" else []
    command = make_module_command("rlplan.runtime.models.start_checkpoint", spec.job.policy.path, str(draft), *seed)
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
    """Wait for the child process, then rename the finished folder. Raises: RunError."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout_s)
    if child.returncode == 0:
        draft.rename(folder)
        return folder
    # The child's exit status is the error number of its disk error, if there was one.
    if failure := disk_error(OSError(child.returncode or 0, "", str(folder)), folder.parent):
        raise failure
    raise RunError(
        f"the start weights were not created: {_describe_exit(child)}",
        where=log,
        rule="the policy has a config.json that transformers can build, and its weights can be written in time",
        way_out="read the log",
    )


def _describe_exit(child: "subprocess.Popen[bytes]") -> str:
    return "timeout" if child.returncode is None else f"exit status {child.returncode}"
