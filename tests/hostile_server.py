"""Servers on the loopback that hold their clients: they answer in drops, without an end, or too much.

In: shapes of answers, as the parts that are sent. Out: a port. A request's path holds `shape-N`, and its connection
gets the parts of shape N one by one until the client has gone. A TLS handshake holds no path and gets the first shape.
"""

import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

DROP_S = 0.02
"""Seconds between two drops, far below any timeout of a single read."""
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM = HEAD + b"Content-Type: text/event-stream\r\n\r\n"


def _drip(first: bytes, drop: bytes) -> Iterator[bytes]:
    yield first
    while True:
        time.sleep(DROP_S)
        yield drop


def _flood(first: bytes, wave: bytes) -> Iterator[bytes]:
    yield first
    yield from itertools.repeat(wave * (1 + (1 << 14) // len(wave)))


Shape = Callable[[], Iterator[bytes]]
SHAPES: dict[str, Shape] = {
    "silence": lambda: _drip(b"", b""),
    "a dripped status line": lambda: _drip(b"HTTP/1.1 200 ", b"O"),
    "a dripped header": lambda: _drip(HEAD + b"X-A: ", b"a"),
    "dripped headers": lambda: _drip(HEAD, b"X-A: a\r\n"),
    "dripped 100 Continue": lambda: _drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "endless 100 Continue": lambda: _flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "headers of a dripped 100 Continue": lambda: _drip(b"HTTP/1.1 100 Continue\r\n", b"X-A: a\r\n"),
    "a dripped answer of nothing": lambda: _drip(b"HTTP/1.1 204 No Content\r\nX-A: ", b"a"),
    "a dripped body of an error": lambda: _drip(b"HTTP/1.1 500 Error\r\nX-A: ", b"a"),
    "a dripped stream of bytes that are no text": lambda: _drip(STREAM + b"data: ", b"\xff"),
    "a dripped body": lambda: _drip(HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
    "a dripped body without a length": lambda: _drip(HEAD + b"\r\n", b" "),
    "a dripped chunk size": lambda: _drip(CHUNKED, b"0"),
    "a dripped chunk extension": lambda: _drip(CHUNKED + b"1;", b"a"),
    "chunks of one byte": lambda: _drip(CHUNKED, b"1\r\n \r\n"),
    "dripped trailers": lambda: _drip(CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-A: a\r\n"),
    "endless trailers": lambda: _flood(CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-A: a\r\n"),
    "a dripped redirect": lambda: _drip(b"HTTP/1.1 302 Found\r\nLocation: /", b"a"),
    "dripped comments of a stream": lambda: _drip(STREAM, b": a\n\n"),
    "an endless line of a stream": lambda: _drip(STREAM + b"data: ", b"a"),
}
"""Answers that never end, by what of them is endless."""
TOO_MUCH: dict[str, Shape] = {
    "an endless body": lambda: _flood(HEAD + b"\r\n", b" "),
    "an endless stream": lambda: _flood(STREAM, b": a\n\n"),
    "a long chunk": lambda: _flood(CHUNKED + b"fffffff\r\n", b" "),
    "a flood of notifications": lambda: _flood(STREAM, b'data: {"jsonrpc": "2.0", "method": "x"}\n\n'),
}
"""Answers of which more than a client takes comes before any deadline."""


@contextmanager
def serve_shapes(shapes: Sequence[Shape]) -> Iterator[int]:
    """The port of a server with these shapes; for the block."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        thread = threading.Thread(target=_accept, args=(listener, shapes))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=10)


def _accept(listener: socket.socket, shapes: Sequence[Shape]) -> None:
    with suppress(OSError):
        while True:
            threading.Thread(target=_serve, args=(listener.accept()[0], shapes), daemon=True).start()


def _serve(connection: socket.socket, shapes: Sequence[Shape]) -> None:
    with suppress(OSError), connection:
        number = re.search(rb"shape-(\d+)", connection.recv(1 << 16))
        for part in shapes[int(number[1]) if number else 0]():
            connection.sendall(part)
            if not part and _has_ended(connection):
                return
        connection.shutdown(socket.SHUT_WR)
        while not _has_ended(connection):  # closing with unread bytes would reset the connection
            time.sleep(DROP_S)


def _has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1 << 16, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
