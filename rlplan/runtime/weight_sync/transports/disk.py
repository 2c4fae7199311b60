"""The disk transport: safetensors files in one folder per update, for engines on any host that shares the folder.

In: packets. Out: the same bytes, read back into one buffer. A file gets its final name when it is complete. Full
packets store tensors by name, so that any safetensors reader can read them; deltas store one tensor of bytes. A reader
on the sender's host notices at once that the sender has ended; a reader on another host notices at its timeout.
Left out: fsync. Data that the kernel has accepted counts as written.
"""

import json
import os
import select
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from rlplan.memory.weight_sync.packets import Packet
from rlplan.runtime.run_folder.disk_errors import writing_file
from rlplan.runtime.weight_sync.channel import Deadline, Encoding, Endpoint, GivenUpError, Header, Update, sync_error
from rlplan.runtime.weight_sync.contents.full import view

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
FAILED = "failed"
SENDER = "sender"
"""Name of the file that identifies the sender's process."""


class DiskSide:
    """Either side: a buffer for the largest packet, and the folder of the current update."""

    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet]) -> None:
        self.endpoint, self.packets = endpoint, packets
        self.arena = torch.zeros(max(packet.bucket.num_bytes for packet in packets), dtype=torch.uint8)
        self.num_bytes = self.arena.numel()
        self.folder, self.deadline = Path(endpoint.path), Deadline(0.0)

    def begin(self, update: Update) -> None:
        self.folder = Path(self.endpoint.path) / f"version-{update.version:06d}-{update.serial:06d}"
        self.deadline = Deadline(update.timeout_s)

    def abort(self) -> None:
        """Create a marker file for the other sides; if even that fails, they wait until their timeout."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / FAILED).touch()

    def _file(self, index: int) -> Path:
        return self.folder / f"packet-{index:04d}.safetensors"

    def _pieces(self, index: int, encoding: int, num_bytes: int) -> Iterator[tuple[str, str, list[int], torch.Tensor]]:
        """Yield (name, type, shape, bytes) of each tensor in a packet's file."""
        if encoding != Encoding.FULL:
            yield "delta", "U8", [num_bytes], self.arena[:num_bytes]
            return
        dtype = getattr(torch, self.endpoint.dtype)
        for entry in self.packets[index].bucket.entries:
            tensor = view(self.arena, entry, dtype)
            size = tensor.numel() * dtype.itemsize
            yield entry.name, _NAMES[self.endpoint.dtype], list(entry.shape), self.arena[entry.offset :][:size]


class DiskOutlet(DiskSide):
    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet]) -> None:
        super().__init__(endpoint, packets)
        self.folder.mkdir(parents=True, exist_ok=True)
        with writing_file(self.folder / SENDER):
            (self.folder / SENDER).write_text(f"{os.getpid()} {_process_namespace()}", encoding="ascii")

    def connect(self) -> None:
        """Do nothing: readers may connect at any time."""

    def begin(self, update: Update) -> None:
        """Prepare for an update; remove the files of earlier updates, which readers have read or given up."""
        super().begin(update)
        for old in Path(self.endpoint.path).glob("version-*"):
            shutil.rmtree(old, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def buffer(self, index: int) -> torch.Tensor:
        """Return the single buffer: each packet is written to disk before the next one is filled."""
        return self.arena[: self.packets[index].bucket.num_bytes]

    def publish(self, header: Header) -> None:
        pieces = list(self._pieces(header.index, header.encoding, header.num_bytes))
        content: dict[str, object] = {"__metadata__": {"header": " ".join(map(str, header.words()))}}
        end = 0
        for name, kind, shape, data in pieces:
            content[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + data.numel()]}
            end += data.numel()
        text = json.dumps(content).encode()
        text += b" " * (-len(text) % 8)  # safetensors aligns the data to 8 bytes
        path = self._file(header.index)
        with writing_file(path, 8 + len(text) + end), path.with_suffix(".part").open("wb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(struct.pack("<Q", len(text)) + text))
            for *_, data in pieces:
                _write_all(file.fileno(), data.numpy().data)
        path.with_suffix(".part").rename(path)  # readers wait for the final name

    def finish(self) -> None:
        """Do nothing: files stay until the next update."""

    def abort(self) -> None:
        """Remove incomplete files, which frees space for the marker on a full disk, then create the marker."""
        for partial in self.folder.glob("*.part"):
            partial.unlink()
        super().abort()

    def close(self) -> None:
        shutil.rmtree(self.endpoint.path, ignore_errors=True)
        self.arena = self.arena[:0]


class DiskInlet(DiskSide):
    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet], reader: int) -> None:
        super().__init__(endpoint, packets)
        self.sender = Sender(self.folder / SENDER)

    def take(self, index: int) -> tuple[Header, torch.Tensor]:
        """Wait for a packet's file and read each tensor to its offset."""
        path = self._file(index)

        def is_there() -> bool:
            if (self.folder / FAILED).exists():
                raise sync_error(f"the other side has aborted {self.folder.name}", GivenUpError)
            if path.exists():
                return True
            if (pid := self.sender.find_ended()) is not None:
                raise sync_error(f"the other side has ended (process {pid}) in {self.folder.name}", GivenUpError)
            return False

        self.deadline.wait(is_there, f"arrival of packet {index}")
        with path.open("rb", buffering=0) as file:
            (size,) = struct.unpack("<Q", file.read(8))
            content = json.loads(file.read(size))
            header = Header(*map(int, content["__metadata__"]["header"].split()))
            if header.num_bytes > self.arena.numel():
                raise sync_error(f"packet {index} has {header.num_bytes} bytes, expected at most {self.arena.numel()}")
            for name, _, _, data in self._pieces(index, header.encoding, header.num_bytes):
                begin, end = content[name]["data_offsets"]
                if end - begin != data.numel():
                    raise sync_error(f"{name} in {path.name} has {end - begin} bytes, expected {data.numel()}")
                _read_all(file.fileno(), data.numpy().data, 8 + size + begin, path.name)
        return header, self.arena[: header.num_bytes]

    def release(self, index: int) -> None:
        """Do nothing: files stay until the next update."""

    def close(self) -> None:
        self.arena = self.arena[:0]
        self.sender.close()


class Sender:
    """The sender's process, as seen by a reader. path: the file that identifies it."""

    def __init__(self, path: Path) -> None:
        words = path.read_text(encoding="ascii").split() if path.exists() else []  # another host may not see it yet
        self.pid, self._descriptor, self._has_ended = int(words[0]) if words else 0, -1, False
        if words[1:] == [_process_namespace()]:
            try:
                self._descriptor = os.pidfd_open(self.pid)
            except ProcessLookupError:
                self._has_ended = True
            except OSError:
                pass  # no pidfd (kernel, sandbox, descriptor limit): the deadline still applies

    def find_ended(self) -> int | None:
        """Process id of a sender that has ended; None while it lives, or if it runs on another host."""
        if self._descriptor >= 0:
            poll = select.poll()  # select.select accepts no descriptor above 1023
            poll.register(self._descriptor, select.POLLIN)
            self._has_ended = bool(poll.poll(0))
        return self.pid if self._has_ended else None

    def close(self) -> None:
        """Release the descriptor; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _process_namespace() -> str:
    """Identifier of the boot and process-id namespace, within which process ids are comparable."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read_all(descriptor: int, data: memoryview, offset: int, name: str) -> None:
    while data:
        count = os.preadv(descriptor, [data], offset)
        if not count:
            raise sync_error(f"{name} ends {len(data)} bytes too early")
        data, offset = data[count:], offset + count
