"""Exact tensors and bytes of a checkpoint, from the headers of its safetensors files.

In: a folder, or one `.safetensors` file. Out: every stored tensor with dtype, shape and bytes. Left out: values, which
are never read; other formats (a pickle is never opened). Source: the safetensors format: eight bytes of header length,
little endian; JSON; then the data.
"""

import os
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from rlplan.errors import SpecError
from rlplan.reading import open_regular
from rlplan.spec.base import parse_json, read_json, shorten_value
from rlplan.spec.model import ModelSpec

MAX_HEADER_BYTES = 32 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_FILES = 2_000
MAX_NUMBER = 1 << 60
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element. Source: safetensors 0.8 `Dtype`."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as stored on disk."""

    name: str
    dtype: str
    """Safetensors name of the data type."""
    shape: tuple[int, ...]
    num_bytes: int


def read_checkpoint(path: Path) -> tuple[StoredTensor, ...]:
    """Every tensor of a folder's safetensors files, or of one file. Raises: SpecError.

    With an index, exactly the files that it names are read, and each tensor must be in the file that it names.
    """
    if not path.is_dir():
        return read_header(path)
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return read_header(path / "model.safetensors")
    places = read_index(index)
    files = sorted(set(places.values()))
    if len(files) > MAX_FILES:
        _refuse(index, f"the index names {len(files)} files", f"at most {MAX_FILES}")
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        for tensor in read_header(path / name):
            if tensor.name in tensors or places.get(tensor.name) != name:
                _refuse(
                    path / name, f"tensor {shorten_value(tensor.name)} is here too, or not in the index", _ONE_PLACE
                )
            tensors[tensor.name] = tensor
    if missing := places.keys() - tensors.keys():
        _refuse(index, f"tensor {shorten_value(min(missing))} is in no file", _ONE_PLACE)
    return tuple(tensors.values())


def check_checkpoint(model: ModelSpec, folder: Path) -> None:
    """Raises: SpecError where a checkpoint and its config differ in the number of parameters.

    Counts: every stored element, except extra layers (multi-token prediction) and rotary tables, which old checkpoints
    store. A tied table may be stored twice. Not checked: folders without safetensors, quantized checkpoints.
    """
    files = [name for name in ("model.safetensors.index.json", "model.safetensors") if (folder / name).exists()]
    if not files or model.quantization is not None:
        return
    known = {tensor.name for tensor in model.tensors}
    counted = [t for t in read_checkpoint(folder) if t.name in known or not _is_extra(t.name, model)]
    stored = sum(prod(tensor.shape) for tensor in counted)
    table = model.vocab_size * model.hidden_size if model.has_tied_embeddings else 0
    if stored not in (model.num_parameters, model.num_parameters + table):
        _refuse(
            folder / files[0],
            f"the checkpoint holds {stored:,} parameters, config.json describes {model.num_parameters:,}",
            "both describe the same model",
        )


def _is_extra(name: str, model: ModelSpec) -> bool:
    """Whether a tensor belongs to an extra layer or is a rotary table."""
    words = name.split(".")
    layers = [int(after) for word, after in pairwise(words) if word == "layers" and after.isdecimal()]
    return "mtp" in words or "rotary_emb" in words or any(layer >= model.num_layers for layer in layers)


MAX_NAME = 255
"""Limit on the characters of a file name, as in common file systems."""
_ONE_PLACE = "each tensor of the index is in the file that the index names, and only there"


def has_weights(folder: Path) -> bool:
    """Whether a folder has all safetensors files: one file, or every file that its index names. Raises: SpecError."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return True
    return index.is_file() and all((folder / name).is_file() for name in set(read_index(index).values()))


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor in an index; all are safetensors in the same folder. Raises: SpecError."""
    data = read_json(path, "the index", limit=MAX_INDEX_BYTES)
    places = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(places, dict) or not places:
        _refuse(path, f"weight_map is {shorten_value(places)}", "an object of tensor names and file names")
    for name in places.values():
        is_near = isinstance(name, str) and not ("/" in name or "\\" in name or name.startswith("."))
        if not is_near or not name.endswith(".safetensors") or len(name) > MAX_NAME:
            _refuse(path, f"weight_map names the file {shorten_value(name)}", "a safetensors file in the same folder")
    return places


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """Every tensor of one file, from its header. Raises: SpecError for overlaps, gaps, wrong sizes or types."""
    header, data_bytes = _read_raw(path)
    spans, tensors = [], []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor, start = _tensor(path, name, entry)
        spans.append((start, start + tensor.num_bytes, name))
        tensors.append(tensor)
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            _refuse(path, f"tensor {shorten_value(name)} starts at byte {start}, the one before ends at {end}", _FILLED)
        end = stop
    if end != data_bytes:
        _refuse(path, f"tensors take {end} bytes, the file holds {data_bytes}", _FILLED)
    return tuple(tensors)


_FILLED = "tensors fill the data without overlap or gap"


def _read_raw(path: Path) -> tuple[dict[str, Any], int]:
    with open_regular(path, "the file of weights") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            _refuse(path, f"the header's length is {length} bytes", f"at most {MAX_HEADER_BYTES}, in the file")
        raw = file.read(length)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        _refuse(path, "the header is not UTF-8", "a safetensors file")
    header = parse_json(text, what="the header", where=str(path))
    if not isinstance(header, dict):
        _refuse(path, f"the header is {shorten_value(header)}", "an object of tensors")
    return header, size - 8 - length


def _tensor(path: Path, name: str, entry: Any) -> tuple[StoredTensor, int]:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        _refuse(path, f"dtype of {shorten_value(name)} is {shorten_value(dtype)}", f"one of {', '.join(BITS)}")
    if not _are_numbers(shape) or not _are_numbers(offsets) or len(offsets) != 2:
        _refuse(
            path, f"tensor {shorten_value(name)} is {shorten_value(entry)}", "shape, and data_offsets of start and end"
        )
    start, stop = offsets
    if len(shape) > 16 or (stop - start) * 8 != prod(shape) * BITS[dtype]:
        what = f"tensor {shorten_value(name)} of {dtype} and shape {shorten_value(shape)} has {stop - start} bytes"
        _refuse(path, what, "bytes of the shape times bits of the dtype")
    return StoredTensor(name, dtype, tuple(shape), stop - start), start


def _are_numbers(value: Any) -> TypeGuard[list[int]]:
    # type() and not isinstance(): True and False are integers too
    return isinstance(value, list) and all(type(number) is int and 0 <= number < MAX_NUMBER for number in value)


def _refuse(path: Path, what: str, rule: str) -> NoReturn:
    raise SpecError(
        what, where=str(path), rule=rule, way_out="download the checkpoint again; its file is incomplete or damaged"
    )
