"""ActionRunner: what each kind of action means on a crew. The Schedule says when; this says how.

In: an action and the step it belongs to. Out: experience, kept until the step ends, and measurements for the recorder.
"""

import random
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.errors import RunError
from rlplan.runtime.crew import Crew
from rlplan.runtime.experience import Prompt, Rollout, RolloutRequest, TrainSample
from rlplan.runtime.fleet import Fleet
from rlplan.runtime.handover import Handover
from rlplan.runtime.losses.advantages import ADVANTAGES
from rlplan.runtime.preflight import PromptSets
from rlplan.runtime.recorder import Recorder
from rlplan.runtime.rewards.total import finish_rewards
from rlplan.runtime.rewards.verifiers import score_rollout
from rlplan.runtime.role_tokenizers import RoleReaders
from rlplan.runtime.step_metrics import StepMetrics
from rlplan.runtime.workers.memory_meter import Measurement
from rlplan.vocabulary import ActionKind, Role

SEED_STRIDE = 1 << 20
"""How far seeds of one step lie from the next one's; the engine adds the sample's index to its prompt's seed."""

LOOPBACK = "127.0.0.1"

LOGPROB_TOLERANCE = 1e-3
"""Rounding between two fp32 implementations: 1e-5 to 1e-4 was seen; stale weights differ by far more."""


class ActionRunner:
    """Performs actions on a crew. `model_folder` holds the start checkpoint."""

    def __init__(
        self, spec: ExecutionSpec, crew: Crew, recorder: Recorder, prompts: PromptSets, model_folder: Path
    ) -> None:
        self.spec, self.job, self.crew, self.recorder = spec, spec.job, crew, recorder
        self.prompts, self.model_folder = prompts, model_folder
        self.metrics = StepMetrics(spec.job)
        self.rollouts: list[Rollout] = []
        self.handover = Handover(spec, crew)
        self.trainers = [worker.process for worker in spec.ray.workers if worker.worker == "policy_trainer"]
        self.fleet = Fleet(crew, spec.schedule.layout("rollout_engine"))
        self._decoder: Any = None
        self._readers = RoleReaders(spec.job)

    def perform(self, action: Action, step: int) -> None:
        """Do one action and record it."""
        handler = {
            ActionKind.START_TRAINER: self._start_trainer,
            ActionKind.START_ENGINE: self._start_engine,
            ActionKind.START_SCORER: self._start_scorer,
            ActionKind.GENERATE: self._generate,
            ActionKind.VERIFY: self._verify,
            ActionKind.SCORE: self._score,
            ActionKind.COMPUTE_ADVANTAGES: self._compute_advantages,
            ActionKind.TRAIN_FORWARD_BACKWARD: self._train_forward_backward,
            ActionKind.OPTIMIZER_STEP: self._optimizer_step,
            ActionKind.SYNC_WEIGHTS: self._sync_weights,
            ActionKind.EVALUATE: self._evaluate,
            ActionKind.CHECKPOINT: self._checkpoint,
        }[action.kind]
        start_s = time.time()
        with self.metrics.timing(action.id):
            measurements = handler(action, step)
        self.recorder.record(action, step, measurements)
        if not action.processes:
            self.recorder.record_own(action, step, start_s, time.time())

    def deadline_s(self, action: Action) -> float:
        """Seconds that an action may take."""
        limits = self.job.limits
        return limits.start_timeout_s if action.kind.value.startswith("start") else limits.action_timeout_s

    def close(self) -> None:
        """Remove what weight sync may have left behind."""
        self.handover.close()

    def _start_trainer(self, action: Action, step: int) -> list[Measurement]:
        imported = self._import_libraries(action)
        timeout = self.deadline_s(action)
        asked = self.job.hardware.rendezvous_port if action.role is Role.POLICY else 0
        port = self.crew.gather([self.crew.submit(action.processes[0], "open_rendezvous", asked)], timeout)[0]
        world, folder = len(action.processes), self._folder_of(action.role)
        started = self._everywhere(action, lambda rank: ("start", rank, world, port, folder))
        return imported + started[1]

    def _start_engine(self, action: Action, step: int) -> list[Measurement]:
        self.handover.forget()
        imported = self._import_libraries(action)
        folder, version = self._folder_of(action.role), self.handover.version
        return imported + self.fleet.start(folder, LOOPBACK, version, self.deadline_s(action))

    def _start_scorer(self, action: Action, step: int) -> list[Measurement]:
        imported = self._import_libraries(action)
        return imported + self._everywhere(action, lambda rank: ("start", self._folder_of(action.role)))[1]

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
        prompts = self._prompts_of(step)
        num_samples, temperature = self.job.workload.num_samples_per_prompt, self.job.workload.temperature
        groups, measurements = self._complete(action, prompts, num_samples, temperature, step)
        self.rollouts = [
            Rollout(prompt, group, completion, self._decode(completion.tokens))
            for group, (prompt, completions) in enumerate(zip(prompts, groups, strict=True))
            for completion in completions
        ]
        self.metrics.add_rollouts(self.rollouts)
        return measurements

    def _verify(self, action: Action, step: int) -> list[Measurement]:
        for rollout in self.rollouts:
            score_rollout(rollout, self.job.rewards)
        return []

    def _score(self, action: Action, step: int) -> list[Measurement]:
        """What a role says of every rollout; they are dealt out over its processes in contiguous shares."""
        shares = _contiguous(self.rollouts, len(action.processes))

        def call(rank: int) -> tuple[Any, ...]:
            return "score", [self._readers.sequence(action.role, rollout) for rollout in shares[rank]]

        results, measurements = self._everywhere(action, call)
        for share, scores in zip(shares, results, strict=True):
            for rollout, score in zip(share, scores, strict=True):
                rollout.scores[action.role] = score
        return measurements

    def _compute_advantages(self, action: Action, step: int) -> list[Measurement]:
        finish_rewards(self.rollouts, self.job, step)
        self.metrics.add_cut_sequences(self._readers.take_num_cut(), len(self.rollouts))
        compute = ADVANTAGES[self.job.algorithm.declaration.advantage]
        for rollout, judged in zip(self.rollouts, compute(self.rollouts, self.job.algorithm), strict=True):
            rollout.advantages, rollout.returns = judged.advantages, judged.returns
        self.metrics.add_rewards(self.rollouts)
        return []

    def _train_forward_backward(self, action: Action, step: int) -> list[Measurement]:
        """Deal the mini-batch out over the ranks; every sequence counts the same, every token of it the same share."""
        size = self.job.workload.mini_batch_size
        batch = self.rollouts[(action.mini_batch or 0) * size :][:size]
        world = len(action.processes)

        def call(rank: int) -> tuple[Any, ...]:
            samples = [_train_sample(rollout) for rollout in batch[rank::world]]
            return "forward_backward", samples, [1 / (size * max(1, len(s.response_tokens))) for s in samples]

        results, measurements = self._everywhere(action, call)
        if action.role is not Role.POLICY:
            self.metrics.add_value_training(results)
            return measurements
        self.metrics.add_training(results, is_first=not action.mini_batch)
        if not action.mini_batch and step - 1 != self.job.controls.skip_sync_after_step:
            _check_agreement(max(result["logprob_difference_max"] for result in results), step)
        return measurements

    def _optimizer_step(self, action: Action, step: int) -> list[Measurement]:
        results, measurements = self._everywhere(action, lambda rank: ("optimizer_step",))
        self.metrics.add_optimizer_step(results[0], action.role)
        return measurements

    def _sync_weights(self, action: Action, step: int) -> list[Measurement]:
        """Hand the policy over, unless the job leaves this step's sync out on purpose."""
        if step and step == self.job.controls.skip_sync_after_step:
            return []
        return self.handover.sync(action)

    def _evaluate(self, action: Action, step: int) -> list[Measurement]:
        """Greedy accuracy on the held-out prompts. The last step's own evaluation is not repeated while finishing."""
        if step == -1 and self.job.workload.num_steps % self.job.workload.evaluate_every == 0:
            return []
        groups, measurements = self._complete(action, self.prompts.heldout, 1, 0.0, 0)
        rollouts = [
            Rollout(prompt, index, completions[0], self._decode(completions[0].tokens))
            for index, (prompt, completions) in enumerate(zip(self.prompts.heldout, groups, strict=True))
        ]
        for rollout in rollouts:
            score_rollout(rollout, self.job.rewards)
        self.metrics.add_evaluation(rollouts)
        return measurements

    def _checkpoint(self, action: Action, step: int) -> list[Measurement]:
        """The trained policy, in Hugging Face layout, beside the run's other files."""
        folder = self.recorder.folder / "policy"
        return self._one(action, self.trainers[0], "save", str(folder), self.job.policy.path)

    def _prompts_of(self, step: int) -> Sequence[Prompt]:
        """This step's prompts: epochs of the training set, each in its own seeded order."""
        count, total = self.job.workload.num_prompts_per_step, len(self.prompts.train)
        chosen = []
        for position in range((step - 1) * count, step * count):
            epoch, index = divmod(position, total)
            chosen.append(self.prompts.train[_order(self.job.seed, epoch, total)[index]])
        return chosen

    def _complete(
        self, action: Action, prompts: Sequence[Prompt], num_samples: int, temperature: float, step: int
    ) -> tuple[list[Any], list[Measurement]]:
        first = self.job.seed * 7919 + max(step, 0) * SEED_STRIDE
        requests = [
            RolloutRequest(
                id=f"{action.id}/{step}/{index}",
                prompt=prompt.tokens,
                num_samples=num_samples,
                temperature=temperature,
                seed=(first + index * num_samples) % (1 << 62),
                max_tokens=self.job.workload.max_response_len,
            )
            for index, prompt in enumerate(prompts)
        ]
        finished, measurements = self.fleet.generate(requests, self.deadline_s(action))
        return [list(done.completions) for done in finished], measurements

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._decoder is None:
            from tokenizers import Tokenizer

            self._decoder = Tokenizer.from_file(str(Path(self.job.policy.path) / "tokenizer.json"))
        return str(self._decoder.decode(list(tokens), skip_special_tokens=True))

    def _everywhere(self, action: Action, call: Any) -> tuple[list[Any], list[Measurement]]:
        """Call every process of an action at once; `call(rank)` gives the method and its arguments."""
        calls = [self.crew.perform(process, *call(rank)) for rank, process in enumerate(action.processes)]
        return self.crew.measured(calls, self.deadline_s(action))

    def _one(self, action: Action, process: str, method: str, *arguments: Any) -> list[Measurement]:
        return self.crew.measured([self.crew.perform(process, method, *arguments)], self.deadline_s(action))[1]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_prompts: int) -> list[int]:
    """The order of the training prompts in one epoch."""
    order = list(range(num_prompts))
    random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return order


def _check_agreement(difference: float, step: int) -> None:
    """Until the first optimizer step on fresh rollouts both hold the same weights, or the sync failed."""
    if difference > LOGPROB_TOLERANCE:
        raise RunError(
            f"engine and trainer differ by {difference:.3g} in the log-prob of a sampled token",
            where=f"step {step}, train_forward_backward",
            rule=f"at most {LOGPROB_TOLERANCE} in fp32 when both hold the same weights",
            way_out="the engine's weights are stale or wrong: report it with the run folder",
        )


def _train_sample(rollout: Rollout) -> TrainSample:
    return TrainSample(
        prompt_tokens=rollout.prompt.tokens,
        response_tokens=rollout.completion.tokens,
        logprobs=rollout.completion.logprobs,
        reference_logprobs=rollout.scores.get(Role.REFERENCE, ()),
        advantages=rollout.advantages,
        teacher_logprobs=rollout.scores.get(Role.TEACHER, ()),
        values=rollout.scores.get(Role.VALUE, ()),
        returns=rollout.returns,
    )


def _contiguous(rollouts: list[Rollout], num_shares: int) -> list[list[Rollout]]:
    size = -(-len(rollouts) // num_shares)
    return [rollouts[index * size : (index + 1) * size] for index in range(num_shares)]
