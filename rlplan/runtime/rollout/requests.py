"""RequestMaker: the request of the n-th prompt, with its seed and length limits.

In: a job and its prompts. Out: requests, which depend only on the job and the prompt's number.
"""

import random
from collections.abc import Sequence
from typing import Any

from rlplan.runtime.data.prompt_sets import PromptSets, build_mixture
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout, RolloutRequest
from rlplan.runtime.rollout.groups import Group
from rlplan.spec.parts.lengths import cut_lengths
from rlplan.spec.resolved import ResolvedJob

SEED_STRIDE = 1 << 20
"""Distance between the seeds of consecutive steps. The engine adds a sample's index to its request's seed."""


class RequestMaker:
    """Prompts are numbered through all steps, from 0: epochs of the training sets (data/mixing.py)."""

    def __init__(self, job: ResolvedJob, prompts: PromptSets) -> None:
        self.job, self.prompts, self.mixture = job, prompts, build_mixture(prompts.train, job)

    def prompt(self, number: int) -> Prompt:
        return self.prompts.train[self.mixture.find_row(number)]

    def request_id(self, number: int) -> str:
        step, index = divmod(number, self.job.workload.num_prompts_per_step)
        return f"generate/{step + 1}/{index}"

    def find_prompt(self, request_id: str) -> Prompt:
        """The prompt of a request. Raises: ValueError for an unknown kind of id."""
        kind, *place = request_id.split("/")
        if kind == "evaluate":
            return self.prompts.heldout[int(place[0])]
        step, index = map(int, place)
        return self.prompt((step - 1) * self.job.workload.num_prompts_per_step + index)

    def rollout_request(self, number: int) -> RolloutRequest:
        work, num_greedy = self.job.workload, self.job.algorithm.declaration.num_baseline_samples
        step, index = divmod(number, work.num_prompts_per_step)
        return self._request(
            self.request_id(number),
            self.prompt(number),
            # Evaluation uses the seeds below the first stride, so no step does.
            (step + 1) * SEED_STRIDE + index * work.num_samples_per_prompt,
            num_samples=work.num_samples_per_prompt + num_greedy,
            temperature=work.temperature,
            lengths=self._forced_lengths(number),
            num_greedy=num_greedy,
        )

    def answer_group(self, number: int) -> Group:
        """The data set's answers to the n-th prompt as rollouts; the first has reward 1, or -1 if labelled bad.

        For unpaired preferences (KTO) an answer to another prompt is added, with reward 0.
        """
        is_unpaired = self.job.algorithm.declaration.given == "unpaired"
        return self.use_dataset_answers(
            self.prompt(number), number, [self._next_other_prompt(number).answers[0]] if is_unpaired else []
        )

    def use_dataset_answers(self, prompt: Prompt, number: int, others: Sequence[tuple[int, ...]] = ()) -> Group:
        """The data set's answers to a prompt, and other answers, as rollouts."""
        answers = [*prompt.answers, *others]
        completions = [Completion(tokens, (0.0,) * len(tokens), "stop") for tokens in answers]
        rollouts = [Rollout(prompt, 0, completion) for completion in completions]
        rollouts[0].reward = 1.0 if prompt.is_good else -1.0
        return Group(number, rollouts, [])

    def _next_other_prompt(self, number: int) -> Prompt:
        """The next prompt with a different text; the prompt itself if there is none."""
        candidates = (self.prompt(number + 1 + ahead) for ahead in range(len(self.prompts.train)))
        prompt = self.prompt(number)
        return next((candidate for candidate in candidates if candidate.text != prompt.text), prompt)

    def evaluation_requests(self) -> list[RolloutRequest]:
        """Requests for the held-out prompts: one greedy response or several samples, with the same seeds every time."""
        count, temperature = self.job.workload.num_evaluation_samples, self.job.workload.evaluation_temperature
        return [
            self._request(f"evaluate/{index}", prompt, index * count, num_samples=count, temperature=temperature)
            for index, prompt in enumerate(self.prompts.heldout)
        ]

    def _request(self, name: str, prompt: Prompt, seed: int, **fields: Any) -> RolloutRequest:
        # The factor keeps jobs with neighbouring seeds apart; seed plus sample index must fit into 64 bits.
        seed, max_tokens = (self.job.seed * 7919 + seed) % (1 << 62), self.job.workload.max_response_len
        return RolloutRequest(
            id=name, prompt=prompt.tokens, seed=seed, max_tokens=max_tokens, images=prompt.images, **fields
        )

    def _forced_lengths(self, number: int) -> tuple[int, ...]:
        """Independently drawn lengths of a prompt's rollouts, if the job forces lengths; else empty."""
        work, num_greedy = self.job.workload, self.job.algorithm.declaration.num_baseline_samples
        if not self.job.controls.forces_lengths:
            return ()
        lengths = cut_lengths(work.response_lengths, work.max_response_len)
        draw = random.Random(f"{self.job.seed}/lengths/{number}").random
        return tuple(max(1, round(lengths.quantile(draw()))) for _ in range(work.num_samples_per_prompt + num_greedy))
