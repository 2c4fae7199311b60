"""Tokenizers of the roles: which agree with the policy's, and what a role reads where its own does not.

In: a job. Out: a SpecError before anything starts, or the tokens that a role gets of a rollout.

Reference, teacher and value judge the policy's tokens one by one, so they must know the same ones. A reward model gives
one number for a whole text: with another tokenizer it reads the text anew.
"""

from functools import lru_cache
from pathlib import Path

from rlplan.errors import SpecError
from rlplan.runtime.data.model_text import ModelText
from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.rollout.experience import Rollout, SequencePair
from rlplan.spec.base import read_json, shorten
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Role

MAX_TOKENIZER_BYTES = 1 << 26
"""Of a tokenizer.json: the largest published ones have some 40 MB."""


def check_role_tokenizers(job: ResolvedJob) -> None:
    """Raises: SpecError when a role that judges tokens has others than the policy, or a vocabulary too small."""
    policy = Path(job.policy.path)
    for role, path in job.roles.paths.items():
        if role not in job.scored_roles:
            continue
        theirs = token_ids(Path(path))
        if theirs is None:
            raise SpecError(
                f"the {role} has no tokenizer",
                where=str(Path(path) / "tokenizer.json"),
                rule="a role's folder has a tokenizer.json, so that its tokens can be compared with the policy's",
                way_out="copy the tokenizer of the model there",
            )
        if role is not Role.REWARD and theirs != token_ids(policy):
            raise _other_tokens(role, path, token_ids(policy) or {}, theirs)
    _check_vocabulary(job)
    if rereads(job):  # by the driver, in the run: whether it can be read at all is tried apart from it
        with ModelText(Path(job.roles.paths[Role.REWARD])) as tokenizer:
            tokenizer.tokens("a text")


def rereads(job: ResolvedJob) -> bool:
    """Whether the reward model has another tokenizer than the policy, and reads texts anew."""
    path = job.roles.paths.get(Role.REWARD)
    return path is not None and token_ids(Path(path)) != token_ids(Path(job.policy.path))


@lru_cache(maxsize=8)
def token_ids(folder: Path) -> dict[str, int] | None:
    """Every token of a folder's `tokenizer.json` with its id; None without the file. Raises: SpecError."""
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
            raise ValueError("a token's id is no number")
        return ids
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SpecError(
            f"the tokenizer cannot be read: {type(error).__name__}: {shorten(str(error))}",
            where=str(path),
            rule="a tokenizer.json of the tokenizers library",
            way_out="copy the model's tokenizer there again",
        ) from None


class RoleReaders:
    """What each role reads of a rollout. num_cut: sequences of the reward model that lost their beginning."""

    def __init__(self, job: ResolvedJob) -> None:
        self.job = job
        self.num_cut = 0
        self.rereads = rereads(job)
        self._words = TextTokenizer(Path(job.roles.paths.get(Role.REWARD, "")))

    def sequence(self, role: Role, rollout: Rollout) -> SequencePair:
        """The tokens of prompt and response, as the role knows them."""
        if role is not Role.REWARD or not self.rereads:
            prompt, completion = rollout.prompt, rollout.completion
            return SequencePair(prompt.tokens, completion.tokens, completion.observed, prompt.images)
        limit = self.job.roles.reward.max_seq_len or self.job.workload.max_seq_len
        tokens = tuple(self._words.tokens(rollout.prompt.text + rollout.text, adds_special_tokens=True))
        self.num_cut += len(tokens) > limit
        return SequencePair(tokens[-limit:], ())

    def take_num_cut(self) -> int | None:
        """How many sequences were cut since the last call; None where nothing is read anew."""
        cut, self.num_cut = self.num_cut, 0
        return cut if self.rereads else None


def _check_vocabulary(job: ResolvedJob) -> None:
    """Every token that a role is asked about must have a row in its table."""
    policy = token_ids(Path(job.policy.path)) or {}
    largest = max(policy.values(), default=-1)
    for role, model in job.load_role_models().items():
        own = token_ids(Path(job.roles.paths[Role.REWARD])) or {} if role is Role.REWARD else policy
        needed = max(own.values(), default=-1) if role is Role.REWARD else largest
        if needed >= model.vocab_size:
            raise SpecError(
                f"the {role} has {model.vocab_size} tokens in its table, its tokenizer's largest id is {needed}",
                where=f"{job.roles.paths.get(role, job.policy.path)}: config.json: vocab_size",
                rule="a row for every token of the tokenizer",
                way_out="take the tokenizer that belongs to the model",
            )


def _other_tokens(role: Role, path: str, mine: dict[str, int], theirs: dict[str, int]) -> SpecError:
    different = [token for token in mine if theirs.get(token) != mine[token]] or [t for t in theirs if t not in mine]
    example = different[0]
    return SpecError(
        f"the {role} has other tokens than the policy: {example!r} is {mine.get(example, 'none')} of {len(mine)} in "
        f"the policy's tokenizer, {theirs.get(example, 'none')} of {len(theirs)} in the {role}'s",
        where=f"roles.{role}.path: {Path(path) / 'tokenizer.json'}",
        rule=f"the {role} judges the policy's tokens one by one: both have the same tokens with the same ids",
        way_out=f"take a {role} of the policy's family"
        + ("; a reward model (roles.reward) may have its own" if role is not Role.REWARD else ""),
    )
