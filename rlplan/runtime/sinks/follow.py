"""Follows a run folder's metrics and hands each row to a sink; a process of its own, so that it can stop nothing.

In: `metrics.jsonl` and `timings.jsonl` while they grow. Out: what the sink makes of them. It ends, with everything
read, when its standard input is closed: by the run, or because the run is gone.
"""

import json
import select
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

POLL_S = 0.5
FILES = ("metrics.jsonl", "timings.jsonl")


class Sink(Protocol):
    """Something that takes numbers."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a step's numbers."""

    def close(self) -> None:
        """Nothing more comes."""


def open_sink(kind: str, folder: Path, name: str) -> Sink:
    """A sink by its name in a job."""
    from rlplan.runtime.sinks.tensorboard import TensorBoard
    from rlplan.runtime.sinks.trackers import Trackio, WeightsAndBiases

    made: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}
    return made[kind](folder, name)  # type: ignore[no-any-return]


class Tail:
    """Whole new lines of a file that grows, and may begin again."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows since the last time."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._at:
                    self._at = 0
                file.seek(self._at)
                data = file.read()
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        self._at += whole
        for line in data[:whole].splitlines():
            yield json.loads(line)


def step_of(row: dict[str, Any], last: int) -> int:
    """The row's step; what is done when a run ends (-1) stands beside its last step."""
    return last if row["step"] < 0 else int(row["step"])


def main() -> None:
    """sys.argv: kind of sink, run folder, name."""
    kind, folder, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    sink = open_sink(kind, folder, name)
    tails = [Tail(folder / file) for file in FILES]
    last, is_over = 0, False
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], POLL_S)[0])
        for tail in tails:
            for row in tail.rows():
                last = step_of(row, last)
                sink.log(last, {k: float(v) for k, v in row.items() if k != "step" and isinstance(v, int | float)})
    sink.close()


if __name__ == "__main__":
    main()
