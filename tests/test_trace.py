"""Trace: what is written comes back; a killed run's torn last line is dropped, other damage is refused."""

import json
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.trace import MemorySample, Span, Trace, record_line

SPAN = Span("generate", 1, "rollout_engine/0", "cpu:1", 0.5, 1.25)
SAMPLE = MemorySample("generate", 1, "rollout_engine/0", "cpu:1", "policy", "kv_cache", "resident", 33_554_432, 1.25)


def a_trace() -> Trace:
    return Trace("predicted", [SPAN, Span("generate", 1, "rollout_engine/0", "cpu:1", 2.0, 3.0, attempt=2)], [SAMPLE])


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    a_trace().write(path)
    assert Trace.read(path) == a_trace()


def test_the_first_line_says_what_the_file_is_and_each_record_has_one_line() -> None:
    header, *records = [json.loads(line) for line in a_trace().lines()]
    assert header == {"type": "trace", "schema_version": 1, "origin": "predicted"}
    assert [record["type"] for record in records] == ["span", "span", "memory"]
    assert records[2]["num_bytes"] == 33_554_432


@pytest.mark.parametrize("kept", [1, 20, -2])
def test_a_torn_last_line_is_dropped(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "trace.jsonl"
    lines = list(a_trace().lines())
    path.write_text("\n".join([*lines, record_line(SPAN)[:kept]]))
    assert Trace.read(path) == a_trace()


@pytest.mark.parametrize(
    "damage",
    [
        "not json",
        '{"type": "span"}',
        '{"type": "memory", "action_id": "x"}',
        '{"type": "weather", "sunny": true}',
        '{"no": "type"}',
        "[1, 2]",
        "5",
        '"span"',
        "null",
        record_line(SPAN)[:-1] + ', "colour": "blue"}',
        '{"type": "trace", "schema_version": 2, "origin": "measured"}',
        '{"type": "trace", "schema_version": 1}',
    ],
)
def test_damage_inside_the_file_is_refused_with_file_and_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "trace.jsonl"
    header, *records = a_trace().lines()
    path.write_text("\n".join([header, damage, *records]) + "\n")
    with pytest.raises(SpecError, match=r"not a record [\s\S]*trace\.jsonl, line 2"):
        Trace.read(path)


def test_a_whole_but_wrong_last_line_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*a_trace().lines(), '{"type": "span", "step": 1}']) + "\n")
    with pytest.raises(SpecError, match="line 5"):
        Trace.read(path)


def test_blank_lines_and_an_empty_file_hold_no_records(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n\n")
    assert Trace.read(path) == Trace("measured")
    path.write_text("\n\n".join(a_trace().lines()))
    assert Trace.read(path) == a_trace()
