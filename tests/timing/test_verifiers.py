"""Seconds that a step waits for rewards in processes: hand-worked."""

import pytest

from rlplan.timing.cpu.host import MATH_S, SANDBOX_S, verify_s
from tests.factories import make_job

CODE, MATH = {"kind": "code_executor"}, {"kind": "answer_matcher", "compares": "math"}


def test_patterns_and_functions_of_one_s_own_count_nothing() -> None:
    assert verify_s(make_job(), 2, 1.0) == 0.0
    assert verify_s(make_job(rewards=[{"kind": "function", "path": "a.py:f"}]), 2, 1.0) == 0.0


def test_what_generation_does_not_cover_is_waited_for() -> None:
    job = make_job(rewards=[CODE])
    n = job.workload.num_rollouts_per_step
    assert verify_s(job, 2, 0.0) == pytest.approx(n * SANDBOX_S / 2)
    assert verify_s(job, 1, 0.0) == pytest.approx(n * SANDBOX_S)
    assert verify_s(job, 2, n * SANDBOX_S / 4) == pytest.approx(n * SANDBOX_S / 4)


def test_the_last_response_is_always_waited_for() -> None:
    assert verify_s(make_job(rewards=[CODE, MATH]), 2, 1e9) == pytest.approx(SANDBOX_S + MATH_S)
