"""How slow the machine is: measured where it has been made slow, and what follows from it."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rlplan.runtime.processes import machine_speed
from rlplan.runtime.processes.machine_speed import (
    FRESH_S,
    MAX_FACTOR,
    REFERENCE_S,
    compute_factor,
    measure_slowdown,
    scale_seconds,
    wait_patiently,
)

NUM_RIVALS = 8


@pytest.fixture
def pins_to_core() -> Iterator[None]:
    """This process, and all that it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@contextlib.contextmanager
def rivals() -> Iterator[None]:
    """Processes that would have the core for themselves."""
    spins = "print('up', flush=True)\nwhile True: pass"
    command = [sys.executable, "-I", "-S", "-c", spins]
    spinning = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(NUM_RIVALS)]
    try:
        for each in spinning:
            assert each.stdout is not None
            assert each.stdout.readline() == b"up\n"
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()
            each.stdout.close()


@pytest.fixture
def forgets_measurement() -> Iterator[None]:
    """Discards the test's measurement, which holds for no other test."""
    yield
    machine_speed._last = None


def measure_often(count: int) -> list[float]:
    return [measure_slowdown(max_age_s=0.0) for _ in range(count)]


def test_the_factor_rises_where_others_want_the_same_core(pins_to_core: None, forgets_measurement: None) -> None:
    """Nine processes on a core, each with a ninth of it, or less where this machine has other work already.

    The largest of several: a scheduler may let a new process finish in its first time slice.
    """
    with rivals():
        crowded = max(measure_often(5))
    alone = min(measure_often(3))
    assert crowded == MAX_FACTOR or crowded > alone + 1, (alone, crowded)


def test_the_factor_is_what_the_work_takes_against_the_reference_and_has_bounds() -> None:
    assert [compute_factor(share * REFERENCE_S) for share in (0.1, 1.0, 2.5, MAX_FACTOR, 1e9)] == [
        1.0,
        1.0,
        2.5,
        MAX_FACTOR,
        MAX_FACTOR,
    ]


def test_a_machine_on_which_nothing_starts_is_as_slow_as_can_be(
    monkeypatch: pytest.MonkeyPatch, forgets_measurement: None
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert measure_slowdown(max_age_s=0.0) == MAX_FACTOR


def test_a_measurement_holds_for_a_while_and_costs_nothing_then(forgets_measurement: None) -> None:
    first = measure_slowdown(max_age_s=0.0)
    begun = time.process_time()
    assert {scale_seconds(2.0) for _ in range(1000)} == {2.0 * first}
    assert time.process_time() - begun < 0.1 * FRESH_S


def waits(seconds: float) -> float:
    if seconds < 0.5:
        raise TimeoutError
    return seconds


def test_a_wait_that_is_late_goes_on_for_as_long_as_the_machine_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_speed, "_last", (time.monotonic(), 3.0))
    asked: list[float] = []

    def late(seconds: float) -> str:
        asked.append(seconds)
        if len(asked) == 1:
            raise TimeoutError
        return "there"

    assert wait_patiently(late, 0.5, TimeoutError) == "there"
    assert asked == [0.5, 1.0]
    monkeypatch.setattr(machine_speed, "_last", (time.monotonic(), 1.0))
    with pytest.raises(TimeoutError):
        wait_patiently(waits, 0.1, TimeoutError)
