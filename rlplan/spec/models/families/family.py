"""Model families as data: tables of tensors, the spelling of their configs, and values that they refuse.

In: the files of this folder. `tables.json` has parts of layers by name. A file per group of families has entries that
name tables (or contain lines in the language of `tensors`; an object names a table and a condition for all of it), keys
of the config and readers. `like` names the
architecture whose entry is extended. Out: `FAMILIES`. Left out: towers (towers.py), the readers themselves
(readers.py).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlplan.spec.models.families import readers, single_families

FOLDER = Path(__file__).resolve().parent
GROUPS = ("dense", "mixtures", "hybrids", "multimodal", "older")
Switches = Mapping[str, tuple[bool, str]]


@dataclass(frozen=True)
class Family:
    """One architecture, as data."""

    layer: str
    """Table of a decoder layer, read once for each kind of layer."""
    before: str
    """Table of the modules before the layers."""
    after: str
    """Table of the modules after the layers."""
    prefix: str = "model.layers."
    """Prefix of a layer's tensors, up to its number."""
    conditions: frozenset[str] = frozenset()
    """Conditions that hold in every model of the family."""
    switches: Switches = field(default_factory=dict)
    """Config booleans with the library's defaults and the conditions that they turn on."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the config that differ from rlplan's names."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the library's config class."""
    required: tuple[str, ...] = ()
    """Keys that must exist, since the library's default would be arbitrary."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that other keys must have, because other values are not modelled."""
    is_tied: bool = False
    """Default of tie_word_embeddings."""
    reads: tuple[readers.Reader, ...] = (readers.full_only,)
    """Readers of fields beyond the plain decoder."""
    text_key: str = ""
    """Key under which a multimodal config has the language model."""
    vision: str = ""
    """Name of the vision tower in towers.json."""
    audio: str = ""
    """Name of the audio tower, if a config may have one."""
    wrapper: tuple[tuple[str, str], ...] = ()
    """Prefixes of tensor names, each with its replacement."""
    has_layer_overrides: bool = False
    """Whether `per_layer_config` is supported; other families refuse it, since it changes single layers."""

    def key(self, name: str) -> str:
        """The config's key for one of rlplan's names."""
        return self.keys.get(name, name)


class Families(Mapping[str, Family]):
    """Every family by the name of its architecture, built on first use. Architectures with the same entry share a
    family.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[str]] = json.loads((FOLDER / "tables.json").read_text("utf-8"))["tables"]
        self._entries: dict[str, dict[str, Any]] = {}
        self._built: dict[int, Family] = {}
        for group in GROUPS:
            for own in load_group(group):
                architectures, like = own.pop("architectures"), own.pop("like", None)
                entry = {"before": ["embeddings"], "after": ["head"]} | self._entries.get(like, {}) | own
                self._entries |= dict.fromkeys(architectures, entry)

    def __getitem__(self, architecture: str) -> Family:
        entry = self._entries[architecture]
        if id(entry) not in self._built:
            self._built[id(entry)] = _family(entry, self._tables)
        return self._built[id(entry)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, architecture: object) -> bool:
        return architecture in self._entries


def load_group(name: str) -> list[dict[str, Any]]:
    """The entries of a group of families, as stored in its file."""
    entries: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["families"]
    return entries


def _family(entry: Mapping[str, Any], tables: Mapping[str, list[str]]) -> Family:
    texts = {
        name: "".join(f"{line}\n" for part in entry[name] for line in _list_lines(part, tables))
        for name in ("layer", "before", "after")
    }
    lists = {name: tuple(map(_freeze, entry[name])) for name in ("required", "wrapper") if name in entry}
    reads = {"reads": tuple(map(_reader, entry["reads"]))} if "reads" in entry else {}
    return Family(**{**entry, "conditions": frozenset(entry.get("conditions", ()))} | texts | lists | reads)


def _list_lines(part: str | list[str] | dict[str, str], tables: Mapping[str, list[str]]) -> list[str]:
    """The lines of a table by its name, of an inline table, or of a named table under one more condition."""
    if isinstance(part, list):
        return part
    if isinstance(part, str):
        return tables[part]
    ((name, condition),) = part.items()
    return [
        f"{line[:-1]}{'' if '?' in line else ' ?'} {condition}]" if line.startswith("[") else line
        for line in tables[name]
    ]


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _reader(named: str | dict[str, dict[str, Any]]) -> readers.Reader:
    """A reader by its name, or built by the function of that name with the entry's arguments."""
    known: dict[str, Any] = vars(readers) | vars(single_families)
    if isinstance(named, str):
        reader: readers.Reader = known[named]
        return reader
    ((maker, arguments),) = named.items()
    reader_with_arguments: readers.Reader = known[maker](
        **{key: known.get(value, value) for key, value in arguments.items()}
    )
    return reader_with_arguments


FAMILIES = Families()
"""Every supported architecture, by its name in a config's `architectures`."""
