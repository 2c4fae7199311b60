"""A YAML parser that refuses tags, and anchors and aliases in rlplan's own files.

In: a text. Out: plain dicts, lists and scalars, or ruamel.yaml's errors, which yaml.py turns into messages. Left out:
limits on a file's size (rlplan/reading.py).
"""

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, ScalarEvent
from ruamel.yaml.nodes import MappingNode

__all__ = ["MAX_NODES", "MarkedYAMLError", "YAMLError", "load"]

MAX_NODES = 21_000
"""Limit on nodes (keys, values, lists and mappings), each of which takes 75 microseconds. A histogram of lengths has up
to 20,000 numbers."""


class _PlainComposer(Composer):
    """Composes plain nodes only: a tag may stand for code, and nested aliases for gigabytes."""

    num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        self.num_nodes += 1
        self._check_anchor(event)
        if self.num_nodes > MAX_NODES:
            raise ComposerError(None, None, f"more than {MAX_NODES} keys and values", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise ComposerError(None, None, f"'{event.tag}' is a tag", event.start_mark)
        if isinstance(parent, MappingNode) and index is None and not isinstance(event, ScalarEvent):
            raise ComposerError(None, None, "a list or a mapping as a key", event.start_mark)
        return super().compose_node(parent, index)

    def _check_anchor(self, event: Any) -> None:
        if isinstance(event, AliasEvent) or event.anchor is not None:
            raise ComposerError(None, None, f"'{event.anchor}' is an anchor or an alias", event.start_mark)


class _ForeignComposer(_PlainComposer):
    """Allows aliases. Each counts as much as the nodes it stands for, so that nested aliases reach the limit."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.sizes: dict[str, int] = {}
        """Number of nodes below each anchor."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        anchor, before = self.parser.peek_event().anchor, self.num_nodes
        node = super().compose_node(parent, index)
        if anchor is not None:
            self.sizes[anchor] = self.num_nodes - before
        return node

    def _check_anchor(self, event: Any) -> None:
        if not isinstance(event, AliasEvent):
            self.sizes.pop(event.anchor, None)  # an alias inside its own anchor is an error
        elif event.anchor not in self.sizes:
            raise ComposerError(None, None, f"'*{event.anchor}' has no anchor before it", event.start_mark)
        else:
            self.num_nodes += self.sizes[event.anchor]


def load(text: str, max_depth: int, *, may_repeat: bool = False) -> Any:
    """The data in a text. may_repeat: whether anchors and aliases are allowed.

    Raises: MarkedYAMLError, YAMLError, RecursionError, ValueError.
    """
    yaml = YAML(typ="safe", pure=True)  # pure: the C parser would bypass our composer
    composer: Any = _ForeignComposer if may_repeat else _PlainComposer
    yaml.Composer, yaml.max_depth = composer, max_depth
    return yaml.load(text)
