"""Followers: the processes that pass a run's metrics on to loggers; started and ended with the run.

In: a job's sinks and the run folder. Out: a line about each process that has died. They only read files, so they cannot
delay the run; their output goes to `logs/sink-NAME.log`.
"""

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.processes.safe_path import make_module_command

END_S = 15.0
"""Seconds that a sink may take to finish after the run, on an otherwise idle machine."""


class Followers:
    """See the module docstring. after: the step that the run resumes from; sinks log later steps only (-1: all)."""

    def __init__(self, sinks: Sequence[str], folder: Path, name: str, after: int = -1) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for sink in sinks:
            with (folder / "logs" / f"sink-{sink}.log").open("wb") as log:
                self._processes[sink] = subprocess.Popen(
                    make_module_command("rlplan.runtime.sinks.follow", sink, str(folder.resolve()), name, str(after)),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C must not end a sink before it has read the last steps
                )

    def take_dead(self) -> list[str]:
        """Return a line about each sink that has ended by itself, once per sink."""
        dead = [sink for sink, process in self._processes.items() if process.poll() is not None]
        return [
            f"the sink {sink} has ended with exit code {self._drop(sink)}; the run continues (logs/sink-{sink}.log)"
            for sink in dead
        ]

    def close(self) -> None:
        """Let the processes finish reading; kill those that exceed `END_S`."""
        for process in self._processes.values():
            assert process.stdin is not None, "a pipe"
            with contextlib.suppress(OSError):
                process.stdin.close()
        for sink in list(self._processes):
            try:
                self._processes[sink].wait(scale_seconds(END_S))
            except subprocess.TimeoutExpired:
                self._processes[sink].kill()
            self._drop(sink)

    def _drop(self, sink: str) -> int:
        process = self._processes.pop(sink)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        return process.wait()
