"""Supervision: what is lost while a run goes on, what is started anew, and what ends the run.

In: actions as they are done on a crew. Out: the same actions done again after an engine or a scorer was lost, or a
RunError. An engine that dies or hangs is started again with the weights that the policy has now, and its requests are
submitted again: seeds belong to the requests, so the completions are the same. A rank cannot rejoin its group.
Left out: how a process is started (steps.py) and noticed (crew.py).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rlplan.dataflow.schedule import Action
from rlplan.errors import RunError
from rlplan.memory.ledger import MemoryLedger, Moment
from rlplan.runtime.workers.memory_meter import Measurement
from rlplan.units import MIB, format_bytes
from rlplan.vocabulary import ActionKind

RESTARTED = ("rollout_engine", "scorer")
"""Workers that hold nothing which cannot be made again: weights come from the trainer or from a folder."""

REPEATED = (ActionKind.GENERATE, ActionKind.EVALUATE, ActionKind.SCORE, ActionKind.SYNC_WEIGHTS)
"""Actions that may be done twice: they change nothing but the process that was lost."""

FREEING = ("sleep_engine", "stop_engine", "offload_role")
"""Actions that are there to free memory."""

LEAST_SHARE_FREED = 0.9
LEAST_CHECKED = 16 * MIB
"""What is planned to become free below this drowns in what a heap keeps."""


class LostProcessError(RunError):
    """A process died or hung. process: which. happened: `is gone` or `hangs`."""

    process: str = ""

    @classmethod
    def of(cls, process: str, what: str, *, where: str, rule: str, way_out: str) -> "LostProcessError":
        """The error for one process."""
        error = cls(what, where=where, rule=rule, way_out=way_out)
        error.process = process
        return error


@dataclass(frozen=True)
class Restart:
    """A process that is about to be started anew."""

    process: str
    step: int
    attempt: int
    reason: str

    def text(self) -> str:
        """For people."""
        return f"{self.reason}; it is started anew (attempt {self.attempt}) and the action is done again"


Handler = Callable[[Action, int], list[Measurement]]


class Supervisor:
    """Does actions, again where a process was lost that can be started anew. max_restarts: of each process in a run."""

    def __init__(
        self, max_restarts: int, revive: Callable[[str, Action, int], None], announce: Callable[[Restart], None]
    ) -> None:
        """revive: starts a process as it was. announce: hears of each restart before it happens."""
        self.max_restarts, self._revive, self._announce = max_restarts, revive, announce
        self._restarts: Counter[str] = Counter()

    def perform(self, handler: Handler, action: Action, step: int) -> tuple[list[Measurement], int]:
        """(measurements of the attempt that succeeded, its number). Raises: RunError."""
        attempt, lost = 1, None
        while True:
            try:
                if lost is not None:
                    self._start_anew(lost, action, step, attempt)
                return handler(action, step), attempt
            except LostProcessError as error:
                lost, attempt = error, attempt + 1
                if self._may_restart(error, action):
                    continue
                raise _cannot_restart(error, action, self._restarts[error.process]) from error

    def _may_restart(self, lost: LostProcessError, action: Action) -> bool:
        is_kind = lost.process.startswith(RESTARTED) and action.kind in REPEATED
        return is_kind and self._restarts[lost.process] < self.max_restarts

    def _start_anew(self, lost: LostProcessError, action: Action, step: int, attempt: int) -> None:
        self._restarts[lost.process] += 1
        self._announce(Restart(lost.process, step, attempt, lost.what))
        self._revive(lost.process, action, step)


def _cannot_restart(lost: LostProcessError, action: Action, num_restarts: int) -> RunError:
    if lost.process.startswith("policy_trainer") or lost.process.startswith("value_trainer"):
        rule = "a lost rank cannot rejoin its group, and there is no checkpoint between steps to go on from yet"
    elif num_restarts:
        rule = f"a process is started anew at most {num_restarts} times in a run (limits.max_restarts)"
    else:
        rule = f"a process is started anew while it generates, scores or is handed weights; this was {action.kind}"
    return RunError(lost.what, where=lost.where, rule=rule, way_out=lost.way_out)


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
    """Bytes that an action frees in a process: held after its action before this one, less held after this one."""
    moment = _moment(step)
    held: dict[tuple[Moment, str], int] = {}
    for row in ledger.rows_of(process):
        if row.space == "device":
            key = (row.moment, row.action_id)
            held[key] = held.get(key, 0) + row.resident_bytes
    mine = [key for key in ledger.order if key in held]
    if (moment, action_id) not in ledger.order:
        return 0
    position = ledger.order.index((moment, action_id))
    earlier = [key for key in mine if ledger.order.index(key) < position]
    if moment == "steady":  # the step before was steady, too
        earlier = [key for key in mine if key[0] == "steady" and key[1] != action_id and key not in earlier] + earlier
    return held[earlier[-1]] - held.get((moment, action_id), 0) if earlier else 0


def _moment(step: int) -> Moment:
    return {0: "start", 1: "first", -1: "finish"}.get(step, "steady")  # type: ignore[return-value]
