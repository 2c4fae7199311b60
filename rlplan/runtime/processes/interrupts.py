"""Interrupts: Ctrl-C, SIGTERM and SIGHUP raise one InterruptedRunError in the main thread, and never disturb clean-up.

A library may swallow an exception that is raised inside it: Ray catches every `Exception` while it waits for its own
processes to start. The signal is therefore remembered, and the error is raised again by `listen_for_signals`. Outside
the main thread, where Python handles no signals, nothing is changed.

In: signals; SIGHUP means a lost terminal. Out: an exception, once.
"""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlplan.errors import InterruptedRunError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_signals: tuple[signal.Signals, ...] = SIGNALS
_received: signal.Signals | None = None


def list_handled_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a command. SIGHUP stays ignored if it was ignored at the start, as `nohup` does."""
    is_kept_alive = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in SIGNALS if number is not signal.SIGHUP or not is_kept_alive)


def listen_for_signals() -> None:
    """Raise InterruptedRunError at the first SIGINT, SIGTERM or SIGHUP from now on, and ignore later ones.

    Raises: InterruptedRunError at once if an earlier one was swallowed.
    """
    raise_received()
    _set_all(_stop)


def raise_received() -> None:
    """Raises: InterruptedRunError if a signal arrived whose exception a library swallowed or replaced."""
    if _received is not None:
        raise _make_interrupt(_received)


def leave_lost_terminal() -> None:
    """Redirect output to /dev/null if the terminal has hung up, or if a pipe's reader is gone.

    Otherwise the next write would fail (EIO, EPIPE) and abort the clean-up.
    """
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)  # POLLHUP and POLLERR are reported without being asked for
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, descriptor)
            os.close(nothing)


@contextmanager
def handle_signals() -> Iterator[None]:
    """Handle signals inside the block, and restore the previous handlers afterwards.

    Ray installs its own SIGTERM handler while it starts, which raises SystemExit; that counts as an interrupt too.
    """
    global _received, _signals
    _received, _signals = None, list_handled_signals()
    with _restore_handlers():
        listen_for_signals()
        try:
            yield
        except SystemExit:
            raise _make_interrupt(signal.SIGTERM) from None


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore signals inside the block, which must bound its own duration."""
    with _restore_handlers():
        _set_all(signal.SIG_IGN)
        yield


@contextmanager
def _restore_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _set_all(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _signals:
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    global _received
    _set_all(signal.SIG_IGN)  # a second Ctrl-C must not interrupt the clean-up
    _received = signal.Signals(number)
    leave_lost_terminal()
    raise _make_interrupt(_received)


def _make_interrupt(number: signal.Signals) -> InterruptedRunError:
    error = InterruptedRunError(
        f"stopped by {number.name}",
        where="rlplan run",
        rule="a run ends after its last step",
        way_out="the run folder keeps every finished step; start the job again in a new folder",
    )
    error.exit_code = 128 + number
    return error
