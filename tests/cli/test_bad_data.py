"""Bad data and bad rewards, by the command line: each bad row is listed, exit code 2, and nothing has been started."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Answer, Call
from tests.cli.test_bad_input import check
from tests.factories import QUICKSTART
from tests.repository.at_night import mark_nightly

GOOD = {"id": "a", "prompt": "Sort: 21", "answer": "12"}
PAIR = {"id": "a", "prompt": "Sort: 21", "chosen": "12", "rejected": "21"}
DPO = QUICKSTART.parent / "algorithms" / "dpo.yaml"


def lines(*rows: Any) -> bytes:
    return b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)


HELDOUT = ("heldout", "several")
BAD: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "a missing column": (lines(GOOD, {"id": "b", "prompt": "x"}), ("1 of 2 rows", "row 2: no answer")),
    "a null prompt": (lines(GOOD, {"id": "b", "prompt": None, "answer": "1"}), ("row 2: prompt is null",)),
    "invalid UTF-8": (lines(GOOD, b'{"prompt": "caf\xe9"}\n'), ("row 2: the line is not UTF-8",)),
    "duplicate ids": (lines(GOOD, GOOD), ("row 2: id 'a' is also the id of row 1",)),
    "an empty file": (b"", ("the prompt file is empty",)),
    "several": (lines(5, {"prompt": ""}, GOOD, GOOD), ("3 of 4 rows", "row 1: ", "row 2: ", "row 4: ")),
    "too long": (lines({**GOOD, "prompt": "Sort: " + "1" * 50}), ("has 51 tokens, the limit is 8",)),
}


def run(rlplan: Call, tmp_path: Path, *arguments: str | Path) -> Answer:
    answer = rlplan("run", *arguments, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []
    return answer


@pytest.mark.parametrize(
    ("key", "name"),
    mark_nightly(product(("prompts", "heldout"), BAD), but=[("prompts", "several"), ("prompts", "too long"), HELDOUT]),
)
def test_bad_rows_are_listed(rlplan: Call, tmp_path: Path, name: str, key: str) -> None:
    content, words = BAD[name]
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    check(run(rlplan, tmp_path, QUICKSTART, f"data.{key}={path}"), 2, str(path), *words)


def test_wrong_pairs_are_listed(rlplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(lines(PAIR, {**PAIR, "id": "b", "rejected": "12"}, {"id": "c", "prompt": "x", "chosen": "y"}))
    words = ("2 of 3 rows", "row 2: chosen and rejected are the same", "row 3: rejected is null")
    check(run(rlplan, tmp_path, DPO, f"data.prompts={path}"), 2, *words)


def test_tests_that_cannot_be_read_are_bad_rows(rlplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "programs.jsonl"
    path.write_bytes(lines({**GOOD, "answer": "assert f(1) == g(2)"}))
    job = QUICKSTART.parent / "rewards" / "code-executor.yaml"
    check(run(rlplan, tmp_path, job, f"data.prompts={path}"), 2, "row 1: its tests: ", "both sides of a comparison")


def test_tests_that_cannot_be_taken_apart_are_said_with_the_rule_and_what_to_write_instead(
    rlplan: Call, tmp_path: Path
) -> None:
    path = tmp_path / "programs.jsonl"
    free = "assert all(abs(f(i) - i) < 0.1 for i in range(3))"
    path.write_bytes(lines({**GOOD, "answer": "assert f(1) == 1"}, {**GOOD, "id": "b", "answer": free}))
    job = QUICKSTART.parent / "rewards" / "code-executor.yaml"
    words = ("1 of 2 rows", "row 2: its tests: `f(i)` is called anew for every `i`", "write one assertion for each")
    rule = "tests must be splittable into calls of the program"
    check(run(rlplan, tmp_path, job, f"data.prompts={path}"), 2, *words, rule)


@pytest.mark.parametrize(
    ("source", "words", "times"),
    mark_nightly(
        [
            ("def f(question, reply): return 1.0", ("it takes (question, reply), which is neither",), 1),
            ("def g(completions, **rest): return [1.0]", ("has no function f",), 1),
            ("import nothing_of_this_name", ("ModuleNotFoundError",), 1),
            ("def f(:", ("SyntaxError",), 2),
        ],
        but=2,
    ),
)
def test_a_reward_function_that_cannot_work_is_one_message(
    rlplan: Call, tmp_path: Path, source: str, words: tuple[str, ...], times: int
) -> None:
    (tmp_path / "own.py").write_text(source)
    reward = f"rewards=[{{kind: function, path: '{tmp_path / 'own.py'}:f'}}]"
    for _ in range(times):  # nothing was written, so the same folder can be named again
        check(rlplan("run", QUICKSTART, reward, "--out", tmp_path / "run"), 2, "the reward function cannot", *words)
        assert not (tmp_path / "run").exists()


def test_lengths_of_a_run_reach_the_plan(rlplan: Call, tmp_path: Path) -> None:
    histogram = {"kind": "histogram", "edges": [2, 4, 6], "counts": [1, 3]}
    (tmp_path / "lengths.json").write_text(json.dumps({"mean_response_len": 4, "response_lengths": histogram}))
    (tmp_path / "data.json").write_text(json.dumps({"prompt_len": {"mean": 5.5, "max": 6}}))
    usual = json.loads(rlplan("plan", QUICKSTART, "--json").out)
    answer = rlplan("plan", QUICKSTART, "--lengths", tmp_path, "--json")
    assert (answer.exit_code, answer.err) == (0, "")
    workload = json.loads(answer.out)["job"]["workload"]
    assert (workload["mean_prompt_len"], workload["mean_response_len"]) == (6, 4)
    assert workload["response_lengths"] == histogram
    assert usual["job"]["workload"]["response_lengths"] != histogram
    check(rlplan("plan", QUICKSTART, "--lengths", tmp_path / "nowhere"), 2, "holds no lengths")
