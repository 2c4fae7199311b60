"""Which tokens end a sequence.

In: a model's folder. Out: token ids.
"""

import json
from pathlib import Path


def end_tokens(model_folder: Path) -> frozenset[int]:
    """Tokens that end a sequence, by the model's own configuration."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model_folder / name
        value = json.loads(path.read_text("utf-8")).get("eos_token_id") if path.is_file() else None
        found |= set(value) if isinstance(value, list) else set() if value is None else {int(value)}
    return frozenset(found)
