"""Abilities of every worker: meeting the others of its group, and importing an engine without collecting garbage."""

import gc
import socket

import pytest

from rlplan.errors import HostError
from rlplan.runtime.workers.worker import Worker, disable_garbage_collection


def test_a_rendezvous_port_that_is_taken_is_refused_with_the_way_out() -> None:
    """A complete run ends so in the nightly form, in tests/runtime/fault_tolerance/test_failures.py."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(HostError, match=f"port {port} cannot be used: ") as caught:
            Worker("policy_trainer/0").open_rendezvous("127.0.0.1", port)
    assert "set it to 0, or end what listens there" in str(caught.value)
    assert caught.value.exit_code == 4


def test_the_listener_of_a_rendezvous_is_given_away_once() -> None:
    worker = Worker("policy_trainer/0")
    port = worker.open_rendezvous("127.0.0.1", 0)
    with socket.socket(fileno=worker.take_listener()) as listener:
        assert listener.getsockname()[1] == port
    assert worker.take_listener() is None


def test_nothing_is_collected_while_libraries_are_imported_and_everything_after() -> None:
    try:
        with disable_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
