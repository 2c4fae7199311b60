"""Follows a run folder's metrics and hands each row to a sink; a process of its own, so that it can stop nothing.

In: `metrics.jsonl` and `timings.jsonl` while they grow. Out: what the sink makes of each step, in order. It ends, with
everything read, when its standard input is closed: by the run, or because the run is gone. Left out: merge.py.
"""

import select
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from rlplan.runtime.sinks.merge import Merge

POLL_S = 0.5


class Sink(Protocol):
    """Something that takes numbers."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a step's numbers; steps never go back."""

    def close(self) -> None:
        """Nothing more comes."""


def open_sink(kind: str, folder: Path, name: str) -> Sink:
    from rlplan.runtime.sinks.tensorboard import TensorBoard
    from rlplan.runtime.sinks.trackers import Trackio, WeightsAndBiases

    made: dict[str, Callable[[Path, str], Sink]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "trackio": Trackio,
    }
    return made[kind](folder, name)


def main() -> None:
    """sys.argv: kind of sink, run folder, name, the step that an earlier run in this folder did last (-1: none)."""
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
