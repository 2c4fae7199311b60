"""Followers: the processes that pass a run's metrics on to loggers; started and ended with the run.

In: a job's sinks and the run folder. Out: a line about each process that has died, or does not reach its server. They
only read files, so they cannot delay the run; their output goes to `logs/sink-NAME.log`.
"""

import contextlib
import json
import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.processes.safe_path import make_module_command
from rlplan.runtime.sinks.follow import Destination
from rlplan.spec.parts.conduct import MetricsSpec

END_S = 15.0
"""Seconds that a sink without a server may take to finish after the run, on an otherwise idle machine."""


class Followers:
    """See the module docstring. after: the step that the run resumes from; sinks log later steps only (-1: all)."""

    def __init__(self, metrics: MetricsSpec, folder: Path, name: str, run_id: str, after: int = -1) -> None:
        self.folder, self.metrics = folder, metrics
        place = str(folder.resolve()), run_id, metrics.run_name or name, metrics.project, metrics.entity
        destination = Destination(*place, metrics.is_online, metrics.sink_timeout_s)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for sink in metrics.sinks:
            (folder / "logs" / f"sink-{sink}.problem").unlink(missing_ok=True)
            text = json.dumps(asdict(destination))
            with (folder / "logs" / f"sink-{sink}.log").open("wb") as log:
                self._processes[sink] = subprocess.Popen(
                    make_module_command("rlplan.runtime.sinks.follow", sink, text, str(after)),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C must not end a sink before it has read the last steps
                )

    def take_problems(self) -> list[str]:
        """Return a line about each sink that has ended by itself or does not reach its server, once each."""
        dead = [sink for sink, process in self._processes.items() if process.poll() is not None]
        lines = [
            f"the sink {sink} has ended with exit code {self._drop(sink)}; the run continues (logs/sink-{sink}.log)"
            for sink in dead
        ]
        for path in sorted((self.folder / "logs").glob("sink-*.problem")):
            lines.append(path.read_text(encoding="utf-8"))
            path.unlink()
        return lines

    def close(self) -> None:
        """Let the processes finish; kill those that exceed their time, with what they have started."""
        # all inputs are closed before the first wait, so that the processes finish at the same time
        for process in self._processes.values():
            assert process.stdin is not None, "a pipe"
            with contextlib.suppress(OSError):
                process.stdin.close()
        for sink in list(self._processes):
            sends = sink == "mlflow" or (sink == "wandb" and self.metrics.is_online)
            try:
                self._processes[sink].wait(self.metrics.sink_timeout_s if sends else scale_seconds(END_S))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(OSError):
                    os.killpg(self._processes[sink].pid, signal.SIGKILL)
            self._drop(sink)

    def _drop(self, sink: str) -> int:
        process = self._processes.pop(sink)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        return process.wait()
