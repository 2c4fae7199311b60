"""Tests of programs: what goes into the sandbox holds nothing of what is right."""

import json

import pytest

from rlplan.runtime.rewards.assertions.trees import UnreadableTestsError
from rlplan.runtime.rewards.code_tests import Pair, read_tests
from rlplan.runtime.sandbox.programs import Case, CaseResult


def ok(*outputs: bytes) -> tuple[CaseResult, ...]:
    return tuple(CaseResult("ok", output) for output in outputs)


def test_inputs_and_outputs_are_programs_that_read_and_print() -> None:
    (check,) = read_tests(json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}))
    assert check.cases == (Case(stdin=b"1 2\n"),)
    assert check.holds(ok(b"3  \n\n"))
    assert not check.holds(ok(b"3 4\n"))
    assert not check.holds((CaseResult("timeout", b"3\n"),))


def test_inputs_with_a_function_s_name_are_calls() -> None:
    first, second = read_tests(json.dumps({"inputs": ["[1, 2]\n3", [[1], 2]], "outputs": ["true", 5], "fn_name": "g"}))
    assert first.cases[0].call == "(Solution().g if 'Solution' in globals() else g)([1, 2], 3)"
    assert isinstance(first, Pair)
    assert isinstance(second, Pair)
    assert (first.right, second.right) == (True, 5)
    assert second.holds(ok(b"i0x5;"))


@pytest.mark.parametrize(
    ("line", "call", "right", "wrong"),
    [
        ("assert f(1) == [1, (2, None)]", "f(1)", b"l2;i0x1;u2;i0x2;n", b"l1;i0x1;"),
        ("assert f(1) == [1]", "f(1)", b"l1;i0x1;", b"u1;i0x1;"),
        ("assert f(1) is True", "f(1)", b"t", b"i0x1;"),
        ("assert f(1) == 1", "f(1)", b"t", b"s1:1"),
        ("assert f(1) < 3", "f(1)", b"i0x2;", b"i0x3;"),
        ("assert 'a' == f('b')", "f('b')", b"s1:a", b"b1:a"),
        ("assert f()", "f()", b"t", b"n"),
        ("assert not f()", "f()", b"l0;", b"t"),
        ("assert f() is None", "f()", b"n", b"f"),
        ("assert abs(f(2) - 0.5) < 1e-3", "f(2)", b"d0x1.0p-1;", b"s3:0.5"),
        ("assert math.isclose(f(2), 2, rel_tol=0.1)", "f(2)", b"d0x1.1p+1;", b"i0x3;"),
    ],
)
def test_assertions_are_taken_apart(line: str, call: str, right: bytes, wrong: bytes) -> None:
    (check,) = read_tests(json.dumps([line]))
    assert [case.call for case in check.cases] == [call]
    assert check.holds(ok(right))
    assert not check.holds(ok(wrong))
    assert not check.holds(ok(b"l9999;"))
    assert not check.holds(ok(b""))


def test_a_human_eval_test_names_its_function() -> None:
    test = "METADATA = {}\ndef check(candidate):\n    assert candidate([1]) == 1\n    assert candidate([]) == 0\n"
    checks = read_tests(json.dumps({"test": test, "entry_point": "count"}))
    assert [case.call for check in checks for case in check.cases] == ["count([1])", "count([])"]


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("assert f([Pair(5, 24)], 4) == 3", "f([Pair(5, 24)], 4)"),
        ("assert f([x * 2 for x in range(3)]) == 6", "f([x * 2 for x in range(3)])"),
        ("assert f(lambda x: x + 1) == 6", "f(lambda x: x + 1)"),
        ("assert Solution().f(int('3')) == 6", "Solution().f(int('3'))"),
        ("assert True, 'for debugging'\nassert f(1) == 1", "f(1)"),
        ("import math\nassert math.isclose(f(1), 1.5)", "f(1)"),
    ],
)
def test_calls_may_name_what_is_python_s_or_the_program_s(line: str, call: str) -> None:
    (check,) = read_tests(line)
    assert [case.call for case in check.cases] == [call]


@pytest.mark.parametrize(
    "answer",
    [
        "", "12", "{}", "[1]", '{"inputs": ["1"], "outputs": []}', '{"inputs": [1], "outputs": [2]}', "assert f(",
        "assert f(1) == g(2)", "assert sorted(x) == x", "assert __import__('os') == 1 == 2",
        "for i in range(3): assert f(i) == 1", "if False: assert f(1) == 2", "import math\nassert f(math.pi) == 3",
        "root = Node(1)\nassert f(root) == 3", "assert max_height(root) == 3", "def g(): return 1\nassert f(g()) == 1",
        "def check(f):\n    def inner():\n        assert f(1) == 1\n", "assert True",
        'assert math.isclose(f(1), 2, rel_tol="x")', "assert math.isclose(f(1), 2, **{'a': 1})", "assert abs() < 1",
        'assert math.isclose(f(1), "a")', 'assert abs(f(1) - "a") < 1', 'assert abs(f(1) - 2) < "x"',
        "assert abs(f(1) - 2) < None", "assert abs(f(1) - 1e999) < 1", f"assert g(0x{'f' * 5000})",
        json.dumps({"inputs": ["\ud800"], "outputs": ["1"]}),
        json.dumps({"fn_name": "f", "inputs": ["[" * 100_000], "outputs": ["1"]}),
        '{"inputs": [], "outputs": []}', '{"inputs": ["x"], "outputs": ["1"], "fn_name": "g"}', "[" * 10_000,
    ],
)  # fmt: skip
def test_other_tests_are_an_error_of_the_row(answer: str) -> None:
    with pytest.raises(UnreadableTestsError):
        read_tests(answer)
