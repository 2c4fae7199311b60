"""A stand-in for the model hub on the loopback: `resolve/main/config.json` of a few models, as the hub answers.

In: nothing. Out: its address, and the headers of each request that it got. `someone/model` is anybody's, after the
hub's own redirect within the host; `someone/whole` has all its files: a tokenizer, a chat template, weights in two
parts, and what nobody should fetch; `someone/gated` asks for the token TOKEN; `someone/elsewhere` does too and leads to
another host; `someone/endless` is too long; all else is not there.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from safetensors.torch import load_file, save

from tests.factories import EXAMPLES

CONFIG = (
    (EXAMPLES / "models" / "decoder-160m" / "config.json")
    .read_bytes()
    .replace(b'"max_position_embeddings": 1024', b'"max_position_embeddings": 32768')
)
WHOLE = "someone/whole"
KEPT = "/api/resolve-cache/models/config.json"
"""Where the hub's redirects lead."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEMPLATE = b"{% for message in messages %}{{ message['content'] }}{% endfor %}"
TOKEN = "hf_a_token_of_the_tests"


@dataclass
class Hub:
    """A running one. requests: (path, headers) in the order in which they came."""

    address: str
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)


def whole_model() -> dict[str, bytes]:
    """The files of the example's sorter as large models lie on the hub: in parts, beside other formats of the same."""
    folder = EXAMPLES / "models" / "sorter"
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    index = {"metadata": {}, "weight_map": {name: part for part, part_names in parts.items() for name in part_names}}
    whole = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".json"}
    whole |= {part: save({name: tensors[name] for name in part_names}) for part, part_names in parts.items()}
    whole |= {"model.safetensors.index.json": json.dumps(index).encode(), "chat_template.jinja": TEMPLATE}
    return whole | {"pytorch_model.bin": b"a pickle", "modeling.py": b"code", "original/model.safetensors": b"again"}


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub for the block."""
    hub, whole, elsewhere = Hub(""), _answers(whole_model()), {"someone/gated": ""}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.requests.append((self.path, dict(self.headers)))
            body = whole.get(self.path.partition("?")[0])
            if body is not None:
                self._answer(200, body)
            else:
                self._answer_for_a_config()

        def _answer_for_a_config(self) -> None:
            model, _, rest = self.path.strip("/").partition("/resolve/main/")
            if rest == "config.json" and model == "someone/model":
                self._answer(307, location=KEPT)
            elif rest == "config.json" and model in elsewhere:
                may_read = self.headers.get("Authorization") == f"Bearer {TOKEN}"
                self._answer(307, location=elsewhere[model] + KEPT) if may_read else self._answer(401, b"gated")
            else:
                self._answer(404, b"Entry not found")

        def _answer(self, code: int, body: bytes = b"", location: str = "") -> None:
            self.send_response(code)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", hashlib.sha1(body).hexdigest())
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        elsewhere["someone/elsewhere"] = f"http://localhost:{server.server_address[1]}"
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join(timeout=10)


def _answers(files: dict[str, bytes]) -> dict[str, bytes]:
    """The fixed answers by path: all files of this model, and the public files of others."""
    hashes = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
    listing = [{"type": "file", "path": name, "size": len(files[name]), "oid": hashes[name]} for name in files]
    answers = {KEPT: CONFIG, "/someone/endless/resolve/main/config.json": CONFIG + b" " * 4_000_000}
    answers |= {f"/{WHOLE}/resolve/{place}/{name}": files[name] for name in files for place in ("main", COMMIT)}
    answers[f"/api/models/{WHOLE}/revision/main"] = json.dumps({"id": WHOLE, "sha": COMMIT, "siblings": []}).encode()
    return answers | {f"/api/models/{WHOLE}/tree/{COMMIT}": json.dumps(listing).encode()}
