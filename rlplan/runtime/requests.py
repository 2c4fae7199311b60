"""RequestMaker: what the engine is asked for: which prompt is the n-th, with which seed, and of what length.

In: a job and its prompts. Out: requests, the same for the same job whoever asks and in whatever order.
"""

import json
import random
from functools import lru_cache
from pathlib import Path

from rlplan.runtime.experience import Prompt, RolloutRequest
from rlplan.runtime.preflight import PromptSets
from rlplan.spec.job import JobSpec
from rlplan.spec.lengths import cut_lengths

SEED_STRIDE = 1 << 20
"""How far seeds of one step lie from the next one's; the engine adds the sample's index to its prompt's seed."""


class RequestMaker:
    """Prompts are numbered through all steps, from 0: epochs of the training set, each in its own seeded order."""

    def __init__(self, job: JobSpec, prompts: PromptSets) -> None:
        self.job, self.prompts = job, prompts

    def prompt(self, number: int) -> Prompt:
        """The n-th prompt of the run."""
        epoch, index = divmod(number, len(self.prompts.train))
        return self.prompts.train[order_of(self.job.seed, epoch, len(self.prompts.train))[index]]

    def name(self, number: int) -> str:
        """The id of the request for the n-th prompt's rollouts."""
        step, index = divmod(number, self.job.workload.num_prompts_per_step)
        return f"generate/{step + 1}/{index}"

    def prompt_of(self, request_id: str) -> Prompt:
        """The prompt of a request. Raises: ValueError for an id that is none of ours."""
        kind, *numbers = request_id.split("/")
        if kind == "evaluate":
            return self.prompts.heldout[int(numbers[0])]
        step, index = map(int, numbers)
        return self.prompt((step - 1) * self.job.workload.num_prompts_per_step + index)

    def rollouts(self, number: int) -> RolloutRequest:
        """The rollouts of the n-th prompt."""
        work = self.job.workload
        step, index = divmod(number, work.num_prompts_per_step)
        return self._request(
            self.name(number),
            self.prompt(number),
            num_samples=work.num_samples_per_prompt,
            temperature=work.temperature,
            seed=(step + 1) * SEED_STRIDE + index * work.num_samples_per_prompt,
            lengths=self._forced_lengths(number),
        )

    def evaluation(self) -> list[RolloutRequest]:
        """One greedy response of each held-out prompt."""
        return [
            self._request(f"evaluate/{index}", prompt, num_samples=1, temperature=0.0, seed=index, lengths=())
            for index, prompt in enumerate(self.prompts.heldout)
        ]

    def _request(
        self, name: str, prompt: Prompt, *, num_samples: int, temperature: float, seed: int, lengths: tuple[int, ...]
    ) -> RolloutRequest:
        return RolloutRequest(
            id=name,
            prompt=prompt.tokens,
            num_samples=num_samples,
            temperature=temperature,
            seed=(self.job.seed * 7919 + seed) % (1 << 62),
            max_tokens=self.job.workload.max_response_len,
            lengths=lengths,
        )

    def _forced_lengths(self, number: int) -> tuple[int, ...]:
        """Lengths drawn for a prompt's rollouts, where the job forces them: independent of each other."""
        work = self.job.workload
        if not self.job.controls.forces_lengths:
            return ()
        lengths = cut_lengths(work.response_lengths, work.max_response_len)
        draw = random.Random(f"{self.job.seed}/lengths/{number}").random
        return tuple(max(1, round(lengths.quantile(draw()))) for _ in range(work.num_samples_per_prompt))


def end_tokens(model_folder: Path) -> frozenset[int]:
    """Tokens that end a sequence, by the model's own configuration."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model_folder / name
        value = json.loads(path.read_text("utf-8")).get("eos_token_id") if path.is_file() else None
        found |= set(value) if isinstance(value, list) else set() if value is None else {int(value)}
    return frozenset(found)


@lru_cache(maxsize=2)
def order_of(seed: int, epoch: int, num_prompts: int) -> list[int]:
    """The order of the training prompts in one epoch."""
    order = list(range(num_prompts))
    random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return order
