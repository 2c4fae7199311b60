"""Weights & Biases and trackio: numbers handed to packages that a user may have; offline, into the run folder.

In: names and numbers of a step. Out: what the package writes. Neither is a dependency; the import fails in the sink's
own process, where it stops nothing. Left out: sending anything anywhere; `wandb sync` does that afterwards.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WeightsAndBiases:
    """A sink: an offline run below `wandb/`."""

    def __init__(self, folder: Path, name: str) -> None:
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(folder))
        import wandb

        self._run: Any = wandb.init(project="rlplan", name=name, dir=str(folder), mode="offline")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A sink: a local project below `trackio/`."""

    def __init__(self, folder: Path, name: str) -> None:
        os.environ["TRACKIO_DIR"] = str(folder / "trackio")
        import trackio

        self._trackio: Any = trackio
        trackio.init(project="rlplan", name=name, embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._trackio.log(dict(scalars), step=step)

    def close(self) -> None:
        self._trackio.finish()
