"""The base class of every spec, and the one place where a validation failure becomes a message.

In: parsed YAML or JSON. Out: a frozen model, or a SpecError with file, key path, value and rule.
"""

import errno
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from rlplan.errors import MisspeltError, RunError, SpecError, did_you_mean
from rlplan.reading import MAX_INTEGER, MAX_SPEC_BYTES, check_values, read_text
from rlplan.spec.limits import list_models, suggest_example, suggest_value
from rlplan.units import parse_bytes

MAX_KEY = 80
"""Limit on the characters of a key in a message."""


class Spec(BaseModel):
    """A frozen model for which an unknown key is an error."""

    EXAMPLE: ClassVar[str] = ""
    """Override that an error message suggests for a missing part, if the part is often written as a word or a
    number."""
    # defer_build: pydantic builds a validator on first use, since building all of them takes a second.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def expand_short_forms(cls, data: Any) -> Any:
        """Parsed data with short forms expanded; unchanged unless a spec has short forms."""
        return data

    @classmethod
    def create_default(cls) -> Self:
        """An instance with all defaults. It is not validated, since building a validator takes a millisecond."""
        return cls.model_construct()


ByteCount = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
Auto = Literal["auto"]
"""A choice left to the planner, or to a machine's or framework's rule (resolved.py)."""
SpecType = TypeVar("SpecType", bound=Spec)


def validate(kind: type[SpecType], data: Any, *, file: str, way_out: str = "") -> SpecType:
    """An instance of `kind` from parsed data. Raises: SpecError that names the file, the key path, the value and the
    rule.

    Types are strict (`true` is not 1, `"5"` is not 5). Pydantic's JSON mode is used because only there strict lists may
    become tuples.
    """
    if not isinstance(data, dict):
        actual = "empty" if data is None else f"{type(data).__name__} {shorten_value(data)}"
        raise SpecError(
            f"{kind.__name__} is {actual}, not a mapping of keys to values",
            where=file,
            rule=f"the top level has the keys {', '.join(kind.model_fields)}",
            way_out=way_out
            or "write `key: value` lines, as docs/job.md does; scripts of other stacks: `rlplan check FILE`",
        )
    data = kind.expand_short_forms(data)
    _refuse_large_numbers(data, kind, file)
    try:
        # default=str: a YAML date becomes text, so that pydantic reports it with its key
        return kind.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise _as_spec_error(error, kind, data, file, way_out) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(
            f"{kind.__name__} holds a value that JSON cannot represent: {shorten_value(str(error), 120)}",
            where=file,
            rule="keys are strings, values are numbers, strings, lists and mappings",
            way_out=way_out or "write plain keys and values",
        ) from None


def _refuse_large_numbers(data: Any, kind: type[Spec], file: str) -> None:
    """Raises: SpecError for an integer of more than 63 bits, which float arithmetic cannot take."""
    pending: list[tuple[tuple[int | str, ...], Any]] = [((), data)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending += [((*path, key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            pending += [((*path, index), item) for index, item in enumerate(value)]
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            named = ".".join(_shorten_key(part) for part in path)
            raise SpecError(
                f"{named} of {kind.__name__} is a whole number of {value.bit_length()} bits",
                where=f"{file}: {named}",
                rule=f"whole numbers have at most {MAX_INTEGER.bit_length()} bits, from "
                f"{-MAX_INTEGER} to {MAX_INTEGER}",
                way_out="write a smaller number",
            )


def _as_spec_error(error: ValidationError, kind: type[Spec], data: Any, file: str, way_out: str) -> SpecError:
    first, *rest = _causes_first(error)
    path = _key_path(first["loc"], data)
    others = [other for other in rest if _key_path(other["loc"], data) != path]  # a union reports an error per member
    known = sorted(_known_keys(kind, tuple(first["loc"])))
    if first["type"] == "extra_forbidden":
        what = f"unknown key '{_shorten_key(first['loc'][-1])}'"
        rule = f"allowed here: {', '.join(known)}." + did_you_mean(_shorten_key(first["loc"][-1]), known)
        way_out = way_out or f"remove it; `rlplan docs {_shorten_key(first['loc'][-1])}` searches the documentation"
    elif first["type"] == "missing":
        what, rule = f"required key '{first['loc'][-1]}' is missing", "this key has no default"
        way_out = way_out or f"add `{first['loc'][-1]}:` there"
    elif first["type"] == "value_error" and isinstance(first["input"], dict):
        what, rule = first["msg"].removeprefix("Value error, "), "the keys of a job agree with each other"
        way_out = first.get("ctx", {}).get("way_out") or way_out or "change one of the values"
    else:
        what, rule = f"{path} is {shorten_value(first['input'])}", _rule(first)
        way_out = suggest_value(kind, first, path)
    if others:
        more = ", ".join(_key_path(other["loc"], data) for other in others[:4])
        what += f" (and {len(others)} more: {more})"
    is_key = first["type"] == "extra_forbidden"
    leaf, value = _find_leaf(path, first["input"]) if is_key else (path, first["input"])
    value_text = _value_as_typed(value)
    if near := re.search(r"Did you mean '([^']*)'\?$", rule):
        parent, dot, _ = path.rpartition(".")
        meant = f"{parent}{dot}{near[1]}{leaf.removeprefix(path)}{value_text}" if is_key else f"{path}={near[1]}"
        way_out = f"write {meant}" if not re.search(r"\.\d", path) else f"write '{near[1]}'"
    way_out = suggest_example(kind, first, path, near[1] if near else "") or way_out
    misspelt = MisspeltError(what, where=f"{file}: {path}", rule=rule, way_out=way_out)
    misspelt.key, misspelt.word = leaf, None
    misspelt.value_text = value_text
    if not is_key and isinstance(first["input"], str):
        misspelt.word = first["input"]
    return misspelt if is_key or misspelt.word else SpecError(what, where=misspelt.where, rule=rule, way_out=way_out)


def _causes_first(error: ValidationError) -> list[ErrorDetails]:
    """Errors of a validation, unknown keys before missing keys: an unknown key is often a missing one, misspelt."""
    errors = error.errors()
    if errors[0]["type"] != "missing":
        return errors
    return sorted(
        errors, key=lambda item: item["type"] != "extra_forbidden" or item["loc"][:-1] != errors[0]["loc"][:-1]
    )


def _value_as_typed(value: Any) -> str:
    """`=VALUE` of a short word or number, as on a command line; empty for other values."""
    text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, int | float) else ""
    return f"={text}" if 0 < len(text) <= MAX_KEY else ""


def _find_leaf(path: str, value: Any) -> tuple[str, Any]:
    """(dotted path, value) of the first value below a path."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}"
    return path, value


def _rule(error: ErrorDetails) -> str:
    """Pydantic's message, with enum members as their values, and the nearest allowed word."""
    rule = re.sub(r"<\w+\.\w+: ('[^']*')>", r"\1", error["msg"].removeprefix("Value error, "))
    context = error.get("ctx", {})
    allowed = re.findall(r"'([^']*)'", str(context.get("expected_tags", context.get("expected", ""))))
    word = error["input"].get("kind", "") if isinstance(error["input"], dict) else error["input"]
    return rule + (f".{did_you_mean(str(word), allowed)}" if did_you_mean(str(word), allowed) else "")


def _key_path(loc: tuple[int | str, ...], data: Any) -> str:
    """Dotted path of the keys in the file: pydantic also names the member of a union, which is no key."""
    parts: list[str] = []
    for position, part in enumerate(loc):
        inside = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if inside or (position == len(loc) - 1 and (isinstance(data, dict) or not parts)):
            parts.append(_shorten_key(part))
            data = data[part] if inside else None
    return ".".join(parts) or "(top level)"


def _shorten_key(part: int | str) -> str:
    """A key for a message, cut if it is far longer than any real key."""
    return str(part) if len(str(part)) <= MAX_KEY else str(part)[:MAX_KEY] + "…"


def _known_keys(kind: type[Spec], loc: tuple[Any, ...]) -> list[str]:
    """The keys allowed at the level of the last part of `loc`, as far as nested models determine them."""
    current: Any = kind
    for part in loc[:-1]:
        field = getattr(current, "model_fields", {}).get(part)
        if field is None:
            continue
        current = next(list_models(field.annotation), current)
    return list(getattr(current, "model_fields", {}))


_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 200, 200, 40


def shorten_value(value: Any, limit: int = 60) -> str:
    """`repr` for a message, cut to `limit` characters however large or deep the value is."""
    try:
        text = _SHORT.repr(value)
    except ValueError:
        text = f"a {type(value).__name__} too long to print"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def read_json(path: Path, what: str, *, limit: int = MAX_SPEC_BYTES) -> Any:
    """Parsed JSON of a file, checked as in `parse_json`. Raises: SpecError."""
    return parse_json(read_text(path, what, limit=limit), what=what, where=str(path))


def parse_json(text: str, *, what: str, where: str, takes_infinity: bool = False) -> Any:
    """Parsed JSON. A key that occurs twice is an error, since readers disagree on which value counts. Raises:
    SpecError.
    """

    def parse_constant(name: str) -> float:
        if takes_infinity and name == "Infinity":
            return float(name)
        raise ValueError(f"{name} is not a JSON number")

    try:
        check_values(text)
        return json.loads(text, parse_constant=parse_constant, object_pairs_hook=_refuse_repeated_keys)
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"{what} is not JSON: {shorten_value(str(error), 120)}",
            where=where,
            rule="one JSON value, each key once in its object, no NaN",
            way_out="repair or replace the file",
        ) from None


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while writing into a message. Raises: SpecError naming the path; RunError if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"{path} cannot be written: {error.strerror}",
                where=str(error.filename or path),
                rule="a disk with room for what is written",
                way_out="make room there, or name another place",
            ) from None
        raise SpecError(
            f"{path} cannot be written: {error.strerror}",
            where=str(error.filename or path),
            rule="the path must be writable",
            way_out="name another path, or change its permissions",
        ) from None


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shorten_value(twice)} occurs twice")
    return mapping
