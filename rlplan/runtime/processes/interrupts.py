"""Interrupts: Ctrl-C, SIGTERM and SIGHUP become one InterruptedRunError in the main thread; clean-up is left alone.

In: signals; SIGHUP is that of a lost terminal. Out: an exception, once. Outside the main thread (where Python has no
signals) nothing is changed. An exception that is raised inside a library may be swallowed there: Ray catches every
`Exception` in the loop in which it waits for its own processes to answer. So the signal is remembered, and raised again
when we listen anew.
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


def signals_to_hear() -> tuple[signal.Signals, ...]:
    """The signals that end a command. A SIGHUP that is ignored when it begins stays ignored: `nohup` asked for it."""
    is_kept_alive = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in SIGNALS if number is not signal.SIGHUP or not is_kept_alive)


def listen_for_signals() -> None:
    """From now on the first SIGINT, SIGTERM or SIGHUP raises InterruptedRunError, and later ones are ignored.

    Raises: InterruptedRunError at once where one came before and its exception was swallowed.
    """
    raise_received()
    _set_all(_stop)


def raise_received() -> None:
    """Raises: InterruptedRunError where a signal came whose exception a library swallowed or made another one of."""
    if _received is not None:
        raise _interrupted(_received)


def leave_lost_terminal() -> None:
    """Discard what is still printed to a terminal that has hung up, or to a pipe whose reader died with it.

    Each write would fail (EIO, EPIPE) and end the clean-up half-way.
    """
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, descriptor)
            os.close(nothing)


@contextmanager
def interruptible() -> Iterator[None]:
    """Listen for signals inside the block; afterwards the handlers are as before.

    Ray's own SIGTERM handler, in place for a moment while Ray starts, raises SystemExit: that is an interrupt too.
    """
    global _received, _signals
    _received, _signals = None, signals_to_hear()
    with _handlers_kept():
        listen_for_signals()
        try:
            yield
        except SystemExit:
            raise _interrupted(signal.SIGTERM) from None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore signals inside the block, which is bounded by itself."""
    with _handlers_kept():
        _set_all(signal.SIG_IGN)
        yield


@contextmanager
def _handlers_kept() -> Iterator[None]:
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
    _set_all(signal.SIG_IGN)
    _received = signal.Signals(number)
    leave_lost_terminal()
    raise _interrupted(_received)


def _interrupted(number: signal.Signals) -> InterruptedRunError:
    error = InterruptedRunError(
        f"stopped by {number.name}",
        where="rlplan run",
        rule="a run continues until its last step",
        way_out="the run folder keeps every finished step; start the job again in a new folder",
    )
    error.exit_code = 128 + number
    return error
