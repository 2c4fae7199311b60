"""Signals become one exception, which no library can make disappear."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from rlplan.errors import InterruptedRunError
from rlplan.runtime.processes.interrupts import handle_signals, listen_for_signals


@pytest.fixture(autouse=True)
def hang_up_is_heard() -> Iterator[None]:
    """These tests may themselves run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_block_and_handlers_are_as_before(number: signal.Signals, exit_code: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(InterruptedRunError, match=f"stopped by {number.name}") as stopped, handle_signals():
        os.kill(os.getpid(), number)
    assert stopped.value.exit_code == exit_code
    assert signal.getsignal(number) is before


def test_a_signal_whose_exception_a_library_swallowed_is_raised_when_we_listen_again() -> None:
    """Ray does so where it waits for its own processes to come up."""
    with handle_signals():
        with suppress(Exception):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(InterruptedRunError, match="stopped by SIGTERM"):
            listen_for_signals()
    with handle_signals():
        listen_for_signals()  # it belonged to the block before


def test_a_hang_up_that_is_ignored_from_the_start_stays_ignored() -> None:
    """`nohup` starts a command this way."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with handle_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        listen_for_signals()
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
