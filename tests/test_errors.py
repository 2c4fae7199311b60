"""Errors: the four parts, the exit codes, and the way across a process boundary."""

import pickle

import pytest

from rlplan.errors import (
    EXIT_BUG,
    EmitError,
    HostError,
    InterruptedRunError,
    NoFeasiblePlanError,
    RlplanError,
    RunError,
    SpecError,
    did_you_mean,
)

EXIT_CODES = {
    NoFeasiblePlanError: 1,
    SpecError: 2,
    EmitError: 3,
    HostError: 4,
    RunError: 5,
    InterruptedRunError: 130,
    RlplanError: EXIT_BUG,
}


@pytest.mark.parametrize(("kind", "code"), EXIT_CODES.items())
def test_each_kind_of_error_has_the_exit_code_of_the_design(kind: type[RlplanError], code: int) -> None:
    assert kind("it went wrong").exit_code == code


def test_every_error_of_the_tree_has_an_exit_code_of_its_own() -> None:
    assert set(RlplanError.__subclasses__()) == set(EXIT_CODES) - {RlplanError}
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)


def test_a_message_shows_its_four_parts_in_order() -> None:
    error = SpecError("seed is -1", where="job.yaml: seed", rule="at least 0", way_out="change the value")
    assert str(error).splitlines() == [
        "seed is -1",
        "  where: job.yaml: seed",
        "  rule: at least 0",
        "  way out: change the value",
    ]


def test_parts_that_are_not_given_leave_no_empty_line() -> None:
    assert str(RunError("rank 1 died", way_out="look at its log")) == "rank 1 died\n  way out: look at its log"


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_an_error_crosses_a_process_boundary_whole(kind: type[RlplanError]) -> None:
    error = kind("what", where="where", rule="rule", way_out="way out")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.what, copy.where, copy.rule, copy.way_out) == ("what", "where", "rule", "way out")
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("plicy", " Did you mean 'policy'?"), ("polices", " Did you mean 'policy'?"), ("xyz", ""), ("", "")],
)
def test_a_near_word_is_suggested_and_a_far_one_is_not(word: str, hint: str) -> None:
    assert did_you_mean(word, ["policy", "reward", "verifier"]) == hint
