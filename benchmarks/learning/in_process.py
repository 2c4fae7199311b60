"""A whole job in this process, without vLLM, DeepSpeed and Ray: what an algorithm is made of, and nothing else.

Prompts, groups, rewards, advantages, mini-batches, losses and the trainers' passes are the runtime's own; the engine is
transformers' model with the same weights, the optimizer torch's AdamW.
In: a job. Out: greedy accuracy on the held-out prompts, before training and after so many steps; of a reward model the
share of held-out pairs that it ranks right.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rlplan.runtime.data.prompt_sets import load_prompts
from rlplan.runtime.data.text_tokens import read_end_tokens
from rlplan.runtime.environments.chat import ChatTurns
from rlplan.runtime.environments.conversations import Conversations, MultiTurnRollouts
from rlplan.runtime.environments.pool import EnvironmentPool
from rlplan.runtime.gateway.agent_rollouts import AgentRollouts
from rlplan.runtime.learning.mini_batch import assign_rollouts, assign_samples, make_train_sample
from rlplan.runtime.losses.registry import find_advantage
from rlplan.runtime.rewards.reward_pool import RewardPool
from rlplan.runtime.rewards.total import finish_rewards
from rlplan.runtime.rollout.experience import (
    Completion,
    FinishedRequest,
    Rollout,
    RolloutRequest,
    SequencePair,
    WeightSpan,
)
from rlplan.runtime.rollout.groups import Group, GroupMaker, gather_groups
from rlplan.runtime.rollout.requests import RequestMaker
from rlplan.runtime.workers.scorer import Scorer
from rlplan.runtime.workers.trainer.policy_trainer import PolicyTrainer
from rlplan.runtime.workers.trainer.reward_trainer import RewardTrainer
from rlplan.runtime.workers.trainer.value_trainer import ValueTrainer
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Role


class PlainEngine:
    """A stand-in for the DeepSpeed engine, with only torch."""

    dp_world_size = 1

    def __init__(self, module: torch.nn.Module, job: ResolvedJob, learning_rate: float) -> None:
        self.module, self.clip = module, job.algorithm.gradient_clipping
        betas = (job.algorithm.adam_beta1, job.algorithm.adam_beta2)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, betas=betas, weight_decay=0.0)

    def __call__(self, batch: Any) -> Any:
        return self.module(batch)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def apply(self) -> None:
        """One optimizer step."""
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlainFleet:
    """A stand-in for the engines of conversations: every waiting turn is completed when it is asked for."""

    processes = ("in process",)

    def __init__(self, complete: Callable[[Sequence[RolloutRequest]], list[list[Completion]]]) -> None:
        self.complete = complete
        self.waiting: list[RolloutRequest] = []

    def submit(self, requests: Sequence[RolloutRequest], timeout_s: float) -> None:
        self.waiting += requests

    def collect(self, max_wait_s: float, at_least: int, timeout_s: float) -> tuple[list[FinishedRequest], list[Any]]:
        """Turns of one length at a time, for the engine pads nothing."""
        by_length: dict[int, list[RolloutRequest]] = {}
        for request in self.waiting:
            by_length.setdefault(len(request.prompt), []).append(request)
        self.waiting = []
        if not by_length:
            time.sleep(max_wait_s)
        done = [
            FinishedRequest(request.id, tuple(completions))
            for turns in by_length.values()
            for request, completions in zip(turns, self.complete(turns), strict=True)
        ]
        return done, []

    def end_session(self, session: str) -> None:
        """Nothing is kept between turns."""


class InProcess:
    """A job's steps, one after the other."""

    def __init__(self, job: ResolvedJob) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(job.seed)
        self.job, self.prompts = job, load_prompts(job)
        self.requests = RequestMaker(job, self.prompts)
        self.ends = read_end_tokens(Path(job.policy.path))
        self.reward_pool = RewardPool(job)
        self.groups = GroupMaker(job, self.requests.prompt, self.ends)
        self.engine = AutoModelForCausalLM.from_pretrained(job.policy.path, dtype=torch.float32)
        self.trains_scalar = job.algorithm.declaration.trains_scalar
        self.policy = (RewardTrainer if self.trains_scalar else PolicyTrainer)("policy_trainer/0", job, {}, 1)
        self.policy.engine = self._plain(self.policy, job.algorithm.learning_rate)
        self.value: ValueTrainer | None = None
        if Role.VALUE in job.trained_roles:
            self.value = ValueTrainer("value_trainer/0", job, {}, 1)
            rate = job.algorithm.value_learning_rate
            self.value.engine = self._plain(self.value, job.algorithm.learning_rate if rate is None else rate)
        self.reference: Scorer | None = None
        if Role.REFERENCE in job.frozen_roles:
            self.reference = Scorer("scorer/reference/0", job, Role.REFERENCE, 1)
            self.reference.start(job.policy.path)
        self.talks: MultiTurnRollouts | None = None
        fleet: Any = PlainFleet(self._complete_turns)
        if job.rollout.environment.agent is not None:
            self.talks = AgentRollouts(fleet, job, self.requests.find_prompt, Path(os.devnull))
        elif job.has_turns:
            pool = EnvironmentPool(job.rollout.environment, Path(os.devnull), self.prompts.environment)
            words, described = self.groups.words, self.prompts.environment
            chat = ChatTurns(Path(job.policy.path), words, described.schemas) if self.prompts.has_chats else None
            self.talks = Conversations(fleet, pool, words, self.requests.find_prompt, chat, job.workload.max_prompt_len)
        self.next, self.steps_done = 0, 0

    def close(self) -> None:
        """End the processes beside this one."""
        self.reward_pool.close()
        if self.talks is not None:
            self.talks.close()

    def train(self, num_steps: int) -> float:
        """So many steps; the greedy accuracy after them."""
        for _ in range(num_steps):
            self.steps_done += 1
            self._step()
        return self.accuracy()

    def accuracy(self) -> float:
        """Greedy, on the held-out prompts; of a reward model on the held-out pairs."""
        if self.trains_scalar:
            return self._pair_accuracy()
        completions = self._complete(self.requests.evaluation_requests())
        rollouts = [
            Rollout(prompt, 0, completion, self.groups.text(completion))
            for prompt, (completion,) in zip(self.prompts.heldout, completions, strict=True)
        ]
        self.reward_pool.judge(rollouts)
        return sum(rollout.rewards["answer_matcher"] for rollout in rollouts) / len(rollouts)

    def _pair_accuracy(self) -> float:
        """The share of held-out pairs whose chosen answer has the higher score; of equal scores a half."""
        ranked = []
        for prompt in self.prompts.heldout:
            answers = [SequencePair(prompt.tokens, tokens) for tokens in prompt.answers]
            (chosen,), (rejected,) = self.policy.score(answers, Role.POLICY.value)
            ranked.append(((chosen > rejected) + (chosen >= rejected)) / 2)
        return sum(ranked) / len(ranked)

    def _step(self) -> None:
        groups = gather_groups(self.job.workload.num_prompts_per_step, self._more, self.job.max_refills, lambda _: None)
        for index, group in enumerate(groups):
            group.place(index)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        finish_rewards(rollouts, [each for group in groups for each in group.baselines], self.job, self.steps_done)
        self._score(rollouts)
        judged = find_advantage(self.job.algorithm)(rollouts, self.job.algorithm)
        for rollout, each in zip(rollouts, judged, strict=True):
            rollout.advantage, rollout.advantages, rollout.returns = each.whole, each.advantages, each.returns
        if self.value is not None:
            self._train(self.value, rollouts)
        if self.steps_done > self.job.algorithm.value_warmup_steps:
            self._train(self.policy, rollouts)
        if not self.trains_scalar:
            self.engine.load_state_dict(self.policy.engine.module.language_model.state_dict())

    def _more(self, count: int) -> list[Group]:
        numbers = range(self.next, self.next + count)
        self.next += count
        if not self.job.algorithm.declaration.has_rollouts:
            return [self.requests.answer_group(number) for number in numbers]
        completions = self._complete([self.requests.rollout_request(number) for number in numbers])
        groups = [self.groups.make(each) for each in zip(numbers, completions, strict=True)]
        for group in groups:
            self.reward_pool.judge([*group.rollouts, *group.baselines])
        return groups

    def _score(self, rollouts: list[Rollout]) -> None:
        pairs = [
            SequencePair(rollout.prompt.tokens, rollout.completion.tokens, rollout.completion.observed)
            for rollout in rollouts
        ]
        for role in self.job.scored_roles:
            worker = {Role.POLICY: self.policy, Role.VALUE: self.value, Role.REFERENCE: self.reference}[role]
            assert worker is not None
            if role is Role.POLICY:
                self._score_policy(rollouts)
                continue
            for rollout, scores in zip(rollouts, worker.score(pairs, role.value), strict=True):
                rollout.scores[role] = scores

    def _score_policy(self, rollouts: list[Rollout]) -> None:
        (packs,) = assign_rollouts(rollouts, self.job, 1)
        passes = [[SequencePair(r.prompt.tokens, r.completion.tokens, r.completion.observed) for r in p] for p in packs]
        scored = self.policy.score_passes(passes)
        for rollout, scores in zip((rollout for pack in packs for rollout in pack), scored, strict=True):
            rollout.scores[Role.POLICY] = scores

    def _train(self, trainer: PolicyTrainer, rollouts: list[Rollout]) -> None:
        size = self.job.workload.mini_batch_size
        for first in range(0, len(rollouts), size):
            samples = [make_train_sample(r, is_first_update=not first) for r in rollouts[first : first + size]]
            (passes,) = assign_samples(samples, self.job, 1)
            trainer.forward_backward([samples for samples, _ in passes], [weights for _, weights in passes])
            trainer.engine.apply()

    def _plain(self, trainer: PolicyTrainer, learning_rate: float) -> PlainEngine:
        return PlainEngine(trainer.wrap(trainer.load(self.job.policy.path)), self.job, learning_rate)

    def _complete(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """All samples of all requests, with all their turns."""
        if self.talks is None:
            return self._complete_turns(requests)
        finished, _ = self.talks.generate(requests, self.job.limits.action_timeout_s)
        return [list(each.completions) for each in finished]

    @torch.no_grad()
    def _complete_turns(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """All samples of all requests at once, a turn of each. Prompts are of one length here."""
        samples = [(request, index) for request in requests for index in range(request.num_samples)]
        tokens = torch.tensor([request.prompt for request, _ in samples])
        greedy = torch.tensor([r.temperature == 0 or index >= r.num_samples - r.num_greedy for r, index in samples])
        columns, logprobs, cache = [], [], None
        draws = torch.Generator().manual_seed(requests[0].seed)
        ends = torch.tensor(sorted(self.ends))
        has_ended = torch.zeros(len(samples), dtype=torch.bool)
        for _ in range(min(request.max_tokens for request in requests)):
            output = self.engine(tokens, past_key_values=cache, use_cache=True)
            cache, table = output.past_key_values, torch.log_softmax(output.logits[:, -1].float(), -1)
            sampled = torch.multinomial(table.exp(), 1, generator=draws)[:, 0]
            tokens = torch.where(greedy, table.argmax(-1), sampled)[:, None]
            columns.append(tokens[:, 0])
            logprobs.append(table.gather(-1, tokens)[:, 0])
            has_ended |= torch.isin(tokens[:, 0], ends)
            if has_ended.all():
                break
        rows = zip(torch.stack(columns, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
        finished = iter([self._cut(*row) for row in rows])
        return [[next(finished) for _ in range(request.num_samples)] for request in requests]

    def _cut(self, tokens: list[int], logprobs: list[float]) -> Completion:
        ends = [index for index, token in enumerate(tokens) if token in self.ends]
        length = ends[0] + 1 if ends else len(tokens)
        spans = (WeightSpan(0, 0, length),)
        return Completion(tuple(tokens[:length]), tuple(logprobs[:length]), "stop" if ends else "length", spans)
