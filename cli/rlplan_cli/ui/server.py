"""The server of `rlplan ui`, on Python's own http.server. It listens on 127.0.0.1 only, and requires a token.

Only the printed address has the token. A page of another site has neither the token nor the right Host header, so it
can neither read nor plan anything.
In: a port. Out: a server that answers until it is closed. Left out: the answers (answer.py).
"""

import hmac
import json
import math
import secrets
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rlplan.errors import HostError
from rlplan_cli.ui.answer import answer

HOST = "127.0.0.1"
MAX_BYTES = 64 << 10
"""Largest size of a request."""
MAX_CONNECTIONS = 64
REQUEST_S = 10.0
"""Seconds for a client to send its whole request; later its connection is shut down."""
SEND_S = 30.0
"""Seconds for a client to take a whole answer."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Server(ThreadingHTTPServer):
    """Answers on one port; `address` is the URL to open."""

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, port: int) -> None:
        """Listen on a port; 0 takes a free one. Raises: HostError when it is in use or not permitted."""
        self.token = secrets.token_urlsafe(18)
        self.num_asked = 0
        """Number of questions so far."""
        self._counts, self._searches = threading.Lock(), threading.Lock()
        self._connections: dict[socket.socket, float] = {}
        """Open connections, with the time by which the request must be there; infinite once it is."""
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise HostError(
                f"port {port} cannot be used: {(error.strerror or str(error)).lower()}",
                where=f"command line: --port {port}",
                rule=f"a free port of {HOST}; ports below 1024 need an administrator",
                way_out="--port 0 takes any free port",
            ) from None

    @property
    def address(self) -> str:
        """The URL of the page, with the token."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def ask(self, fields: dict[str, str]) -> dict[str, Any] | None:
        """Answer a question; None if a newer question arrived while this one waited.

        Searches run one at a time: they share caches, and two at once would compete for one core.
        """
        with self._counts:
            self.num_asked += 1
            number = self.num_asked
        with self._searches:
            return answer(fields) if number == self.num_asked else None

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more connection."""
        if len(self._connections) >= MAX_CONNECTIONS:
            with suppress(OSError):
                request.send(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
            return False
        self._connections[request] = time.monotonic() + REQUEST_S
        return True

    def note_request(self, connection: socket.socket) -> None:
        """Note that a request was read whole."""
        self._connections[connection] = math.inf

    def service_actions(self) -> None:
        """Shut down the connections whose request is late; `serve_forever` calls it twice a second."""
        now = time.monotonic()
        for connection, end_s in [*self._connections.items()]:
            if now > end_s:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, except a closed connection: the page cancels its question at every change."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = SEND_S
    raw_requestline: bytes  # which typeshed leaves out
    default_request_version = "HTTP/1.0"  # by default a malformed line counts as HTTP/0.9, which has no status

    def parse_request(self) -> bool:
        """Parse a request line and headers; answer malformed ones with status 400."""
        is_parsed = super().parse_request()
        if not is_parsed and not self.raw_requestline.strip():
            self.send_error(HTTPStatus.BAD_REQUEST, "Empty request line")
        return is_parsed

    def do_GET(self) -> None:
        """Send the page."""
        self.server.note_request(self.connection)
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, "The address is malformed.")
            return
        if self._is_refused(parse_qs(url.query).get("token", [""])[0]):
            return
        if url.path != "/":
            self._send(HTTPStatus.NOT_FOUND, "This server has only one page.")
            return
        from rlplan_cli.ui.page import page

        self._send(HTTPStatus.OK, page(self.server.token), "text/html")

    def do_POST(self) -> None:
        """Answer a question: a JSON object of fields."""
        if self._is_refused(self.headers.get("X-Token", "")):
            return
        fields = self._fields()
        if fields is None:
            self._send(HTTPStatus.BAD_REQUEST, "A question must be a JSON object of strings.")
            return
        try:
            result = self.server.ask(fields)
        except Exception as error:
            traceback.print_exc()
            self._send(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"a bug in rlplan: {type(error).__name__}: {error}. Please report the traceback in the terminal",
            )
            return
        if result is None:
            self._send(HTTPStatus.CONFLICT, "Replaced by a newer question.")
            return
        self._send(HTTPStatus.OK, json.dumps(result), "application/json")

    def _is_refused(self, token: str) -> bool:
        host = self.headers.get("Host", "")
        is_ours = host in {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        # a page of another site could reach 127.0.0.1 through a DNS name of its own, hence the check of Host
        if is_ours and hmac.compare_digest(token.encode(), self.server.token.encode()):
            return False
        self._send(HTTPStatus.FORBIDDEN, "The token is missing: copy the whole address from the terminal.")
        return True

    def _fields(self) -> dict[str, str] | None:
        try:
            length = int(self.headers.get("Content-Length", ""))
            text = self.rfile.read(length) if 0 <= length <= MAX_BYTES else b""
            self.server.note_request(self.connection)
            data: Any = json.loads(text)
        except (ValueError, RecursionError):
            return None
        is_text = isinstance(data, dict) and all(isinstance(value, str) for value in data.values())
        return data if is_text else None

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            **HEADERS,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing, so the terminal keeps showing the address."""
