"""Assertions taken apart: a call goes in with what the function is given, and nothing else of the row does."""

import ast
import json
import re

import pytest

from rlplan.runtime.rewards.assertions.split import Assertion, Names, split
from rlplan.runtime.rewards.assertions.trees import UnreadableTestsError
from rlplan.runtime.rewards.code_tests import read_tests
from rlplan.runtime.sandbox.programs import CaseResult
from tests.runtime.rewards.assertions.encoding import encode


def assertion(line: str) -> Assertion:
    return split(ast.parse(line, mode="eval").body, Names())


def calls(line: str) -> list[str | None]:
    return [case.call for case in assertion(line).cases]


def holds(line: str, *values: object) -> bool:
    return assertion(line).holds([CaseResult("ok", encode(value)) for value in values])


@pytest.mark.parametrize(
    ("line", "call", "right", "wrong"),
    [
        ("all(abs(a - b) < 1e-6 for a, b in zip(f(3), [1.0, 2.0]))", "[*f(3)]", [1.0, 2], [1.0, 2.1]),
        ("all(abs(a - b) < 1e-6 for a, b in zip(f(3), [1.0, 2.0]))", "[*f(3)]", (1.0, 2.0), []),
        ("all(abs(a - b) < 1e-6 for a, b in zip([1.0, 2.0], f(3)))", "[*f(3)]", [1, 2], [1.0, 2.0, 3.0]),
        ("all(x == y for p, q in zip(f(3), [[1], [2]]) for x, y in zip(p, q))", "[*f(3)]", [[1], [2]], [[], []]),
        ("all(a <= b for a, b in zip(f(3), f(3)[1:]))", "f(3)", [1, 2, 2], [2, 1]),
        ("all(x == [5, 6][i] for i, x in enumerate(f(3)))", "[*f(3)]", [5, 6], [6, 5]),
        ("any(x > 2 for x in f(3))", "[*f(3)]", [1, 3], [1, 2]),
        ("math.isclose(f(3), 0.1, rel_tol=0.5)", "f(3)", 0.15, 0.3),
        ("isclose(f(3), 0.0, abs_tol=1e-3)", "f(3)", 1e-4, float("nan")),
        ("math.fabs(f(3) - 2.0 / 3.0) < 1e-9", "f(3)", 2 / 3, 0.66),
        ("set(f(3)) == set([2, 1])", "[*f(3)]", [1, 2, 1], [1]),
        ("sorted(f(3), reverse=True) == [3, 2]", "[*f(3)]", [2, 3], [2]),
        ("tuple(f(3)) == tuple([1, 2])", "[*f(3)]", [1, 2], [2, 1]),
        ("len(f(3)) == 2 and sum(f(3)) == 3", "f(3)", [1, 2], [3]),
        ("round(f(3), 2) == 0.33", "f(3)", 1 / 3, 0.34),
        ("f(3)[0] == 1 and f(3)['a'] == 2", "f(3)", {0: 1, "a": 2}, [1]),
        ("f(3)[1:] == [2]", "f(3)", [1, 2], [2]),
        ("f(3) == [x * x for x in range(3)]", "f(3)", [0, 1, 4], [0, 1]),
        ("f(3) == {k: v for k, v in [(1, 2)]}", "f(3)", {1: 2}, {}),
        ("f(3) is True", "f(3)", True, 1),
        ("f(3) is not None", "f(3)", 0, None),
        ("f(3) == 1", "f(3)", True, "1"),
        ("f(3) == (1, 2)", "f(3)", (1, 2), [1, 2]),
        ("not f(3)", "f(3)", 0, 1),
        ("f(3) in (4, 5)", "f(3)", 5, 6),
        ("3 not in f(3)", "f(3)", [2], [3]),
        ("1 < f(3) <= 2", "f(3)", 2, 3),
        ("-f(3) == 2 ** 3 - 9 % 5 // 2", "f(3)", -6, 6),
        ("str(f(3)) == '[1, 2]'", "f(3)", [1, 2], "[1,2]"),
        ("f(g(2)) == 4", "f(g(2))", 4, 5),
        ("f([Pair(1, 2)], key=3) == 4", "f([Pair(1, 2)], key=3)", 4, 5),
        ("Solution().f(3) == 4", "Solution().f(3)", 4, 5),
        ("bool(f(3)) == True", "f(3)", [0], []),
        ("max(f(3)) - min(f(3)) == 1", "[*f(3)]", [1, 2], [1]),
        ("[*f(3)] == [1, 2]", "[*f(3)]", [1, 2], [1]),
        ("math.isnan(f(3))", "f(3)", float("nan"), 1.0),
    ],
)
def test_one_call_goes_in_and_what_is_said_of_it_stays(line: str, call: str, right: object, wrong: object) -> None:
    assert calls(line) == [call]
    assert holds(line, right)
    assert not holds(line, wrong)
    assert not assertion(line).holds([CaseResult("error", encode(right))])


def test_several_calls_of_one_assertion_are_cases_of_their_own_and_the_same_call_is_made_once() -> None:
    line = "f(1) == 2 and f(2) == 4 and len(g(f(1))) < 3 and f(1) > 1"
    assert calls(line) == ["f(1)", "f(2)", "g(f(1))"]
    assert holds(line, 2, 4, [1])
    assert not holds(line, 2, 5, [1])
    assert not assertion(line).holds([CaseResult("ok", encode(2)), CaseResult("ok", encode(4)), CaseResult("missing")])
    assert holds("(f(1) + 1, f(2) + 'a', f(3) + [1], f(4)) == (2, 'ba', [1], {})", 1, "b", [], {})
    assert holds("(f(1) + 1, f(2) + 'a', f(3) + [1]) == (2, 'ba', [1])", 1, "b", [])


def test_a_function_under_one_of_python_s_names_is_the_program_s_where_nothing_else_is_called() -> None:
    """MBPP 126. The program has to define it: what Python has under that name is no answer."""
    first, second = read_tests("assert sum(10,15) == 6\nassert sum(100, sum(1, 2)) == 93")
    assert first.cases[0].call == "globals()['sum'](10, 15)"
    assert second.cases[0].call == "globals()['sum'](100, globals()['sum'](1, 2))"
    with pytest.raises(UnreadableTestsError, match="calls nothing of the program's"):
        read_tests("assert sum(f(1), 2) == 6\nassert len([1]) == 1")
    (named,) = read_tests('{"test": "assert sorted(candidate([2, 1])) == 3", "entry_point": "max"}')
    assert named.cases[0].call == "[*globals()['max']([2, 1])]"


def test_the_tested_function_of_a_row_may_be_a_method() -> None:
    (check,) = read_tests(
        '{"test": "def check(candidate):\\n assert candidate(n=3) == 4", "entry_point": "Solution().f"}'
    )
    assert check.cases[0].call == "Solution().f(n=3)"


REFUSED = {
    "all(f(i) == i for i in range(3))": "`f(i)` is called anew for every `i`; write one assertion for each",
    "all(x == 1 for x in map(f, [1]))": "`map(f, [1])` is no literal",
    "all(x(1) for x in f(3))": "`x` would have to be executed first",
    "sorted(f(3), key=lambda x: f(x)) == [1]": "`f(x)` needs `x`",
    "run(lambda: f(3) == 1)": "`f(3)` is called inside of `lambda: f(3) == 1`",
    "g([f(x) for x in (1, 2)]) == 3": "`f(x)` is called inside of",
    "g(f(3) == [1.0]) == 1": "`f(3)` is called inside of `f(3) == [1.0]`",
    "f((x := 3)) == 1": "`(x := 3)` would have to be executed first",
    "close(f(3), [1.0, 2.0])": "says whether that is right",
    "not differs(f(3), [1.0, 2.0])": "says whether that is right",
    "close(f(3), 1.0) is True and f(1) == 2": "says whether that is right",
    "bool(close(f(3), 1.0))": "says whether that is right",
    "f(3) == f(3)": "both sides of a comparison",
    "tuple(f(3)) == tuple(g(3))": "both sides of a comparison",
    "f(3).real.__class__ == 1": "is no literal",
    "''.join(f(3)) == 'a'": "is no literal",
    "f(3) == ().__class__": "is no literal",
    "f(3) == open('/etc/passwd')": "is no literal",
    "f(3) == __import__('os')": "is no literal",
    "f(3) == f'{1}'": "is no literal",
    "f(3) == '%99999d' % 1": "has no value",
    "f(3) == 'a' * 10**9": "has no value",
    "f(3) == 9 ** 9 ** 9": "has no value",
    "f(3) == [0 for x in range(10**9)]": "has no value",
    "f(3) == [1, 2][5]": "has no value",
    "f(3) == 1 << 9": "is no literal",
    "f(3) is 5": "compares by `is`; write ==",
    "abs(f(3)) + 'a' == 1": "fails whatever the program gives",
    "len(f(3), 2) == 1": "is no call of len",
    "all(a == b for a, b in zip(f(3), [1], strict=False))": "write zip without strict",
    "all(len == 1 for len in f(3))": "give it a name of its own",
    "1 == 1": "calls nothing of the program's",
    "f(*xs) == 1": "`f(*xs)` needs `xs`",
    "f(3) == x": "`x` would have to be executed first",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_taken_apart_is_refused_with_what_to_write_instead(line: str) -> None:
    with pytest.raises(UnreadableTestsError, match=re.escape(REFUSED[line])):
        assertion(line)


def test_only_the_tested_function_is_called_where_the_row_says_which_it_is() -> None:
    """Anything else would be a judge that the program brings along."""
    line = "assert same(candidate(3), [1.0])"
    with pytest.raises(UnreadableTestsError, match="is not the tested function, f"):
        read_tests(f'{{"test": "{line}", "entry_point": "f"}}')
    (check,) = read_tests('{"test": "assert candidate(Node(3))", "entry_point": "f"}')
    assert check.cases[0].call == "f(Node(3))"


@pytest.mark.parametrize(
    "source",
    [
        "push(1)\nassert size() == 1",
        "x = f(1)\nassert x == 2",
        "from numpy import isclose\nassert isclose(f(1), 2)",
        "import numpy as math\nassert math.isclose(f(1), 2)",
        "def all(x): return True\nassert all(f(1))",
        "global x\nassert f(1) == 1",
        "with a: pass\nassert f(1) == 1",
    ],
)
def test_tests_with_statements_that_matter_are_refused(source: str) -> None:
    with pytest.raises(UnreadableTestsError, match="would have to be executed"):
        read_tests(source)


def test_statements_that_do_not_matter_are_left_out() -> None:
    body = "  'text'\n  print('x')\n  assert isclose(candidate(1), 2)\ncheck(f)"
    source = f"from math import isclose\nMETADATA = {{}}\ndef check(candidate):\n{body}"
    (check,) = read_tests(json.dumps({"test": source, "entry_point": "f"}))
    assert check.cases[0].call == "f(1)"
