"""A program cannot make its judge believe that it is right: 77 ways to try, as functions and as programs."""

import json
from collections.abc import Callable, Iterator
from itertools import product

import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rewards.code_executor import grade_program
from rlplan.runtime.rollout.experience import Prompt
from rlplan.runtime.sandbox.choice import BACKENDS
from rlplan.runtime.sandbox.process import _parse_verdict
from rlplan.runtime.sandbox.programs import Limits, Sandbox
from rlplan.spec.parts.rewards import CodeExecutorSpec
from tests.repository.at_night import mark_nightly
from tests.runtime.sandbox.attacks import open_each, read_programs

FORGERIES = read_programs("forgeries.txt")
UNTIL_THE_DEADLINE = ("calls itself without end", "stops the runner")
"""These take all the time that they are given, in each of three forms: in `make test` one will do."""
SPEC = CodeExecutorSpec(kind="code_executor", case_timeout_s=scale_seconds(1.0), timeout_s=scale_seconds(2.0))
RIGHT = 4 * 10**6 + 13
CALLS = json.dumps({"test": f"def check(candidate):\n    assert candidate(7) == {RIGHT}", "entry_point": "f"})
CLOSE = json.dumps([f"assert all(abs(a - b) < 1e-6 for a, b in zip(f(7), [1.5, {RIGHT}.0]))"])
"""A comparison in the form of a call."""
PRINTS = json.dumps({"inputs": ["7\n"], "outputs": [f"{RIGHT}\n"]})


@pytest.fixture(scope="module")
def opens() -> Iterator[Callable[[str], Sandbox]]:
    with open_each(1, Limits()) as opens:
        yield opens


@pytest.fixture(params=BACKENDS)
def sandbox(request: pytest.FixtureRequest, opens: Callable[[str], Sandbox]) -> Sandbox:
    return opens(request.param)


def value(sandbox: Sandbox, source: str, tests: str) -> float:
    prompt = Prompt("1", "Write f.", tests, (1,))
    return grade_program(SPEC, f"```python\n{source}\n```", prompt, sandbox)[0]


def test_the_right_program_passes(sandbox: Sandbox) -> None:
    assert value(sandbox, f"def f(x): return {RIGHT - 7} + x", CALLS) == 1.0
    assert value(sandbox, f"def f(x): return [1.5, {RIGHT - 7.0} + x]", CLOSE) == 1.0
    assert value(sandbox, f"print({RIGHT - 7} + int(input()))", PRINTS) == 1.0


@pytest.mark.parametrize(
    ("sandbox", "name"),
    mark_nightly(
        product(BACKENDS, FORGERIES),
        # The judge is the same in each sandbox, and in the first a program takes a fifth of the second's time.
        but=[*product(["bubblewrap"], FORGERIES), *product(["sandlock"], [*FORGERIES][::8])],
    ),
    indirect=["sandbox"],
)
def test_no_forged_verdict_passes(name: str, sandbox: Sandbox) -> None:
    """Nor does one escape its 0: a sandbox that was seen as broken would be a RewardFailure."""
    assert value(sandbox, FORGERIES[name], CALLS) == 0.0


@pytest.mark.parametrize(
    "sandbox",
    [name if at == 0 else pytest.param(name, marks=pytest.mark.nightly) for at, name in enumerate(BACKENDS)],
    indirect=True,
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if at % 8 or name in UNTIL_THE_DEADLINE else ())
     for at, name in enumerate(FORGERIES)],
)  # fmt: skip
def test_no_forged_verdict_passes_as_a_comparison_or_a_program(name: str, sandbox: Sandbox) -> None:
    """Every eighth, in one of the sandboxes: the runner is the same in both. All of them at night."""
    assert value(sandbox, FORGERIES[name], CLOSE) == 0.0
    assert value(sandbox, FORGERIES[name] + "\nprint(f(7))", PRINTS) == 0.0


def test_there_are_enough_forgeries() -> None:
    assert len(FORGERIES) >= 75


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"ok 0 1\nt",
        b"1" * 32 + b"%016x" % 8 + b"ok 0 1\nt" + b"1" * 32,
        b"0" * 32 + b"%016x" % 8 + b"ok 0 1\nt" + b"1" * 32,
        b"0" * 32 + b"%016x" % 9 + b"ok 0 1\nt" + b"0" * 32,
        b"x" + b"0" * 32 + b"%016x" % 8 + b"ok 0 1\nt" + b"0" * 32,
    ],
)
def test_a_verdict_without_the_nonce_of_its_run_is_none(text: bytes) -> None:
    assert _parse_verdict(text, b"0" * 32) is None
    assert _parse_verdict(b"0" * 32 + b"%016x" % 8 + b"ok 0 1\nt" + b"0" * 32, b"0" * 32) is not None
