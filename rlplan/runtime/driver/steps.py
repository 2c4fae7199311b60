"""ActionRunner: what each kind of action means on a crew. The Schedule says when; this says who does it.

In: an action and the step it belongs to. Out: measurements for the recorder. Left out: how a run's processes start
(starter.py), where a step's rollouts come from (collector.py), what is learned from them (learner.py), how the policy
reaches the engines (handover.py), and who comes and goes between phases (switches.py).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.runtime.checkpoints.checkpointer import Checkpointer
from rlplan.runtime.checkpoints.finding import Resumption
from rlplan.runtime.checkpoints.manifest import RunState
from rlplan.runtime.checkpoints.run_state import give_state, take_state
from rlplan.runtime.cluster.crew import Crew
from rlplan.runtime.driver.calls import Calls
from rlplan.runtime.driver.preflight import PromptSets
from rlplan.runtime.driver.starter import Starter
from rlplan.runtime.driver.switches import Switches
from rlplan.runtime.fault_tolerance.revival import Revival
from rlplan.runtime.fault_tolerance.supervision import Handler, Restart, Supervisor
from rlplan.runtime.learning.learner import Learner
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.measure.step_metrics import StepMetrics
from rlplan.runtime.rewards.desk import RewardDesk
from rlplan.runtime.rollout.collector import Collector
from rlplan.runtime.rollout.fleet import Fleet
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.runtime.weight_sync.handed_over import check_fresh
from rlplan.runtime.weight_sync.handover import Handover
from rlplan.vocabulary import ActionKind, Role


class ActionRunner:
    """Performs actions on a crew. `model_folder` holds the start checkpoint. listen: set to hear of alarms."""

    def __init__(
        self,
        spec: ExecutionSpec,
        crew: Crew,
        recorder: Recorder,
        prompts: PromptSets,
        model_folder: Path,
        announce: Callable[[Restart], None],
        desk: RewardDesk,
        resumption: Resumption | None = None,
    ) -> None:
        """announce: hears of processes that are started anew. desk: judges rollouts; whoever opened it closes it.

        resumption: the checkpoint that the run goes on from.
        """
        self.spec, self.job, self.recorder, self.resumption = spec, spec.job, recorder, resumption
        self.listen: Callable[[int, str], None] = lambda step, text: None
        self.metrics = StepMetrics(spec.job)
        self.handover = Handover(spec, crew)
        self.fleet = Fleet(crew, spec.schedule.layout("rollout_engine"))
        self.switches = Switches(crew, recorder.folder, spec.job)
        self.checkpoints = Checkpointer(spec, crew, recorder)
        calls = Calls(crew, spec.job.limits)
        self.calls, self.deadline_s = calls, calls.deadline_s
        self.starter = Starter(
            spec, calls, recorder, self.fleet, self.handover, self.switches, self.checkpoints, model_folder, resumption
        )
        self.collector = Collector(spec, calls, recorder, self.metrics, self.fleet, prompts, desk, resumption)
        self.learner = Learner(spec, calls, self.metrics)
        self.revival = Revival(spec, crew, self.fleet, self.handover, self.switches, self.starter.folder_of)
        self.supervisor = self._supervisor(crew, announce)
        self.stream = self.collector.stream
        if self.stream is not None:
            self.stream.watch = self._watch_stream
        self.resumed = give_state(resumption, self.handover, self.fleet, self.stream) if resumption else ""

    def perform(self, action: Action, step: int) -> None:
        """Do one action and record it. The one that leads goes on until all steps are done."""
        if self.stream is not None and action == self.spec.schedule.leading:
            return self.collector.lead()
        if step == 0 and self.resumption is not None and action.kind is ActionKind.EVALUATE:
            return None  # the run has its first evaluation already
        handler = self._handlers().get(action.kind, lambda action, step: self.switches.perform(action))
        start_s = time.time()
        with self.metrics.timing(action.id):
            measurements, attempt = self.supervisor.perform(self._alone(handler, action), action, step)
        self.recorder.record(action, step, measurements, attempt)
        if not action.processes:
            self.recorder.record_own(action, step, start_s, time.time())
        return None

    def _handlers(self) -> dict[ActionKind, Handler]:
        """Who does what; every other kind is a switch."""
        starter, collector = self.starter, self.collector
        return {
            ActionKind.START_TRAINER: starter.start_trainer,
            ActionKind.START_ENGINE: starter.start_engine,
            ActionKind.START_SCORER: starter.start_scorer,
            ActionKind.GENERATE: collector.generate,
            ActionKind.TAKE_ROLLOUTS: self._take_rollouts,
            ActionKind.SAVE_WEIGHTS: self._save_weights,
            ActionKind.VERIFY: collector.verify,
            ActionKind.SCORE: self._score,
            ActionKind.COMPUTE_ADVANTAGES: self._compute_advantages,
            ActionKind.TRAIN_FORWARD_BACKWARD: self._train_forward_backward,
            ActionKind.OPTIMIZER_STEP: self._optimizer_step,
            ActionKind.SYNC_WEIGHTS: self._sync_weights,
            ActionKind.EVALUATE: collector.evaluate,
            ActionKind.SAVE_STATES: self._save_states,
            ActionKind.WRITE_STATES: self._save_states,
            ActionKind.CHECKPOINT: self._checkpoint,
        }

    def _supervisor(self, crew: Crew, announce: Callable[[Restart], None]) -> Supervisor:
        max_restarts = self.job.limits.max_restarts if self.revival.is_possible else 0
        supervisor = Supervisor(max_restarts, self.revival.revive, announce)
        supervisor.is_replaced, supervisor.num_open = crew.is_replaced, self._num_open
        return supervisor

    def _watch_stream(self, call: Callable[[], Any]) -> Any:
        leading = self.spec.schedule.leading
        assert leading is not None, "generation leads"
        return self.supervisor.watch(call, leading, self.handover.version)

    def _num_open(self, process: str) -> int:
        return self.fleet.num_open(process) if process in self.fleet.processes else 0

    def _alone(self, handler: Handler, action: Action) -> Handler:
        """The same, while nobody beside the steps asks the trainers: their ranks must hear everything in one order."""
        is_trainers = any("_trainer/" in process for process in action.processes)
        if self.stream is None or not is_trainers or action.kind is ActionKind.SYNC_WEIGHTS:
            return handler

        def alone(action: Action, step: int) -> list[Measurement]:
            with self.revival.trainers:
                return handler(action, step)

        return alone

    def finish_step(self, step: int) -> None:
        """What was saved in a step becomes a checkpoint, now that the step has ended."""
        if step > 0:
            self.checkpoints.commit(step, lambda: self._state(step))
        elif step < 0:
            self.checkpoints.settle(self.job.limits.action_timeout_s)

    def _state(self, step: int) -> tuple[RunState, Any]:
        state, buffer = take_state(step, self.handover, self.fleet, self.stream)
        more = {"num_replaced": self.collector.num_replaced, "response_lengths": self.collector.lengths.counts()}
        return state.model_copy(update=more), buffer

    def close(self) -> None:
        """Let the collector end; remove what weight sync may have left behind."""
        self.collector.close()
        self.handover.close()

    def _take_rollouts(self, action: Action, step: int) -> list[Measurement]:
        """What the engine did meanwhile counts as the action that led."""
        self.collector.take_rollouts(step)
        if self.stream is None:
            return []
        self.metrics.add_staleness(self.collector.rollouts, self.handover.version)
        self.metrics.add_begun_anew(self.fleet.num_begun_anew)
        self.fleet.num_begun_anew = 0
        leading = self.spec.schedule.leading
        if leading is not None:
            self.recorder.record(leading, step, self.stream.take_measurements())
        return []

    def _score(self, action: Action, step: int) -> list[Measurement]:
        baselines = self.collector.baselines if action.role is Role.REWARD else []
        return self.learner.score(action, [*self.collector.rollouts, *baselines])

    def _compute_advantages(self, action: Action, step: int) -> list[Measurement]:
        self.collector.finish_rewards(step)
        self.learner.compute_advantages(self.collector.rollouts, step)
        return []

    def _train_forward_backward(self, action: Action, step: int) -> list[Measurement]:
        rollouts, held = self.collector.rollouts, self._engine_held_the_policy(step)
        if held and action.role is Role.POLICY and not action.mini_batch:
            sampled = {span.version for rollout in rollouts for span in rollout.completion.spans}
            check_fresh(self.handover.is_behind, self.handover.version, sampled, step)
        measurements = self.learner.train_forward_backward(action, step, rollouts, held)
        if (alarm := self.learner.take_alarm()) is not None:
            self.recorder.write_alarm(step, "numerics", alarm)
            self.listen(step, alarm)
        return measurements

    def _optimizer_step(self, action: Action, step: int) -> list[Measurement]:
        if action.role is Role.POLICY:
            self.handover.is_behind = True
        return self.learner.optimizer_step(action, step)

    def _engine_held_the_policy(self, step: int) -> bool:
        """Whether these rollouts were made by the weights that are trained now."""
        generates = self.job.algorithm.declaration.has_rollouts
        return generates and step - 1 != self.job.controls.skip_sync_after_step and self.stream is None

    def _sync_weights(self, action: Action, step: int) -> list[Measurement]:
        """Hand the policy over, unless the job leaves this step's sync out on purpose."""
        if step and step == self.job.controls.skip_sync_after_step:
            return []
        if self.stream is None or not step:  # the first hand-over comes before anything is begun
            return self.handover.sync(action)
        with self.stream.handing_over(), self.revival.trainers:
            return self.handover.sync(action)

    def _save_weights(self, action: Action, step: int) -> list[Measurement]:
        self.handover.version += 1
        self.handover.is_behind = False
        return self.switches.save_weights(action, self.handover.version, self.job.policy.path)

    def _save_states(self, action: Action, step: int) -> list[Measurement]:
        return self.checkpoints.save(action, step, self.deadline_s(action))

    def _checkpoint(self, action: Action, step: int) -> list[Measurement]:
        """The trained policy, in Hugging Face layout, beside the run's other files."""
        folder = self.recorder.folder / "policy"
        return self.calls.everywhere(action, lambda rank: ("save", str(folder), self.job.policy.path))[1]
