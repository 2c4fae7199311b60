"""Bad rows of data sets: each is listed, with its line and what is wrong with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.data.layouts import Columns
from rlplan.runtime.data.loading import RowNeeds, load_rows
from tests.repository.at_night import mark_nightly
from tests.runtime.data.test_loading import GOOD, SORTER, VERL, jsonl, load


@pytest.mark.parametrize(
    ("name", "content", "what"),
    mark_nightly(
        [
            ("tokenizer_config.json", b"{bad", "the tokenizer's configuration is not JSON"),
            ("tokenizer_config.json", b"[1]", "the tokenizer's configuration is \\[1\\]"),
            ("tokenizer_config.json", b"\xff\xfe", "the tokenizer's configuration is not UTF-8 text"),
            ("chat_template.jinja", b"\xff\xfe", "the policy's chat template is not UTF-8 text"),
            ("chat_template.jinja", b"{% bad", "the policy's chat template cannot render the prompts: jinja2"),
        ],
        but=4,
    ),
)
def test_a_damaged_tokenizer_s_folder_is_one_message(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((SORTER / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / name).write_bytes(content)
    path = jsonl(tmp_path / "p.jsonl", [VERL])
    with pytest.raises(SpecError, match=what):
        load_rows(path, Columns(), tmp_path, RowNeeds())


@pytest.mark.parametrize("name", mark_nightly(["data.parquet", "data.arrow", "folder"], but=1))
def test_a_table_that_is_none_is_one_message(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(SpecError, match="the data cannot be read"):
        load(path)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (b"not json", "not JSON"),
        (b'{"id": "b", "prompt": "x", "answer": "y"', "not JSON"),
        (b"{'id': 'b'}", "not JSON"),
        (b"\xef\xbb\xbf" + GOOD, "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"id": "b", "prompt": "x"}', "no answer"),
        (b'{"id": "b", "answer": "x"}', "prompt is null"),
        (b'{"id": "b", "prompt": null, "answer": "y"}', "prompt is null"),
        (b'{"id": "b", "prompt": "x", "answer": null}', "no answer"),
        (b'{"id": "b", "prompt": ["x"], "answer": "y"}', "a message must be an object"),
        (b'{"id": "b", "prompt": 5, "answer": "y"}', "prompt is int, not a text or a chat"),
        (b'{"id": "b", "prompt": "", "answer": "y"}', "prompt is empty"),
        (b'{"prompt": "What is this?", "answer": "y", "images": ["a.png"]}', "column 'images' holds images"),
        (
            b'{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": "y"}',
            "a message holds an image, which prompts cannot",
        ),
        (b'{"id": "b", "prompt": "\\ud800", "answer": "y"}', "a lone surrogate"),
        (b'{"id": "a", "prompt": "x", "answer": "y"}', "id 'a' is also the id of row 1"),
        (b"[1, 2]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"id": "b", "prompt": "caf\xe9", "answer": "y"}', "the line is not UTF-8"),
        (b"\x00\x01\x02", "not JSON"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, row: bytes, what: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + b"\n\n" + row + b"\n")
    with pytest.raises(SpecError) as caught:
        load(path)
    assert "row 3: " in caught.value.what
    assert what in caught.value.what
    assert caught.value.where == str(path)
    assert len(str(caught.value)) < 700


def test_many_bad_rows_are_counted_and_some_are_told(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"200 of 201 rows cannot be used: rows 2, 3, 4 and 197 more: the line is no"):
        load(jsonl(tmp_path / "p.jsonl", [json.loads(GOOD), *([5] * 200)]))


@pytest.mark.parametrize(
    "rows",
    [
        [{"A" * 200_000: 1, "\x1b[31mred": 2}],
        [{f"column {number}": 1 for number in range(1000)}],
        [{"id": "A" * 3_000_000, "prompt": "x", "answer": "y"}] * 2,
        [{"id": "\x1b[31mred", "prompt": "x", "answer": "y"}] * 2,
        [{"prompt": "x", "reward_model": {}, "\x1b[31m": 1}, {"prompt": {"\x1b[31m" * 100: 1}}],
    ],
    ids=range(5),
)
def test_a_message_is_short_and_has_nothing_in_it_for_a_terminal(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(SpecError) as caught:
        load(jsonl(tmp_path / "p.jsonl", rows))
    assert len(caught.value.what) < 600
    assert caught.value.what.isprintable()


def test_a_table_without_a_prompt_says_which_columns_it_has(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no column holds a prompt; the columns are question, result"):
        load(jsonl(tmp_path / "p.jsonl", [{"question": "x", "result": "y"}]))


def test_a_column_whose_name_cannot_be_typed_is_not_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no column holds a prompt") as caught:
        load(jsonl(tmp_path / "p.jsonl", [{"p" * 9_000: "How many?"}]))
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(SpecError, match="the prompt file is empty") as caught:
        load(path)
    assert caught.value.where == str(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the data is missing"):
        load(tmp_path / "absent.jsonl")
