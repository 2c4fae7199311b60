"""Typical mistakes on a command line: each answer names the cause, and nearly each what to type instead.

The table says what a reader judged to be an answer; a generic "see --help" does not count as a way out.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplan.spec.files.yaml import read_yaml
from tests.cli.conftest import Call

TABLE: dict[str, list[list[str]]] = read_yaml(Path(__file__).parent / "mistakes.yaml", "mistakes")
ANSWERED: list[tuple[str, str]] = read_yaml(Path(__file__).parent / "answered.yaml", "answers")
LEAST = 120
LEAST_SHARE = 0.95
"""Number of the mistakes that get a specific way out."""
WORDS = {"$Q": "examples/quickstart.yaml", "$G": "examples/grpo-7b-8xh100.yaml"}
FILES = {
    "bin.sh": bytes(range(256)),
    "empty.yaml": b"",
    "notes.txt": b"hello",
    "job.json": b"{}",
    "train.sh": b"echo hi\n",
    "trl.yaml": b"model_name_or_path: x\nfoo: 1\n",
    "rows.csv": b"question;answer\n1;2\n",
}


def test_there_are_enough_and_nearly_all_have_a_way_out() -> None:
    rows = [row for group in TABLE.values() for row in group]
    assert len({row[0] for row in rows}) == len(rows) >= LEAST
    assert sum(bool(way_out) for _, _, way_out in rows) >= LEAST_SHARE * len(rows)


def typed(command: str, folder: Path) -> Iterator[str]:
    for word in shlex.split(command):
        yield str(folder / word[1:]) if word.startswith("@") else WORDS.get(word, word)


@pytest.mark.parametrize("group", TABLE)
def test_the_answer_to_a_mistake_names_its_cause_and_a_way_out(
    rlplan: Call, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    for command, cause, way_out in TABLE[group]:
        answer = rlplan(*typed(command, tmp_path))
        message = answer.err.replace(f"{tmp_path}/", "")
        assert answer.exit_code not in (0, 70), command
        assert cause in message.splitlines()[0], message
        assert way_out in message, message


@pytest.mark.parametrize(("command", "headline"), ANSWERED)
def test_a_short_or_foreign_word_is_answered(rlplan: Call, command: str, headline: str) -> None:
    answer = rlplan(*typed(command, Path()))
    assert headline in answer.out.splitlines()[0], answer.err
