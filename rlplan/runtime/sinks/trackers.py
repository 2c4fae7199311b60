"""Sinks for the optional packages wandb and trackio. trackio logs into the run folder; wandb there or to its server.

A wandb server that does not answer in time is replaced by the run folder, from which `wandb sync` uploads later.

In: names and numbers of a step. Out: the package's files and uploads. Neither package is a dependency; a failed import
only ends the sink's own process.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlplan.runtime.sinks.follow import Destination


class WeightsAndBiases:
    """A sink that logs to a wandb run with this run's id, on the server or in `wandb/`. A resumed run continues it."""

    def __init__(self, destination: Destination) -> None:
        os.environ.update(WANDB_SILENT="true", WANDB_DIR=destination.folder)
        import wandb

        self._to = destination
        if destination.is_online:
            try:
                self._run = self._begin("online")
                return
            except Exception as error:  # an unknown project, no key, no server
                why = " ".join(str(error).split())[:200]
                text = (
                    f"wandb is not reached ({why}); metrics are kept in wandb/ for `wandb sync`, and the run continues"
                )
                wandb.teardown(1)  # its service would refuse a second run of the same id
                destination.report_problem("wandb", text)
        self._run = self._begin("offline")

    def _begin(self, mode: Literal["online", "offline"]) -> Any:
        import wandb

        to = self._to
        settings = wandb.Settings(init_timeout=to.timeout_s, finish_timeout=to.timeout_s, finish_timeout_raises=False)
        resume: Literal["allow"] | None = "allow" if mode == "online" else None
        return wandb.init(
            project=to.project, entity=to.entity, name=to.name, id=to.run_id or None, resume=resume, dir=to.folder,
            mode=mode, settings=settings,
        )  # fmt: skip

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A sink that logs to a local project in `trackio/`."""

    def __init__(self, destination: Destination) -> None:
        os.environ["TRACKIO_DIR"] = str(Path(destination.folder, "trackio"))
        import trackio

        self._trackio: Any = trackio
        trackio.init(
            destination.project, destination.name, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._trackio.log(dict(scalars), step=step)

    def close(self) -> None:
        self._trackio.finish()
