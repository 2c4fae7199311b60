"""The base of every spec, and the one place where a validation failure becomes a message for people.

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
from rlplan.spec.limits import example_of, way_out_of
from rlplan.units import parse_bytes

MAX_KEY = 80
"""Characters of a key that a message shows."""


class Spec(BaseModel):
    """Frozen, and strict about keys: a wrong key is an error, never ignored."""

    EXAMPLE: ClassVar[str] = ""
    """What is typed where a job lacks one, of parts that are often written as a word or a number."""
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def long_form(cls, data: Any) -> Any:
        """Parsed data with what stands for something longer expanded: nothing, unless a spec has short forms."""
        return data

    @classmethod
    def by_default(cls) -> Self:
        """With each key at its default. Nothing is validated, for a validator takes a millisecond to build."""
        return cls.model_construct()


ByteCount = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
Auto = Literal["auto"]
"""A choice that is left to the planner, or to a rule that says what it is on a machine (resolved.py)."""
SpecType = TypeVar("SpecType", bound=Spec)


def validate(kind: type[SpecType], data: Any, *, file: str, way_out: str = "") -> SpecType:
    """Build `kind` from parsed data. Raises: SpecError that names the file, the key path, the value and the rule.

    Types are strict (`true` is no 1, `"5"` no 5), in pydantic's JSON mode, where lists may become tuples.
    """
    if not isinstance(data, dict):
        found = "empty" if data is None else f"{type(data).__name__} {shorten(data)}"
        raise SpecError(
            f"{kind.__name__} is {found}, not a mapping of keys to values",
            where=file,
            rule=f"the top level has the keys {', '.join(kind.model_fields)}",
            way_out=way_out
            or "write `key: value` lines, as docs/job.md does; scripts of other stacks: `rlplan check FILE`",
        )
    data = kind.long_form(data)
    _refuse_large_numbers(data, kind, file)
    try:
        return kind.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise _as_spec_error(error, kind, data, file, way_out) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(
            f"{kind.__name__} holds what JSON cannot: {shorten(str(error), 120)}",
            where=file,
            rule="keys are strings, values are numbers, strings, lists and mappings",
            way_out=way_out or "write plain keys and values",
        ) from None


def _refuse_large_numbers(data: Any, kind: type[Spec], file: str) -> None:
    """Raises: SpecError for a whole number of more than 63 bits, which no arithmetic with fractions can take."""
    waiting: list[tuple[tuple[int | str, ...], Any]] = [((), data)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*path, key), each) for key, each in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [((*path, index), each) for index, each in enumerate(value)]
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            named = ".".join(_named(part) for part in path)
            raise SpecError(
                f"{named} of {kind.__name__} is a whole number of {value.bit_length()} bits",
                where=f"{file}: {named}",
                rule=f"whole numbers have at most {MAX_INTEGER.bit_length()} bits, so that they lie from "
                f"{-MAX_INTEGER} to {MAX_INTEGER}",
                way_out="write a smaller number",
            )


def _as_spec_error(error: ValidationError, kind: type[Spec], data: Any, file: str, way_out: str) -> SpecError:
    first, *rest = _causes_first(error)
    path = _key_path(first["loc"], data)
    others = [other for other in rest if _key_path(other["loc"], data) != path]  # a union gives one for each member
    known = sorted(_known_keys(kind, tuple(first["loc"])))
    if first["type"] == "extra_forbidden":
        what = f"unknown key '{_named(first['loc'][-1])}'"
        rule = f"allowed here: {', '.join(known)}." + did_you_mean(_named(first["loc"][-1]), known)
        way_out = way_out or f"remove it; `rlplan docs {_named(first['loc'][-1])}` looks a word up"
    elif first["type"] == "missing":
        what, rule = f"required key '{first['loc'][-1]}' is missing", "this key has no default"
        way_out = way_out or f"add `{first['loc'][-1]}:` there"
    elif first["type"] == "value_error" and isinstance(first["input"], dict):
        what, rule = first["msg"].removeprefix("Value error, "), "the keys of a job agree with each other"
        way_out = first.get("ctx", {}).get("way_out") or way_out or "change one of the values"
    else:
        what, rule = f"{path} is {shorten(first['input'])}", _rule(first)
        way_out = way_out_of(kind, first, path)
    if others:
        more = ", ".join(_key_path(other["loc"], data) for other in others[:4])
        what += f" (and {len(others)} more: {more})"
    is_key = first["type"] == "extra_forbidden"
    given = _given(first["input"])
    if near := re.search(r"Did you mean '([^']*)'\?$", rule):
        parent, dot, _ = path.rpartition(".")
        meant = f"{parent}{dot}{near[1]}{given}" if is_key else f"{path}={near[1]}"
        way_out = f"write {meant}" if not re.search(r"\.\d", path) else f"write '{near[1]}'"
    way_out = example_of(kind, first, path, near[1] if near else "", _models_in) or way_out
    misspelt = MisspeltError(what, where=f"{file}: {path}", rule=rule, way_out=way_out)
    misspelt.key, misspelt.word = _leaf(path, first["input"]) if is_key else path, None
    misspelt.given = given
    if not is_key and isinstance(first["input"], str):
        misspelt.word = first["input"]
    return misspelt if is_key or misspelt.word else SpecError(what, where=misspelt.where, rule=rule, way_out=way_out)


def _causes_first(error: ValidationError) -> list[ErrorDetails]:
    """What is wrong, unknown keys before keys that are missing: one of them is often the other, misspelt."""
    found = error.errors()
    if found[0]["type"] != "missing":
        return found
    return sorted(found, key=lambda one: one["type"] != "extra_forbidden" or one["loc"][:-1] != found[0]["loc"][:-1])


def _given(value: Any) -> str:
    """`=VALUE` as it is typed, of one short word or number."""
    text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, int | float) else ""
    return f"={text}" if 0 < len(text) <= MAX_KEY else ""


def _leaf(path: str, value: Any) -> str:
    """The dotted path down to the first value."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}"
    return path


def _rule(error: ErrorDetails) -> str:
    """What pydantic says, enum members as their values, with the nearest allowed word."""
    rule = re.sub(r"<\w+\.\w+: ('[^']*')>", r"\1", error["msg"].removeprefix("Value error, "))
    context = error.get("ctx", {})
    allowed = re.findall(r"'([^']*)'", str(context.get("expected_tags", context.get("expected", ""))))
    found = error["input"].get("kind", "") if isinstance(error["input"], dict) else error["input"]
    return rule + (f".{did_you_mean(str(found), allowed)}" if did_you_mean(str(found), allowed) else "")


def _key_path(loc: tuple[int | str, ...], data: Any) -> str:
    """Dotted path of the keys that stand in the file: pydantic also names the member of a union."""
    parts: list[str] = []
    for position, part in enumerate(loc):
        inside = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if inside or (position == len(loc) - 1 and (isinstance(data, dict) or not parts)):
            parts.append(_named(part))
            data = data[part] if inside else None
    return ".".join(parts) or "(top level)"


def _named(part: int | str) -> str:
    """A key in a message: its beginning, where it is far longer than any of ours."""
    return str(part) if len(str(part)) <= MAX_KEY else str(part)[:MAX_KEY] + "…"


def _known_keys(kind: type[Spec], loc: tuple[Any, ...]) -> list[str]:
    """The keys that are allowed beside the last part of `loc`, as far as nested models tell."""
    current: Any = kind
    for part in loc[:-1]:
        field = getattr(current, "model_fields", {}).get(part)
        if field is None:
            continue
        current = next((arg for arg in _models_in(field.annotation)), current)
    return list(getattr(current, "model_fields", {}))


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in getattr(annotation, "__args__", ()) for model in _models_in(arg)]


_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 200, 200, 40


def shorten(value: Any, limit: int = 60) -> str:
    """`repr` for a message, however large or deep the value is."""
    try:
        text = _SHORT.repr(value)
    except ValueError:
        text = f"a {type(value).__name__} too long to print"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def read_json(path: Path, what: str, *, limit: int = MAX_SPEC_BYTES) -> Any:
    """Parsed JSON of a file, as `parse_json` has it. Raises: SpecError."""
    return parse_json(read_text(path, what, limit=limit), what=what, where=str(path))


def parse_json(text: str, *, what: str, where: str, takes_infinity: bool = False) -> Any:
    """JSON, as data only; a key that occurs twice is refused, for readers take one or the other. Raises: SpecError."""

    def constant(name: str) -> float:
        if takes_infinity and name == "Infinity":
            return float(name)
        raise ValueError(f"{name} is not a JSON number")

    try:
        check_values(text)
        return json.loads(text, parse_constant=constant, object_pairs_hook=_each_key_once)
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"{what} is not JSON: {shorten(str(error), 120)}",
            where=where,
            rule="one JSON value, each key once in its object, no NaN",
            way_out="repair or replace the file",
        ) from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failure to write into a message. Raises: SpecError naming the path; RunError where its disk is full."""
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
            rule="a place where files can be made",
            way_out="name another place, or change its permissions",
        ) from None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shorten(twice)} occurs twice")
    return found
