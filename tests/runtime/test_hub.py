"""The hub, stood in for by a server on the loopback: a config is fetched once, and what goes wrong has its name."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.factories import EXAMPLES, ROOT

PROGRAM = "import sys; from rlplan.runtime.hub import fetch_config; print(fetch_config(sys.argv[1]))"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """Serves one model, `someone/model`, as the hub does."""
    folder = tmp_path / "served" / "someone" / "model" / "resolve" / "main"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes((EXAMPLES / "models" / "decoder-160m" / "config.json").read_bytes())
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(timeout=10)


def fetch(name: str, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HF_ENDPOINT": endpoint, "XDG_CACHE_HOME": str(cache), "HOME": str(cache)}
    command = [sys.executable, "-c", PROGRAM, name]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_config_is_fetched_once_and_then_read_from_the_cache(hub: str, tmp_path: Path) -> None:
    first = fetch("someone/model", hub, tmp_path)
    path = Path(first.stdout.strip())
    assert path == tmp_path / "rlplan" / "configs" / "someone--model" / "config.json", first.stderr
    assert path.read_bytes() == (EXAMPLES / "models" / "decoder-160m" / "config.json").read_bytes()
    assert fetch("someone/model", "http://127.0.0.1:9", tmp_path).stdout == first.stdout


def test_a_model_that_the_hub_does_not_have_is_said_to_be_missing(hub: str, tmp_path: Path) -> None:
    answer = fetch("someone/else", hub, tmp_path)
    assert "the hub gives no config.json of 'someone/else' (HTTP 404)" in answer.stderr
    assert not (tmp_path / "rlplan").exists()


def test_a_hub_that_cannot_be_reached_is_said_to_be_so(tmp_path: Path) -> None:
    answer = fetch("someone/model", "http://127.0.0.1:9", tmp_path)
    assert "the hub cannot be reached" in answer.stderr
