"""Groups: turns finished completions into rollouts, and replaces zero-variance groups (dynamic sampling).

In: completions of prompts by number. Out: rollouts, and separately greedy baselines.
Left out: generation (fleet.py, rollout_stream.py) and rewards (rewards/).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout, add_branches
from rlplan.spec.resolved import ResolvedJob

Finished = tuple[int, Sequence[Completion]]
"""The number of a prompt, and its completions: samples first, then baselines."""


@dataclass(slots=True)
class Group:
    """Rollouts of one prompt. baselines: greedy rollouts, which are rewarded but never trained on."""

    number: int
    rollouts: list[Rollout]
    baselines: list[Rollout]

    @property
    def has_variance(self) -> bool:
        """Whether rewards differ; else all advantages are 0. Source: DAPO, arXiv:2503.14476, section 3.2."""
        return len({rollout.reward for rollout in self.rollouts if not rollout.has_failed}) > 1

    def place(self, index: int) -> None:
        """Set this group's index within the step."""
        for rollout in add_branches((*self.rollouts, *self.baselines)):
            rollout.group = index


class GroupMaker:
    """Builds groups: decodes responses and marks tokens that the loss ignores. end_tokens: end-of-sequence tokens."""

    def __init__(
        self,
        job: ResolvedJob,
        prompt_of: Callable[[int], Prompt],
        end_tokens: frozenset[int],
        name_of: Callable[[int], str] = str,
    ) -> None:
        """prompt_of, name_of: return the prompt, and the id of its request, by number."""
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
        """Text that rewards judge: an agent's answer, or the chosen tokens without those that a forced length added."""
        if completion.answer is not None:
            return completion.answer
        return self.words.text(completion.chosen[: self._count_tokens(completion)])

    def _rollout(self, prompt: Prompt, completion: Completion) -> Rollout:
        learned, text = self._count_tokens(completion), self.text(completion)
        if self.job.algorithm.masks_truncated and completion.finish_reason == "length":
            learned = 0
        num_ignored, branches = len(completion.logprobs) - learned, completion.branches
        rollout = Rollout(add_reset_tokens(prompt, completion), 0, completion, text, num_ignored)
        rollout.branches = [self._rollout(prompt, branch) for branch in branches]
        return rollout

    def _count_tokens(self, completion: Completion) -> int:
        """Number of tokens up to the first end-of-sequence token; a forced length continues after it."""
        chosen = completion.chosen
        ends = [index for index, token in enumerate(chosen) if token in self.end_tokens]
        return ends[0] + 1 if ends and self.job.controls.forces_lengths else len(chosen)


def add_reset_tokens(prompt: Prompt, completion: Completion) -> Prompt:
    """The prompt with the tokens of an environment's `reset` for this rollout, if there was one."""
    return replace(prompt, tokens=completion.prompt_tokens) if completion.prompt_tokens else prompt


def gather_groups(
    count: int, more: Callable[[int], list[Group]], max_refills: int, replaced: Callable[[int], None]
) -> list[Group]:
    """Gather `count` groups by dynamic sampling: zero-variance groups are replaced in at most `max_refills` rounds.

    more: returns that many new groups with rewards. replaced: called with the number of groups requested beyond
    `count`. Missing groups are filled with the oldest zero-variance ones, so that every step has `count` groups.

    >>> flat = Group(0, [], [])
    >>> len(gather_groups(3, lambda n: [flat] * n, 2, lambda n: None))
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
