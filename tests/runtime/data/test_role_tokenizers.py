"""Roles that judge tokens must know the policy's; a reward model may read texts anew."""

import json
import shutil
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.data.role_tokenizers import RoleReaders, check_role_tokenizers, needs_retokenizing, read_token_ids
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Role
from tests.factories import EXAMPLES, make_job

SORTER = EXAMPLES / "models" / "sorter"


def other_folder(folder: Path, *, swaps: bool = False, vocab_size: int = 64) -> Path:
    """A copy of the sorter's config and tokenizer, with two tokens swapped or another table."""
    folder.mkdir(parents=True)
    config = json.loads((SORTER / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    shutil.copyfile(SORTER / "tokenizer.json", folder / "tokenizer.json")
    if swaps:
        data = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = data["model"]["vocab"]
        vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
        (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def make_role_job(role: str, folder: Path) -> ResolvedJob:
    return make_job(**{f"roles.{role}.path": str(folder)})


def test_the_same_tokenizer_passes(tmp_path: Path) -> None:
    check_role_tokenizers(make_role_job("reference", other_folder(tmp_path / "other")))


def test_swapped_tokens_are_refused_with_an_example(tmp_path: Path) -> None:
    folder = other_folder(tmp_path / "other", swaps=True)
    with pytest.raises(SpecError) as caught:
        check_role_tokenizers(make_role_job("teacher", folder))
    ids = read_token_ids(SORTER)
    assert ids
    assert f"'1' is {ids['1']}" in caught.value.what or f"'2' is {ids['2']}" in caught.value.what
    assert "roles.teacher.path" in caught.value.where
    assert "same tokens" in caught.value.rule


def test_a_table_with_too_few_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has 7 tokens in its embedding table"):
        check_role_tokenizers(make_role_job("reference", other_folder(tmp_path / "other", vocab_size=7)))


@pytest.mark.parametrize("text", [None, "{", "{}", '{"model": {"vocab": 5}}'])
def test_a_missing_or_broken_tokenizer_is_refused(tmp_path: Path, text: str | None) -> None:
    path = other_folder(tmp_path / "other") / "tokenizer.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError, match="tokenizer"):
        check_role_tokenizers(make_role_job("reference", tmp_path / "other"))


def test_a_reward_model_with_other_tokens_reads_the_text_anew_and_keeps_its_end(tmp_path: Path) -> None:
    job = make_role_job("reward", other_folder(tmp_path / "other", swaps=True))
    check_role_tokenizers(job)
    assert needs_retokenizing(job)
    readers, ids = RoleReaders(job), read_token_ids(tmp_path / "other")
    assert ids
    rollout = Rollout(Prompt("1", "Sort: 12", "", (1, 2)), 0, Completion((3,), (0.0,), "stop"), text="<answer>12")
    pair = readers.make_sequence(Role.REWARD, rollout)
    assert pair.prompt_tokens[-2:] == (ids["1"], ids["2"])
    assert pair.response_tokens == ()
    assert readers.take_num_cut() == 0
    long = Rollout(rollout.prompt, 0, rollout.completion, text="1" * 60)
    assert len(readers.make_sequence(Role.REWARD, long).prompt_tokens) == job.workload.max_seq_len
    assert (readers.take_num_cut(), readers.take_num_cut()) == (1, 0)


def test_roles_with_the_policys_tokens_read_them_as_they_are() -> None:
    readers = RoleReaders(make_job())
    rollout = Rollout(Prompt("1", "x", "", (1, 2)), 0, Completion((3,), (0.0,), "stop"))
    assert readers.make_sequence(Role.REFERENCE, rollout).prompt_tokens == (1, 2)
    assert readers.take_num_cut() is None
