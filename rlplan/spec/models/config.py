"""A `config.json` read key by key: each value is checked where it is used, and errors name file, key and value.

In: parsed JSON. Out: counts, booleans, lists of names. Left out: keys that are never read, such as `auto_map` and
`trust_remote_code`, so that code named by a config is never looked at.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlplan.errors import SpecError
from rlplan.reading import read_text
from rlplan.spec.base import parse_json, shorten_value

MAX_DIMENSION = 1 << 24
"""Limit of a model's sizes, above any real one: a larger value is broken or hostile."""

MAX_LAYERS = 10_000
MAX_CONFIG_BYTES = 2 << 20
"""Size limit of a config. The longest published ones list thousands of unquantized layers in 1.2 MB."""

OTHER_MODEL = "use another model, or measure this one with `rlplan estimate --trace`"
REPAIR = "repair or replace the config"


class Config:
    """The keys of one level of a config.

    where: the file, for messages. path: dotted path of this level, empty at the top. defaults: values that the
    library's config class assumes for missing keys.
    """

    def __init__(
        self, data: Mapping[str, Any], *, where: str, path: str = "", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.data, self.where, self.path, self.defaults = data, where, path, defaults or {}

    def get(self, key: str) -> Any:
        """The value in the file, else the library's default, else None."""
        return self.data[key] if key in self.data else self.defaults.get(key)

    def read_count(self, key: str, *, maximum: int = MAX_DIMENSION, minimum: int = 1) -> int:
        """An integer. Raises: SpecError where it is missing, not an integer, or out of bounds."""
        value = self.get(key)
        if value is None:
            self.refuse_missing(key)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.refuse(key, value, f"a whole number from {minimum} to {maximum}")
        return value

    def read_optional_count(self, key: str, *, maximum: int = MAX_DIMENSION, minimum: int = 1) -> int | None:
        """An integer, or None if the file has null or nothing. Raises: SpecError."""
        return None if self.get(key) is None else self.read_count(key, maximum=maximum, minimum=minimum)

    def read_flag(self, key: str, *, default: bool) -> bool:
        """A boolean, or the default if the file has none. Raises: SpecError."""
        # not self.get(): an explicit null is an error here, not a missing key
        value = self.data.get(key, self.defaults.get(key, default))
        if value is None:
            self.refuse_missing(key)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value

    def read_words(self, key: str, allowed: Sequence[str], *, length: int) -> tuple[str, ...] | None:
        """One word per layer, or None if the file has none. Raises: SpecError."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) and word in allowed for word in value):
            wrong = next((word for word in value if word not in allowed), value) if isinstance(value, list) else value
            self.refuse(key, wrong, f"a list of one of {', '.join(allowed)} for each layer")
        if len(value) != length:
            self.refuse(key, f"{len(value)} layers", f"one word for each of the {length} layers")
        return tuple(value)

    def read_indices(self, key: str) -> tuple[int, ...]:
        """A list of layer numbers, empty if the file has none. Raises: SpecError."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(index) is int and 0 <= index < MAX_LAYERS for index in value):
            self.refuse(key, value, f"a list of layer numbers from 0 to {MAX_LAYERS - 1}")
        return tuple(value)

    def read_child(self, key: str, *, defaults: Mapping[str, Any] | None = None) -> "Config":
        """A nested level. Raises: SpecError where it is missing or not an object."""
        value = self.get(key)
        if value is None:
            self.refuse_missing(key)
        if not isinstance(value, dict):
            self.refuse(key, value, "an object of keys and values")
        return Config(value, where=self.where, path=self.key_path(key), defaults=defaults)

    def key_path(self, key: str) -> str:
        """Dotted path of a key of this level."""
        return f"{self.path}.{key}" if self.path else key

    def refuse_unless(self, key: str, allowed: Any) -> None:
        """Raises: SpecError where a key has a value that changes tensors beyond what the tables describe."""
        value = self.get(key)
        if value is not None and value != allowed:
            self.refuse(key, value, f"{shorten_value(allowed)}: another value is not modelled", way_out=OTHER_MODEL)

    def refuse(self, key: str, value: Any, rule: str, *, way_out: str = REPAIR) -> NoReturn:
        """Raises: SpecError naming file, key path, value and rule."""
        raise SpecError(
            f"{key} is {shorten_value(value)}", where=f"{self.where}: {self.key_path(key)}", rule=rule, way_out=way_out
        )

    def refuse_missing(self, key: str) -> NoReturn:
        """Raises: SpecError for a missing key without a safe default."""
        raise SpecError(
            f"key '{key}' is {'null' if key in self.data else 'missing'}",
            where=f"{self.where}: {self.key_path(key)}",
            rule="the key is required: a library's default would be a guess",
            way_out=REPAIR,
        )


def read_config(path: Path) -> dict[str, Any]:
    """The top level of a config file. Raises: SpecError unless it is a small JSON object with unique keys."""
    text = read_text(path, "the model's config.json", limit=MAX_CONFIG_BYTES)
    # published configs contain `Infinity` (NemotronH's `time_step_limit`), but never a meaningful NaN
    data = parse_json(text, what="config.json", where=str(path), takes_infinity=True)
    if not isinstance(data, dict):
        raise SpecError(
            f"config.json holds a {type(data).__name__}",
            where=str(path),
            rule="one JSON object",
            way_out="give a Hugging Face model folder or its config.json",
        )
    return data
