"""Supervision: what is lost while a run goes on, what is restarted, and what ends the run.

In: actions as they are done on a worker group. Out: the same actions done again after an engine or a scorer was lost,
or a RunError. An engine that dies or hangs is started again with the weights that the policy has now, and its requests
are submitted again: seeds belong to the requests, so the completions are the same. A rank cannot rejoin its process
group. Where generation runs beside the steps two threads may find the same process lost: the first starts it anew.
Left out: how a process is restarted (recovery.py), and its loss noticed (cluster/calls.py).
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
"""Workers that hold nothing which cannot be made again: weights come from the trainer or from a folder."""

TRAINERS = ("policy_trainer", "value_trainer")
"""Workers whose ranks hold what no other process has: they are lost together, and come back from a checkpoint."""

REPEATED = (
    *(ActionKind.GENERATE, ActionKind.EVALUATE, ActionKind.SCORE, ActionKind.SYNC_WEIGHTS),
    *(ActionKind.START_ENGINE, ActionKind.STOP_ENGINE, ActionKind.OFFLOAD_ROLE, ActionKind.RELOAD_ROLE),
)
"""Actions that may be done twice: they change nothing but the process that was lost."""

FREEING = ("sleep_engine", "stop_engine", "offload_role")
"""Actions that are there to free memory."""

LEAST_SHARE_FREED = 0.9
LEAST_CHECKED = 16 * MIB
"""What is planned to become free below this drowns in what a heap keeps."""


class LostProcessError(RunError):
    """A process died or hung. process: which; restart_count: its restarts when it was called."""

    restart_count = 0

    def __init__(self, what: str, *, process: str = "", **parts: str) -> None:
        super().__init__(what, **parts)
        self.process = process


class LostGroupError(RunError):
    """A process was lost that cannot be restarted alone: all processes restart, from the last checkpoint."""


Handler = Callable[[Action, int], list[Measurement]]
Announce = Callable[[str, int, str], None]
"""Hears of a process that is about to be restarted: which, in which step, and what is to be said of it."""

Result = TypeVar("Result")


class Supervisor:
    """Does actions, again where a process was lost that can be restarted. max_restarts: of each process in a run.

    is_replaced: whether a lost process has been restarted since. num_open: requests under way in a process.
    """

    def __init__(self, max_restarts: int, recover: Callable[[str, Action, int], None], announce: Announce) -> None:
        """recover: restarts a process with its former state. announce: called before each restart."""
        self.max_restarts, self._recover, self._announce = max_restarts, recover, announce
        self.is_replaced: Callable[[LostProcessError], bool] = lambda lost: False
        self.num_open: Callable[[str], int] = lambda process: 0
        self._restarts: Counter[str] = Counter()
        self._restarting = threading.RLock()

    def perform(self, handler: Handler, action: Action, step: int) -> tuple[list[Measurement], int]:
        """(measurements of the attempt that succeeded, its number). Raises: RunError."""
        attempts = []

        def once() -> list[Measurement]:
            attempts.append(step)
            return handler(action, step)

        return self.watch(once, action, step), len(attempts)

    def watch(self, call: Callable[[], Result], action: Action, step: int) -> Result:
        """The result of a call that belongs to an action, made again after what was lost is there again.

        Raises: RunError where it may not be restarted.
        """
        attempt, lost = 1, None
        while True:
            try:
                if lost is not None:
                    self._start_anew(lost, action, step, attempt)
                return call()
            except LostProcessError as error:
                lost, attempt = error, attempt + 1

    def _may_restart(self, lost: LostProcessError, action: Action, step: int) -> bool:
        """A process that is lost while it first starts would be lost again."""
        is_first = action.kind is ActionKind.START_ENGINE and step == 0
        is_kind = lost.process.startswith(RESTARTED) and action.kind in REPEATED and not is_first
        return is_kind and self._restarts[lost.process] < self.max_restarts

    def _start_anew(self, lost: LostProcessError, action: Action, step: int, attempt: int) -> None:
        """Raises: RunError where it may not be, LostProcessError where it is lost again."""
        with self._restarting:
            if self.is_replaced(lost):
                return
            if not self._may_restart(lost, action, step):
                raise _cannot_restart(lost, action, self._restarts[lost.process]) from lost
            self._restarts[lost.process] += 1
            count = self.num_open(lost.process)
            again = f"{count} requests are begun anew" if count else "the action is done again"
            text = f"{lost.what}; it is restarted (attempt {attempt}) and {again}"
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
        rule = f"a process is restarted once it was up, while it does what can be done again; this was {action.kind}"
    return kind(lost.what, where=lost.where, rule=rule, way_out=lost.way_out)


def check_freed(ledger: MemoryLedger, action: Action, step: int, before: dict[str, int], after: dict[str, int]) -> None:
    """A swap or a sleep that frees less than planned fails loudly. before, after: bytes each process holds.

    Raises: RunError naming the process and both numbers.
    """
    if action.kind.value not in FREEING:
        return
    for process in action.processes:
        planned = planned_release(ledger, action.id, step, process)
        freed = before.get(process, 0) - after.get(process, 0)
        if planned >= LEAST_CHECKED and freed < LEAST_SHARE_FREED * planned:
            raise RunError(
                f"{action.id} freed {format_bytes(max(0, freed))} in {process}, the plan says {format_bytes(planned)}",
                where=f"step {step}, {process}",
                rule=f"at least {LEAST_SHARE_FREED:.0%} of what the plan says becomes free",
                way_out="another phase would not fit: report it with the run folder, or plan another placement",
            )


def planned_release(ledger: MemoryLedger, action_id: str, step: int, process: str) -> int:
    """Bytes that an action frees in a process: held after its action before this one, less held after this one.

    Step 0 of what the start has not is a rehearsal after it: what was held then, less what the first step leaves.
    """
    run_phases: dict[int, RunPhase] = {0: "start", 1: "first", -1: "finish"}
    run_phase = run_phases.get(step, "steady")
    is_rehearsed = run_phase == "start" and (run_phase, action_id) not in ledger.order
    run_phase = "first" if is_rehearsed else run_phase
    held: Counter[tuple[RunPhase, str]] = Counter()
    for row in ledger.rows_of(process):
        if row.space == "device":
            held[(row.run_phase, row.action_id)] += row.resident_bytes
    mine = [key for key in ledger.order if key in held]
    if (run_phase, action_id) not in ledger.order:
        return 0
    position = ledger.order.index((run_phase, action_id))
    earlier = [key for key in mine if ledger.order.index(key) < position and not (is_rehearsed and key[0] == run_phase)]
    if run_phase == "steady":  # the step before was steady, too
        earlier = [key for key in mine if key[0] == "steady" and key[1] != action_id and key not in earlier] + earlier
    return held[earlier[-1]] - held[(run_phase, action_id)] if earlier else 0
