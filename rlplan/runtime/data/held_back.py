"""Held back: prompts that are not trained on, taken from the training prompts where a job names no file of such.

In: tokenized prompts. Out: the same in two parts. Left out: reading them (tokenizing.py).
"""

import hashlib
from collections.abc import Sequence

from rlplan.errors import SpecError
from rlplan.runtime.rollout.experience import Prompt
from rlplan.spec.resolved import ResolvedJob

ONE_IN = 10
"""So many different prompts is one held out."""


def held_back(prompts: Sequence[Prompt], most: int, seed: int) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """(prompts to train on, prompts held out): a tenth of the different texts, at least one and at most `most`.

    Which ones follows from their texts and the seed, not from where they stand: a run that goes on finds the same, and
    a text that occurs twice is never on both sides.
    """
    texts = sorted(
        {prompt.text for prompt in prompts}, key=lambda text: hashlib.sha256(f"{seed} {text}".encode()).digest()
    )
    chosen = set(texts[: min(most, max(1, len(texts) // ONE_IN))])
    first = {prompt.text: prompt for prompt in reversed(prompts) if prompt.text in chosen}
    return tuple(p for p in prompts if p.text not in chosen), tuple(p for p in prompts if p is first.get(p.text))


def check_held_back(job: ResolvedJob) -> None:
    """Raises: SpecError where nothing can be held back: of labelled answers none is the right one to be judged by."""
    declared = job.algorithm.declaration
    if declared.given in ("pair", "unpaired") and not declared.trains_scalar:
        raise SpecError(
            f"data.heldout is not given, and {job.algorithm.name} trains on pairs or labelled answers",
            where="data.heldout",
            rule="held-out prompts are generated from and judged by rewards, for which such data have no right answer",
            way_out="data.heldout=FILE, with prompts and right answers",
        )
