"""What a model family is: tables of tensors, the spelling of its config, and what it refuses.

In: nothing. Out: the type. Left out: the families themselves.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from rlplan.records import dataclass
from rlplan.spec.models.families import readers, tables
from rlplan.spec.models.families.towers import VisionReader

Switches = Mapping[str, tuple[bool, str]]


@dataclass(frozen=True)
class Family:
    """One architecture, as data."""

    layer: str
    """Table of a decoder layer, read once for each kind of layer."""
    before: str = tables.EMBEDDINGS
    """Table of what comes before the stack."""
    after: str = tables.HEAD
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
    vision: VisionReader | None = None
    """Reads the vision tower."""
    audio: VisionReader | None = None
    """Reads the audio tower, where a config has one."""
    wrapper: tuple[tuple[str, str], ...] = ()
    """Renames tensors: (prefix, its replacement)."""
    has_layer_overrides: bool = False
    """`per_layer_config` is read; elsewhere it is refused, for it would change layers one by one."""

    def key(self, name: str) -> str:
        """The config's key for one of ours."""
        return self.keys.get(name, name)


def words(text: str) -> frozenset[str]:
    """Conditions, from words."""
    return frozenset(text.split())
