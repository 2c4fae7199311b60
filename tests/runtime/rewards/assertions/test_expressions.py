"""Expressions over values that a program has made up: as Python has them, and never at a cost without bound."""

import ast
import contextlib
import math
import time
from typing import Any

import pytest

from rlplan.runtime.rewards.assertions.expressions import FAULTS, evaluate, read_expression
from rlplan.runtime.rewards.assertions.functions import FUNCTIONS
from rlplan.units import MIB
from tests.repository.at_night import mark_nightly

NAN = float("nan")


def evaluate_text(line: str, value: object = None) -> Any:
    return evaluate(read_expression(ast.parse(line, mode="eval").body, frozenset({"v"})), {"v": value})


@pytest.mark.parametrize(
    "line",
    [
        "v + v == v * 2", "v - 1", "v / 2 // 1", "7 % v", "v ** 2", "-v", "+v", "not v", "v and 0 or 5", "0 or v",
        "v < 4 > v != 9 == 9", "v is None", "v in [v]", "v not in {3: 1}", "[v, 1][0]", "[1, 2][:v:2]", "[*range(v)]",
        "{v: 1, 2: v}", "{v, 1}", "(v, (v,))", "[x + y for x in range(v) for y in range(x) if y % 2 if x]",
        "{x: y for x, (y, _) in enumerate([(v, 1)], 5)}", "{x % 2 for x in range(v)}", "sum(x for x in range(v))",
        "all(x for x in range(v))", "any(x for x in range(v))", "abs(-v)", "len([] * v)", "round(v / 7, 2)", "round(v)",
        "sorted([v, 1, 2], reverse=True)", "min(v, 1)", "max([v, 9])", "list(zip([v], 'a'))", "list(reversed([v, 1]))",
        "str([v, 'a', None])", "int('12') + int(v / 2)", "float('1e3') + v", "bool(v)", "dict([(v, 1)])", "dict(a=v)",
        "set('aab') | {'c'} - {'a'} ^ set()", "frozenset([v])", "tuple(range(v))", "[1] + [v]", "'a' + 'b'", "b'' * v",
        "math.sqrt(v)", "math.floor(v / 2) + math.ceil(v / 2)", "math.isclose(v, 3.1, rel_tol=0.1)", "isclose(v, 3.1)",
        "math.fabs(-v)", "math.isnan(v)", "math.isinf(v)", "math.isclose(v, 3.1, abs_tol=1)", "5 + 2j * v", "[[]] * v",
        "[y for y in [x for x in range(v)] if [x for x in range(y)]]",
    ],
)  # fmt: skip
def test_what_is_evaluated_is_what_python_gives(line: str) -> None:
    names = {"v": 3, "math": math, "isclose": math.isclose}
    right = eval(line, names)
    assert evaluate_text(line, 3) == right
    assert type(evaluate_text(line, 3)) is type(right)


def test_values_keep_python_s_ways() -> None:
    assert evaluate_text("v == 1", True) is True
    assert evaluate_text("v is True", 1) is False
    assert evaluate_text("v == v", NAN) is False
    assert evaluate_text("v == [1, 2]", (1, 2)) is False
    assert evaluate_text("v == {1, 2}", [1, 2]) is False
    assert evaluate_text("v == 1.0", 1) is True
    assert evaluate_text("len(set(v)) == 1", [7] * 1000) is True


@pytest.mark.parametrize(
    "line",
    [
        "list(zip(v, [1, 2]))",
        "list(zip([1, 2], v))",
        "all(a == b for a, b in zip(v, (1, 2)))",
        "list(zip(v, range(2)))",
    ],
)
@pytest.mark.parametrize("value", [[], [1], [1, 2, 3], {}, "", "abc", set()])
def test_a_zip_of_different_lengths_never_holds(line: str, value: object) -> None:
    with pytest.raises(ValueError, match="different lengths"):
        evaluate_text(line, value)


def test_a_zip_of_a_value_with_a_part_of_itself_is_python_s_own() -> None:
    assert evaluate_text("list(zip(v, v[1:], v[2:]))", [1, 2, 3, 4]) == [(1, 2, 3), (2, 3, 4)]
    with pytest.raises(ValueError, match="different lengths"):
        evaluate_text("list(zip(v, v[1:], [1]))", [1, 2, 3, 4])


HUNGRY: dict[str, tuple[Any, tuple[str, ...]]] = {
    "truths": ([True] * 1_000_000, ("set(v) == {1}", "max(v) == 1", "dict(v) == {}", "list(enumerate(v)) == 3")),
    "integers": (
        [7] * 200_000,
        ("[x == v for x in v] == 1", "len([x * y for x in v for y in v]) == 3", "all(x in v for x in range(9**6))"),
    ),
    "integers that are long": (
        [(1 << 60_000) + k for k in range(64)],
        ("len([x // 7 for x in v for y in range(1000)]) == 3", "len([x * x for x in v for y in range(999)]) == 3"),
    ),
    "one huge integer": (
        1 << 4_000_000,
        ("v * v == 5", "v ** v == 4", "round(v, -9) == 1", "[v] * v == 1", "str(v) == 1"),
    ),
    "one integer": (10**9, ("'a' * v == 1", "9 ** v == 1", "list(range(v)) == 1", "round(1, v) == 1", "[0] * v == 1")),
    "a numeral": ("1" * MIB, ("int(v) == 4", "float(v) == 4", "v * 9999 == 1", "sorted(v) == 1")),
    "keys that collide": ([k * (2**61 - 1) for k in range(40_000)], ("set(v) == 1", "{x: 1 for x in v} == 1")),
    "lists that are alike": (
        [[0] * 1000 for _ in range(190)],
        ("[x == y for x in v for y in v] == 1", "sorted(v * 99) == 1"),
    ),
}
"""Values of the size that a program can give back at most, a mebibyte encoded, and what takes long over them."""


@pytest.mark.parametrize(
    "name", mark_nightly(HUNGRY, but=("integers", "one huge integer", "keys that collide", "lists that are alike"))
)
def test_no_value_keeps_the_driver_busy(name: str) -> None:
    value, lines = HUNGRY[name]
    for line in lines:
        begun = time.thread_time()
        with contextlib.suppress(FAULTS):
            evaluate_text(line, value)
        assert time.thread_time() - begun < 4, line


def test_there_is_no_way_out_of_plain_values() -> None:
    """None of the functions takes a name, a function or a text that would be executed, or gives a type away."""
    assert not {"eval", "exec", "getattr", "type", "open", "compile", "map", "vars", "iter", "print"} & FUNCTIONS.keys()
