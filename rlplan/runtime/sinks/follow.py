"""Follows a run folder's metrics and passes each step to a sink, in a separate process that cannot disturb the run.

In: `metrics.jsonl` and `timings.jsonl` while they grow. Out: the sink's output for each step, in order. The process
ends after reading everything once its standard input is closed, by the run or by the run's end. Left out: merging the
files (merge.py).
"""

import select
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from rlplan.runtime.sinks.merge import Merge

POLL_S = 0.5


class Sink(Protocol):
    """A logger of metrics."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log a step's numbers; step numbers never decrease."""

    def close(self) -> None:
        """Write out everything and close the logger."""


def open_sink(kind: str, folder: Path, name: str) -> Sink:
    """Open a sink of a kind for a run."""
    from rlplan.runtime.sinks.tensorboard import TensorBoard
    from rlplan.runtime.sinks.trackers import Trackio, WeightsAndBiases

    sinks: dict[str, Callable[[Path, str], Sink]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "trackio": Trackio,
    }
    return sinks[kind](folder, name)


def main() -> None:
    """Run the follower. sys.argv: kind of sink, run folder, run name, last step of an earlier run here (-1: none)."""
    kind, folder, name, after = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    sink, merge = open_sink(kind, folder, name), Merge(folder, after)
    is_over = False
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], POLL_S)[0])
        for step, numbers in merge.new(is_over=is_over):
            sink.log(step, numbers)
    sink.close()


if __name__ == "__main__":
    main()
