"""Launch: run a bundle from the first process to the last, and leave a readable run folder however it ends.

In: a bundle folder and a run folder. Out: the run folder; RunError, HostError or InterruptedRunError when it failed.
Events for a display go to a listener; this module prints nothing.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.emit.bundle import read_bundle, write_bundle
from rlplan.emit.execution import ExecutionSpec, execution_spec
from rlplan.errors import EXIT_BUG, InterruptedRunError, RlplanError, RunError
from rlplan.planner.plan import Plan, read_plan
from rlplan.runtime.controller import Controller
from rlplan.runtime.crew import Crew
from rlplan.runtime.interrupts import interruptible, listen_for_signals, uninterrupted
from rlplan.runtime.leaks import LeakWatch
from rlplan.runtime.preflight import check_host, check_plan, load_prompts
from rlplan.runtime.recorder import Recorder
from rlplan.runtime.steps import ActionRunner
from rlplan.spec.base import writing


@dataclass(frozen=True)
class RunEvent:
    """Something to show. kind: `phase` (text says what begins), `action` (began), `step` (ended, with its numbers),
    `alarm` (text says what is wrong, while the run goes on).
    """

    kind: str
    step: int
    text: str = ""
    learning: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)


Listener = Callable[[RunEvent], None]

SAMPLES_PER_STEP = 2
"""Rollouts of each step that are written out to be read."""


def prepare_run_folder(plan: Plan, run_folder: Path) -> Path:
    """Write the bundle of a plan into a run folder of its own (claim.py), once nothing speaks against running it.

    Returns: the bundle's folder. Raises: SpecError, EmitError, HostError; then nothing has been written.
    """
    spec = execution_spec(plan)
    check_plan(plan)
    check_host(spec, plan.ledger)
    load_prompts(spec.job)
    bundle = run_folder / "bundle"
    write_bundle(plan, bundle)
    return bundle


def run_bundle(bundle: Path, run_folder: Path, listener: Listener) -> None:
    """Run a bundle. Raises: RlplanError; the run folder's status.json says the same."""
    spec, plan = read_bundle(bundle), read_plan(bundle / "plan.json")
    check_plan(plan)
    check_host(spec, plan.ledger)
    prompts = load_prompts(spec.job)
    with writing(run_folder):
        (run_folder / "logs").mkdir(parents=True, exist_ok=True)
        (run_folder / "plan.json").write_bytes(_plan_for(plan, run_folder))
    recorder = Recorder(run_folder, dict(spec.schedule.processes))
    recorder.write_status("running", None)
    try:
        with interruptible():
            _run(spec, recorder, prompts, listener)
        recorder.write_status("finished", 0)
    except RlplanError as error:
        state = "interrupted" if isinstance(error, InterruptedRunError) else "failed"
        recorder.write_status(state, error.exit_code, str(error))
        raise
    except BaseException as error:
        recorder.write_status("failed", EXIT_BUG, f"{type(error).__name__}: {error}")
        raise
    finally:
        recorder.close()


def _plan_for(plan: Plan, folder: Path) -> bytes:
    from rlplan.planner.plan import dump_plan

    return (dump_plan(plan, folder) + "\n").encode()


def _run(spec: ExecutionSpec, recorder: Recorder, prompts: Any, listener: Listener) -> None:
    listener(
        RunEvent("phase", 0, "preparing the start checkpoint" if spec.job.policy.init == "random" else "starting Ray")
    )
    model_folder = _start_checkpoint(spec, recorder.folder)
    crew = Crew(spec, recorder.folder / "logs")
    runner: ActionRunner | None = None
    try:
        crew.start()
        listen_for_signals()  # Ray has put its own handler in place
        runner = ActionRunner(spec, crew, recorder, prompts, model_folder)
        play = _Player(runner, recorder, crew, listener)
        Controller(spec.schedule, play.perform, runner.deadline_s).run(spec.job.workload.num_steps, play.finish_step)
    finally:
        with uninterrupted():
            crew.close()
            if runner is not None:
                runner.close()


class _Player:
    """Joins the runner with the recorder and the listener."""

    def __init__(self, runner: ActionRunner, recorder: Recorder, crew: Crew, listener: Listener) -> None:
        self.runner, self.recorder, self.crew, self.listener = runner, recorder, crew, listener
        self.leaks = LeakWatch()

    def perform(self, action: Action, step: int) -> None:
        self.listener(RunEvent("action", step, action.id))
        self.runner.perform(action, step)

    def finish_step(self, step: int) -> None:
        learning, timings = self.runner.metrics.take_rows(step)
        self.recorder.record_host(step, self.crew.system_bytes())
        for leak in self.leaks.observe(step, self.recorder.resident):
            self.recorder.write_alarm(step, "leak", leak.text(), process=leak.process, slope=leak.bytes_per_step)
            self.listener(RunEvent("alarm", step, leak.text()))
        timings["memory/host_total_bytes"] = sum(self.recorder.resident.values())
        if len(learning) > 1:
            self.recorder.write_metrics(learning)
        self.recorder.write_timings(timings)
        for rollout in self.runner.rollouts[: SAMPLES_PER_STEP if step > 0 else 0]:
            self.recorder.write_sample(
                {
                    "step": step,
                    "prompt": rollout.prompt.text,
                    "response": rollout.text,
                    "reward": rollout.reward,
                    "answer": rollout.prompt.answer,
                }
            )
        self.listener(RunEvent("step", step, "", learning, timings))


def _start_checkpoint(spec: ExecutionSpec, run_folder: Path) -> Path:
    """The folder that every process loads: the policy's own, or start weights drawn now in a child process."""
    if spec.job.policy.init == "checkpoint":
        return Path(spec.job.policy.path)
    folder = run_folder / "start_policy"
    command = [
        sys.executable,
        "-m",
        "rlplan.runtime.start_checkpoint",
        spec.job.policy.path,
        str(folder),
        str(spec.job.seed),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (run_folder / "logs" / "start_checkpoint.log").open("wb") as log:
        try:
            subprocess.run(
                command, check=True, stdout=log, stderr=log, env=environment, timeout=spec.job.limits.start_timeout_s
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise RunError(
                f"the start weights were not made: {error}",
                where=log.name,
                rule="a config that transformers can build",
                way_out="read the log",
            ) from error
    return folder
