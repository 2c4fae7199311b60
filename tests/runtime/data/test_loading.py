"""Data sets: each known layout becomes the same rows, and bad rows are listed, each with what is wrong with it."""

import datetime as dt
import json
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.data.layouts import BadRowError, Columns, DataRow
from rlplan.runtime.data.loading import Loaded, RowNeeds, load_rows
from tests.factories import EXAMPLES
from tests.repository.at_night import mark_nightly

SORTER = EXAMPLES / "models" / "sorter"
GOOD = b'{"id": "a", "prompt": "Sort: 21", "answer": "12"}'
USER = {"role": "user", "content": "1 + 1?"}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def load(path: Path, *, columns: Columns = Columns(), pairs: bool = False, answers: bool = True) -> Loaded:  # noqa: B008
    return load_rows(path, columns, SORTER, RowNeeds("pair" if pairs else "", answers=answers and not pairs))


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_shipped_prompts_are_read_whole(split: str) -> None:
    path = EXAMPLES / "data" / "sort_digits" / f"{split}.jsonl"
    loaded = load(path)
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [row.id for row in loaded.rows]
    assert all(row.answer == "".join(sorted(str(row.prompt).removeprefix("Sort: "))) for row in loaded.rows)
    assert loaded.summarize(path).endswith("rows in the layout of rlplan, prompts are text")


def test_train_and_heldout_prompts_have_nothing_in_common() -> None:
    folder = EXAMPLES / "data" / "sort_digits"
    train, heldout = ({row.prompt for row in load(folder / f"{split}.jsonl").rows} for split in ("train", "heldout"))
    assert not train & heldout


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n   \n" + '{"id": "é", "prompt": "二", "answer": "1"}'.encode())
    assert load(path).rows == (DataRow("a", "Sort: 21", "12"), DataRow("é", "二", "1"))
    assert [row.number for row in load(path).rows] == [1, 4]
    whole = tmp_path / "p.json"
    whole.write_bytes(b"\xef\xbb\xbf[" + GOOD + b"]")
    assert load(whole).rows == (DataRow("a", "Sort: 21", "12"),)


@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_answer_is_a_bad_row_where_a_reward_compares_with_it(tmp_path: Path, answer: str) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": "x", "answer": answer}])
    assert load(path, answers=False).rows[0].answer == answer
    with pytest.raises(SpecError, match="row 1: the answer is empty"):
        load(path)


def test_the_answer_s_column_goes_to_functions_under_its_own_name_too(tmp_path: Path) -> None:
    (row,) = load(jsonl(tmp_path / "p.jsonl", [{"prompt": "x", "solution": "2"}])).rows
    assert (row.answer, json.loads(row.others)) == ("2", {"solution": "2"})


VERL = {
    "data_source": "gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}
LAYOUTS: dict[str, tuple[dict[str, Any], Columns, str, str]] = {
    "verl": (VERL, Columns(), "verl", "7"),
    "TRL, a text": ({"prompt": "1 + 1?", "solution": "2"}, Columns(), "trl", "row-1"),
    "TRL, a chat": ({"prompt": [USER], "answer": "2", "level": 3}, Columns(), "trl", "row-1"),
    "OpenRLHF": ({"input": "1 + 1?", "label": "2"}, Columns(), "openrlhf", "row-1"),
    "named columns": ({"question": "1 + 1?", "result": 2}, Columns("question", "result"), "columns", "row-1"),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    # A table is read by a process of its own, 1 s each: two of them see every kind, the others are for the night.
    mark_nightly(
        product(("jsonl", "json", "parquet", "folder"), LAYOUTS),
        but=[*product(("jsonl", "json"), LAYOUTS), ("parquet", "verl"), ("folder", "TRL, a chat")],
    ),
)
def test_every_layout_becomes_the_same_row(tmp_path: Path, name: str, kind: str) -> None:
    cells, columns, layout, identity = LAYOUTS[name]
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        jsonl(path, [cells])
    elif kind == "json":
        path.write_text(json.dumps([cells]))
    else:
        _write_with_arrow(path, cells)
    loaded = load(path, columns=columns)
    (row,) = loaded.rows
    assert (row.id, row.prompt, row.answer) == (identity, "1 + 1?", "2")
    assert loaded.layout == layout
    assert layout in loaded.summarize(path)
    others = json.loads(row.others)
    if name == "verl":
        assert others["data_source"] == "gsm8k"
        assert others["extra_info"]["split"] == "train"
    if name == "TRL, a chat":
        assert others == {"level": 3}
        assert "joined" in loaded.template


def _write_with_arrow(path: Path, cells: dict[str, Any]) -> None:
    """A parquet file; or a folder as `Dataset.save_to_disk` of datasets 5.2 leaves it."""
    import pyarrow as pa

    _write_table(path, pa.Table.from_pylist([cells]))


def _write_table(path: Path, table: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
        return
    part = path / "train"
    part.mkdir(parents=True)
    (path / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    (part / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    with pa.OSFile(str(part / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)


PAIRS: dict[str, dict[str, Any]] = {
    "ours": {"id": "row-1", "prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
    "TRL, explicit": {"prompt": [USER], "chosen": [said("2")], "rejected": [said("3")]},
    "TRL, implicit": {"chosen": [USER, said("2")], "rejected": [USER, said("3")]},
    "OpenRLHF, whole chats beside the prompt": {
        "prompt": [USER],
        "chosen": [USER, said("2")],
        "rejected": [USER, said("3")],
    },
    "UltraFeedback, whole chats beside the prompt as a text": {
        "prompt": USER["content"],
        "chosen": [USER, said("2")],
        "rejected": [USER, said("3")],
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_preferences_of_every_layout_become_the_same_pair(tmp_path: Path, name: str) -> None:
    (row,) = load(jsonl(tmp_path / "p.jsonl", [PAIRS[name]]), pairs=True).rows
    assert (row.id, row.prompt, row.chosen, row.rejected) == ("row-1", "1 + 1?", "2", "3")


def test_texts_that_hold_their_prompt_are_cut_after_it(tmp_path: Path) -> None:
    talk = "\n\nHuman: 1 + 1?\n\nAssistant:"
    (row,) = load(jsonl(tmp_path / "p.jsonl", [{"chosen": talk + " 2", "rejected": talk + " 3"}]), pairs=True).rows
    assert (row.prompt, row.chosen, row.rejected) == (talk, " 2", " 3")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
        (
            {"prompt": "x", "chosen": "a", "rejected": " a\n"},
            "chosen and rejected are the same apart from surrounding spaces",
        ),
        ({"prompt": "x", "chosen": None, "rejected": "a"}, "chosen is null"),
        ({"prompt": "x", "chosen": "", "rejected": "a"}, "chosen is empty"),
        ({"prompt": "x", "chosen": [said("a")], "rejected": "a"}, "chosen and rejected must both be chats"),
        ({"chosen": "left", "rejected": "right"}, "no prompt column"),
        ({"chosen": [USER], "rejected": [USER, said("a")]}, "must differ in one final assistant message"),
        (
            {"chosen": [{"role": "user"}], "rejected": [USER]},
            "a message must be an object with the texts role and content",
        ),
        ({"prompt": "x", "chosen": "a"}, "rejected is null"),
    ],
)
def test_a_wrong_pair_is_a_bad_row(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    with pytest.raises(SpecError, match="1 of 1 rows cannot be used: row 1: ") as caught:
        load(jsonl(tmp_path / "p.jsonl", [row]), pairs=True)
    assert what in caught.value.what


def test_a_chat_is_rendered_by_the_policy_s_template(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((SORTER / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    loaded = load_rows(jsonl(tmp_path / "p.jsonl", [VERL]), Columns(), tmp_path, RowNeeds(answers=True))
    assert loaded.rows[0].prompt == "<user>1 + 1?<assistant>"
    assert loaded.template == "chats by the policy's template"


def test_answers_that_a_reward_cannot_use_are_bad_rows(tmp_path: Path) -> None:
    def check(answer: str) -> None:
        if answer != "2":
            raise BadRowError(f"not {answer}")

    path = jsonl(tmp_path / "p.jsonl", [{"prompt": "x", "answer": "2"}, {"prompt": "y", "answer": "3"}])
    with pytest.raises(SpecError, match="1 of 2 rows cannot be used: row 2: not 3"):
        load_rows(path, Columns(), SORTER, RowNeeds(answers=True, check=check))


@pytest.mark.parametrize("kind", mark_nightly(["parquet", "folder"], but=["parquet"]))
def test_bytes_that_are_no_text_are_a_bad_row_of_a_table_too(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa

    texts = pa.array([b"one", b"caf\xe9", b"three"]).view(pa.string())
    path = tmp_path / f"data.{kind}"
    _write_table(path, pa.table({"prompt": texts, "answer": ["1", "2", "3"]}))
    with pytest.raises(SpecError, match=r"1 of 3 rows cannot be used: row 2: the row is not UTF-8"):
        load(path)


@pytest.mark.parametrize("kind", mark_nightly(["parquet", "folder"], but=["folder"]))
def test_a_column_whose_name_is_no_text_is_told(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa

    path = tmp_path / f"data.{kind}"
    _write_table(path, pa.table({"prompt": ["one"], "zzzz": ["1"]}))
    (file,) = [path] if path.is_file() else path.rglob("*.arrow")
    file.write_bytes(file.read_bytes().replace(b"zzzz", b"z\xeezz"))
    with pytest.raises(SpecError, match="a column's name is not UTF-8"):
        load(path)


@pytest.mark.parametrize("kind", mark_nightly(["parquet", "folder"], but=["parquet"]))
def test_bytes_that_are_text_are_read_and_what_json_does_not_know_is_no_answer(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa

    day, path = dt.date(2026, 1, 2), tmp_path / f"data.{kind}"
    answers = pa.array([b"12", b"caf\xe9"], pa.binary())
    beside = {"day": [day, day], "image": pa.array([b"\xff", b"\xff"], pa.binary()), "raw": pa.array([b"a", b"b"])}
    _write_table(path, pa.table({"prompt": pa.array([b"one", b"two"]), "answer": answers, **beside}))
    with pytest.raises(
        SpecError, match=r"1 of 2 rows cannot be used: row 2: the answer holds bytes that are not UTF-8"
    ):
        load(path)
    (row, _) = load(path, columns=Columns(answer="raw")).rows
    assert (row.prompt, row.answer) == ("one", "a")
    assert json.loads(row.others) == {"answer": "12", "day": "2026-01-02", "image": None, "raw": "a"}


@pytest.mark.parametrize("column", mark_nightly(["prompt", "answer"], but=["prompt"]))
def test_a_date_is_no_prompt_and_no_answer(tmp_path: Path, column: str) -> None:
    import pyarrow as pa

    path, cells = tmp_path / "data.parquet", {"prompt": ["x"], "answer": ["y"]}
    _write_table(path, pa.table({**cells, column: [dt.date(2026, 1, 2)]}))
    with pytest.raises(SpecError, match=f"row 1: (the )?{column} holds a date: write it as text"):
        load(path)


def test_a_null_answer_of_a_table_of_numbers_is_null(tmp_path: Path) -> None:
    import pyarrow as pa

    path = tmp_path / "data.parquet"
    _write_table(path, pa.table({"prompt": ["a", "b"], "answer": [1.0, float("nan")]}))
    with pytest.raises(SpecError, match=r"1 of 2 rows cannot be used: row 2: no answer"):
        load(path)


def test_indices_of_several_sources_are_no_duplicate_ids(tmp_path: Path) -> None:
    other = {**VERL, "data_source": "math"}
    assert [row.id for row in load(jsonl(tmp_path / "p.jsonl", [VERL, other])).rows] == ["7", "7-row-2"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (
            b'[{"prompt": "x", "answer": "y"}, "hello", 5, null]',
            "3 of 4 rows cannot be used: rows 2, 3, 4: the item is not a JSON",
        ),
        (b'{"prompt": "x"}', "the file is not a list of rows"),
        (b'[{"prompt": "x"', "the file is not JSON"),
        (b'["caf\xe9"]', "the file is not UTF-8"),
        (b"[" * 100_000, "the file is not JSON"),
        (b"", "the file is not JSON"),
        (b"[]", "the prompt file is empty"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_json_file_that_is_no_list_of_rows_is_one_message(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=what):
        load(path)


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "a", "prompt": "b", "answer": "c"}',
        '{"prompt": [{"role": "user", "content": "a", "content": "b"}], "answer": "c"}',
    ],
)
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_a_key_that_stands_twice_is_a_bad_row(tmp_path: Path, row: str, kind: str) -> None:
    path = tmp_path / f"p.{kind}"
    path.write_text(f"[{GOOD.decode()}, {row}]" if kind == "json" else f"{GOOD.decode()}\n{row}\n")
    with pytest.raises(SpecError, match=r"1 of 2 rows .* row 2: the key '(prompt|content)' occurs twice in one object"):
        load(path)


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.parquet"])
def test_a_pipe_is_no_data(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(SpecError, match="the data is a pipe or a device"):
        load(tmp_path / name)


WRONG_NAMES = (
    ("dataset_dict.json", "{bad", "dataset_dict.json is not JSON"),
    ("dataset_dict.json", "[]", "dataset_dict.json names no splits"),
    ("dataset_dict.json", '{"splits": []}', "dataset_dict.json names no splits"),
    ("dataset_dict.json", '{"splits": ["../../elsewhere"]}', "names '../../elsewhere', which is not a plain file name"),
    ("state.json", "{}", "state.json names no _data_files"),
    ("state.json", '{"_data_files": "x"}', "state.json names no _data_files"),
    ("state.json", '{"_data_files": [{}]}', "names None, which is not a plain file name"),
    (
        "state.json",
        '{"_data_files": [{"filename": "../good.arrow"}]}',
        "names '../good.arrow', which is not a plain file name",
    ),
    ("state.json", '{"_data_files": [{"filename": "absent.arrow"}]}', "absent.arrow is not a file"),
)


@pytest.mark.parametrize(("name", "content", "what"), mark_nightly(WRONG_NAMES, but=[WRONG_NAMES[at] for at in (3, 5)]))
def test_a_data_set_that_names_its_files_wrongly_is_one_message(
    tmp_path: Path, name: str, content: str, what: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_text(content)
    with pytest.raises(SpecError) as caught:
        load(folder)
    assert caught.value.what.startswith("the data cannot be read: ")
    assert what in caught.value.what
    assert "Error" not in caught.value.what


# --------------------------------------------------------------------------------------------------------------- CSV


def test_a_csv_has_its_columns_in_the_first_line_and_cells_of_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_bytes('\ufeffprompt,answer,level\r\n"Sort, please:\n21",12,easy\r\n\r\nSort: 3,3,hard\r\n'.encode())
    rows = load(path).rows
    assert [(row.prompt, row.answer, row.others) for row in rows] == [
        ("Sort, please:\n21", "12", '{"level": "easy"}'),
        ("Sort: 3", "3", '{"level": "hard"}'),
    ]
    tsv = tmp_path / "train.tsv"
    tsv.write_text("question\tright\nSort: 21\t12\n")
    assert load(tsv, columns=Columns("question", "right")).rows[0].answer == "12"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\nSort: 1,1\nSort: 2\n", "row 2: the row has 1 cells, the first line names 2 columns"),
        ("prompt,prompt\na,b\n", "the column 'prompt' occurs twice"),
        ('prompt,answer\n"Sort: 1,1\n', "the file is not CSV"),
        ("prompt,answer\n", "the prompt file is empty"),
        ("", "the prompt file is empty"),
    ],
)
def test_a_csv_that_is_none_says_where_it_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "train.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        load(path)


def test_one_cause_is_one_message_with_what_to_type(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "train.jsonl", [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(100)])
    with pytest.raises(SpecError) as caught:
        load(path)
    assert caught.value.what.startswith("100 of 100 rows cannot be used: rows 1, 2, 3 and 97 more: no column holds")
    assert caught.value.way_out == "data.prompt_column=question"
    assert len(load(path, columns=Columns("question")).rows) == 100
    with pytest.raises(SpecError, match="rows 1, 2, 3 and 97 more: there is no column 'problem'"):
        load(path, columns=Columns("problem"))
