"""The parser of YAML, without what stands for something else: tags, anchors and aliases.

In: a text. Out: plain dicts, lists and scalars, or ruamel.yaml's errors, which yaml.py turns into messages. Left out:
limits of a file's size (rlplan/reading.py).
"""

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, ScalarEvent
from ruamel.yaml.nodes import MappingNode

__all__ = ["MAX_NODES", "MarkedYAMLError", "YAMLError", "load"]

MAX_NODES = 21_000
"""Keys, values, lists and mappings, at 75 microseconds each: a histogram of lengths has up to 20,000 numbers."""


class _PlainComposer(Composer):
    """Only what is written out: a tag may stand for code, and a few aliases of aliases for gigabytes."""

    num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise ComposerError(None, None, f"more than {MAX_NODES} keys and values", event.start_mark)
        if isinstance(event, AliasEvent) or event.anchor is not None:
            raise ComposerError(None, None, f"'{event.anchor}' is an anchor or an alias", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise ComposerError(None, None, f"'{event.tag}' is a tag", event.start_mark)
        if isinstance(parent, MappingNode) and index is None and not isinstance(event, ScalarEvent):
            raise ComposerError(None, None, "a list or a mapping as a key", event.start_mark)
        return super().compose_node(parent, index)


def load(text: str, max_depth: int) -> Any:
    """The data in a text. Raises: MarkedYAMLError, YAMLError, RecursionError, ValueError."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.max_depth = _PlainComposer, max_depth
    return yaml.load(text)
