"""Controller: releases the actions of a Schedule when what they wait for is done, and knows nothing else.

Async rollouts, where there are any, are one action that is begun once and runs beside all steps until the last.

In: a Schedule and something that performs one action. Out: nothing; the performer keeps the results.
Every wait has a deadline.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from rlplan.dataflow.schedule import Action, Schedule
from rlplan.errors import RunError

Perform = Callable[[Action, int], None]

POLL_S = 0.2
"""A wait is cut into pieces of this length, so that a signal is heard."""


class Controller:
    """Runs a schedule. deadline_s: how long one action may take before the run fails."""

    def __init__(self, schedule: Schedule, perform: Perform, deadline_s: Callable[[Action], float]) -> None:
        self.schedule, self.perform, self.deadline_s = schedule, perform, deadline_s
        self._beside: Future[None] | None = None

    def run(self, num_steps: int, finish_step: Callable[[int], bool | None], *, first_step: int = 1) -> None:
        """Start, steps up to `num_steps`, finish. `finish_step(step)` is called after each part: 0, 1 … num_steps, -1.

        finish_step: says whether no further step comes.
        first_step: those before it were done by an earlier run, which this one goes on from.
        """
        self._play(self.schedule.start, 0)
        finish_step(0)
        async_action = self.schedule.async_action
        beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="leading")
        try:
            self._beside = beside.submit(self.perform, async_action, first_step) if async_action else None
            for step in range(first_step, num_steps + 1):
                actions = self.schedule.actions_of(step)
                self._play([action for action in actions if not async_action or action.id != async_action.id], step)
                if finish_step(step):
                    break
            self._join(async_action, num_steps)
        finally:
            beside.shutdown(wait=False, cancel_futures=True)
        self._play(self.schedule.finish, -1)
        finish_step(-1)

    def _join(self, async_action: Action | None, step: int) -> None:
        """Wait for the end of async rollouts: everything that was generated has been taken."""
        if async_action is None or self._beside is None:
            return
        deadline = time.monotonic() + self.deadline_s(async_action)
        while not wait([self._beside], timeout=POLL_S).done:
            _check_deadlines([(async_action, deadline)], step)
        self._beside.result()

    def _play(self, actions: Sequence[Action], step: int) -> None:
        """Run a graph of actions. What is not among them counts as done."""
        waiting = {action.id: action for action in actions}
        names = set(waiting)
        done: set[str] = set()
        running: dict[Future[None], tuple[Action, float]] = {}
        pool = ThreadPoolExecutor(max_workers=max(1, len(waiting)), thread_name_prefix="action")
        try:
            while waiting or running:
                for action in [a for a in waiting.values() if all(b in done or b not in names for b in a.after)]:
                    del waiting[action.id]
                    future = pool.submit(self.perform, action, step)
                    running[future] = (action, time.monotonic() + self.deadline_s(action))
                if not running:
                    raise AssertionError(f"actions wait for each other: {sorted(waiting)}")
                finished, _ = wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for future in finished:
                    action, _ = running.pop(future)
                    future.result()
                    done.add(action.id)
                _check_deadlines(list(running.values()), step)
                if self._beside is not None and self._beside.done():
                    self._beside.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _check_deadlines(running: list[tuple[Action, float]], step: int) -> None:
    for action, deadline in running:
        if time.monotonic() > deadline:
            raise RunError(
                f"{action.id} did not finish within its deadline",
                where=f"step {step}, {', '.join(action.processes) or 'driver'}",
                rule="an action ends within limits.action_timeout_s (start_timeout_s while starting)",
                way_out="read the logs in the run folder; raise the limit if the work is really that long",
            )
