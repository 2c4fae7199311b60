"""A driver that has faults: `rlplan ARGUMENTS` with a list of faults, each of which is injected once.

Run as `python -m tests.trust.faults.faulty_driver LIST ARGUMENTS`. LIST is a JSON file of rows (`fault_matrix.Fault`).
A fault waits at its point of its step until the file LIST.allowed says that it may happen, and is written to LIST.done
just before it does. While one waits its number and the time are in LIST.waiting.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rlplan_cli.app import main

from rlplan.errors import RlplanError
from rlplan.runtime.driver.player import Player
from tests.trust.faults.points import KINDS, POINTS

MAX_DELAY_S = 0.1
"""After the begin of what the fault is to meet."""
POLL_S = 0.02
WORKERS = {"trainer": "policy_trainer", "engine": "rollout_engine", "scorer": "scorer"}


class Faults:
    """Faults that are still to happen, in order."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())
        self.done = path.with_suffix(".done")
        self.num_done = self.done.read_text().count("\n") if self.done.exists() else 0

    def meet(self, player: Player, step: int, kind: str) -> None:
        """A point of a step: what is to happen here happens."""
        with self.lock:
            if self.num_done == len(self.rows):
                return
            row = self.rows[self.num_done]
            if step < row["step"] or kind not in POINTS[row["point"]]:
                return
            self.num_done += 1
            number = self.num_done
        try:
            while int(self.path.with_suffix(".allowed").read_text() or 0) < number:
                self.path.with_suffix(".waiting").write_text(f"{number} {time.time()}")
                player.worker_group._check_services(())  # as a run does all the time that does not wait here
                time.sleep(POLL_S)
        except RlplanError:  # the fault before this one was noticed here: this one is still to come
            self.num_done = number - 1
            raise
        threading.Thread(target=self._inject, args=(player, row, number), daemon=True).start()

    def _inject(self, player: Player, row: dict[str, Any], number: int) -> None:
        time.sleep(random.Random(number).uniform(0, MAX_DELAY_S))
        pid, name = _victim(player, row["victim"])
        with self.done.open("a") as file:
            file.write(json.dumps({"pid": pid, "name": name, "at_s": time.time()}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if row["kind"] != "exit":
            os.kill(pid, KINDS[row["kind"]])
        elif pid == os.getpid():
            os._exit(3)
        elif name in player.worker_group.actors:
            import ray

            ray.kill(player.worker_group.actors[name])  # it exits by itself
        else:
            os.kill(pid, signal.SIGTERM)  # Ray's own processes leave on it


def _victim(player: Player, victim: str) -> tuple[int, str]:
    """Its process id now, and its name."""
    if victim == "driver":
        return os.getpid(), victim
    if victim in ("raylet", "gcs"):
        import ray

        node: Any = ray._private.worker._global_node  # type: ignore[attr-defined]
        kind = {"raylet": "raylet", "gcs": "gcs_server"}[victim]
        return node.all_processes[kind][0].process.pid, victim
    pids, prefix = player.worker_group.pids, WORKERS[victim]
    name = next(name for name in pids if name.startswith(prefix))
    while not pids[name]:  # it is being started anew
        time.sleep(POLL_S)
    return pids[name], name


def install(faults: Faults) -> None:
    perform, finish_step = Player.run_action, Player.finish_step

    def faulty_perform(self: Player, action: Any, step: int) -> None:
        faults.meet(self, step, action.kind.value)
        perform(self, action, step)

    def faulty_finish(self: Player, step: int) -> bool:
        faults.meet(self, step, "finish_step")
        return finish_step(self, step)

    Player.run_action, Player.finish_step = faulty_perform, faulty_finish  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Faults(Path(sys.argv.pop(1))))
    main()
