"""What a model family is: tables of tensors, the spelling of its config, and what it refuses.

In: the files of this folder: `tables.json`, parts of layers by name, and a file for each group of families, whose entry
names tables (or writes lines of its own, in the language of `tensors`), keys of the config and readers. `like` is the
architecture with whose entry it begins. Out: `FAMILIES`. Left out: towers (towers.py), what readers do (readers.py).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlplan.spec.models.families import readers, single_families

FOLDER = Path(__file__).resolve().parent
GROUPS = ("dense", "mixtures", "multimodal", "older")
Switches = Mapping[str, tuple[bool, str]]


@dataclass(frozen=True)
class Family:
    """One architecture, as data."""

    layer: str
    """Table of a decoder layer, read once for each kind of layer."""
    before: str
    """Table of what comes before the stack."""
    after: str
    """Table of what comes after the stack."""
    prefix: str = "model.layers."
    """Of layer 0's tensors, up to its number."""
    conditions: frozenset[str] = frozenset()
    """Hold in every model of the family."""
    switches: Switches = field(default_factory=dict)
    """Config booleans, the library's default for each, and the conditions that they turn on."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Our key -> the config's, where that is not the usual one."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the library's config class assumes."""
    required: tuple[str, ...] = ()
    """Keys that must be there: for an absent one the library assumes a number that follows from nothing else."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that other keys must have, for what is not modelled."""
    is_tied: bool = False
    """tie_word_embeddings where the config does not say."""
    reads: tuple[readers.Reader, ...] = (readers.full_only,)
    """What is beyond the plain decoder."""
    text_key: str = ""
    """Where a multimodal config keeps the language model."""
    vision: str = ""
    """Name of the vision tower in towers.json."""
    audio: str = ""
    """Name of the audio tower, where a config has one."""
    wrapper: tuple[tuple[str, str], ...] = ()
    """Renames tensors: (prefix, its replacement)."""
    has_layer_overrides: bool = False
    """`per_layer_config` is read; elsewhere it is refused, for it would change layers one by one."""

    def key(self, name: str) -> str:
        """The config's key for one of ours."""
        return self.keys.get(name, name)


class Families(Mapping[str, Family]):
    """Every family by the name of its architecture, made when it is asked for; architectures of one entry share one."""

    def __init__(self) -> None:
        self._tables: dict[str, list[str]] = json.loads((FOLDER / "tables.json").read_text("utf-8"))["tables"]
        self._entries: dict[str, dict[str, Any]] = {}
        self._made: dict[int, Family] = {}
        for group in GROUPS:
            for own in load_group(group):
                architectures, like = own.pop("architectures"), own.pop("like", None)
                entry = {"before": ["embeddings"], "after": ["head"]} | self._entries.get(like, {}) | own
                self._entries |= dict.fromkeys(architectures, entry)

    def __getitem__(self, architecture: str) -> Family:
        entry = self._entries[architecture]
        if id(entry) not in self._made:
            self._made[id(entry)] = _family(entry, self._tables)
        return self._made[id(entry)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, architecture: object) -> bool:
        return architecture in self._entries


def load_group(name: str) -> list[dict[str, Any]]:
    """The entries of a group of families, as its file has them."""
    entries: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["families"]
    return entries


def _family(entry: Mapping[str, Any], tables: Mapping[str, list[str]]) -> Family:
    texts = {
        name: "".join(f"{line}\n" for part in entry[name] for line in (tables[part] if isinstance(part, str) else part))
        for name in ("layer", "before", "after")
    }
    lists = {name: tuple(map(_frozen, entry[name])) for name in ("required", "wrapper") if name in entry}
    reads = {"reads": tuple(map(_reader, entry["reads"]))} if "reads" in entry else {}
    return Family(**{**entry, "conditions": frozenset(entry.get("conditions", ()))} | texts | lists | reads)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _reader(named: str | dict[str, dict[str, Any]]) -> readers.Reader:
    """A reader by its name, or made by the function of that name with the arguments that the entry gives."""
    known: dict[str, Any] = vars(readers) | vars(single_families)
    if isinstance(named, str):
        reader: readers.Reader = known[named]
        return reader
    ((maker, arguments),) = named.items()
    made: readers.Reader = known[maker](**{key: known.get(value, value) for key, value in arguments.items()})
    return made


FAMILIES = Families()
"""Every architecture whose tensors are known, by the name that stands in a config's `architectures`."""
