"""A signal while Ray starts is an interrupt, whatever Ray makes of it, and there is nothing to leave then."""

import os
import signal
import sys
from types import ModuleType

import pytest

from rlplan.emit.ray import RayPlacement
from rlplan.errors import InterruptedRunError
from rlplan.runtime.cluster import ray_cluster
from rlplan.runtime.cluster.ray_cluster import Cluster
from rlplan.runtime.processes.interrupts import handle_signals

ALONE = RayPlacement(bundles=(), islands=(), workers=())


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_signal_while_ray_starts_is_no_failure_of_ray(is_wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except InterruptedRunError as error:
            if is_wrapped:
                raise RuntimeError("the node did not answer") from error
            raise

    monkeypatch.setattr(ray_cluster, "_init", init)
    with pytest.raises(InterruptedRunError) as caught, handle_signals():
        Cluster().reserve(ALONE, 1.0)
    assert caught.value.exit_code == 128 + signal.SIGTERM


def test_where_the_import_of_ray_was_broken_off_there_is_no_ray_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    Cluster().close()
