"""Tokenizers of the roles: they are compared with the policy's, and a reward model may re-tokenize the text.

Reference, teacher and value model score the policy's tokens one by one, so their tokenizers must be the same. A reward
model gives one number per text, so with another tokenizer it tokenizes the text again.

In: a job. Out: a SpecError before anything starts, or the tokens of a rollout for a role.
"""

from functools import lru_cache
from pathlib import Path

from rlplan.errors import SpecError
from rlplan.runtime.data.model_text import ModelText
from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.rollout.experience import Rollout, SequencePair
from rlplan.spec.base import read_json, shorten_value
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Role

MAX_TOKENIZER_BYTES = 1 << 26
"""Most bytes of a tokenizer.json; the largest published ones have about 40 MB."""


def check_role_tokenizers(job: ResolvedJob) -> None:
    """Raises: SpecError when a role that scores tokens has other tokens, or when its vocabulary is too small."""
    policy = Path(job.policy.path)
    for role, path in job.roles.paths.items():
        if role not in job.scored_roles:
            continue
        theirs = read_token_ids(Path(path))
        if theirs is None:
            raise SpecError(
                f"the {role} has no tokenizer",
                where=str(Path(path) / "tokenizer.json"),
                rule="a role's folder has a tokenizer.json, which is compared with the policy's",
                way_out="copy the model's tokenizer there",
            )
        if role is not Role.REWARD and theirs != read_token_ids(policy):
            raise _make_mismatch_error(role, path, read_token_ids(policy) or {}, theirs)
    _check_vocabulary(job)
    if needs_retokenizing(job):  # the driver loads this tokenizer during the run, so a child process tries it first
        with ModelText(Path(job.roles.paths[Role.REWARD])) as tokenizer:
            tokenizer.tokens("a text")


def needs_retokenizing(job: ResolvedJob) -> bool:
    """Whether the reward model has another tokenizer than the policy, and so re-tokenizes texts."""
    path = job.roles.paths.get(Role.REWARD)
    return path is not None and read_token_ids(Path(path)) != read_token_ids(Path(job.policy.path))


@lru_cache(maxsize=8)
def read_token_ids(folder: Path) -> dict[str, int] | None:
    """Ids of all tokens in a folder's `tokenizer.json`; None without the file. Raises: SpecError."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    data = read_json(path, "the tokenizer", limit=MAX_TOKENIZER_BYTES)
    try:
        vocabulary = data["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram models list [token, score]
            vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
        added = {entry["content"]: entry["id"] for entry in data.get("added_tokens") or ()}
        ids = {**vocabulary, **added}
        if not all(type(number) is int and number >= 0 for number in ids.values()):
            raise ValueError("a token's id is not a number")
        return ids
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SpecError(
            f"the tokenizer cannot be read: {type(error).__name__}: {shorten_value(str(error))}",
            where=str(path),
            rule="a tokenizer.json of the tokenizers library",
            way_out="copy the model's tokenizer there again",
        ) from None


class RoleReaders:
    """The tokens of a rollout for each role. num_cut: reward-model sequences that were truncated at the beginning."""

    def __init__(self, job: ResolvedJob) -> None:
        self.job = job
        self.num_cut = 0
        self.rereads = needs_retokenizing(job)
        self._words = TextTokenizer(Path(job.roles.paths.get(Role.REWARD, "")))

    def make_sequence(self, role: Role, rollout: Rollout) -> SequencePair:
        """Tokens of prompt and response in the role's vocabulary."""
        if role is not Role.REWARD or not self.rereads:
            prompt, completion = rollout.prompt, rollout.completion
            experts = completion.experts if role is Role.POLICY else None
            return SequencePair(prompt.tokens, completion.tokens, completion.observed, prompt.images, experts)
        limit = self.job.roles.reward.max_seq_len or self.job.workload.max_seq_len
        tokens = tuple(self._words.tokens(rollout.prompt.text + rollout.text, adds_special_tokens=True))
        self.num_cut += len(tokens) > limit
        return SequencePair(tokens[-limit:], ())

    def take_num_cut(self) -> int | None:
        """The number of sequences truncated since the last call; None if the reward model does not re-tokenize."""
        cut, self.num_cut = self.num_cut, 0
        return cut if self.rereads else None


def _check_vocabulary(job: ResolvedJob) -> None:
    """Check that every token that a role may get has a row in its embedding table. Raises: SpecError."""
    policy = read_token_ids(Path(job.policy.path)) or {}
    largest = max(policy.values(), default=-1)
    for role, model in job.load_role_models().items():
        own = read_token_ids(Path(job.roles.paths[Role.REWARD])) or {} if role is Role.REWARD else policy
        needed = max(own.values(), default=-1) if role is Role.REWARD else largest
        if needed >= model.vocab_size:
            raise SpecError(
                f"the {role} has {model.vocab_size} tokens in its embedding table, its largest token id is {needed}",
                where=f"{job.roles.paths.get(role, job.policy.path)}: config.json: vocab_size",
                rule="the embedding table has a row for every token of the tokenizer",
                way_out="use the tokenizer that belongs to the model",
            )


def _make_mismatch_error(role: Role, path: str, policy_ids: dict[str, int], role_ids: dict[str, int]) -> SpecError:
    different = [token for token in policy_ids if role_ids.get(token) != policy_ids[token]] or [
        t for t in role_ids if t not in policy_ids
    ]
    example = different[0]
    return SpecError(
        f"the {role} has other tokens than the policy: {example!r} is {policy_ids.get(example, 'none')} of "
        f"{len(policy_ids)} in the policy's tokenizer, {role_ids.get(example, 'none')} of {len(role_ids)} in the "
        f"{role}'s",
        where=f"roles.{role}.path: {Path(path) / 'tokenizer.json'}",
        rule=f"the {role} scores the policy's tokens one by one, so both need the same tokens with the same ids",
        way_out=f"use a {role} of the policy's family"
        + ("; a reward model (roles.reward) may have its own" if role is not Role.REWARD else ""),
    )
