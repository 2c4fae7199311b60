"""Files and validation: every way in which a small file cannot be read, and how a failure is worded."""

import errno
import json
import os
from pathlib import Path
from typing import Any, Literal

import pytest

from rlplan.errors import RunError, SpecError
from rlplan.reading import MAX_SPEC_BYTES, read_text
from rlplan.spec.base import ByteCount, Spec, explain_write_errors, read_json, shorten_value, validate
from rlplan.spec.resolved import ResolvedJob


class Inner(Spec):
    size: ByteCount = 1
    mode: Literal["fast", "slow"] = "fast"


class Outer(Spec):
    count: int
    ratio: float = 0.5
    is_on: bool = False
    name: str = "x"
    inner: Inner = Inner()
    items: tuple[Inner, ...] = ()


def refuse(data: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        validate(Outer, data, file="outer.yaml")
    return caught.value


def test_what_is_right_is_read_with_its_types() -> None:
    data = {"count": 3, "ratio": 1, "is_on": True, "inner": {"size": "2KiB"}, "items": [{"mode": "slow"}]}
    outer = validate(Outer, data, file="outer.yaml")
    assert outer == Outer(count=3, ratio=1.0, is_on=True, inner=Inner(size=2048), items=(Inner(mode="slow"),))


@pytest.mark.parametrize(
    "data",
    [
        {"count": "3"},
        {"count": True},
        {"count": 3.0},
        {"count": None},
        {"count": [3]},
        {"count": 3, "ratio": "0.5"},
        {"count": 3, "ratio": True},
        {"count": 3, "ratio": float("nan")},
        {"count": 3, "ratio": float("inf")},
        {"count": 3, "is_on": 1},
        {"count": 3, "is_on": "no"},
        {"count": 3, "name": 5},
        {"count": 3, "inner": [1]},
        {"count": 3, "items": {"mode": "slow"}},
        {"count": 3, "items": "slow"},
        {"count": 3, "inner": {"size": 1.5}},
    ],
    ids=json.dumps,
)
def test_types_are_strict(data: dict[str, Any]) -> None:
    error = refuse(data)
    key = next((key for key in data if key != "count"), "count")
    assert error.where.startswith(f"outer.yaml: {key}")
    assert error.rule
    assert error.way_out


@pytest.mark.parametrize("data", [None, 5, "text", [1], ["count"], True])
def test_the_top_level_is_a_mapping(data: Any) -> None:
    error = refuse(data)
    assert ("empty" if data is None else type(data).__name__) in error.what
    assert "count, ratio, is_on" in error.rule


def test_the_key_path_leads_through_lists() -> None:
    error = refuse({"count": 1, "items": [{}, {"mode": "fst"}]})
    assert error.where == "outer.yaml: items.1.mode"
    assert error.what == "items.1.mode is 'fst'"
    assert error.rule == "Input should be 'fast' or 'slow'. Did you mean 'fast'?"


def test_an_unknown_key_gets_the_keys_that_stand_beside_it() -> None:
    error = refuse({"count": 1, "inner": {"sise": 3}})
    assert error.what == "unknown key 'sise'"
    assert error.where == "outer.yaml: inner.sise"
    assert error.rule == "allowed here: mode, size. Did you mean 'size'?"


def test_several_mistakes_are_counted_and_named() -> None:
    error = refuse({"cont": 1, "inner": {"mode": "x"}, "name": 3})
    assert error.what == "unknown key 'cont' (and 3 more: count, name, inner.mode)"
    assert error.way_out == "write count=1"


@pytest.mark.parametrize("key", [("a",), 1, None, 2.5])
def test_keys_that_are_not_strings_are_refused(key: object) -> None:
    assert refuse({"count": 1, key: 2}).exit_code == 2


def test_a_large_value_is_not_printed_whole() -> None:
    assert len(str(refuse({"count": "9" * 100_000}))) < 400
    assert len(str(refuse({"count": [[0] * 1000] * 1000}))) < 400
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    assert len(shorten_value(deep)) < 80


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin1.yaml").write_bytes("näme: x".encode("latin-1"))
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_SPEC_BYTES + 1))
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    (tmp_path / "dangling.yaml").symlink_to(tmp_path / "nowhere.yaml")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("absent.yaml", "is missing"),
        ("dangling.yaml", "is missing"),
        ("folder", "cannot be read: Is a directory"),
        ("latin1.yaml/x", "cannot be read: Not a directory"),
        ("latin1.yaml", "is not UTF-8 text"),
        ("large.yaml", "has more than 1048576 bytes"),
        ("loop.yaml", "cannot be read: Too many levels of symbolic links"),
        ("n" * 5000, "cannot be read: File name too long"),
        ("nul\0byte", "cannot be read: embedded null byte"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(folder: Path, name: str, word: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_text(folder / name, "the job file")
    assert caught.value.what == f"the job file {word}"
    assert caught.value.where.startswith(str(folder / name)[:100])
    assert caught.value.rule
    assert caught.value.way_out


@pytest.mark.parametrize(
    "text",
    ["", "{", "{'a': 1}", "NaN", '{"a": Infinity}', "\ufeff{}", "[" * 100_000, "1" * 5000, '{"a": 1} x'],
    ids=["empty", "open", "quotes", "nan", "infinity", "bom", "deep", "digits", "more"],
)
def test_what_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match="it is not JSON") as caught:
        read_json(path, "it")
    assert caught.value.where == str(path)
    assert len(str(caught.value)) < 500


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(SpecError) as caught, explain_write_errors(file / "plan.json"):
        (file / "sub").mkdir()
    assert caught.value.what == f"{file / 'plan.json'} cannot be written: Not a directory"
    assert caught.value.where == str(file / "sub")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_fault_of_what_was_asked_for(number: int) -> None:
    with (
        pytest.raises(RunError, match=r"plan.json cannot be written: .*(space|quota)"),
        explain_write_errors(Path("plan.json")),
    ):
        raise OSError(number, os.strerror(number))


def list_specs() -> list[type[Spec]]:
    specs = [Spec]
    for each in specs:
        specs += each.__subclasses__()
    assert ResolvedJob in specs
    return [each for each in specs if not any(field.is_required() for field in each.model_fields.values())]


@pytest.mark.parametrize("kind", [each for each in list_specs() if each.__module__.startswith("rlplan.")])
def test_what_is_made_by_default_is_what_the_validator_makes(kind: type[Spec]) -> None:
    default, validated = kind.create_default(), kind()
    assert default == validated
    assert default.model_fields_set == validated.model_fields_set == set()
    assert default.model_dump(mode="json") == validated.model_dump(mode="json")
    assert kind.model_validate(validated.model_dump()) == default
