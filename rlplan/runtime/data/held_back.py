"""Held-out prompts, taken from the training prompts when a job names no file of held-out prompts.

In: tokenized prompts. Out: the training and the held-out part. Left out: reading them (tokenizing.py).
"""

import hashlib
from collections.abc import Sequence

from rlplan.errors import SpecError
from rlplan.runtime.rollout.experience import Prompt
from rlplan.spec.resolved import ResolvedJob

HELDOUT_DIVISOR = 10
"""One of this many distinct prompts is held out."""


def split_held_out(
    prompts: Sequence[Prompt], max_heldout: int, seed: int
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """(training prompts, held-out prompts). A tenth of the distinct texts is held out: 1 to `max_heldout`.

    The choice depends on texts and seed, not on the order of rows. A resumed run makes the same choice, and a text that
    occurs twice is never in both parts.
    """
    texts = sorted(
        {prompt.text for prompt in prompts}, key=lambda text: hashlib.sha256(f"{seed} {text}".encode()).digest()
    )
    chosen = set(texts[: min(max_heldout, max(1, len(texts) // HELDOUT_DIVISOR))])
    first = {prompt.text: prompt for prompt in reversed(prompts) if prompt.text in chosen}
    return tuple(p for p in prompts if p.text not in chosen), tuple(p for p in prompts if p is first.get(p.text))


def check_can_hold_out(job: ResolvedJob) -> None:
    """Check that prompts can be held out. Raises: SpecError for pairs and labelled answers."""
    declared = job.algorithm.declaration
    if declared.given in ("pair", "unpaired") and not declared.trains_scalar:
        raise SpecError(
            f"data.heldout is missing, and {job.algorithm.name} trains on pairs or labelled answers",
            where="data.heldout",
            rule="rewards judge the responses to held-out prompts, and such data have no right answers for that",
            way_out="data.heldout=FILE, with prompts and right answers",
        )
