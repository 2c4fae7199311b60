"""Supervision: decides which lost processes are restarted, which actions are repeated, and which losses end the run.

In: actions that run on a worker group. Out: repeated actions after the loss of an engine or a scorer, or a RunError. An
engine that dies or hangs is restarted with the policy's current weights, and its requests are submitted again. Seeds
belong to requests, so the completions are the same. A trainer rank cannot rejoin its process group. With async
generation two threads may notice the same loss; the first one restarts the process.
Left out: restarting a process (recovery.py), and detecting its loss (cluster/worker_group.py).
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from rlplan.dataflow.schedule import Action
from rlplan.errors import RunError
from rlplan.memory.ledger import MemoryLedger, RunPhase
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.units import MIB, format_bytes
from rlplan.vocabulary import ActionKind

RESTARTED = ("rollout_engine", "scorer")
"""Workers that can be restarted alone, because their weights come from the trainer or from a folder."""

TRAINERS = ("policy_trainer", "value_trainer")
"""Workers with states that no other process has; if one rank is lost, all restart from a checkpoint."""

REPEATED = (
    *(ActionKind.GENERATE, ActionKind.EVALUATE, ActionKind.SCORE, ActionKind.SYNC_WEIGHTS),
    *(ActionKind.START_ENGINE, ActionKind.STOP_ENGINE, ActionKind.OFFLOAD_ROLE, ActionKind.RELOAD_ROLE),
)
"""Actions that may be repeated, because they change only the lost process."""

FREEING = ("sleep_engine", "stop_engine", "offload_role")

LEAST_SHARE_FREED = 0.9
"""Minimum share of the planned bytes that an action of FREEING must free."""
LEAST_CHECKED = 16 * MIB
"""Smallest planned release that is checked; smaller ones are hidden by memory that the heap retains."""


class LostProcessError(RunError):
    """A process died or hung. process: its name; restart_count: its number of restarts when it was called."""

    restart_count = 0

    def __init__(self, what: str, *, process: str = "", **parts: str) -> None:
        super().__init__(what, **parts)
        self.process = process


class LostGroupError(RunError):
    """A process was lost that cannot be restarted alone, so all processes restart from the last checkpoint."""


Handler = Callable[[Action, int], list[Measurement]]
"""Runs an action of a step on a worker group."""
Announce = Callable[[str, int, str], None]
"""Called with (process, step, text) before a process is restarted."""

Result = TypeVar("Result")


class Supervisor:
    """Runs actions, and repeats them after a lost process was restarted. max_restarts: limit per process and run.

    is_replaced: returns whether a lost process has been restarted since. num_open: returns a process's open requests.
    """

    def __init__(self, max_restarts: int, recover: Callable[[str, Action, int], None], announce: Announce) -> None:
        """recover: restarts a process with its former state. announce: called before each restart."""
        self.max_restarts, self._recover, self._announce = max_restarts, recover, announce
        self.is_replaced: Callable[[LostProcessError], bool] = lambda lost: False
        self.num_open: Callable[[str], int] = lambda process: 0
        self._restarts: Counter[str] = Counter()
        self._restarting = threading.RLock()

    def run_with_restarts(self, handler: Handler, action: Action, step: int) -> tuple[list[Measurement], int]:
        """Run an action; return (measurements of the successful attempt, its number). Raises: RunError."""
        num_attempts = 0

        def attempt() -> list[Measurement]:
            nonlocal num_attempts
            num_attempts += 1
            return handler(action, step)

        return self.call_with_restarts(attempt, action, step), num_attempts

    def call_with_restarts(self, call: Callable[[], Result], action: Action, step: int) -> Result:
        """Make a call that belongs to an action; repeat it after restarting a lost process. Returns: its result.

        Raises: RunError where the process may not be restarted.
        """
        attempt, lost = 1, None
        while True:
            try:  # around the restart too, because the process may be lost again while it starts
                if lost is not None:
                    self._restart(lost, action, step, attempt)
                return call()
            except LostProcessError as error:
                lost, attempt = error, attempt + 1

    def _may_restart(self, lost: LostProcessError, action: Action, step: int) -> bool:
        """Whether a lost process may be restarted; not at its first start, where it would be lost again."""
        is_first = action.kind is ActionKind.START_ENGINE and step == 0
        is_kind = lost.process.startswith(RESTARTED) and action.kind in REPEATED and not is_first
        return is_kind and self._restarts[lost.process] < self.max_restarts

    def _restart(self, lost: LostProcessError, action: Action, step: int, attempt: int) -> None:
        """Restart a lost process, unless another thread has done so. Raises: RunError, or LostProcessError again."""
        with self._restarting:
            if self.is_replaced(lost):
                return
            if not self._may_restart(lost, action, step):
                raise _cannot_restart(lost, action, self._restarts[lost.process]) from lost
            self._restarts[lost.process] += 1
            count = self.num_open(lost.process)
            consequence = f"{count} requests start over" if count else "the action is repeated"
            text = f"{lost.what}; it is restarted (attempt {attempt}) and {consequence}"
            self._announce(lost.process, step, text)
            self._recover(lost.process, action, step)


def _cannot_restart(lost: LostProcessError, action: Action, num_restarts: int) -> RunError:
    kind: type[RunError] = LostGroupError
    if lost.process.startswith(TRAINERS):
        rule = (
            "a lost rank cannot rejoin its process group; all processes restart from a checkpoint, where there is one"
        )
    elif num_restarts:
        kind, rule = RunError, f"a process is restarted at most {num_restarts} times in a run (limits.max_restarts)"
    else:
        rule = f"only engines and scorers restart, after the first start, in repeatable actions; this was {action.kind}"
    return kind(lost.what, where=lost.where, rule=rule, way_out=lost.way_out)


def check_freed(ledger: MemoryLedger, action: Action, step: int, before: dict[str, int], after: dict[str, int]) -> None:
    """Check that an action which should free memory frees what the plan says.

    before, after: bytes that each process holds. Raises: RunError naming the process and both numbers.
    """
    if action.kind.value not in FREEING:
        return
    for process in action.processes:
        planned = predict_release(ledger, action.id, step, process)
        freed = before.get(process, 0) - after.get(process, 0)
        if planned >= LEAST_CHECKED and freed < LEAST_SHARE_FREED * planned:
            raise RunError(
                f"{action.id} freed {format_bytes(max(0, freed))} in {process}, the plan says {format_bytes(planned)}",
                where=f"step {step}, {process}",
                rule=f"such an action must free at least {LEAST_SHARE_FREED:.0%} of the planned bytes",
                way_out="the next phase might not fit: report it with the run folder, or plan another placement",
            )


def predict_release(ledger: MemoryLedger, action_id: str, step: int, process: str) -> int:
    """Predict the bytes that an action frees in a process: those after its previous action minus those after this one.

    For an action that the start phase lacks, step 0 means the rehearsal after the start: bytes at the end of the start
    minus bytes after the action in the first step.
    """
    run_phases: dict[int, RunPhase] = {0: "start", 1: "first", -1: "finish"}
    run_phase = run_phases.get(step, "steady")
    is_rehearsed = run_phase == "start" and (run_phase, action_id) not in ledger.order
    run_phase = "first" if is_rehearsed else run_phase
    resident: Counter[tuple[RunPhase, str]] = Counter()
    for row in ledger.find_rows(process):
        if row.space == "device":
            resident[(row.run_phase, row.action_id)] += row.resident_bytes
    keys = [key for key in ledger.order if key in resident]
    if (run_phase, action_id) not in ledger.order:
        return 0
    position = ledger.order.index((run_phase, action_id))
    earlier = [key for key in keys if ledger.order.index(key) < position and not (is_rehearsed and key[0] == run_phase)]
    if run_phase == "steady":  # the previous step was steady too, so later actions of a step also precede this one
        earlier = [key for key in keys if key[0] == "steady" and key[1] != action_id and key not in earlier] + earlier
    return resident[earlier[-1]] - resident[(run_phase, action_id)] if earlier else 0
