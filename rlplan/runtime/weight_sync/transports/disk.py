"""The disk transport: safetensors files, a folder for every update, for engines anywhere that see the folder.

In: packets. Out: the same bytes, read back into one buffer. A file appears under its name when it is whole. Full
packets hold their tensors by name, so that whatever reads safetensors can read them; deltas hold a tensor of bytes.
A reader on the sender's host learns at once that the sender has ended; on another host, when its time is up.
Left out: waiting for a disk: what the kernel has taken over counts as written.
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
"""The file that says whose process the sender is."""


class DiskSide:
    """Either side: a buffer of the largest packet, and the folder of the update that is under way."""

    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet]) -> None:
        self.endpoint, self.packets = endpoint, packets
        self.arena = torch.zeros(max(packet.bucket.num_bytes for packet in packets), dtype=torch.uint8)
        self.num_bytes = self.arena.numel()
        self.folder, self.deadline = Path(endpoint.path), Deadline(0.0)

    def begin(self, update: Update) -> None:
        self.folder = Path(self.endpoint.path) / f"version-{update.version:06d}-{update.serial:06d}"
        self.deadline = Deadline(update.timeout_s)

    def abort(self) -> None:
        """Leave a mark for the others; where even that is impossible, they wait until their time is up."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / FAILED).touch()

    def _file(self, index: int) -> Path:
        return self.folder / f"packet-{index:04d}.safetensors"

    def _pieces(self, index: int, encoding: int, num_bytes: int) -> Iterator[tuple[str, str, list[int], torch.Tensor]]:
        """(name, type, shape, bytes) of what a packet's file holds."""
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
        """Readers may come at any time."""

    def begin(self, update: Update) -> None:
        """An update follows; what is left of earlier ones is removed: its readers have read it, or failed."""
        super().begin(update)
        for old in Path(self.endpoint.path).glob("version-*"):
            shutil.rmtree(old, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def buffer(self, index: int) -> torch.Tensor:
        """One buffer for all packets: each is written before the next is filled."""
        return self.arena[: self.packets[index].bucket.num_bytes]

    def publish(self, header: Header) -> None:
        pieces = list(self._pieces(header.index, header.encoding, header.num_bytes))
        content: dict[str, object] = {"__metadata__": {"header": " ".join(map(str, header.words()))}}
        end = 0
        for name, kind, shape, data in pieces:
            content[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + data.numel()]}
            end += data.numel()
        text = json.dumps(content).encode()
        text += b" " * (-len(text) % 8)
        path = self._file(header.index)
        with writing_file(path, 8 + len(text) + end), path.with_suffix(".part").open("wb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(struct.pack("<Q", len(text)) + text))
            for *_, data in pieces:
                _write_all(file.fileno(), data.numpy().data)
        path.with_suffix(".part").rename(path)

    def finish(self) -> None:
        """Files stay until the next update."""

    def abort(self) -> None:
        """Remove what was half written, which is room for the mark where the disk is full, and leave the mark."""
        for half in self.folder.glob("*.part"):
            half.unlink()
        super().abort()

    def close(self) -> None:
        shutil.rmtree(self.endpoint.path, ignore_errors=True)
        self.arena = self.arena[:0]


class DiskInlet(DiskSide):
    def __init__(self, endpoint: Endpoint, packets: Sequence[Packet], reader: int) -> None:
        super().__init__(endpoint, packets)
        self.sender = Sender(self.folder / SENDER)

    def take(self, index: int) -> tuple[Header, torch.Tensor]:
        """Wait for a packet's file and read it, each tensor to its place."""
        path = self._file(index)

        def is_there() -> bool:
            if (self.folder / FAILED).exists():
                raise sync_error(f"the other side has given up {self.folder.name}", GivenUpError)
            if path.exists():
                return True
            if (pid := self.sender.gone()) is not None:
                raise sync_error(f"the other side has ended (process {pid}) in {self.folder.name}", GivenUpError)
            return False

        self.deadline.wait(is_there, f"arrival of packet {index}")
        with path.open("rb", buffering=0) as file:
            (size,) = struct.unpack("<Q", file.read(8))
            content = json.loads(file.read(size))
            header = Header(*map(int, content["__metadata__"]["header"].split()))
            if header.num_bytes > self.arena.numel():
                raise sync_error(f"packet {index} has {header.num_bytes} bytes, at most {self.arena.numel()} were due")
            for name, _, _, data in self._pieces(index, header.encoding, header.num_bytes):
                begin, end = content[name]["data_offsets"]
                if end - begin != data.numel():
                    raise sync_error(f"{name} in {path.name} has {end - begin} bytes, {data.numel()} were due")
                _read_all(file.fileno(), data.numpy().data, 8 + size + begin, path.name)
        return header, self.arena[: header.num_bytes]

    def release(self, index: int) -> None:
        """Files stay until the next update."""

    def close(self) -> None:
        self.arena = self.arena[:0]
        self.sender.close()


class Sender:
    """The process that writes, as the kernel of a reader's host knows it. path: where it said who it is."""

    def __init__(self, path: Path) -> None:
        words = path.read_text(encoding="ascii").split() if path.exists() else []  # another host may not see it yet
        self.pid, self._descriptor, self._has_ended = int(words[0]) if words else 0, -1, False
        if words[1:] == [_process_namespace()]:
            try:
                self._descriptor = os.pidfd_open(self.pid)
            except ProcessLookupError:
                self._has_ended = True
            except OSError:
                pass  # a kernel or a sandbox without it, or no descriptor left: the deadline is there still

    def gone(self) -> int | None:
        """Its process id where it has ended; None where it lives, or on another host."""
        if self._descriptor >= 0:
            ends = select.poll()  # select.select takes no descriptor above 1023
            ends.register(self._descriptor, select.POLLIN)
            self._has_ended = bool(ends.poll(0))
        return self.pid if self._has_ended else None

    def close(self) -> None:
        """May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _process_namespace() -> str:
    """What two processes have in common that know each other by their process ids."""
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
