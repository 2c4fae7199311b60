"""HTTP requests with one deadline for everything: name lookup, TLS, redirects, status line, headers, body and trailers.

A socket's timeout bounds a single read, so a server that sends a byte now and then could hold its client forever. Each
request therefore runs in a thread of its own. At the deadline the caller gets an error, and the request's sockets are
shut down, which ends the thread.

In: a request of urllib and a deadline. Out: the answer's bytes and headers. Left out: interrupting a DNS lookup or the
handshake of a proxy. Their thread ends when the resolver or the proxy does, and nobody waits for it.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import (
    AbstractHTTPHandler,
    BaseHandler,
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    OpenerDirector,
    Request,
)

from rlplan.runtime.processes.line_process import Deadline, LateError, TooLongError

_CHUNK_BYTES = 1 << 16
THREAD = "http exchange"
"""Name of the thread of a request."""
Result = TypeVar("Result")
Answer = tuple[bytes, HTTPMessage]
"""The body and the headers of an answer."""


def fetch(
    request: Request,
    deadline: Deadline,
    max_bytes: int,
    *handlers: BaseHandler,
    is_enough: Callable[[bytes], bool] = lambda part: False,
) -> Answer:
    """Send a request and read its answer.

    handlers: urllib's for proxies and redirects; without one for redirects, these are statuses other than 2xx.
    is_enough: gets each part of the body as it arrives, and returns whether the rest is not needed.
    Raises: LateError, TooLongError, HTTPError (a status other than 2xx), OSError, HTTPException, ValueError.
    """
    deadline.check()
    sockets = _Sockets()

    def exchange() -> Answer:
        opener = OpenerDirector()  # the default one would follow redirects
        for handler in (_Connector(sockets), HTTPDefaultErrorHandler(), HTTPErrorProcessor(), *handlers):
            opener.add_handler(handler)
        try:
            with opener.open(request, timeout=deadline.check()) as response:
                return _read_body(response, max_bytes, is_enough), response.headers
        except HTTPError as error:
            error.close()
            raise

    try:
        return run_within(deadline, exchange)
    except URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise deadline.make_error() from None
        raise
    finally:
        sockets.close()


def run_within(deadline: Deadline, work: Callable[[], Result]) -> Result:
    """Run work in a thread of its own and wait for it until the deadline. Raises: LateError, and what `work` raises.

    Late work continues until the caller ends it or the process ends.
    """
    outcome = Future[Result]()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=THREAD, daemon=True).start()
    try:
        return outcome.result(deadline.remaining_s)
    except TimeoutError:  # raised by this wait, or by a socket, whose timeout ends with the deadline
        raise deadline.make_error() from None


def explain_failure(error: Exception) -> str:
    """Explain in words why there was no answer. error: an exception that `fetch` raises."""
    if isinstance(error, HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, LateError):
        return f"no whole answer: {error}"
    return str(getattr(error, "reason", None) or error)[:200] or type(error).__name__


FAILURES = (OSError, HTTPException, ValueError)
"""Exceptions of a request besides LateError and TooLongError; HTTPError and URLError are OSErrors."""


def _read_body(response: HTTPResponse, max_bytes: int, is_enough: Callable[[bytes], bool]) -> bytes:
    body = bytearray()
    while part := response.read1(_CHUNK_BYTES):
        body += part
        if len(body) > max_bytes:
            raise TooLongError(f"an answer of more than {max_bytes} bytes")
        if is_enough(part):
            return bytes(body)
    if response.length:  # unlike read(), read1() ends an incomplete body without an error
        raise IncompleteRead(bytes(body), response.length)
    return bytes(body)


class _Sockets:
    """Second handles of a request's sockets, which another thread can shut down."""

    def __init__(self) -> None:
        self._lock, self._handles, self._is_closed = threading.Lock(), list[socket.socket](), False

    def add(self, used: socket.socket) -> None:
        """Raises: ConnectionAbortedError when the deadline has passed."""
        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError("the deadline has passed")
            self._handles.append(used.dup())

    def close(self) -> None:
        """Shut all sockets down: a thread that reads or writes one gets its end at once."""
        with self._lock:
            self._is_closed = True
            for handle in self._handles:
                with contextlib.suppress(OSError), handle:
                    handle.shutdown(socket.SHUT_RDWR)


class _PlainConnection(HTTPConnection):
    """A connection whose socket is known to `sockets` from its start."""

    sockets: _Sockets

    def connect(self) -> None:
        super().connect()
        self.sockets.add(self.sock)  # before the TLS handshake, which may hang too


class _TlsConnection(HTTPSConnection, _PlainConnection):
    """The same with TLS: HTTPSConnection connects through _PlainConnection, then shakes hands."""


class _Connector(AbstractHTTPHandler):
    """Opens both kinds of connections."""

    http_request = https_request = AbstractHTTPHandler.do_request_

    def __init__(self, sockets: _Sockets) -> None:
        super().__init__()
        self.sockets = sockets

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(self._connect, _PlainConnection), req)

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(self._connect, _TlsConnection), req)

    def _connect(self, kind: type[_PlainConnection], host: str, *, timeout: float) -> _PlainConnection:
        connection = kind(host, timeout=timeout)
        connection.sockets = self.sockets
        return connection
