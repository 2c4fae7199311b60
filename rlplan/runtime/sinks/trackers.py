"""Sinks for the optional packages wandb and trackio, which log offline into the run folder.

In: names and numbers of a step. Out: the package's files. Neither package is a dependency; a failed import only ends
the sink's own process. Left out: uploads; use `wandb sync` after the run.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WeightsAndBiases:
    """A sink that logs to an offline run in `wandb/`."""

    def __init__(self, folder: Path, name: str) -> None:
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(folder))
        import wandb

        self._run: Any = wandb.init(project="rlplan", name=name, dir=str(folder), mode="offline")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A sink that logs to a local project in `trackio/`."""

    def __init__(self, folder: Path, name: str) -> None:
        os.environ["TRACKIO_DIR"] = str(folder / "trackio")
        import trackio

        self._trackio: Any = trackio
        trackio.init(project="rlplan", name=name, embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._trackio.log(dict(scalars), step=step)

    def close(self) -> None:
        self._trackio.finish()
