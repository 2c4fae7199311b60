"""A stand-in for the model hub on the loopback: `resolve/main/config.json` of a few models, as the hub answers.

In: nothing. Out: its address, and the headers of each request that it got. `someone/model` is anybody's, after the
hub's own redirect within the host; `someone/gated` asks for the token TOKEN; `someone/elsewhere` does too and leads to
another host; `someone/endless` is too long; all else is not there.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.factories import EXAMPLES

CONFIG = (
    (EXAMPLES / "models" / "decoder-160m" / "config.json")
    .read_bytes()
    .replace(b'"max_position_embeddings": 1024', b'"max_position_embeddings": 32768')
)
TOKEN = "hf_a_token_of_the_tests"


@dataclass
class Hub:
    """A running one. requests: (path, headers) in the order in which they came."""

    address: str
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub for the block."""
    hub = Hub("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.requests.append((self.path, dict(self.headers)))
            model, _, rest = self.path.strip("/").partition("/resolve/main/")
            if self.path == "/api/resolve-cache/models/config.json":
                self._answer(200, CONFIG)
            elif rest == "config.json" and model == "someone/model":
                self._answer(307, location="/api/resolve-cache/models/config.json")
            elif rest == "config.json" and model == "someone/gated":
                may_read = self.headers.get("Authorization") == f"Bearer {TOKEN}"
                self._answer(*((307, b"", "/api/resolve-cache/models/config.json") if may_read else (401, b"gated")))
            elif rest == "config.json" and model == "someone/elsewhere":
                may_read = self.headers.get("Authorization") == f"Bearer {TOKEN}"
                address = hub.address.replace("127.0.0.1", "localhost")
                self._answer(
                    *((302, b"", f"{address}/api/resolve-cache/models/config.json") if may_read else (401, b""))
                )
            elif rest == "config.json" and model == "someone/endless":
                self._answer(200, CONFIG + b" " * 4_000_000)
            else:
                self._answer(404, b"Entry not found")

        def _answer(self, code: int, body: bytes = b"", location: str = "") -> None:
            self.send_response(code)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join(timeout=10)
