"""Cost of an event of the simulator, in two ways of running, and how that grows with the engines.

Prints microseconds an event, seconds for a million, and ratios within one run. Run by `make bench`.
"""

import time

from benchmarks.simulated.linear_speed import LinearSpeed
from benchmarks.simulated.plain_schedule import plain_schedule
from rlplan.simulate.engine import EngineLimits
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import Asynchrony, SimulationSetting, StepRollouts
from rlplan.spec.parts.lengths import Lengths, LogNormalLengths
from rlplan.timing.cost import Cost, Resource
from rlplan.vocabulary import Placement

LENGTHS = Lengths(LogNormalLengths(kind="lognormal", median=1000, sigma=1.0), 16384)
SPEED = LinearSpeed(0.005, 2e-5, 5e-9, 1e-5)
REPEATS = 3
MODES = {
    "synchronous": None,
    "streaming": Asynchrony(0.5, interrupts=True, num_takes=4),
}


def setting(num_engines: int, asynchrony: Asynchrony | None = None, num_steps: int = 4) -> SimulationSetting:
    """16 prompts an engine, 16 samples each; a reward takes a second."""
    schedule = plain_schedule(Placement.DISAGGREGATED, num_engines, num_engines, num_mini_batches=4)
    costs = {action.id: Cost({Resource.COMPUTE: 20.0}) for action in schedule.step if action.mini_batch is not None}
    work = StepRollouts(16 * num_engines, 16, 200, LENGTHS, num_engines, EngineLimits(256, 40_000))
    return SimulationSetting(schedule, costs, work, SPEED, num_steps, asynchrony, reward_latency_s=1.0)


def seconds_per_event(setting: SimulationSetting, repeats: int = REPEATS) -> tuple[float, int]:
    """The least of some runs, in CPU seconds; and the events of one."""
    best, events = float("inf"), 0
    for _ in range(repeats):
        start = time.process_time()
        events = simulate(setting).num_events
        best = min(best, (time.process_time() - start) / events)
    return best, events


def main() -> None:
    """One line a mode, one for the growth, one for a whole million."""
    for name, asynchrony in MODES.items():
        cost, events = seconds_per_event(setting(32, asynchrony))
        print(f"{name}: {1e6 * cost:.2f} us an event ({events} events)")
    few, many = (seconds_per_event(setting(count, num_steps=1))[0] for count in (8, 256))
    print(f"256 engines against 8: {many / few:.2f} times as long an event")
    cost, events = seconds_per_event(setting(64, num_steps=31), repeats=1)
    print(f"{events} events in {cost * events:.2f} s: a million in {1e6 * cost:.2f} s")


if __name__ == "__main__":
    main()
