"""Tensor files: what safetensors itself reads, ranges, and files that are not what they should be."""

import hashlib
import json
from array import array
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlplan.errors import SpecError
from rlplan.runtime.checkpoints.tensor_file import Piece, TensorFile, compute_digest, write

NUMBERS = array("f", [0.5 * number for number in range(1000)])
PIECES = [Piece("master/a@0", "F32", memoryview(NUMBERS)), Piece("rng/cpu", "U8", memoryview(b"\x00\x01\xff"))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "x.safetensors", PIECES)
    return tmp_path / "x.safetensors"


def test_the_format_is_the_one_that_safetensors_reads(path: Path) -> None:
    tensors = load_file(path)
    assert tensors["master/a@0"].tolist() == list(NUMBERS)
    assert tensors["rng/cpu"].tolist() == [0, 1, 255]


def test_the_digest_is_that_of_the_whole_file(tmp_path: Path) -> None:
    digest = write(tmp_path / "x", PIECES)
    data = (tmp_path / "x").read_bytes()
    assert (digest.num_bytes, digest.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert compute_digest(tmp_path / "x") == digest


def test_any_range_of_a_tensor_goes_into_memory_that_is_there(path: Path) -> None:
    target = array("f", [0.0] * 7)
    with TensorFile(path) as file:
        file.read_into("master/a@0", 990, memoryview(target))
        assert list(target) == list(NUMBERS[990:997])
        assert bytes(file.read("rng/cpu")) == b"\x00\x01\xff"
        with pytest.raises(SpecError, match="has 1000 elements"):
            file.read_into("master/a@0", 995, memoryview(target))


def test_a_file_is_never_written_over_another(path: Path) -> None:
    with pytest.raises(FileExistsError):
        write(path, PIECES)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nope",
        b"\x80\x04\x95pickle...",
    ],
)
def test_what_is_no_tensor_file_is_said_and_not_read(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(SpecError, match="cannot be read"):
        TensorFile(tmp_path / "x")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 400]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
        {"dtype": "Q3", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"shape": [2]},
    ],
)
def test_tensors_lie_inside_their_file(entry: dict[str, object], tmp_path: Path) -> None:
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(SpecError, match="header"):
        TensorFile(tmp_path / "x")


def test_of_two_tensors_with_one_name_none_is_read(tmp_path: Path) -> None:
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    header = f'{{"a": {entry}, "a": {entry}}}'.encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(SpecError, match="twice"):
        TensorFile(tmp_path / "x")
