"""Live policy trainers on CPU ranks: one start of the processes for many tests.

A case takes a second, so `exercise` goes on with the ranks that an earlier test has started.
"""

import atexit
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tests.runtime.live.live_forks import read_answers, start

DEADLINE_S = 280

Case = Mapping[str, Any]


def exercise(
    num_ranks: int, cases: Mapping[str, Case], folder: Path, *, is_fresh: bool = False, is_measured: bool = False
) -> dict[str, list[Any]]:
    """The ranks' results for each case. A case: `exercise` by name and `overrides` of the job, and what it asks for.

    is_fresh: on processes of its own, for what stays in a process. is_measured: which share no memory either.
    """
    (folder / "cases.json").write_text(json.dumps(dict(cases)))
    is_own = is_fresh or is_measured
    ranks = Ranks(num_ranks, is_alone=is_measured) if is_own else Ranks.shared(num_ranks)
    try:
        answers = ranks.ask(folder)
    except BaseException:
        ranks.close()
        raise
    finally:
        if is_own:
            ranks.close()
    return {name: [answer[name] for answer in answers] for name in cases}


class Ranks:
    """Processes that wait for cases; those that are shared end with the tests."""

    _shared: ClassVar[dict[int, "Ranks"]] = {}

    def __init__(self, num_ranks: int, *, is_alone: bool = False) -> None:
        """is_alone: see live_forks.start."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory(prefix="rlplan-ranks-")
        self.processes, self._asking = [], list[int]()
        for rank in range(num_ranks):
            log, pipe = (Path(self._folder.name) / f"{rank}.{kind}" for kind in ("log", "pipe"))
            os.mkfifo(pipe)
            self._asking.append(os.open(pipe, os.O_RDWR))  # which does not wait for a reader
            target = "tests.runtime.live.live_trainer:main"
            place = (rank, num_ranks, port, str(pipe))
            self.processes.append(start(target, *place, log=log, environment={}, is_alone=is_alone))

    @classmethod
    def shared(cls, num_ranks: int) -> "Ranks":
        """Those that are there, or new ones."""
        ranks = cls._shared.get(num_ranks)
        if ranks is None or not all(process.is_running for process in ranks.processes):
            ranks = cls._shared[num_ranks] = cls(num_ranks)
            atexit.register(ranks.close)
        return ranks

    def ask(self, folder: Path) -> list[Any]:
        """The ranks' results for the cases in a folder. A rank that fails ends them all: the others would wait."""
        for pipe in self._asking:
            os.write(pipe, f"{folder}\n".encode())
        paths = [folder / f"answer-{rank}.json" for rank in range(len(self.processes))]
        return read_answers(self.processes, paths, DEADLINE_S)

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            process.close()
        while self._asking:
            os.close(self._asking.pop())
        self._folder.cleanup()
