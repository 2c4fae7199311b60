"""A leak is distinguished from memory that settles, fluctuates or jumps once."""

import random

from rlplan.runtime.measure.leaks import LEAST_SLOPE, SETTLING_STEPS, WINDOW, Leak, LeakWatch, theil_sen
from rlplan.units import MIB


def watch(sizes: list[int]) -> list[tuple[int, Leak]]:
    """(step, leak) of every alarm."""
    observer, name = LeakWatch(), "rollout_engine/0"
    return [(step, leak) for step, size in enumerate(sizes, 1) for leak in observer.observe(step, {name: size})]


def test_the_slope_of_a_straight_line_is_its_slope() -> None:
    assert theil_sen([(step, 7 * step + 100) for step in range(12)]) == (7.0, 1.0)


def test_an_injected_leak_raises_one_alarm_with_its_slope() -> None:
    noise = random.Random(1)
    leaks = watch([700 * MIB + 10 * MIB * step + noise.randrange(4 * MIB) for step in range(40)])
    ((step, leak),) = leaks
    assert step == SETTLING_STEPS + WINDOW
    assert 9 * MIB < leak.bytes_per_step < 11 * MIB
    assert "rollout_engine/0 grew by" in leak.text


def test_memory_that_settles_steps_up_once_or_wavers_raises_none() -> None:
    settling = [int(685 * MIB - 27 * MIB * 0.85**step) for step in range(40)]
    step_up = [500 * MIB + (300 * MIB if step > 20 else 0) for step in range(40)]
    noise = random.Random(2)
    wavering = [500 * MIB + noise.randrange(200 * MIB) for _ in range(200)]
    assert watch(settling) == watch(step_up) == watch(wavering) == []


def test_one_long_step_does_not_hide_a_leak() -> None:
    sizes = [500 * MIB + 2 * LEAST_SLOPE * step for step in range(40)]
    sizes[10] += 900 * MIB
    assert len(watch(sizes)) == 1


def test_what_a_large_process_wavers_by_is_no_leak() -> None:
    grown = [100_000 * MIB + 100 * MIB * step for step in range(40)]
    assert watch(grown) == []
    assert len(watch([100_000 * MIB + 600 * MIB * step for step in range(40)])) == 1


def test_a_process_that_was_started_anew_is_watched_anew() -> None:
    observer = LeakWatch()
    for step in range(1, SETTLING_STEPS + WINDOW):
        assert not list(observer.observe(step, {"engine": step * 20 * MIB}))
    observer.forget("engine")
    assert not list(observer.observe(20, {"engine": 900 * MIB}))
