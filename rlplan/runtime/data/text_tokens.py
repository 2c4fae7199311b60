"""A model's tokenizer in this process, and its end-of-sequence tokens.

In: a model's folder. Out: texts and token ids.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.spec.base import read_json, shorten_value
from rlplan.spec.models.config import MAX_CONFIG_BYTES
from rlplan.spec.models.language_part import language_config


class TextTokenizer:
    """A folder's tokenizer, loaded on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @property
    def num_tokens(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; a text of n tokens has at most n times as many."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def text(self, tokens: Sequence[int], *, keeps_special: bool = False) -> str:
        """Text of tokens, without special tokens unless `keeps_special`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not keeps_special))

    def tokens(self, text: str, *, adds_special_tokens: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=adds_special_tokens).ids)

    def truncate(self, text: str, most: int) -> str:
        """A text truncated to at most `most` tokens."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return text if len(encoded.ids) <= most else text[: encoded.offsets[most - 1][1]]


def read_end_tokens(model_folder: Path) -> frozenset[int]:
    """End-of-sequence tokens from the model's configuration. Raises: SpecError."""
    tokens: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model_folder / name
        data = read_json(path, name, limit=MAX_CONFIG_BYTES) if path.exists() else {}
        value = language_config(data).get("eos_token_id") if isinstance(data, dict) else data
        ends = value if isinstance(value, list) else [] if value is None else [value]
        if not isinstance(data, dict) or not all(type(end) is int and end >= 0 for end in ends):
            raise SpecError(
                f"eos_token_id is {shorten_value(value)}",
                where=f"{path}: eos_token_id",
                rule="a JSON object with a token id or a list of token ids",
                way_out=f"copy the model's {name} there again",
            )
        tokens |= set(ends)
    return frozenset(tokens)
