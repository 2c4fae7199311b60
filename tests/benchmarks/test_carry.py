"""Archives for a GPU machine without a network: stripped libraries, and files that travel together."""

import struct
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import carry


def write_code(*, is_ptx: bool, architecture: int, code: bytes) -> bytes:
    """One entry of a fat binary: a header of 64 bytes, then the code."""
    head = struct.pack("<HHIQ", 1 if is_ptx else 2, 0x101, 64, len(code))
    return (head + bytes(12) + struct.pack("<I", architecture)).ljust(64, b"\0") + code


def write_fat_binary(*entries: bytes) -> bytes:
    """A fat binary as it lies in a library, between other bytes."""
    body = b"".join(entries)
    return b"before" + carry.FAT_BINARY + struct.pack("<HHQ", 1, 16, len(body)) + body + b"after"


def test_machine_code_for_hopper_stays_and_all_other_code_becomes_zeros() -> None:
    old, new = b"x" * 96, b"y" * 80
    data = bytearray(
        write_fat_binary(
            write_code(is_ptx=False, architecture=80, code=old),
            write_code(is_ptx=False, architecture=90, code=new),
            write_code(is_ptx=True, architecture=80, code=b"p" * 32),
        )
    )
    size = len(data)
    assert carry.strip_fat_binaries(data) == len(new)
    assert len(data) == size
    assert new in data
    assert b"x" not in data.replace(b"before", b"").replace(b"after", b"")
    assert b"pp" not in data
    assert data.startswith(b"before")
    assert data.endswith(b"after")


def test_ptx_stays_where_a_small_kernel_has_no_code_for_hopper() -> None:
    newest = b"q" * 64
    entries = [
        write_code(is_ptx=True, architecture=75, code=b"p" * 64),
        write_code(is_ptx=True, architecture=80, code=newest),
        write_code(is_ptx=True, architecture=100, code=b"r" * 64),
    ]
    data = bytearray(write_fat_binary(*entries))
    assert carry.strip_fat_binaries(data) == len(newest)
    assert newest in data
    large = write_code(is_ptx=True, architecture=80, code=bytes(carry.KEPT_PTX_BYTES + 1))
    assert carry.strip_fat_binaries(bytearray(write_fat_binary(large))) == 0


def test_half_a_fat_binary_is_left_as_it_is() -> None:
    whole = write_fat_binary(write_code(is_ptx=False, architecture=80, code=b"x" * 96))
    cut = bytearray(whole[:60])
    assert carry.strip_fat_binaries(cut) == 0
    assert bytes(cut) == whole[:60]


def test_the_tree_is_packed_and_unpacked_with_the_script_that_unpacks_it(tmp_path: Path) -> None:
    sizes = carry.pack(tmp_path / "carried", ["tree"])
    assert sizes["tree"] < 10 * carry.MIB
    assert (tmp_path / "carried" / "carry.py").read_text("utf-8").startswith('"""Archives for a GPU machine')
    for _ in range(2):  # the second time it is there already
        carry.unpack(tmp_path / "carried", tmp_path / "site")
    assert (tmp_path / "site" / "benchmarks" / "gpu" / "ten_minutes.py").exists()
    assert (tmp_path / "site" / "hardware_profiles" / "gpu").is_dir()


def test_an_archive_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "carried").mkdir()
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    with tarfile.open(tmp_path / "carried" / "bad.tar.xz", "w:xz") as archive:
        archive.add(outside, "../outside.txt")
    with pytest.raises(tarfile.OutsideDestinationError):
        carry.unpack(tmp_path / "carried", tmp_path / "site")
