"""ActionRunner: runs each kind of action of a Schedule on a worker group.

In: an action and its step. Out: measurements for the recorder. Left out: starting processes (starter.py), rollouts
(collector.py), training (learner.py), weight sync (weight_sync_driver.py), switches of time sharing (switches.py).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.planner.plan import read_plan
from rlplan.runtime.checkpoints.checkpointer import Checkpointer
from rlplan.runtime.checkpoints.finding import Resumption
from rlplan.runtime.checkpoints.manifest import RunState
from rlplan.runtime.checkpoints.model_card import CARD, model_card
from rlplan.runtime.checkpoints.run_state import restore_state, take_state
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.data.prompt_sets import PromptSets
from rlplan.runtime.driver.best import BestSoFar
from rlplan.runtime.driver.starter import Starter
from rlplan.runtime.driver.switches import Switches
from rlplan.runtime.fault_tolerance.recovery import Recovery
from rlplan.runtime.fault_tolerance.supervision import Announce, Handler, Supervisor
from rlplan.runtime.learning.learner import Learner
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.measure.step_metrics import StepMetrics
from rlplan.runtime.rewards.reward_pool import RewardPool
from rlplan.runtime.rollout.collector import Collector
from rlplan.runtime.rollout.fleet import Fleet
from rlplan.runtime.run_folder.disk_errors import writing_file
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.runtime.weight_sync.weight_sync_driver import WeightSync
from rlplan.runtime.weight_sync.weight_verification import check_fresh
from rlplan.runtime.workers.typed_calls import TRAINER, bind_call
from rlplan.vocabulary import ActionKind, Phase, Role


class ActionRunner:
    """See the module docstring."""

    def __init__(
        self,
        spec: ExecutionSpec,
        worker_group: WorkerGroup,
        recorder: Recorder,
        prompts: PromptSets,
        model_folder: Path,
        announce: Announce,
        reward_pool: RewardPool,
        resumption: Resumption | None = None,
    ) -> None:
        """model_folder: the start checkpoint. announce: called before a process is restarted.

        reward_pool: computes rewards; the caller closes it. resumption: the checkpoint that the run resumes from.
        """
        self.spec, self.job, self.recorder, self.resumption = spec, spec.job, recorder, resumption
        self.metrics = StepMetrics(spec.job)
        self.best = BestSoFar(spec.job, resumption.state if resumption else None)
        self.weight_sync = WeightSync(spec, worker_group)
        self._handed_over: list[Measurement] | None = None
        self.fleet = Fleet(worker_group, spec.schedule, shares_base=spec.job.rollout.shares_base)
        self.switches = Switches(worker_group, recorder.folder, spec.job)
        self.checkpoints = Checkpointer(spec, worker_group, recorder)
        self.worker_group, self.deadline_s = worker_group, worker_group.deadline_s
        parts = self.fleet, self.weight_sync, self.switches, self.checkpoints
        self.starter = Starter(spec, worker_group, recorder, *parts, model_folder, resumption)
        self.collector = Collector(
            spec, worker_group, recorder, self.metrics, self.fleet, prompts, reward_pool, resumption
        )
        self.learner = Learner(spec, worker_group, self.metrics)
        folders = self.starter.model_folder_for_role, self.starter.engine_folder
        self.recovery = Recovery(spec, worker_group, self.fleet, self.weight_sync, self.switches, *folders)
        self.supervisor = self._build_supervisor(worker_group, announce)
        self.stream = self.collector.stream
        if self.stream is not None:
            self.stream.watch = self._call_for_stream
        self.resumed = restore_state(resumption, self.weight_sync, self.fleet, self.stream) if resumption else ""

    def run_action(self, action: Action, step: int) -> None:
        """Run one action and record it. The action of async rollouts runs until the last step's rollouts are done."""
        if self.stream is not None and action == self.spec.schedule.async_action:
            return self.collector.run_async_rollouts()
        if step == 0 and self.resumption is not None and action.phase is Phase.EVALUATE:
            return None  # the earlier run has done the first evaluation
        handler = self.find_handler(action)
        start_s = time.time()
        with self.metrics.timing(action.id):
            measurements, attempt = self.supervisor.run_with_restarts(
                self._serialize_trainer_calls(handler, action), action, step
            )
        self.recorder.record(action, step, measurements, attempt)
        if not action.processes:
            self.recorder.record_span(action, step, start_s, time.time())
        return None

    def find_handler(self, action: Action) -> Handler:
        """The function that runs an action; kinds without a handler are switches of time sharing."""
        return self._handlers().get(action.kind, lambda action, step: self.switches.run_switch(action))

    def _handlers(self) -> dict[ActionKind, Handler]:
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
            ActionKind.CHECKPOINT: self._export_policy,
        }

    def _build_supervisor(self, worker_group: WorkerGroup, announce: Announce) -> Supervisor:
        max_restarts = self.job.limits.max_restarts if self.recovery.is_possible else 0
        supervisor = Supervisor(max_restarts, self.recovery.recover, announce)
        supervisor.is_replaced, supervisor.num_open = worker_group.is_replaced, self.fleet.num_open
        return supervisor

    def _call_for_stream(self, call: Callable[[], Any]) -> Any:
        async_action = self.spec.schedule.async_action
        assert async_action is not None, "rollouts are async"
        return self.supervisor.call_with_restarts(call, async_action, self.weight_sync.version)

    def _serialize_trainer_calls(self, handler: Handler, action: Action) -> Handler:
        """Serialize calls to the trainers: all ranks must run collectives in the same order."""
        # `_sync_weights` takes the lock itself, once the engines are paused. Until then it may wait for a lost engine,
        # which can be restored only while the lock is free.
        is_trainers = any("_trainer/" in process for process in action.processes)
        if self.stream is None or not is_trainers or action.kind is ActionKind.SYNC_WEIGHTS:
            return handler

        def call_serialized(action: Action, step: int) -> list[Measurement]:
            with self.recovery.trainers:
                return handler(action, step)

        return call_serialized

    def finish_step(self, step: int) -> None:
        """Commit the states saved in a step as a checkpoint, now that the step has ended."""
        if step > 0:
            self.checkpoints.commit(step, lambda: self._collect_state(step))
        elif step < 0:
            self.checkpoints.settle(self.job.limits.action_timeout_s)

    def stop_early(self, step: int) -> None:
        """Make this the last step. Async generation starts no more rollouts."""
        self.collector.stop_after(step)

    def _collect_state(self, step: int) -> tuple[RunState, Any]:
        state, buffer = take_state(step, self.weight_sync, self.fleet, self.stream)
        more = {
            "num_replaced": self.collector.num_replaced,
            "response_lengths": tuple(sorted(self.collector.lengths.items())),
            "early_stopping": self.best.early,
            "best_checkpoint": self.best.kept,
        }
        return state.model_copy(update=more), buffer

    def close(self) -> None:
        """Wait for a checkpoint that is being written, end the collector, and remove files of weight sync."""
        self.checkpoints.close()
        self.collector.close()
        self.weight_sync.close()

    def _take_rollouts(self, action: Action, step: int) -> list[Measurement]:
        """Take the step's rollouts; async generation is recorded under the async action."""
        self.collector.take_rollouts(step)
        if self.stream is None:
            return []
        self.metrics.add_staleness(self.collector.rollouts, self.weight_sync.version)
        if (alarm := self.metrics.uncorrected_staleness()) is not None:
            self.recorder.write_alarm(step, "staleness", alarm)
        self.metrics.add_begun_anew(self.fleet.num_begun_anew)
        self.fleet.num_begun_anew = 0
        async_action = self.spec.schedule.async_action
        if async_action is not None:
            self.recorder.record(async_action, step, self.stream.take_measurements())
        return []

    def _score(self, action: Action, step: int) -> list[Measurement]:
        if action.phase is Phase.EVALUATE:
            return self.collector.evaluate_pairs(step, lambda rollouts: self.learner.score(action, rollouts))
        if action.role is Role.POLICY:
            return self.learner.score_policy(action, self.collector.rollouts)
        baselines = self.collector.baselines if action.role is Role.REWARD else []
        return self.learner.score(action, [*self.collector.rollouts, *baselines])

    def _compute_advantages(self, action: Action, step: int) -> list[Measurement]:
        self.collector.finish_rewards(step)
        self.learner.compute_advantages(self.collector.rollouts, step)
        words = self.collector.groups.words
        self.recorder.rollouts.begin(step, self.collector.rollouts, self.job.metrics, words.text)
        return []

    def _train_forward_backward(self, action: Action, step: int) -> list[Measurement]:
        rollouts, is_on_policy = self.collector.rollouts, self._is_on_policy(step)
        if is_on_policy and action.role is Role.POLICY and not action.mini_batch:
            sampled = {span.version for rollout in rollouts for span in rollout.completion.spans}
            check_fresh(self.weight_sync.is_behind, self.weight_sync.version, sampled, step)
        measurements = self.learner.train_forward_backward(action, step, rollouts, is_on_policy)
        if (alarm := self.learner.take_alarm()) is not None:
            self.recorder.write_alarm(step, "numerics", alarm)
        return measurements

    def _optimizer_step(self, action: Action, step: int) -> list[Measurement]:
        if action.role is Role.POLICY:
            self.weight_sync.is_behind = True
        return self.learner.optimizer_step(action, step)

    def _is_on_policy(self, step: int) -> bool:
        """Whether the step's rollouts were sampled from the weights that are trained now."""
        generates = self.job.algorithm.declaration.has_rollouts
        return generates and step - 1 != self.job.controls.skip_sync_after_step and self.stream is None

    def _sync_weights(self, action: Action, step: int) -> list[Measurement]:
        """Sync the policy to the engines, unless `controls.skip_sync_after_step` skips this step's sync."""
        if step and step == self.job.controls.skip_sync_after_step:
            return []
        if self.stream is None or not step:  # the first weight sync precedes async generation
            return self._sync_and_record(action)
        with self.stream.pause_for_sync(), self.recovery.trainers:
            if self._handed_over is None:  # not None in a retry: an engine was lost after the sync, when it resumed
                self._handed_over = self._sync_and_record(action)
        measurements, self._handed_over = self._handed_over, None
        return measurements

    def _sync_and_record(self, action: Action) -> list[Measurement]:
        measurements = self.weight_sync.sync(action)
        self.recorder.facts["weight_sync"] = self.weight_sync.verified
        return measurements

    def _save_weights(self, action: Action, step: int) -> list[Measurement]:
        self.weight_sync.version += 1
        self.weight_sync.is_behind = False
        return self.switches.save_weights(action, self.weight_sync.version, self.job.policy.path)

    def _save_states(self, action: Action, step: int) -> list[Measurement]:
        return self.checkpoints.save(action, step)

    def _export_policy(self, action: Action, step: int) -> list[Measurement]:
        """Export the policy in Hugging Face layout into the run folder; write its model card last."""
        run_folder = self.recorder.folder
        folder = run_folder / "policy" if step < 0 else run_folder / "exports" / f"step-{step}"
        exported = self.worker_group.everywhere(
            action, lambda rank: bind_call(TRAINER.export, str(folder), self.job.policy.path)
        )[1]
        card = model_card(read_plan(run_folder / "plan.json"), run_folder, step)
        with writing_file(folder / CARD):
            folder.mkdir(parents=True, exist_ok=True)  # the trainer may have written the policy on another host
            (folder / CARD).write_text(card, encoding="utf-8")
        return exported
