"""Safetensors headers: what the library writes is read exactly, and what it would not write is refused."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlplan.errors import SpecError
from rlplan.spec.model import read_model
from rlplan.spec.models.catalogue import resolve_model
from rlplan.spec.models.headers import check_checkpoint, read_checkpoint, read_header
from tests.factories import EXAMPLES


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start: int, stop: int, *, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def write_sharded(folder: Path, places: dict[str, str]) -> None:
    for file in set(places.values()):
        names = [name for name, place in places.items() if place == file]
        save_file({name: torch.zeros(2, 3, dtype=torch.bfloat16) for name in names}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_a_file_of_the_library_is_read_exactly(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, 4, dtype=torch.bfloat16),
        "b": torch.zeros(5, dtype=torch.float8_e4m3fn),
        "scalar": torch.zeros((), dtype=torch.float32),
        "empty": torch.zeros(0, 7, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = {tensor.name: tensor for tensor in read_checkpoint(tmp_path)}
    assert {name: (tensor.shape, tensor.num_bytes) for name, tensor in stored.items()} == {
        name: (tuple(tensor.shape), tensor.numel() * tensor.element_size()) for name, tensor in tensors.items()
    }
    assert [stored[name].dtype for name in tensors] == ["BF16", "F8_E4M3", "F32", "I64"]


def test_shards_are_joined_by_their_index(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"})
    assert sorted(tensor.name for tensor in read_checkpoint(tmp_path)) == ["a", "b", "c"]
    assert sum(tensor.num_bytes for tensor in read_checkpoint(tmp_path)) == 36


BROKEN: dict[str, tuple[Any, bytes]] = {
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6)),
    "gap": ({"a": entry(0, 2), "b": entry(4, 6)}, bytes(6)),
    "two at one place": ({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)),
    "short data": ({"a": entry(0, 4)}, bytes(3)),
    "long data": ({"a": entry(0, 4)}, bytes(5)),
    "starts late": ({"a": entry(2, 4)}, bytes(4)),
    "wrong size": ({"a": entry(0, 4, shape=[5])}, bytes(4)),
    "wrong dtype": ({"a": entry(0, 4, dtype="F99", shape=[1])}, bytes(4)),
    "dtype no text": ({"a": entry(0, 4, dtype=["F32"], shape=[1])}, bytes(4)),  # type: ignore[arg-type]
    "negative shape": ({"a": entry(0, 4, shape=[-4])}, bytes(4)),
    "boolean shape": ({"a": entry(0, 1, shape=[True])}, bytes(1)),
    "astronomic shape": ({"a": entry(0, 4, shape=[10**18] * 40)}, bytes(4)),
    "astronomic offset": ({"a": entry(0, 10**30)}, bytes(4)),
    "backward": ({"a": entry(4, 0, shape=[0])}, bytes(4)),
    "no offsets": ({"a": {"dtype": "U8", "shape": [4]}}, bytes(4)),
    "three offsets": ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}}, bytes(4)),
    "entry null": ({"a": None}, b""),
    "header list": ([], b""),
    "not json": (b"{a}", b""),
    "twice": (b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "a": 1}', b""),
    "deep": (b'{"a":' * 5000 + b"1" + b"}" * 5000, b""),
    "latin-1": (b'{"caf\xe9": 1}', b""),
}


@pytest.mark.parametrize(("header", "data"), BROKEN.values(), ids=BROKEN)
def test_a_broken_header_is_refused_with_its_file(tmp_path: Path, header: Any, data: bytes) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(SpecError) as caught:
        read_checkpoint(tmp_path)
    assert str(path) in caught.value.where
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("content", [b"", b"\1", struct.pack("<Q", 1 << 63), struct.pack("<Q", 100) + b"{}"])
def test_a_header_that_is_not_there_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(SpecError, match="the header's length is"):
        read_header(tmp_path / "x.safetensors")


def test_a_header_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 400 << 20))
    with path.open("r+b") as file:
        file.truncate(500 << 20)
    with pytest.raises(SpecError, match="the header's length is 419430400 bytes"):
        read_header(path)


@pytest.mark.parametrize(
    "place", ["../x.safetensors", "/etc/passwd", ".hidden", 7, None, "a\\b", "0" * 250 + ".safetensors"]
)
def test_an_index_names_files_of_its_own_folder(tmp_path: Path, place: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(SpecError, match="weight_map names the file"):
        read_checkpoint(tmp_path)


def test_a_tensor_lies_where_the_index_says_and_only_there(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    index = tmp_path / "model.safetensors.index.json"
    for places, word in (
        ({"a": "two.safetensors", "b": "two.safetensors"}, "is in no file"),
        ({"a": "one.safetensors"}, None),
        ({"b": "one.safetensors", "a": "two.safetensors"}, "is here too, or not in the index"),
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, "'c' is in no file"),
        ({"a": "one.safetensors", "b": "gone.safetensors"}, "is missing"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        if word is None:
            assert [tensor.name for tensor in read_checkpoint(tmp_path)] == ["a"]
            continue
        with pytest.raises(SpecError, match=word):
            read_checkpoint(tmp_path)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_places_is_refused(tmp_path: Path, index: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match="weight_map is"):
        read_checkpoint(tmp_path)


def test_a_checkpoint_holds_what_its_config_says() -> None:
    folder = EXAMPLES / "models" / "sorter"
    assert resolve_model(str(folder)) == read_model(folder)


def test_a_config_of_another_model_beside_a_checkpoint_is_refused_with_both_counts(tmp_path: Path) -> None:
    folder = EXAMPLES / "models" / "sorter"
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    with pytest.raises(SpecError, match=r"the checkpoint holds [\d,]+ parameters, config.json describes [\d,]+"):
        resolve_model(str(tmp_path))


def test_further_layers_and_rotary_tables_do_not_count(tmp_path: Path) -> None:
    folder = EXAMPLES / "models" / "sorter"
    model = read_model(folder)
    for beside in (f"model.layers.{model.num_layers}.mlp.up_proj.weight", "model.layers.0.rotary_emb.inv_freq"):
        shapes = {tensor.name: tensor.shape for tensor in model.parameters} | {beside: (4, 4)}
        tensors = {name: torch.zeros(shape, dtype=torch.uint8) for name, shape in shapes.items()}
        save_file(tensors, tmp_path / "model.safetensors")
        check_checkpoint(model, tmp_path)
