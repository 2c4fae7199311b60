"""Live policy trainers on CPU ranks: one start of the processes for many tests.

Imports take ten seconds and a case one, so `exercise` goes on with the ranks that an earlier test has started.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rlplan.emit.ray import COMMON_ENVIRONMENT
from tests.waiting import Patience

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("live_trainer.py")
DEADLINE_S = 280

Case = Mapping[str, Any]


def exercise(
    num_ranks: int, cases: Mapping[str, Case], folder: Path, *, is_fresh: bool = False
) -> dict[str, list[Any]]:
    """For each case what each rank gave. A case: `exercise` by name and `overrides` of the job, and what it asks for.

    is_fresh: on processes of its own, for what stays in a process, or is measured of it.
    """
    (folder / "cases.json").write_text(json.dumps(dict(cases)))
    ranks = Ranks(num_ranks) if is_fresh else Ranks.shared(num_ranks)
    try:
        answers = ranks.ask(folder)
    except BaseException:
        ranks.close()
        raise
    finally:
        if is_fresh:
            ranks.close()
    return {name: [answer[name] for answer in answers] for name in cases}


class Ranks:
    """Processes that wait for cases; those that are shared end with the tests."""

    _shared: ClassVar[dict[int, "Ranks"]] = {}

    def __init__(self, num_ranks: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory(prefix="rlplan-ranks-")
        self.logs = [Path(self._folder.name) / f"{rank}.log" for rank in range(num_ranks)]
        self.processes = []
        for rank, path in enumerate(self.logs):
            command = [sys.executable, str(PROGRAM), str(rank), str(num_ranks), str(port)]
            with path.open("wb") as log:
                self.processes.append(
                    subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=log, stderr=log)
                )

    @classmethod
    def shared(cls, num_ranks: int) -> "Ranks":
        """Those that are there, or new ones."""
        ranks = cls._shared.get(num_ranks)
        if ranks is None or any(process.poll() is not None for process in ranks.processes):
            ranks = cls._shared[num_ranks] = cls(num_ranks)
            atexit.register(ranks.close)
        return ranks

    def ask(self, folder: Path) -> list[Any]:
        """What each rank gives for the cases in a folder. A rank that fails ends it all: the others would wait."""
        for process in self.processes:
            assert process.stdin is not None, "a pipe"
            process.stdin.write(f"{folder}\n".encode())
            process.stdin.flush()
        paths = [folder / f"answer-{rank}.json" for rank in range(len(self.processes))]
        patience = Patience(DEADLINE_S)
        while not all(path.exists() for path in paths):
            assert all(process.poll() is None for process in self.processes), self._said()
            assert patience.left_s() > 0, self._said()
            time.sleep(0.02)
        return [json.loads(path.read_text()) for path in paths]

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.communicate()
        self._folder.cleanup()

    def _said(self) -> str:
        return "\n".join(log.read_text(errors="replace")[-4000:] for log in self.logs)


def environment() -> dict[str, str]:
    """Of a rank."""
    return dict(
        os.environ | COMMON_ENVIRONMENT,
        PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        MALLOC_MMAP_THRESHOLD_=str(128 * 1024),
        MALLOC_TRIM_THRESHOLD_=str(256 * 1024),
    )
