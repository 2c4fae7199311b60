"""Groups: finished completions become rollouts, and zero-variance groups are replaced by other prompts' (dynamic
sampling).

In: completions of prompts by number. Out: rollouts, and greedy baselines apart from them.
Left out: where completions come from (an engine asked now, or a stream), and rewards (rewards/).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout
from rlplan.spec.resolved import ResolvedJob

Finished = tuple[int, Sequence[Completion]]
"""The number of a prompt, and its completions: samples first, then baselines."""


@dataclass(slots=True)
class Group:
    """Rollouts of one prompt. baselines: greedy ones, that are rewarded and never trained on."""

    number: int
    rollouts: list[Rollout]
    baselines: list[Rollout]

    @property
    def has_variance(self) -> bool:
        """Whether its rewards differ (else its advantages are 0). Source: DAPO, arXiv:2503.14476, section 3.2."""
        return len({rollout.reward for rollout in self.rollouts if not rollout.has_failed}) > 1

    def place(self, index: int) -> None:
        """Make it the step's `index`-th group."""
        for rollout in (*self.rollouts, *self.baselines):
            rollout.group = index


class GroupMaker:
    """Decodes responses and marks the tokens that are masked from the loss. end_tokens: that end a sequence."""

    def __init__(
        self,
        job: ResolvedJob,
        prompt_of: Callable[[int], Prompt],
        end_tokens: frozenset[int],
        name_of: Callable[[int], str] = str,
    ) -> None:
        """prompt_of, name_of: the prompt by its number, and the request for its rollouts."""
        self.job, self.prompt_of, self.end_tokens, self.name_of = job, prompt_of, end_tokens, name_of
        self.words = TextTokenizer(Path(job.policy.path))

    def make(self, finished: Finished) -> Group:
        number, completions = finished
        prompt = self.prompt_of(number)
        rollouts = [self._rollout(prompt, completion) for completion in completions]
        for index, rollout in enumerate(rollouts):
            rollout.id = f"{self.name_of(number)}/{index}"
        num_samples = self.job.workload.num_samples_per_prompt
        return Group(number, rollouts[:num_samples], rollouts[num_samples:])

    def text(self, completion: Completion) -> str:
        """What a completion says, without what a forced length added."""
        return self.words.text(completion.chosen[: self._num_said(completion)])

    def _rollout(self, prompt: Prompt, completion: Completion) -> Rollout:
        learned, text = self._num_said(completion), self.text(completion)
        if self.job.algorithm.masks_truncated and completion.finish_reason == "length":
            learned = 0
        return Rollout(as_begun(prompt, completion), 0, completion, text, len(completion.logprobs) - learned)

    def _num_said(self, completion: Completion) -> int:
        """Tokens up to the first end of sequence, which a forced length goes beyond."""
        chosen = completion.chosen
        ends = [index for index, token in enumerate(chosen) if token in self.end_tokens]
        return ends[0] + 1 if ends and self.job.controls.forces_lengths else len(chosen)


def as_begun(prompt: Prompt, completion: Completion) -> Prompt:
    """The prompt with what an environment's `reset` has added to it for this rollout."""
    return replace(prompt, tokens=completion.prompt_tokens) if completion.prompt_tokens else prompt


def gather(
    count: int, more: Callable[[int], list[Group]], max_refills: int, replaced: Callable[[int], None]
) -> list[Group]:
    """`count` groups with variance, by dynamic sampling: the others are replaced at most `max_refills` times.

    more: gives so many new groups, rewarded. replaced: hears how many were asked for beyond `count`. What is missing in
    the end is made up with the oldest zero-variance groups, so that a step always has as many groups.

    >>> flat = Group(0, [], [])
    >>> len(gather(3, lambda n: [flat] * n, 2, lambda n: None))
    3
    """
    groups = more(count)
    if not max_refills:
        return groups
    kept = [group for group in groups if group.has_variance]
    flat = [group for group in groups if not group.has_variance]
    for _ in range(max_refills):
        missing = count - len(kept)
        if not missing:
            break
        replaced(missing)
        groups = more(missing)
        kept += [group for group in groups if group.has_variance]
        flat += [group for group in groups if not group.has_variance]
    return sorted([*kept, *flat[: count - len(kept)]], key=lambda group: group.number)
