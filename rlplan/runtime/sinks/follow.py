"""Follows a run folder's metrics and passes each step to a sink, in a separate process that cannot disturb the run.

In: `metrics.jsonl` and `timings.jsonl` while they grow. Out: the sink's output for each step, in order. When its
standard input closes, because the run closes it or ends, the process reads the rest and ends. Left out: merging the
files (merge.py).
"""

import json
import select
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlplan.runtime.sinks.merge import Merge

POLL_S = 0.5


@dataclass(frozen=True)
class Destination:
    """The place of a run's metrics in a logger."""

    folder: str
    """The run folder."""

    run_id: str
    """Id of the run, which it keeps when it is resumed in its folder."""

    name: str
    project: str
    entity: str | None
    is_online: bool
    timeout_s: float
    """`project` and the three fields after it come from the job's `metrics`."""

    def report_problem(self, kind: str, text: str) -> None:
        """Report why metrics do not reach the logger, in a file that the run turns into an alarm."""
        Path(self.folder, "logs", f"sink-{kind}.problem").write_text(text, encoding="utf-8")


class Sink(Protocol):
    """A logger of metrics."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log a step's numbers; step numbers never decrease."""

    def close(self) -> None:
        """Write out everything and close the logger."""


def open_sink(kind: str, destination: Destination) -> Sink:
    """Open a sink of a kind for a run."""
    # here, because these modules import this one
    from rlplan.runtime.sinks.mlflow import MLflow
    from rlplan.runtime.sinks.tensorboard import TensorBoard
    from rlplan.runtime.sinks.trackers import Trackio, WeightsAndBiases

    sinks: dict[str, Callable[[Destination], Sink]] = {
        "tensorboard": lambda to: TensorBoard(Path(to.folder), to.name),
        "wandb": WeightsAndBiases,
        "trackio": Trackio,
        "mlflow": MLflow,
    }
    return sinks[kind](destination)


def main() -> None:
    """Run the follower. sys.argv: kind of sink, Destination as JSON, last step of an earlier run here (-1: none)."""
    kind, destination, after = sys.argv[1], Destination(**json.loads(sys.argv[2])), int(sys.argv[3])
    sink, merge = open_sink(kind, destination), Merge(Path(destination.folder), after)
    is_over = False
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], POLL_S)[0])
        for step, numbers in merge.new(is_over=is_over):
            sink.log(step, numbers)
    sink.close()


if __name__ == "__main__":
    main()
