"""Player: connects the action runner with the recorder, the memory checks and the progress display.

In: a Task, and the controller's calls. Out: lines in the run folder, events for the listener.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.planner.plan import Plan
from rlplan.runtime.checkpoints.finding import Resumption
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.data.prompt_sets import PromptSets
from rlplan.runtime.driver.cycle import Cycle
from rlplan.runtime.driver.events import Listener, RunEvent
from rlplan.runtime.driver.rehearsal import Rehearsed, check_fits, compare, rehearsal_as_json
from rlplan.runtime.driver.steps import ActionRunner
from rlplan.runtime.fault_tolerance.supervision import check_freed
from rlplan.runtime.measure.leaks import LeakWatch
from rlplan.runtime.rewards.reward_pool import RewardPool
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.runtime.sinks.followers import Followers

STOPPED_EARLY = "stopped_early"
"""Key of status.json for the reason why a run stopped early."""


@dataclass(frozen=True)
class Task:
    """A run: its specification, plan, data and processes outside of Ray."""

    spec: ExecutionSpec
    plan: Plan
    """Plan with the prediction that measurements are compared with."""

    prompts: PromptSets
    address: str | None
    """HOST:PORT of a running Ray cluster; None starts Ray here."""

    reward_pool: RewardPool
    followers: Followers | None = None
    """Processes that pass metrics on to loggers; None without metric sinks."""

    changes: tuple[str, ...] = ()
    """Fallbacks that have changed the job since its start, one line each."""

    resumption: Resumption | None = None
    """Checkpoint to resume from."""

    identity: Mapping[str, str] | None = None
    """Fingerprints stored in checkpoints to recognize the job; None if the run neither saves nor resumes any."""


class Player:
    """See the module docstring. runner: set before the first action."""

    runner: ActionRunner

    def __init__(self, recorder: Recorder, worker_group: WorkerGroup, listener: Listener, task: Task) -> None:
        self.recorder, self.worker_group, self.listener, self.task = recorder, worker_group, listener, task
        self.ledger = task.plan.ledger
        self.leaks = LeakWatch()

    def run_action(self, action: Action, step: int) -> None:
        """Run one action. Raises: RunError where it frees less memory than planned."""
        self.listener(RunEvent("action", step, action.id))
        before = self.recorder.memory_by_process()
        self.runner.run_action(action, step)
        check_freed(self.ledger, action, step, before, self.recorder.memory_by_process())

    def announce(self, process: str, step: int, text: str) -> None:
        """Record that a process is about to be restarted."""
        self.leaks.forget(process)
        self.recorder.write_alarm(step, "restart", text, process=process)

    def rehearse(self) -> None:
        """Run a step of the largest size before step 1 and compare it with the plan. Raises: MisfitError, RunError."""
        changes = list(self.task.changes)
        write = partial(self.recorder.write_file, "preflight.json")
        if not self.task.spec.job.preflight.rehearses:
            return write(rehearsal_as_json((), changes, "preflight.rehearses is false"))
        self.listener(RunEvent("action", 0, "rehearse"))
        cycle = Cycle(self.runner, self.ledger, dict(self.recorder.resident), self.recorder.memory_by_process())
        rehearsed: tuple[Rehearsed, ...] = ()
        for actions, peaks in cycle.play():
            latest = compare(self.ledger, peaks, actions)
            rehearsed += latest
            write(rehearsal_as_json(rehearsed, changes))
            # With time sharing, the peaks of earlier phases are over; otherwise all trainers hold their memory at once.
            check_fits(self.ledger, latest if cycle.shares_time else rehearsed, cycle.resident)
        return None

    def finish_step(self, step: int) -> bool:
        """Record a finished step; step 0 is the run's start, and -1 its end.

        Returns: whether the run stops early after this step.
        """
        self.recorder.record_host(step, self.worker_group.system_bytes())
        if step == 0 and self.task.resumption is not None:
            self.runner.metrics.take_rows(step)  # the earlier run has recorded the start
            return False
        if step == 0:
            self.rehearse()
        learning, timings = self.runner.metrics.take_rows(step)
        for leak in self.leaks.observe(step, self.recorder.resident):
            self.recorder.write_alarm(step, "leak", leak.text, process=leak.process, slope=leak.bytes_per_step)
        for line in self.task.followers.take_problems() if self.task.followers else ():
            self.recorder.write_alarm(step, "sink", line)
        timings["memory/allocated_gb"] = round(sum(self.recorder.memory_by_process().values()) / 1e9, 3)
        timings["memory/host_total_bytes"] = sum(self.recorder.resident.values())
        if len(learning) > 1:  # more than the step's number
            self.recorder.write_row("metrics.jsonl", learning)
        self.recorder.write_row("timings.jsonl", timings)
        if step > 0:
            by_group = {rollout.group: rollout.prompt.id for rollout in self.runner.collector.rollouts}
            self.recorder.write_row("prompts.jsonl", {"step": step, "prompts": [*by_group.values()]})
            self.recorder.rollouts.settle()  # before the step's checkpoint, which promises that the file is complete
        why = self.runner.best.observe(step, learning) if step >= 0 else None
        self.runner.finish_step(step)
        self.listener(RunEvent("step", step, "", learning, timings))
        return why is not None and self._stops_early(step, why)

    def last_step(self) -> int:
        """Number of the run's last step; for a resumed run that had stopped early, the step at which it stopped."""
        resumption = self.task.resumption
        if resumption is not None and self._stops_early(resumption.step, self.runner.best.explain_stop()):
            return resumption.step
        return self.task.spec.job.workload.num_steps

    def _stops_early(self, step: int, why: str) -> bool:
        """Decide whether to stop early, and record it. A run that has reached its last step does not stop early."""
        self.recorder.facts.pop(STOPPED_EARLY, None)
        if not why or step in (0, self.task.spec.job.workload.num_steps):
            return False
        text = f"stopped early after step {step}: {why}"
        self.recorder.facts[STOPPED_EARLY] = text
        self.runner.stop_early(step)
        self.listener(RunEvent("phase", step, text))
        return True
