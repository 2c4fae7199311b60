"""Collector: a step's rollouts, from prompts to rewards, and the evaluation on held-out prompts.

In: actions that generate, take, verify and evaluate. Out: the step's rollouts in the order of its prompts; statistics
for the step's metrics. Rollouts are judged while others are still being generated.
Left out: training on them (learner.py).
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import VERIFIER_PROCESS, Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.errors import RlplanError
from rlplan.runtime.checkpoints.finding import Resumption
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.data.prompt_sets import PromptSets
from rlplan.runtime.data.text_tokens import read_end_tokens
from rlplan.runtime.environments.chat import ChatTurns
from rlplan.runtime.environments.conversations import Conversations, MultiTurnRollouts
from rlplan.runtime.environments.pool import EnvironmentPool, measure_resident_bytes
from rlplan.runtime.environments.tool_calls import BY_THE_TOOL
from rlplan.runtime.gateway.agent_rollouts import AgentRollouts
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.measure.step_metrics import StepMetrics
from rlplan.runtime.rewards.judge import Response
from rlplan.runtime.rewards.reward_pool import RewardPool, list_failures
from rlplan.runtime.rewards.total import add_environment, finish_rewards
from rlplan.runtime.rollout.buffer import ExperienceBuffer
from rlplan.runtime.rollout.experience import FinishedRequest, Rollout, RolloutRequest
from rlplan.runtime.rollout.fleet import Fleet
from rlplan.runtime.rollout.groups import Finished, Group, GroupMaker, add_reset_tokens, gather_groups
from rlplan.runtime.rollout.requests import RequestMaker
from rlplan.runtime.rollout.rollout_stream import RolloutStream, StreamSettings
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.spec.parts.rewards import PAIR_ACCURACY
from rlplan.vocabulary import Role

SAMPLES_S = 0.1
"""Seconds that an engine waits for a finished sample before it returns none."""


class Collector:
    """See the module docstring. rollouts, baselines: those of the current step. stream: async generation, or None.

    last_step: number of the run's last step.
    """

    def __init__(
        self,
        spec: ExecutionSpec,
        worker_group: WorkerGroup,
        recorder: Recorder,
        metrics: StepMetrics,
        fleet: Fleet,
        prompts: PromptSets,
        reward_pool: RewardPool,
        resumption: Resumption | None,
    ) -> None:
        self.spec, self.job, self.worker_group, self.recorder = spec, spec.job, worker_group, recorder
        self.metrics, self.fleet, self.prompts, self.reward_pool = metrics, fleet, prompts, reward_pool
        self.last_step = spec.job.workload.num_steps
        self.rollouts: list[Rollout] = []
        self.baselines: list[Rollout] = []
        self.requests = RequestMaker(spec.job, prompts)
        ends = read_end_tokens(Path(spec.job.policy.path))
        self.groups = GroupMaker(spec.job, self.requests.prompt, ends, self.requests.request_id)
        self.generation = self._start_conversations() if spec.job.has_turns else fleet
        self.stream = self._build_stream() if spec.schedule.async_rollouts is not None else None
        self.reward_pool.reset()  # the pool outlives a restart of the worker group
        self.lengths = Counter(dict(resumption.state.response_lengths) if resumption else ())
        self.num_replaced = resumption.state.num_replaced if resumption else 0

    def generate(self, action: Action, step: int) -> list[Measurement]:
        """Generate rollouts of new prompts. Dynamic sampling replaces zero-variance groups by further ones."""
        first = (step - 1) * self.job.workload.num_prompts_per_step + self.num_replaced
        measurements: list[Measurement] = []

        def more(count: int) -> list[Group]:
            nonlocal first
            numbers, first = range(first, first + count), first + count
            with self._judge_early():
                completions, measured = self._complete(
                    action, [self.requests.rollout_request(number) for number in numbers]
                )
            measurements.extend(measured)
            return self._build_groups(zip(numbers, completions, strict=True), step)

        self._gather_groups(more)
        return measurements

    def take_rollouts(self, step: int) -> None:
        """Take the oldest complete groups of the stream. Without generation, take the data set's answers."""
        if self.stream is None:
            count = self.job.workload.num_prompts_per_step
            self._gather_groups(
                lambda _: [self.requests.answer_group(n) for n in range((step - 1) * count, step * count)]
            )
            return
        stream = self.stream

        def more(count: int) -> list[Group]:
            return self._build_groups(((number, finished.completions) for number, finished in stream.take(count)), step)

        self._gather_groups(more, stream.replace)
        if step == self.job.workload.num_steps:
            stream.finish()

    def verify(self, action: Action, step: int) -> list[Measurement]:
        """Judge the rollouts that have no reward yet. Raises: RunError when too many rewards failed."""
        all_rollouts = (*self.rollouts, *self.baselines)
        for batch in (self.rollouts, self.baselines):
            self.reward_pool.judge(batch, step - 1)
        notes, num_judged = self.reward_pool.take_notes()
        self.metrics.add_reward_notes(notes, num_judged, self.reward_pool.take_metrics())
        if (text := self.reward_pool.describe_exhaustion(notes, num_judged)) is not None:
            self.recorder.write_alarm(step, "rewards", text)
        self.recorder.write_failures(list_failures(all_rollouts, step))
        span = self.reward_pool.take_span()
        if span is not None:
            self.recorder.record_span(action, step, *span, VERIFIER_PROCESS)
        self.reward_pool.check_failures(all_rollouts, step)
        return []

    def finish_rewards(self, step: int) -> None:
        """Combine all rewards, including the environment's and the reward model's.

        Raises: RunError when too many rewards failed.
        """
        self._watch_environment(step)
        failed = finish_rewards(self.rollouts, self.baselines, self.job, step)
        if failed:
            self.recorder.write_failures(list_failures(failed, step))
            answered = [rollout for rollout in self.rollouts if not rollout.completion.failure]
            self.reward_pool.check_failures(answered, step)

    def _watch_environment(self, step: int) -> None:
        """Record the memory of environment processes; raise alarms for masked rollouts and failed tool calls."""
        if isinstance(self.generation, MultiTurnRollouts):
            self.recorder.record_extra_process("environment", step, measure_resident_bytes(self.generation.pids))
        unanswered = [rollout.failure for rollout in self.rollouts if rollout.completion.failure]
        if unanswered:
            text = f"{len(unanswered)} of {len(self.rollouts)} rollouts are masked, such as: {unanswered[0]}"
            self.recorder.write_alarm(step, "environment", text, num_masked=len(unanswered))
        calls = (call for rollout in self.rollouts for call in rollout.completion.calls)
        faults = Counter(call for call in calls if call in BY_THE_TOOL)
        if faults:
            text = f"failed tool calls: {', '.join(f'{count} {fault}' for fault, count in faults.items())}"
            self.recorder.write_alarm(step, "tools", text, num_calls=faults.total())

    def evaluate(self, action: Action, step: int) -> list[Measurement]:
        """Evaluate on the held-out prompts, unless the last step has done so and this is the run's final evaluation."""
        if self._is_evaluated(step):
            return []
        requests = self.requests.evaluation_requests()
        with self._judge_early():
            groups, measurements = self._complete(action, requests)
        text = self.groups.words.text
        rollouts = [
            Rollout(
                add_reset_tokens(prompt, completion),
                index,
                completion,
                text(completion.chosen) if completion.answer is None else completion.answer,
                id=f"evaluate/{index}/{sample}",
            )
            for index, (prompt, completions) in enumerate(zip(self.prompts.heldout, groups, strict=True))
            for sample, completion in enumerate(completions)
        ]
        self.reward_pool.judge(rollouts, self.last_step if step == -1 else step)
        self.reward_pool.take_notes()  # drop them: the metrics count only training rollouts
        self.reward_pool.take_metrics()
        self.reward_pool.take_span()
        self.recorder.write_failures(list_failures(rollouts, step))
        self.reward_pool.check_failures(rollouts, step)
        add_environment(rollouts, self.job)
        self.metrics.add_evaluation(rollouts)
        return measurements

    def evaluate_pairs(self, step: int, score: Callable[[list[Rollout]], list[Measurement]]) -> list[Measurement]:
        """Evaluate the share of held-out pairs that the trained model ranks correctly; equal scores count half."""
        if self._is_evaluated(step):
            return []
        groups = [self.requests.use_dataset_answers(prompt, index) for index, prompt in enumerate(self.prompts.heldout)]
        measurements = score([rollout for group in groups for rollout in group.rollouts])
        for index, group in enumerate(groups):
            group.place(index)
            better, worse = (rollout.scores[Role.POLICY][0] for rollout in group.rollouts)
            group.rollouts[0].rewards[PAIR_ACCURACY] = ((better > worse) + (better >= worse)) / 2
        self.metrics.add_evaluation([group.rollouts[0] for group in groups])
        return measurements

    def _is_evaluated(self, step: int) -> bool:
        return step == -1 and self.last_step % self.job.workload.evaluate_every == 0

    def run_async_rollouts(self) -> None:
        """Run async generation until the last step's rollouts are complete."""
        assert self.stream is not None, "rollouts are async"
        with self._judge_early():
            self.stream.run()

    def stop_after(self, step: int) -> None:
        """End the run after this step, before the job's last one."""
        self.last_step = step
        if self.stream is not None:
            self.stream.stop_after(step)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream.buffer.close()
        if isinstance(self.generation, MultiTurnRollouts):
            self.generation.close()

    def _build_stream(self) -> RolloutStream:
        async_rollouts, work, place = self.spec.schedule.async_rollouts, self.job.workload, self.job.placement
        assert async_rollouts is not None, "rollouts are async"
        folder = self.recorder.folder / "buffer"
        limits = (place.max_staleness, place.max_buffered_groups, place.max_groups_in_memory)
        return RolloutStream(
            self.generation,
            self.requests.rollout_request,
            async_rollouts,
            StreamSettings(
                work.num_prompts_per_step,
                work.num_steps,
                self.job.limits.action_timeout_s,
                can_replace=self.job.max_refills > 0,
            ),
            ExperienceBuffer(*limits, folder),
        )

    def _start_conversations(self) -> MultiTurnRollouts:
        """Start multi-turn generation, where an environment, tools or an agent act between the policy's turns."""
        log, described = self.recorder.folder / "logs" / "environment.log", self.prompts.environment
        if self.job.rollout.environment.agent is not None:
            agents = AgentRollouts(self.fleet, self.job, self.requests.find_prompt, log)
            self.worker_group.pids_outside_ray = lambda: agents.pids
            return agents
        pool = EnvironmentPool(self.job.rollout.environment, log, described)
        words, max_prompt_len = self.groups.words, self.job.workload.max_prompt_len
        chat = ChatTurns(Path(self.job.policy.path), words, described.schemas) if self.prompts.has_chats else None
        talks = Conversations(self.fleet, pool, words, self.requests.find_prompt, chat, max_prompt_len)
        self.worker_group.pids_outside_ray = lambda: talks.pids
        return talks

    def _build_groups(self, finished: Iterable[Finished], step: int) -> list[Group]:
        """Build groups of finished completions, and judge them if dynamic sampling needs their variance."""
        groups = [self.groups.make(request) for request in finished]
        if self.job.max_refills:
            self.reward_pool.judge([rollout for group in groups for rollout in group.rollouts], step - 1)
        return groups

    def _gather_groups(
        self, more: Callable[[int], list[Group]], replaced: Callable[[int], None] = lambda _: None
    ) -> None:
        """Gather the step's groups and set its rollouts and baselines."""
        num_replaced: list[int] = []  # added to the total only on success, because a failed attempt is repeated

        def note(num_groups: int) -> None:
            num_replaced.append(num_groups)
            replaced(num_groups)

        groups = gather_groups(self.job.workload.num_prompts_per_step, more, self.job.max_refills, note)
        self.num_replaced += sum(num_replaced)
        for index, group in enumerate(groups):
            group.place(index)
        self.rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.baselines = [rollout for group in groups for rollout in group.baselines]
        self.metrics.add_rollouts(self.rollouts)
        self.metrics.add_replaced(sum(num_replaced))
        self.lengths.update(len(rollout.completion.tokens) for rollout in self.rollouts)

    @contextmanager
    def _judge_early(self) -> Iterator[None]:
        """Context in which rollouts are judged as they finish, if rewards run in processes of their own."""
        if not self.reward_pool.is_early or self.job.has_turns:
            yield
            return
        is_over = threading.Event()
        thread = threading.Thread(target=self._judge_samples, args=(is_over,), name="samples", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(self.job.limits.action_timeout_s)

    def _judge_samples(self, is_over: threading.Event) -> None:
        """Judge finished samples until `is_over`. A lost engine ends only this thread: `verify` judges the rest."""
        while not is_over.is_set():
            try:
                samples = self.fleet.finished_samples(SAMPLES_S, self.job.limits.action_timeout_s)
            except RlplanError:
                return
            for sample in samples:
                self._submit_to_judges(sample)

    def _submit_to_judges(self, sample: FinishedRequest) -> None:
        prompt, completion = self.requests.find_prompt(sample.id.rpartition("/")[0]), sample.completions[0]
        is_rollout = sample.id.startswith("generate/")
        text = self.groups.text(completion) if is_rollout else self.groups.words.text(completion.tokens)
        self.reward_pool.begin(sample.id, Response(prompt, text, completion.tokens))

    def _complete(self, action: Action, requests: Sequence[RolloutRequest]) -> tuple[list[Any], list[Measurement]]:
        finished, measurements = self.generation.generate(requests, self.worker_group.deadline_s(action))
        return [list(done.completions) for done in finished], measurements
