"""YAML as data: what 1.2 says, the traps of 1.1, and everything that is more than data."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.errors import SpecError
from rlplan.spec.files.yaml import apply_overrides, parse_yaml, read_yaml


def parse(text: str) -> Any:
    return parse_yaml(text, where="job.yaml", what="the job file")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),  # YAML 1.1, as PyYAML reads it: the string '1e-5'
        ("2E3", 2000.0),
        ("3e-4", 3e-4),
        ("no", "no"),  # YAML 1.1: false
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("1:30", "1:30"),  # YAML 1.1: 90
        ("010", 10),  # YAML 1.1: 8
        ("0o10", 8),
        ("80G", "80G"),
        ("64MiB", "64MiB"),
        ("'5'", "5"),
        ("5", 5),
        ("", None),
    ],
)
def test_scalars_are_read_as_yaml_1_2_says(text: str, value: object) -> None:
    read = parse(f"key: {text}")["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "word", "line", "column"),
    [
        ("a: 1\nb: 2\na: 3", "duplicate key", 3, 1),
        ("a:\n  b: 1\n  b: 2", "duplicate key", 3, 3),
        ("\ta: 1", "'\\t'", 1, 1),
        ("a:\t1", "'\\t'", 1, 3),
        ("a: !!python/object/apply:os.system ['true']", "tag", 1, 4),
        ("a: !include other.yaml", "tag", 1, 4),
        ("a: !!str 5", "tag", 1, 4),
        ("a: &many [1, 2]\nb: *many", "anchor", 1, 4),
        ("b: *many", "alias", 1, 4),
        ("a: 1\n---\nb: 2", "another document", 2, 1),
        ("a: [1, 2", "expected ','", 1, 9),
        ("a: 'open", "end of stream", 1, 9),
        ("a: b: c", "mapping values", 1, 5),
        ("{a: 1}: 2", "as a key", 1, 1),
        ("[[a]]: 2", "as a key", 1, 1),
        ("[" * 5000, "depth", 1, 33),
        ("- " * 5000, "depth", 1, 65),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_line_and_column(text: str, word: str, line: int, column: int) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert word in caught.value.what
    assert caught.value.what.startswith("the job file is not YAML: ")
    assert caught.value.where == f"job.yaml, line {line}, column {column}"
    assert caught.value.rule == "YAML 1.2 without tags, aliases, tabs, duplicate keys, or lists and mappings as keys"


@pytest.mark.parametrize("text", ["a: \x01", "a: 2026-99-99", "a: " + "9" * 5000], ids=["control", "date", "digits"])
def test_scalars_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="the job file is not YAML"):
        parse(text)


def test_a_few_aliases_cannot_stand_for_gigabytes() -> None:
    lines = ["a0: &a0 [lol, lol]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]
    with pytest.raises(SpecError, match="anchor"):
        parse("\n".join(lines))


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm() -> None:
    assert parse("\ufeffa: 1\r\nb:\r\n  - x\r\n") == {"a": 1, "b": ["x"]}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["a.b=2"], {"a": {"b": 2, "c": [1]}, "d": "x"}),
        (["a.c=[2, 3]", "d=no"], {"a": {"b": 1, "c": [2, 3]}, "d": "no"}),
        (["e.f.g=1e-3"], {"a": {"b": 1, "c": [1]}, "d": "x", "e": {"f": {"g": 0.001}}}),
        (["a.b=5", "a.b=6"], {"a": {"b": 6, "c": [1]}, "d": "x"}),
        (["d="], {"a": {"b": 1, "c": [1]}, "d": None}),
        (["d=a=b"], {"a": {"b": 1, "c": [1]}, "d": "a=b"}),
        (["a={b: 7}"], {"a": {"b": 7}, "d": "x"}),
    ],
)
def test_overrides_are_laid_over_the_job_from_left_to_right(overrides: list[str], expected: dict[str, Any]) -> None:
    data = {"a": {"b": 1, "c": [1]}, "d": "x"}
    assert apply_overrides(data, overrides) == expected
    assert data == {"a": {"b": 1, "c": [1]}, "d": "x"}


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("workload.num_steps", "is not KEY=VALUE"),
        ("=5", "is not KEY=VALUE"),
        ("a..b=5", "is not KEY=VALUE"),
        (".a=5", "is not KEY=VALUE"),
        ("rewards.0.weight=2", "leads through ['x'], which has no keys"),
        ("seed.a=1", "leads through 3, which has no keys"),
        ("seed=[1", "the override's value is not YAML"),
        ("seed=!!int 5", "the override's value is not YAML"),
    ],
)
def test_a_malformed_override_is_refused(override: str, word: str) -> None:
    with pytest.raises(SpecError) as caught:
        apply_overrides({"seed": 3, "rewards": ["x"]}, [override])
    assert word in caught.value.what
    assert "command line" in caught.value.where


def test_an_override_of_an_empty_file_is_refused() -> None:
    with pytest.raises(SpecError, match="leads through None"):
        apply_overrides(None, ["seed=1"])


def test_a_file_is_read_with_its_path_in_the_message(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("a: 1\na: 2\n")
    with pytest.raises(SpecError) as caught:
        read_yaml(path, "the job file")
    assert caught.value.where == f"{path}, line 2, column 1"


@given(st.text(max_size=200))
def test_no_text_makes_the_reader_fall_over(text: str) -> None:
    with contextlib.suppress(SpecError):
        parse(text)
