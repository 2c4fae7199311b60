"""What a model family is: tables of tensors, the spelling of its config, and what it refuses.

In: nothing. Out: the type. Left out: the families themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlplan.spec.models.families import readers, tables
from rlplan.spec.models.families.towers import VisionReader

Switches = Mapping[str, tuple[bool, str]]


@dataclass(frozen=True)
class Family:
    """One architecture, as data.

    layer: table of a decoder layer, read once for each kind of layer. before, after: tables around the stack.
    prefix: of layer 0's tensors, up to its number. conditions: hold in every model of the family.
    switches: config booleans, the library's default for each, and the conditions (words) that they turn on.
    keys: where a config's key is not the usual one, ours -> its. defaults: what the library's config class assumes.
    required: keys whose absence would mean a number of the library's rather than one that follows from others.
    fixed: values that other keys must have, for what is not modelled. is_tied: tie_word_embeddings if not given.
    reads: what is beyond the plain decoder. head_dim: how it follows from the rest when no key gives it.
    text_key: where a multimodal config keeps the language model. vision: reads the tower. wrapper: renames tensors.
    has_layer_overrides: `per_layer_config` is read; elsewhere it is refused, for it would change layers one by one.
    """

    layer: str
    before: str = tables.EMBEDDINGS
    after: str = tables.HEAD
    prefix: str = "model.layers."
    conditions: frozenset[str] = frozenset()
    switches: Switches = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    is_tied: bool = False
    reads: tuple[readers.Reader, ...] = (readers.full_only,)
    text_key: str = ""
    vision: VisionReader | None = None
    wrapper: tuple[tuple[str, str], ...] = ()
    has_layer_overrides: bool = False

    def key(self, name: str) -> str:
        """The config's key for one of ours."""
        return self.keys.get(name, name)


def words(text: str) -> frozenset[str]:
    """Conditions, from words."""
    return frozenset(text.split())
