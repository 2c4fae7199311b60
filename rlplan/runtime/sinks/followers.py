"""Followers: the processes that hand a run's metrics to other people's loggers, started and ended with it.

In: a job's sinks and the run folder. Out: nothing but a line about each one that has died. They read files, so that
none of them can hold the run up; their output goes to `logs/sink-NAME.log`.
"""

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rlplan.runtime.processes.machine_speed import scaled
from rlplan.runtime.processes.safe_path import module_command

END_S = 15.0
"""How long a sink may take to write out what is left, on a machine that has nothing else to do."""


class Followers:
    """See the module docstring. after: the step from which a run goes on; sinks begin behind it. -1: from the start."""

    def __init__(self, sinks: Sequence[str], folder: Path, name: str, after: int = -1) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for sink in sinks:
            with (folder / "logs" / f"sink-{sink}.log").open("wb") as log:
                self._processes[sink] = subprocess.Popen(
                    module_command("rlplan.runtime.sinks.follow", sink, str(folder.resolve()), name, str(after)),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def take_dead(self) -> list[str]:
        """A line about each sink that has ended by itself; each is told once."""
        dead = [sink for sink, process in self._processes.items() if process.poll() is not None]
        return [
            f"the sink {sink} has ended with exit code {self._drop(sink)}; the run continues (logs/sink-{sink}.log)"
            for sink in dead
        ]

    def close(self) -> None:
        """Let them read to the end, and end those that do not."""
        for process in self._processes.values():
            assert process.stdin is not None, "a pipe"
            with contextlib.suppress(OSError):
                process.stdin.close()
        for sink in list(self._processes):
            try:
                self._processes[sink].wait(scaled(END_S))
            except subprocess.TimeoutExpired:
                self._processes[sink].kill()
            self._drop(sink)

    def _drop(self, sink: str) -> int:
        process = self._processes.pop(sink)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        return process.wait()
