"""ActionRunner: what each kind of action means on a crew. The Schedule says when; this says how.

In: an action and the step it belongs to. Out: experience, kept until the step ends, and measurements for the recorder.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.errors import RunError
from rlplan.runtime.buffer import BufferLimits, ExperienceBuffer
from rlplan.runtime.checkpoints.checkpointer import Checkpointer
from rlplan.runtime.checkpoints.finding import Resumption
from rlplan.runtime.checkpoints.manifest import RunState
from rlplan.runtime.checkpoints.run_state import give_state, take_state
from rlplan.runtime.crew import Crew
from rlplan.runtime.data.facts import ResponseLengths
from rlplan.runtime.end_tokens import end_tokens
from rlplan.runtime.environments.conversations import Conversations, Words
from rlplan.runtime.environments.pool import EnvironmentPool
from rlplan.runtime.experience import FinishedRequest, Rollout, RolloutRequest
from rlplan.runtime.fleet import Fleet
from rlplan.runtime.groups import Finished, Group, GroupMaker, gather
from rlplan.runtime.handover import Handover
from rlplan.runtime.losses.registry import find_advantage
from rlplan.runtime.mini_batch import deal_out, train_sample
from rlplan.runtime.preflight import PromptSets
from rlplan.runtime.recorder import Recorder
from rlplan.runtime.requests import RequestMaker
from rlplan.runtime.revival import Revival
from rlplan.runtime.rewards.desk import RewardDesk, failures_of
from rlplan.runtime.rewards.judge import Response
from rlplan.runtime.rewards.total import add_environment, finish_rewards
from rlplan.runtime.role_tokenizers import RoleReaders
from rlplan.runtime.rollout_stream import RolloutStream, StreamWork
from rlplan.runtime.sample_watch import SampleWatch
from rlplan.runtime.step_metrics import StepMetrics
from rlplan.runtime.supervision import Handler, Restart, Supervisor
from rlplan.runtime.switches import Switches
from rlplan.runtime.workers.memory_meter import Measurement
from rlplan.vocabulary import ActionKind, Role

LOGPROB_TOLERANCE = {2: 0.25, 4: 1e-3}
"""Rounding between two implementations, by bytes of the coarser one's numbers: 1e-5 to 1e-4 was seen in fp32, up to
2e-2 in bf16; stale weights differ by far more."""


class ActionRunner:
    """Performs actions on a crew. `model_folder` holds the start checkpoint."""

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
        self.resumption = resumption
        self.spec, self.job, self.crew, self.recorder = spec, spec.job, crew, recorder
        self.prompts, self.model_folder = prompts, model_folder
        self.metrics = StepMetrics(spec.job)
        self.rollouts: list[Rollout] = []
        self.baselines: list[Rollout] = []
        self.num_replaced = 0
        self.handover = Handover(spec, crew)
        self.trainers = [worker.process for worker in spec.ray.workers if worker.worker == "policy_trainer"]
        self._layouts = spec.schedule.layouts
        self.fleet = Fleet(crew, spec.schedule.layout("rollout_engine"))
        self.requests = RequestMaker(spec.job, prompts)
        ends = end_tokens(Path(spec.job.policy.path))
        self.groups = GroupMaker(spec.job, self.requests.prompt, ends, self.requests.name)
        self.generation = self._with_turns() if spec.job.has_turns else self.fleet
        self.switches = Switches(crew, recorder.folder, spec.job)
        self.revival = Revival(spec, crew, self.fleet, self.handover, self.switches, self._folder_of)
        max_restarts = spec.job.limits.max_restarts if self.revival.is_possible else 0
        self.supervisor = Supervisor(max_restarts, self.revival.revive, announce)
        self.supervisor.is_replaced, self.supervisor.num_open = crew.is_replaced, self._num_open
        self.stream: RolloutStream | None = None
        if spec.schedule.lead is not None:
            work = spec.job.workload
            self.stream = RolloutStream(
                self.generation,
                self.requests.rollouts,
                spec.schedule.lead,
                StreamWork(
                    work.num_prompts_per_step,
                    work.num_steps,
                    spec.job.limits.action_timeout_s,
                    can_replace=spec.job.max_refills > 0,
                ),
                ExperienceBuffer(self._buffer_limits()),
            )
            self.stream.watch = self._watch_stream
        self._readers = RoleReaders(spec.job)
        self.desk = desk
        self.desk.forget()
        self.lengths = ResponseLengths(resumption.state.response_lengths if resumption else ())
        self._watch = SampleWatch(self.fleet, self._begin_to_judge, spec.job.limits.action_timeout_s)
        self.checkpoints = Checkpointer(spec, crew, recorder)
        self.resumed = give_state(resumption, self.handover, self.fleet, self.stream) if resumption else ""
        self.num_replaced = resumption.state.num_replaced if resumption else 0

    def perform(self, action: Action, step: int) -> None:
        """Do one action and record it. The one that leads goes on until all steps are done."""
        if self.stream is not None and action == self.spec.schedule.leading:
            with self._judging_early():
                self.stream.run()
            return
        if step == 0 and self.resumption is not None and action.kind is ActionKind.EVALUATE:
            return  # the run has its first evaluation already
        handler = {
            ActionKind.START_TRAINER: self._start_trainer,
            ActionKind.START_ENGINE: self._start_engine,
            ActionKind.START_SCORER: self._start_scorer,
            ActionKind.GENERATE: self._generate,
            ActionKind.TAKE_ROLLOUTS: self._take_rollouts,
            ActionKind.SAVE_WEIGHTS: self._save_weights,
            ActionKind.VERIFY: self._verify,
            ActionKind.SCORE: self._score,
            ActionKind.COMPUTE_ADVANTAGES: self._compute_advantages,
            ActionKind.TRAIN_FORWARD_BACKWARD: self._train_forward_backward,
            ActionKind.OPTIMIZER_STEP: self._optimizer_step,
            ActionKind.SYNC_WEIGHTS: self._sync_weights,
            ActionKind.EVALUATE: self._evaluate,
            ActionKind.SAVE_STATES: self._save_states,
            ActionKind.WRITE_STATES: self._save_states,
            ActionKind.CHECKPOINT: self._checkpoint,
        }.get(action.kind, lambda action, step: self.switches.perform(action))
        start_s = time.time()
        with self.metrics.timing(action.id):
            measurements, attempt = self.supervisor.perform(self._alone(handler, action), action, step)
        self.recorder.record(action, step, measurements, attempt)
        if not action.processes:
            self.recorder.record_own(action, step, start_s, time.time())

    def rehearse(self) -> dict[str, int]:
        """The largest step that the plan allows for, on every trainer, and back to the start: each process's peak."""
        peaks = {}
        for action in self.spec.schedule.start:
            if action.kind is ActionKind.START_TRAINER:
                for measurement in self._everywhere(action, lambda rank: ("rehearse",))[1]:
                    device = measurement.device
                    peaks[measurement.process] = device.peak if device else measurement.peak_bytes
                folder = self._folder_of(action.role)
                self._everywhere(action, lambda rank, folder=folder: ("begin_anew", folder))
        return peaks

    def _with_turns(self) -> Conversations:
        """The engines, and between the policy's turns the job's environment."""
        environment = self.job.rollout.environment
        words = Words(str(Path(self.job.policy.path) / "tokenizer.json"))
        pool = EnvironmentPool(environment, self.recorder.folder / "logs" / "environment.log")
        self.crew.not_ray = lambda: pool.pids
        return Conversations(self.fleet, pool, environment, words, self.requests.named)

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

    def deadline_s(self, action: Action) -> float:
        """Seconds that an action may take."""
        limits = self.job.limits
        return limits.start_timeout_s if action.kind.value.startswith("start") else limits.action_timeout_s

    def _buffer_limits(self) -> BufferLimits:
        place, folder = self.job.placement, self.recorder.folder / "buffer"
        return BufferLimits(place.max_staleness, place.max_buffered_groups, place.max_groups_in_memory, folder)

    def finish_step(self, step: int) -> None:
        """What was saved in a step becomes a checkpoint, now that the step has ended."""
        if step > 0:
            self.checkpoints.commit(step, lambda: self._state(step))
        elif step < 0:
            self.checkpoints.settle(self.job.limits.action_timeout_s)

    def _state(self, step: int) -> tuple[RunState, Any]:
        state, buffer = take_state(step, self.handover, self.fleet, self.stream)
        more = {"num_replaced": self.num_replaced, "response_lengths": self.lengths.counts()}
        return state.model_copy(update=more), buffer

    def close(self) -> None:
        """Let the stream end; remove what it, and weight sync, may have left behind."""
        if self.stream is not None:
            self.stream.close()
            self.stream.buffer.close()
        if isinstance(self.generation, Conversations):
            self.generation.close()
        self.handover.close()

    def _start_trainer(self, action: Action, step: int) -> list[Measurement]:
        imported = self._import_libraries(action)
        asked = self.job.hardware.rendezvous_port if action.role is Role.POLICY else 0
        address, port = self._rendezvous(action, asked)
        world, folder = len(action.processes), self._folder_of(action.role)
        started = self._everywhere(action, lambda rank: ("start", rank, world, port, folder, address))[1]
        prepared = self.checkpoints.prepare(action, self.resumption, self.deadline_s(action))
        return imported + started + prepared + self._prepare_weights(action)

    def _prepare_weights(self, action: Action) -> list[Measurement]:
        """Of a resumed run, for engines that are started from a folder, and not handed weights over before step 1."""
        hands_over = any(other.kind is ActionKind.SYNC_WEIGHTS for other in self.spec.schedule.start)
        if self.resumption is None or action.role is not Role.POLICY:
            return []
        if hands_over:
            self.handover.version -= 1  # the hand-over that follows makes it the saved one
            return []
        saving = next((a for a in self.spec.schedule.step if a.kind is ActionKind.SAVE_WEIGHTS), action)
        return self.switches.save_weights(saving, self.handover.version, self.job.policy.path)

    def _start_engine(self, action: Action, step: int) -> list[Measurement]:
        """The first time with its libraries; an engine that was stopped starts from the weights saved last."""
        self.handover.forget()
        imported = self._import_libraries(action) if step == 0 else []
        folder = self._folder_of(action.role) if self.switches.saved is None else str(self.switches.saved)
        return imported + self.fleet.start(folder, self.handover.version, self.deadline_s(action))

    def _start_scorer(self, action: Action, step: int) -> list[Measurement]:
        imported, folder = self._import_libraries(action), self._folder_of(action.role)
        if not self.spec.schedule.layout("scorer", action.role).shares_frozen_weights:
            return imported + self._everywhere(action, lambda rank: ("start", folder))[1]
        address, config = self._rendezvous(action, 0), self.spec.deepspeed[action.role]
        world = len(action.processes)
        return (
            imported + self._everywhere(action, lambda rank: ("start_share", rank, world, address, folder, config))[1]
        )

    def _rendezvous(self, action: Action, port: int) -> tuple[str, int]:
        """Where the ranks of an action's processes meet: at the first one's, on a free port where none is given."""
        first = action.processes[0]
        address = self.crew.addresses[first]
        listening = self.crew.submit(first, "open_rendezvous", address, port)
        return address, int(self.crew.gather([listening], self.deadline_s(action))[0])

    def _folder_of(self, role: Role) -> str:
        """Where a role's model is loaded from: its own folder, or the start checkpoint."""
        return self.job.roles.paths.get(role, str(self.model_folder))

    def _import_libraries(self, action: Action) -> list[Measurement]:
        """Measure what each process holds before it holds a model: the import baseline."""
        _, measurements = self._everywhere(action, lambda rank: ("import_libraries",))
        for measurement in measurements:
            self.recorder.record_baseline(action.id, measurement.process, action.role.value, measurement.resident_bytes)
        return measurements

    def _generate(self, action: Action, step: int) -> list[Measurement]:
        """New prompts' rollouts; where the job says so, groups that teach nothing are replaced by the next prompts'."""
        first = (step - 1) * self.job.workload.num_prompts_per_step + self.num_replaced
        measurements: list[Measurement] = []

        def more(count: int) -> list[Group]:
            nonlocal first
            numbers, first = range(first, first + count), first + count
            with self._judging_early():
                completions, measured = self._complete(action, [self.requests.rollouts(number) for number in numbers])
            measurements.extend(measured)
            return self._made(zip(numbers, completions, strict=True))

        self._keep(more)
        return measurements

    def _take_rollouts(self, action: Action, step: int) -> list[Measurement]:
        """The oldest complete groups of the stream. What the engine did meanwhile counts as the action that led."""
        if self.stream is None:
            count = self.job.workload.num_prompts_per_step
            self._keep(lambda _: [self.requests.answers(n) for n in range((step - 1) * count, step * count)])
            return []
        stream = self.stream

        def more(count: int) -> list[Group]:
            return self._made((number, finished.completions) for number, finished in stream.take(count))

        self._keep(more, stream.replace)
        if step == self.job.workload.num_steps:
            stream.finish()
        self.metrics.add_staleness(self.rollouts, self.handover.version)
        self.metrics.add_begun_anew(self.fleet.num_begun_anew)
        self.fleet.num_begun_anew = 0
        leading = self.spec.schedule.leading
        if leading is not None:
            self.recorder.record(leading, step, self.stream.take_measurements())
        return []

    def _made(self, finished: Iterable[Finished]) -> list[Group]:
        """Groups of finished completions, rewarded where it must be known which of them teach."""
        groups = [self.groups.make(each) for each in finished]
        if self.job.max_refills:
            self.desk.judge([rollout for group in groups for rollout in group.rollouts])
        return groups

    def _keep(self, more: Callable[[int], list[Group]], replaced: Callable[[int], None] = lambda _: None) -> None:
        """Make this step's rollouts of new groups."""
        num_replaced: list[int] = []

        def note(num_groups: int) -> None:
            num_replaced.append(num_groups)
            replaced(num_groups)

        groups = gather(self.job.workload.num_prompts_per_step, more, self.job.max_refills, note)
        self.num_replaced += sum(num_replaced)
        for index, group in enumerate(groups):
            group.place(index)
        self.rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.baselines = [rollout for group in groups for rollout in group.baselines]
        self.metrics.add_rollouts(self.rollouts)
        self.metrics.add_replaced(sum(num_replaced))
        for rollout in self.rollouts:
            self.lengths.add(len(rollout.completion.tokens))

    def _judging_early(self) -> AbstractContextManager[None]:
        """Inside the block rollouts are judged as they end, where judging takes processes of its own."""
        is_early = self.desk.is_early and not self.job.has_turns
        return self._watch.watching() if is_early else nullcontext()

    def _begin_to_judge(self, sample: FinishedRequest) -> None:
        prompt, completion = self.requests.named(sample.id.rpartition("/")[0]), sample.completions[0]
        is_rollout = sample.id.startswith("generate/")
        text = self.groups.text(completion) if is_rollout else self.groups.decode(completion.tokens)
        self.desk.begin(sample.id, Response(prompt, text, completion.tokens))

    def _verify(self, action: Action, step: int) -> list[Measurement]:
        everything = (*self.rollouts, *self.baselines)
        self.desk.judge(everything)
        self.metrics.add_reward_notes(*self.desk.take_notes())
        self.recorder.write_failures(failures_of(everything, step))
        if self.desk.span is not None:
            self.recorder.record_verifiers(action, step, *self.desk.span)
        self.desk.check_failures(everything, step)
        return []

    def _score(self, action: Action, step: int) -> list[Measurement]:
        """What a role says of every rollout; they are dealt out over its processes in contiguous shares."""
        wanted = [*self.rollouts, *(self.baselines if action.role is Role.REWARD else [])]
        ways = self._ranks_per_pass(action)
        shares = _contiguous(wanted, len(action.processes) // ways)

        def call(rank: int) -> tuple[Any, ...]:
            return (
                "score",
                [self._readers.sequence(action.role, rollout) for rollout in shares[rank // ways]],
                action.role.value,
            )

        results, measurements = self._everywhere(action, call)
        for share, scores in zip(shares, results[::ways], strict=True):
            for rollout, score in zip(share, scores, strict=True):
                rollout.scores[action.role] = score
        return measurements

    def _compute_advantages(self, action: Action, step: int) -> list[Measurement]:
        finish_rewards(self.rollouts, self.baselines, self.job, step)
        self._watch_environment(step)
        self.metrics.add_cut_sequences(self._readers.take_num_cut(), len(self.rollouts))
        compute = find_advantage(self.job.algorithm)
        for rollout, judged in zip(self.rollouts, compute(self.rollouts, self.job.algorithm), strict=True):
            rollout.advantage, rollout.advantages, rollout.returns = judged.whole, judged.advantages, judged.returns
        self.metrics.add_rewards(self.rollouts)
        return []

    def _watch_environment(self, step: int) -> None:
        """Note what its processes hold. Masked rollouts must not go unseen. Raises: RunError when no other is left."""
        if isinstance(self.generation, Conversations):
            self.recorder.record_beside("environment", step, self.generation.pool.resident_bytes())
        failed = [rollout.failure for rollout in self.rollouts if rollout.has_failed]
        if len(failed) == len(self.rollouts):
            raise RunError(
                f"none of the step's {len(failed)} rollouts can be learned from: {failed[0]}",
                where=f"step {step}, " + ("rollout.environment" if self.job.has_turns else "rewards"),
                rule="environments answer and rewards judge",
                way_out="read logs/environment.log and failures.jsonl in the run folder",
            )
        unanswered = [rollout.failure for rollout in self.rollouts if rollout.completion.failure]
        if unanswered:
            text = f"{len(unanswered)} of {len(self.rollouts)} rollouts are masked, such as: {unanswered[0]}"
            self.recorder.write_alarm(step, "environment", text, num_masked=len(unanswered))

    def _train_forward_backward(self, action: Action, step: int) -> list[Measurement]:
        """Deal the mini-batch out over the ranks by length and pack it into passes."""
        size = self.job.workload.mini_batch_size
        batch = [train_sample(rollout) for rollout in self.rollouts[(action.mini_batch or 0) * size :][:size]]
        ways = self._ranks_per_pass(action)
        shares = deal_out(batch, self.job, len(action.processes) // ways)

        def call(rank: int) -> tuple[Any, ...]:
            mine = shares[rank // ways]
            return "forward_backward", [samples for samples, _ in mine], [weights for _, weights in mine]

        results, measurements = self._everywhere(action, call)
        results = results[::ways]  # ranks that share a pass all give the numbers of the whole
        if action.role is not Role.POLICY:
            self.metrics.add_value_training(results)
            return measurements
        self.metrics.add_training(results, is_first=not action.mini_batch)
        if not action.mini_batch and self._engine_held_the_policy(step):
            coarser = min(self.job.training.dtype.num_bytes, self.job.rollout.dtype.num_bytes)
            tolerance = LOGPROB_TOLERANCE[coarser]
            _check_agreement(max(result["logprob_difference_max"] for result in results), tolerance, step)
        return measurements

    def _engine_held_the_policy(self, step: int) -> bool:
        """Whether these rollouts were made by the weights that are trained now."""
        generates = self.job.algorithm.declaration.has_rollouts
        return generates and step - 1 != self.job.controls.skip_sync_after_step and self.stream is None

    def _optimizer_step(self, action: Action, step: int) -> list[Measurement]:
        results, measurements = self._everywhere(action, lambda rank: ("optimizer_step",))
        self.metrics.add_optimizer_step(results[0], action.role)
        return measurements

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
        return self.switches.save_weights(action, self.handover.version, self.job.policy.path)

    def _save_states(self, action: Action, step: int) -> list[Measurement]:
        return self.checkpoints.save(action, step, self.deadline_s(action))

    def _evaluate(self, action: Action, step: int) -> list[Measurement]:
        """Greedy accuracy on the held-out prompts. The last step's own evaluation is not repeated while finishing."""
        if step == -1 and self.job.workload.num_steps % self.job.workload.evaluate_every == 0:
            return []
        requests = self.requests.evaluation()
        with self._judging_early():
            groups, measurements = self._complete(action, requests)
        rollouts = [
            Rollout(prompt, index, completions[0], self.groups.decode(completions[0].chosen), id=f"evaluate/{index}/0")
            for index, (prompt, completions) in enumerate(zip(self.prompts.heldout, groups, strict=True))
        ]
        self.desk.judge(rollouts)
        self.desk.take_notes()  # they are of training rollouts
        self.recorder.write_failures(failures_of(rollouts, step))
        self.desk.check_failures(rollouts, step)
        add_environment(rollouts, self.job)
        self.metrics.add_evaluation(rollouts)
        return measurements

    def _checkpoint(self, action: Action, step: int) -> list[Measurement]:
        """The trained policy, in Hugging Face layout, beside the run's other files."""
        folder = self.recorder.folder / "policy"
        return self._everywhere(action, lambda rank: ("save", str(folder), self.job.policy.path))[1]

    def _complete(self, action: Action, requests: Sequence[RolloutRequest]) -> tuple[list[Any], list[Measurement]]:
        finished, measurements = self.generation.generate(requests, self.deadline_s(action))
        return [list(done.completions) for done in finished], measurements

    def _everywhere(self, action: Action, call: Any) -> tuple[list[Any], list[Measurement]]:
        """Call every process of an action at once; `call(rank)` gives the method and its arguments."""
        calls = [self.crew.perform(process, *call(rank)) for rank, process in enumerate(action.processes)]
        return self.crew.measured(calls, self.deadline_s(action))

    def _ranks_per_pass(self, action: Action) -> int:
        """How many neighbours among an action's processes compute each pass together."""
        return max(la.num_ranks_per_pass if action.processes[0] == la.processes[0][0] else 1 for la in self._layouts)

    def _one(self, action: Action, process: str, method: str, *arguments: Any) -> list[Measurement]:
        return self.crew.measured([self.crew.perform(process, method, *arguments)], self.deadline_s(action))[1]


def _check_agreement(difference: float, tolerance: float, step: int) -> None:
    """Until the first optimizer step on fresh rollouts both hold the same weights, or the sync failed."""
    if difference > tolerance:
        raise RunError(
            f"engine and trainer differ by {difference:.3g} in the log-prob of a sampled token",
            where=f"step {step}, train_forward_backward",
            rule=f"at most {tolerance} when both hold the same weights",
            way_out="the engine's weights are stale or wrong: report it with the run folder",
        )


def _contiguous(rollouts: list[Rollout], num_shares: int) -> list[list[Rollout]]:
    size = -(-len(rollouts) // num_shares)
    return [rollouts[index * size : (index + 1) * size] for index in range(num_shares)]
