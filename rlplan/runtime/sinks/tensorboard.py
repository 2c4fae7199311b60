"""TensorBoard event files, written without the tensorboard package, because the format is small and the package large.

In: names and numbers of a step. Out: `tensorboard/events.out.tfevents.*`: records (length, masked CRC-32C, an Event in
protobuf's encoding, masked CRC-32C). Source: tensorflow, core/lib/io/record_writer.h, core/util/event.proto. Left out:
everything but scalars.
"""

import struct
import time
from collections.abc import Mapping
from pathlib import Path

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum. Source: RFC 3720, appendix B.4 has test vectors.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _mask_crc(length)) + data + struct.pack("<I", _mask_crc(data))


def encode_event(wall_s: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """Encode an Event with a Summary of scalars."""
    summary = b"".join(
        _encode_field(1, _encode_field(1, name.encode()) + struct.pack("<Bf", 0x15, v)) for name, v in scalars.items()
    )
    # protobuf writes a negative int64 as its two's complement in 64 bits
    return struct.pack("<Bd", 0x09, wall_s) + b"\x10" + _encode_varint(step & (2**64 - 1)) + _encode_field(5, summary)


class TensorBoard:
    """A sink that writes one event file."""

    def __init__(self, folder: Path, name: str) -> None:
        place = folder / "tensorboard"
        place.mkdir(exist_ok=True)
        number = len(list(place.iterdir()))  # distinguishes starts of the run within one second
        self._file = (place / f"events.out.tfevents.{int(time.time())}.{name}.{number}").open("xb")
        self._file.write(record(struct.pack("<Bd", 0x09, time.time()) + _encode_field(3, b"brain.Event:2")))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._file.write(record(encode_event(time.time(), step, scalars)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _mask_crc(data: bytes) -> int:
    value = crc32c(data)
    return (((value >> 15) | (value << 17)) + _MASK) & 0xFFFFFFFF


def _encode_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _encode_field(number: int, data: bytes) -> bytes:
    """Encode a length-delimited field."""
    return bytes([number << 3 | 2]) + _encode_varint(len(data)) + data
