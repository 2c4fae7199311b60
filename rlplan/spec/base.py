"""The base of every spec, and the one place where a validation failure becomes a message for people.

In: parsed YAML or JSON. Out: a frozen model, or a SpecError with file, key path, value and rule.
"""

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from rlplan.errors import SpecError, did_you_mean
from rlplan.units import parse_bytes

MAX_SPEC_BYTES = 1 << 20
"""A job or a profile is small; anything larger is a mistake or an attack."""


class Spec(BaseModel):
    """Frozen, and strict about keys: a wrong key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


ByteCount = Annotated[int, BeforeValidator(parse_bytes)]
SpecType = TypeVar("SpecType", bound=Spec)


def validate(kind: type[SpecType], data: Any, *, file: str, way_out: str = "") -> SpecType:
    """Build `kind` from parsed data. Raises: SpecError that names the file, the key path, the value and the rule."""
    if not isinstance(data, dict):
        raise SpecError(
            f"{kind.__name__} is {type(data).__name__} {_shorten(data)}, not a mapping of keys to values",
            where=file,
            rule=f"the top level has the keys {', '.join(kind.model_fields)}",
            way_out=way_out or "write `key: value` lines; docs/job.md shows a whole job",
        )
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _as_spec_error(error, kind, file, way_out) from None


def _as_spec_error(error: ValidationError, kind: type[Spec], file: str, way_out: str) -> SpecError:
    first, *others = error.errors()
    path = ".".join(str(part) for part in first["loc"]) or "(top level)"
    known = sorted(_known_keys(kind, tuple(first["loc"])))
    if first["type"] == "extra_forbidden":
        what = f"unknown key '{first['loc'][-1]}'"
        rule = f"allowed here: {', '.join(known)}." + did_you_mean(str(first["loc"][-1]), known)
        way_out = way_out or "remove or rename the key"
    elif first["type"] == "missing":
        what, rule = f"required key '{first['loc'][-1]}' is missing", first["msg"]
        way_out = way_out or f"add `{first['loc'][-1]}:` there"
    else:
        rule = first["msg"].removeprefix("Value error, ")
        what = f"{path} is {_shorten(first['input'])}" if first["loc"] else rule
        way_out = way_out or "change the value"
    if others:
        more = ", ".join(".".join(str(part) for part in other["loc"]) or "(top level)" for other in others[:4])
        what += f" (and {len(others)} more: {more})"
    return SpecError(what, where=f"{file}: {path}", rule=rule, way_out=way_out)


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


def _shorten(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def read_text(path: Path, what: str, *, limit: int = MAX_SPEC_BYTES) -> str:
    """The text of a small UTF-8 file. Raises: SpecError when it is missing, a folder, too large or not UTF-8."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise SpecError(
                f"{what} has {size} bytes",
                where=str(path),
                rule=f"at most {limit} bytes are read",
                way_out="give the right file",
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(
            f"{what} is missing",
            where=str(path),
            rule="the file must exist",
            way_out="check the path; paths in a job are relative to the job file",
        ) from None
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise SpecError(
            f"{what} cannot be read: {error.strerror}",
            where=str(path),
            rule="a readable file",
            way_out="check the path and its permissions",
        ) from None
    except UnicodeDecodeError:
        raise SpecError(
            f"{what} is not UTF-8 text",
            where=str(path),
            rule="UTF-8 text",
            way_out="save it as UTF-8, or give the right file",
        ) from None


def read_json(path: Path, what: str, *, limit: int = MAX_SPEC_BYTES) -> Any:
    """Parsed JSON, as data only. Raises: SpecError."""
    text = read_text(path, what, limit=limit)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"{what} is not JSON: {_shorten(str(error), 120)}",
            where=str(path),
            rule="one JSON value",
            way_out="repair or replace the file",
        ) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
