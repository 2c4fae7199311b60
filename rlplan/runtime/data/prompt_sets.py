"""Prompt sets: all tokenized training and held-out prompts of a run.

In: a job. Out: PromptSets, or an error about unusable data. Left out: rows (loading.py), the order (mixing.py).
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from rlplan.errors import SpecError
from rlplan.runtime.data.loading import Chats
from rlplan.runtime.data.mixing import Mixture, Share
from rlplan.runtime.data.model_text import ModelText
from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.data.tokenizing import tokenize_file
from rlplan.runtime.environments.chat import ChatTurns
from rlplan.runtime.environments.pool import NOTHING, EnvironmentDescription, describe_environment
from rlplan.runtime.models.snapshots import locate_data
from rlplan.runtime.rollout.experience import Prompt
from rlplan.spec.base import shorten_value
from rlplan.spec.declaration import Given
from rlplan.spec.resolved import ResolvedJob

HELDOUT_DIVISOR = 10
"""One of this many distinct prompts is held out."""


@dataclass(frozen=True)
class PromptSets:
    train: tuple[Prompt, ...]
    """Training prompts, one data set after the other, in the order of the files."""

    heldout: tuple[Prompt, ...]
    """Held-out prompts in the same order."""

    log_lines: tuple[str, ...] = ()
    """A line about each file that was read."""

    columns: frozenset[str] = frozenset()
    """Columns of every row whose responses are judged; empty if no reward function needs any."""

    environment: EnvironmentDescription = NOTHING
    """The job's environment and tools."""

    @property
    def has_chats(self) -> bool:
        """Whether the policy's chat template rendered any prompt."""
        return any(prompt.chat for prompt in (*self.train, *self.heldout))


def load_prompts(job: ResolvedJob) -> PromptSets:
    """Read and tokenize all data sets. Raises: SpecError that lists bad rows and prompts that are too long."""
    _check_tokenizer(job)
    if job.needed_data.heldout is None:
        _check_can_hold_out(job)
    answer_kind, data, max_heldout = job.algorithm.declaration.given, job.needed_data, job.workload.num_heldout_prompts
    environment = describe_environment(job.rollout.environment) if job.has_turns else NOTHING
    chats = Chats(data.system_prompt, environment.schemas)
    log_lines: list[str] = []
    judged: list[frozenset[str]] = []
    with ModelText(Path(job.policy.path)) as tokenizer:

        def read(place: str, name: str, *, answer_kind: Given = "", is_judged: bool = True) -> tuple[Prompt, ...]:
            prompts, line, columns = tokenize_file(
                locate_data(place, "data"), job, tokenizer, chats, answer_kind=answer_kind
            )
            log_lines.append(line)
            judged.extend([columns] * is_judged)
            if not name:
                return prompts
            return tuple(replace(prompt, id=f"{name}/{prompt.id}", source=name) for prompt in prompts)

        is_mixed = len(data.sources) > 1
        # Rewards judge responses to training rows, unless rows hold answers and held-out prompts have their own file.
        is_judged = not (answer_kind and data.heldout)
        train = [
            read(source.path, source.label * is_mixed, answer_kind=answer_kind, is_judged=is_judged)
            for source in data.sources
        ]
        heldout_kind: Given = answer_kind if job.algorithm.declaration.trains_scalar else ""
        heldout = [
            read(place, name, answer_kind=heldout_kind)[:max_heldout] for name, place in data.heldout_sets.items()
        ]
    _check_columns(train, job)
    if data.heldout is None:
        train, heldout = _split(train, max_heldout, job.seed)
        log_lines.append(f"{sum(map(len, heldout))} of these prompts are held out, as data.heldout names none")
    sets = PromptSets(sum(train, ()), sum(heldout, ()), tuple(log_lines), frozenset.intersection(*judged), environment)
    _check_turns(sets, job)
    _check_sets(sets, job)
    build_mixture(sets.train, job)
    return sets


def _check_tokenizer(job: ResolvedJob) -> None:
    path = Path(job.policy.path) / "tokenizer.json"
    if not path.is_file():
        raise SpecError(
            "the policy has no tokenizer",
            where=str(path),
            rule="a Hugging Face folder with tokenizer.json",
            way_out="copy the model's tokenizer there",
        )


def _check_can_hold_out(job: ResolvedJob) -> None:
    """Check that prompts can be held out. Raises: SpecError for pairs and labelled answers."""
    declared = job.algorithm.declaration
    if declared.given in ("pair", "unpaired") and not declared.trains_scalar:
        raise SpecError(
            f"data.heldout is missing, and {job.algorithm.name} trains on pairs or labelled answers",
            where="data.heldout",
            rule="rewards judge the responses to held-out prompts, and such data have no right answers for that",
            way_out="data.heldout=FILE, with prompts and right answers",
        )


def _split(train: Sequence[tuple[Prompt, ...]], max_heldout: int, seed: int) -> tuple[list[tuple[Prompt, ...]], ...]:
    """(training prompts, held-out prompts) of each data set."""
    parts = [split_held_out(prompts, max_heldout, seed) for prompts in train]
    # without a source: the held-out prompts of all data sets are one set in the metrics
    heldout = [tuple(replace(prompt, source="") for prompt in part) for _, part in parts]
    questions = {prompt.question for part in heldout for prompt in part}  # another data set may contain them too
    return [tuple(prompt for prompt in part if prompt.question not in questions) for part, _ in parts], heldout


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


def build_mixture(train: Sequence[Prompt], job: ResolvedJob) -> Mixture:
    """The order of the training prompts. Raises: SpecError for an unusable weight or difficulty."""
    data = job.needed_data
    counts = [len([*prompts]) for _, prompts in groupby(train, key=lambda prompt: prompt.source)]
    is_mixed = len(data.sources) > 1
    shares = [
        Share(source.label * is_mixed, count, source.weight) for source, count in zip(data.sources, counts, strict=True)
    ]
    mixture = Mixture(shares, job.seed, shuffles=data.shuffles, difficulties=_read_difficulties(train, job))
    for share, quota in zip(shares, mixture.quotas, strict=True):
        if not quota:
            raise SpecError(
                f"{share.name} has a weight of {share.weight:g}, which gives it 0 of {len(train)} prompts per epoch",
                where="data.prompts",
                rule="every data set contributes at least one prompt per epoch",
                way_out="give it a larger weight, or leave it out",
            )
    return mixture


def _read_difficulties(train: Sequence[Prompt], job: ResolvedJob) -> list[float]:
    column = job.needed_data.difficulty_column
    if column is None:
        return []
    values = [json.loads(prompt.columns).get(column) for prompt in train]
    for prompt, value in zip(train, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SpecError(
                f"{column} of {shorten_value(prompt.id)} is {'missing' if value is None else shorten_value(value)}",
                where="data.difficulty_column",
                rule="a column with a number in every training row",
                way_out="add it, or name another column",
            )
    return [float(value) for value in values]


def _check_turns(sets: PromptSets, job: ResolvedJob) -> None:
    """Check that the chat template accepts the messages between the policy's turns. Raises: SpecError."""
    if not job.has_turns or not sets.has_chats:
        return
    folder = Path(job.policy.path)
    chat = ChatTurns(folder, TextTokenizer(folder), sets.environment.schemas)
    try:
        chat.check(["tool"] * bool(sets.environment.schemas) + ["user"] * job.rollout.environment.has_environment)
    finally:
        chat.close()


def _check_columns(train: Sequence[Sequence[Prompt]], job: ResolvedJob) -> None:
    """Check that mixed data sets have the same columns. Raises: SpecError with the differing columns."""
    names = [source.label for source in job.needed_data.sources]
    columns = [{key for prompt in prompts for key in json.loads(prompt.columns)} for prompts in train]
    everywhere = set.intersection(*columns)
    differing = [
        f"{name} has {', '.join(sorted(own - everywhere))}"
        for name, own in zip(names, columns, strict=True)
        if own - everywhere
    ]
    if differing:
        raise SpecError(
            f"mixed data sets have different columns: {'; '.join(differing)}, which not all of them have",
            where="data.prompts",
            rule="all data sets of a mixture have the same columns apart from prompt and answer",
            way_out="add the missing columns, or remove those that not all data sets have",
        )


def _check_sets(sets: PromptSets, job: ResolvedJob) -> None:
    """Check that there are enough prompts for a step, and that no held-out prompt is trained on. Raises: SpecError."""
    data = job.needed_data
    if len(sets.train) < job.workload.num_prompts_per_step:
        heldout = "" if data.heldout else f" besides {len(sets.heldout)} held-out ones"
        raise SpecError(
            f"{len(sets.train)} training prompts{heldout}, {job.workload.num_prompts_per_step} per step",
            where=", ".join(source.path for source in data.sources),
            rule="at least workload.num_prompts_per_step prompts",
            way_out="add prompts, or use fewer per step",
        )
    shared = {prompt.question for prompt in sets.train} & {prompt.question for prompt in sets.heldout}
    if shared:
        raise SpecError(
            f"{len(shared)} held-out prompts are also training prompts, such as {shorten_value(min(shared)[0])}",
            where=", ".join(data.heldout_sets.values()) or "data.prompts",
            rule="held-out prompts are not trained on",
            way_out="remove them from one of the two",
        )
