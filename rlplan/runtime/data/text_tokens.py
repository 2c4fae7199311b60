"""Text and tokens of a model: its tokenizer, and which tokens end a sequence.

In: a model's folder. Out: texts and token ids.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any


class TextTokenizer:
    """A folder's tokenizer, read when it is first asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def text(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def tokens(self, text: str, *, adds_special_tokens: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=adds_special_tokens).ids)


def end_tokens(model_folder: Path) -> frozenset[int]:
    """Tokens that end a sequence, by the model's own configuration."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model_folder / name
        value = json.loads(path.read_text("utf-8")).get("eos_token_id") if path.is_file() else None
        found |= set(value) if isinstance(value, list) else set() if value is None else {int(value)}
    return frozenset(found)
