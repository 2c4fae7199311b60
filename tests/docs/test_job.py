"""docs/job.md: every key with its default and its limits, and a minimal job that is one."""

import json
import re
import types
import typing
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import annotated_types
import pytest
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from rlplan.errors import SpecError
from rlplan.planner.executable import list_missing
from rlplan.planner.search import find_plan
from rlplan.runtime.data.layouts import Columns, detect_layout, read_row
from rlplan.runtime.rewards.assertions.functions import FUNCTIONS
from rlplan.spec.files.job_file import load_job
from rlplan.spec.files.yaml import parse_yaml
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.rewards import AnswerMatcherSpec, CodeExecutorSpec, FormatCheckerSpec, FunctionSpec
from tests.docs.documentation import ALL_KEYS, DOCS, EXAMPLES, list_keys, read, rows, section, words

JOB_PAGE = read(DOCS / "job.md")
REWARDS = {
    "answer_matcher": AnswerMatcherSpec,
    "format_checker": FormatCheckerSpec,
    "code_executor": CodeExecutorSpec,
    "function": FunctionSpec,
}


def key_rows(text: str) -> dict[str, list[str]]:
    """Rows of a table of keys: key, type with limits, default, meaning. A table has type and default in one cell."""
    split = [(row, re.fullmatch(r"(.*) \((required|`.+`)\)", row[1])) for row in rows(text) if len(row) == 3]
    return {words(row[0])[0]: [row[0], cell[1], cell[2], row[2]] for row, cell in split if cell}


EVERY_REWARD = key_rows(section(JOB_PAGE, "rewards").partition("#### kind:")[0])
"""Keys that all kinds of rewards have."""
FIELDS = [
    pytest.param(row, field, id=f"{name} {key}".strip())
    for name, heading, kind, prefix in (
        ("", "Keys", JobSpec, ""),
        *((name, f"kind: {name}", kind, "rewards[].") for name, kind in REWARDS.items()),
    )
    for key, field in list_keys(kind, prefix).items()
    for row in [(EVERY_REWARD | key_rows(section(JOB_PAGE, heading))).get(key, [])]
]


def test_every_key_of_a_job_is_documented_and_every_documented_key_exists() -> None:
    documented = {key for key in key_rows(section(JOB_PAGE, "Keys")) if not key.startswith("rewards[]")}
    assert documented == ALL_KEYS
    for name, kind in REWARDS.items():
        own = set(key_rows(section(JOB_PAGE, f"kind: {name}")))
        assert own == set(list_keys(kind, "rewards[].")) - set(EVERY_REWARD)


@pytest.mark.parametrize(("row", "field"), FIELDS)
def test_a_documented_default_is_the_default(row: list[str], field: FieldInfo) -> None:
    if field.is_required():
        assert row[2] == "required"
    else:
        text = words(row[2])[0]
        value = text if field.annotation is str else parse_yaml(text, where="docs/job.md", what="a default")
        kind: Any = typing.Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        assert TypeAdapter(kind).validate_python(value) == field.default


@pytest.mark.parametrize(("row", "field"), FIELDS)
def test_documented_limits_are_the_limits(row: list[str], field: FieldInfo) -> None:
    documented = set(words(row[1]))
    limits = {word for word in documented if comparisons(word)}
    assert {limit for word in limits for limit in comparisons(word)} == set(bounds(field))
    assert allowed_values(field.annotation) <= documented - limits


def comparisons(word: str) -> list[tuple[str, float]]:
    """The comparisons of a limit: `>=1`, `<2^31`, or `1..8` with both ends."""
    ends = re.fullmatch(r"(-?[\d.^]+?)\.\.([\d.^]+)", word)
    signed = [(">=", ends[1]), ("<=", ends[2])] if ends else re.findall(r"^([<>]=?)([\d.^]+)$", word)
    return [(sign, number(text)) for sign, text in signed]


def number(text: str) -> float:
    base, _, exponent = text.partition("^")
    return float(base) ** float(exponent or 1)


def bounds(field: FieldInfo) -> Iterator[tuple[str, float]]:
    for mark in field.metadata:
        for kind, name, sign in (
            (annotated_types.Ge, "ge", ">="),
            (annotated_types.Gt, "gt", ">"),
            (annotated_types.Le, "le", "<="),
            (annotated_types.Lt, "lt", "<"),
        ):
            if isinstance(mark, kind):
                yield sign, float(getattr(mark, name))


def allowed_values(annotation: Any) -> set[str]:
    """The values of a Literal or an enum as they are typed."""
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return {word.value for word in annotation}
    if typing.get_origin(annotation) is typing.Literal:
        return {str(value) for value in typing.get_args(annotation)}
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return set().union(*map(allowed_values, typing.get_args(annotation)))
    return set()


def test_every_key_of_a_prompt_row_is_documented() -> None:
    documented = {words(row[0])[0] for row in rows(section(JOB_PAGE, "Prompt files")) if words(row[0])}
    assert documented == {"id", "prompt", "answer", "chosen", "rejected"}
    line = re.search(r"```json\n(.*)\n```", section(JOB_PAGE, "Prompt files"))
    assert line
    row = json.loads(line.group(1))
    assert detect_layout(set(row), Columns()) == "rlplan"
    assert read_row("rlplan", 1, row, Columns(), answer_kind="").id == "train-0000"


def minimal_job() -> dict[str, Any]:
    block = re.search(r"```yaml\n(.*?)```", section(JOB_PAGE, "A complete minimal job"), re.DOTALL)
    assert block
    data: dict[str, Any] = parse_yaml(block.group(1), where="docs/job.md", what="the minimal job")
    return data


def test_the_minimal_job_can_be_planned(tmp_path: Path) -> None:
    for folder in ("models", "data"):
        (tmp_path / folder).symlink_to(EXAMPLES / folder)
    (tmp_path / "minimal.yaml").write_text(json.dumps(minimal_job()))
    assert find_plan(load_job(tmp_path / "minimal.yaml")).job.name == "minimal"


def test_the_minimal_job_is_minimal(tmp_path: Path) -> None:
    def remove_key(data: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        first, *rest = path
        if rest:
            return {**data, first: remove_key(data[first], tuple(rest))}
        return {name: value for name, value in data.items() if name != first}

    job = minimal_job()
    for folder in ("models", "data"):
        (tmp_path / folder).symlink_to(EXAMPLES / folder)
    file = tmp_path / "job.yaml"
    for path in ((name,) for name in ("policy", "hardware")):
        file.write_text(json.dumps(remove_key(job, path)))
        with pytest.raises(SpecError, match="missing"):
            load_job(file)
    for path in ((name,) for name in ("data", "rewards")):
        file.write_text(json.dumps(remove_key(job, path)))
        assert list(list_missing(load_job(file))), "what a run needs, and a plan does not"


def test_the_functions_that_assertions_may_use_are_listed() -> None:
    (bullet,) = re.findall(r"^- (`abs`.*?)\.$", section(JOB_PAGE, "Tests of programs"), re.MULTILINE | re.DOTALL)
    assert words(bullet) == sorted(FUNCTIONS)
