"""Controller: starts each action of a Schedule once the actions that it depends on are done.

Async rollouts are one action that starts once and runs in parallel to all steps. Every wait has a deadline.

In: a Schedule and a function that runs one action. Out: nothing; the function stores the results.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from rlplan.dataflow.schedule import Action, Schedule
from rlplan.errors import RunError

RunAction = Callable[[Action, int], None]
"""Function that runs an action of a step and returns when the action is done."""

POLL_S = 0.2
"""Longest single wait, so that signals are handled in between."""


class Controller:
    """Runs a schedule. deadline_s: how long one action may take before the run fails."""

    def __init__(self, schedule: Schedule, run_action: RunAction, deadline_s: Callable[[Action], float]) -> None:
        self.schedule, self.perform, self.deadline_s = schedule, run_action, deadline_s
        self._beside: Future[None] | None = None

    def run(self, num_steps: int, finish_step: Callable[[int], bool | None], *, first_step: int = 1) -> None:
        """Run the start actions, the steps up to `num_steps`, and the finish actions.

        finish_step: called with 0 after the start, with each step's number, and with -1 at the end. It returns whether
        the run ends early. first_step: the first step to run; a resumed run skips those before it.
        """
        self._play(self.schedule.start, 0)
        finish_step(0)
        async_action = self.schedule.async_action
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="leading")
        try:
            self._beside = pool.submit(self.perform, async_action, first_step) if async_action else None
            for step in range(first_step, num_steps + 1):
                actions = self.schedule.list_actions(step)
                self._play([action for action in actions if not async_action or action.id != async_action.id], step)
                if finish_step(step):
                    break
            self._join(async_action, num_steps)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an error must not wait for generation to end
        self._play(self.schedule.finish, -1)
        finish_step(-1)

    def _join(self, async_action: Action | None, step: int) -> None:
        """Wait for the end of async rollouts, whose results the steps have already taken."""
        if async_action is None or self._beside is None:
            return
        deadline = time.monotonic() + self.deadline_s(async_action)
        while not wait([self._beside], timeout=POLL_S).done:
            _check_deadlines([(async_action, deadline)], step)
        self._beside.result()

    def _play(self, actions: Sequence[Action], step: int) -> None:
        """Run a graph of actions. Dependencies outside of it count as done."""
        waiting = {action.id: action for action in actions}
        names = set(waiting)
        done: set[str] = set()
        running: dict[Future[None], tuple[Action, float]] = {}
        # One thread per action: an action mostly waits for its processes, and several may run at the same time.
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
                    self._beside.result()  # raises the error of failed async rollouts at once
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an action that hangs must not delay another one's error


def _check_deadlines(running: list[tuple[Action, float]], step: int) -> None:
    for action, deadline in running:
        if time.monotonic() > deadline:
            raise RunError(
                f"{action.id} did not finish within its deadline",
                where=f"step {step}, {', '.join(action.processes) or 'driver'}",
                rule="an action ends within limits.action_timeout_s (start_timeout_s while starting)",
                way_out="read the logs in the run folder; raise the limit if the action really takes that long",
            )
