"""Prompts: the rows of a JSONL file, and what is said about the first bad one."""

import json
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.spec.workload import PromptRow, read_prompts
from tests.factories import EXAMPLES

GOOD = b'{"id": "a", "prompt": "Sort: 21", "answer": "12"}'


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_shipped_prompts_are_read_whole(split: str) -> None:
    path = EXAMPLES / "data" / "sort_digits" / f"{split}.jsonl"
    rows = read_prompts(path)
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [row.id for row in rows]
    assert all(row.answer == "".join(sorted(row.prompt.removeprefix("Sort: "))) for row in rows)


def test_train_and_heldout_prompts_have_nothing_in_common() -> None:
    folder = EXAMPLES / "data" / "sort_digits"
    train, heldout = ({row.prompt for row in read_prompts(folder / f"{split}.jsonl")} for split in ("train", "heldout"))
    assert not train & heldout


def test_blank_lines_windows_line_ends_and_an_empty_answer_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + b"\r\n\r\n   \n" + '{"id": "é", "prompt": "二", "answer": ""}'.encode())
    assert read_prompts(path) == (
        PromptRow(id="a", prompt="Sort: 21", answer="12"),
        PromptRow(id="é", prompt="二", answer=""),
    )


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (b"not json", "not JSON"),
        (b'{"id": "b", "prompt": "x", "answer": "y"', "not JSON"),
        (b"{'id': 'b'}", "not JSON"),
        (b"\xef\xbb\xbf" + GOOD, "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"id": "b", "prompt": "x"}', "answer: Field required"),
        (b'{"id": "b", "answer": "x"}', "prompt: Field required"),
        (b'{"prompt": "x", "answer": "y"}', "id: Field required"),
        (b'{"id": null, "prompt": "x", "answer": "y"}', "id: Input should be a valid string"),
        (b'{"id": "b", "prompt": null, "answer": "y"}', "prompt: Input should be a valid string"),
        (b'{"id": 7, "prompt": "x", "answer": "y"}', "id: Input should be a valid string"),
        (b'{"id": "b", "prompt": ["x"], "answer": "y"}', "prompt: Input should be a valid string"),
        (b'{"id": "b", "prompt": "x", "answer": 12}', "answer: Input should be a valid string"),
        (b'{"id": "", "prompt": "x", "answer": "y"}', "id: String should have at least 1 character"),
        (b'{"id": "b", "prompt": "", "answer": "y"}', "prompt: String should have at least 1 character"),
        (b'{"id": "b", "prompt": "x", "answer": "y", "extra": 1}', "extra: Extra inputs are not permitted"),
        (b'{"id": "b", "prompt": "\\ud800", "answer": "y"}', "prompt: Input should be a valid string"),
        (b"[1, 2]", "row: Input should be a valid dictionary"),
        (b"null", "row: Input should be a valid dictionary"),
        (b"5", "row: Input should be a valid dictionary"),
        (b'{"id": "b", "prompt": "caf\xe9", "answer": "y"}', "the line is not UTF-8"),
        (b"\x00\x01\x02", "not JSON"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path, row: bytes, what: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + b"\n\n" + row + b"\n")
    with pytest.raises(SpecError) as caught:
        read_prompts(path)
    assert what in caught.value.what
    assert caught.value.where == f"{path}, line 3"
    assert len(str(caught.value)) < 600


def test_an_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD + b"\n")
    with pytest.raises(SpecError, match=r"id 'a' stands in line 1 too\n  where: .*line 2"):
        read_prompts(path)


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(SpecError, match="the prompt file is empty") as caught:
        read_prompts(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(("name", "why"), [("absent.jsonl", "No such file"), ("", "Is a directory")])
def test_a_prompt_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(SpecError, match=f"the prompt file cannot be read: {why}"):
        read_prompts(tmp_path / name)
