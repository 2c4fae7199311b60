"""Validation of tool arguments against the JSON schemas of servers, in bounded time because schemas are untrusted.

A schema can refer to itself, branch without end, or hold a pattern that backtracks for hours. Each keyword therefore
checks the deadline, and patterns run in RE2, in time linear in the text. RE2 has no look-around and no back-references;
a pattern with one is left to the server, which validates its arguments itself. JSON Schema prescribes ECMA 262, where
`\\d` and `\\w` match ASCII only and `$` matches only the end of the text, as in RE2.

In: a schema, arguments, a deadline. Out: the first violation, or a SchemaError. Left out: references to other
documents, `$schema`, `unevaluatedProperties` and `unevaluatedItems`.
"""

import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from rlplan.runtime.processes.line_process import Deadline, NoAnswerError

_MAX_PATTERN_BYTES = 1 << 20
"""Memory limit of one compiled pattern."""
_deadline: ContextVar[Deadline] = ContextVar("deadline")
"""Deadline of the evaluation in progress; jsonschema gives keywords no parameter for it."""


class SchemaError(Exception):
    """A schema is not valid, or cannot be evaluated."""


def check_schema(schema: dict[str, Any], deadline: Deadline) -> None:
    """Check that a schema is valid and can be evaluated. Raises: SchemaError, LateError."""
    from jsonschema import Draft202012Validator

    if violation := find_fault(schema, Draft202012Validator.META_SCHEMA, deadline):
        raise SchemaError(violation)
    find_fault({}, schema, deadline)


def find_fault(arguments: dict[str, Any], schema: dict[str, Any], deadline: Deadline) -> str:
    """Find the first violation of a schema by arguments; empty without one. Raises: SchemaError, LateError."""
    from referencing.exceptions import Unresolvable

    _deadline.set(deadline)
    build, registry = _load_validator()
    try:
        first = next(build(_drop_dialects(schema), registry=registry).iter_errors(arguments), None)
    except NoAnswerError:
        raise
    except Unresolvable:
        return ""  # the server validates the arguments itself
    except RecursionError:
        raise SchemaError("it refers to itself without an end") from None
    except Exception as error:  # a reference may lead to anything
        raise SchemaError(f"{type(error).__name__}: {str(error)[:200]}") from None
    if first is None:
        return ""
    place = ".".join(map(str, first.absolute_path))
    return f"{place}: {first.message[:300]}" if place else str(first.message)[:300]


@lru_cache(maxsize=1)
def _load_validator() -> tuple[Any, Any]:
    """(a validator class that checks the deadline before each keyword, a registry with the meta-schema)."""
    from jsonschema import Draft202012Validator, validators
    from jsonschema_specifications import REGISTRY
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    def bound(keyword: Callable[..., Any]) -> Callable[..., Any]:
        def check(*arguments: Any) -> Any:
            _deadline.get().check()
            return keyword(*arguments)

        return check

    documents = ((uri, _drop_dialects(REGISTRY.contents(uri))) for uri in REGISTRY if "2020-12" in uri)
    resources = [(uri, DRAFT202012.create_resource(document)) for uri, document in documents]
    keywords = {name: bound(keyword) for name, keyword in (Draft202012Validator.VALIDATORS | _OWN).items()}
    return validators.extend(Draft202012Validator, keywords), Registry().with_resources(resources)


def _drop_dialects(schema: Any) -> Any:
    """Copy a schema without `$schema`: jsonschema would choose a validator class by it, which checks no deadline."""
    if isinstance(schema, list):
        return [_drop_dialects(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    is_dialect = isinstance(schema.get("$schema"), str)
    return {key: _drop_dialects(part) for key, part in schema.items() if not (is_dialect and key == "$schema")}


def _check_pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if validator.is_type(value, "string") and not matches_pattern(pattern, value):
        yield ValidationError(f"{value[:80]!r} does not match {pattern[:80]!r}")


def _check_pattern_properties(validator: Any, patterns: dict[str, Any], value: Any, schema: Any) -> Iterator[Any]:
    for pattern, part in patterns.items() if validator.is_type(value, "object") else ():
        for key in value:
            _deadline.get().check()  # a keyword's own check comes once, before it compares all patterns with all names
            # a pattern that RE2 does not accept would match every key
            if _compile(pattern) is not None and matches_pattern(pattern, key):
                yield from validator.descend(value[key], part, path=key, schema_path=pattern)


def _matches_any(patterns: dict[str, Any], key: str) -> bool:
    for pattern in patterns:
        _deadline.get().check()
        if matches_pattern(pattern, key):
            return True
    return False


def _check_additional_properties(validator: Any, additional: Any, value: Any, schema: dict[str, Any]) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if not validator.is_type(value, "object"):
        return
    patterns = schema.get("patternProperties", {})
    for key in value:
        if key in schema.get("properties", {}) or _matches_any(patterns, key):
            continue
        if validator.is_type(additional, "object"):
            yield from validator.descend(value[key], additional, path=key)
        elif additional is False:
            yield ValidationError(f"Additional properties are not allowed ({key[:200]!r} was unexpected)")


def _check_unique(validator: Any, is_unique: Any, value: Any, schema: Any) -> Iterator[Any]:
    """Compare elements by their JSON text, in linear time; therefore 1 and 1.0 are different here."""
    from jsonschema.exceptions import ValidationError

    is_checked = is_unique is True and validator.is_type(value, "array")
    if is_checked and len({json.dumps(part, sort_keys=True) for part in value}) < len(value):
        yield ValidationError("its elements are not unique")


def _leave_to_server(*_: Any) -> Iterator[Any]:
    """Check nothing: jsonschema matches the patterns of these keywords with `re`, which may backtrack for hours."""
    yield from ()


_OWN = {
    "pattern": _check_pattern,
    "patternProperties": _check_pattern_properties,
    "additionalProperties": _check_additional_properties,
    "uniqueItems": _check_unique,
    "unevaluatedProperties": _leave_to_server,
    "unevaluatedItems": _leave_to_server,
}
"""Keywords that are evaluated here instead of by jsonschema."""


def matches_pattern(pattern: str, text: str) -> bool:
    """Whether a part of a text matches; true for a pattern that RE2 does not accept.

    >>> matches_pattern("^(a+)+$", "a" * 100_000 + "!"), matches_pattern("(?!b)a", "b")
    (False, True)
    """
    compiled = _compile(pattern)
    return compiled is None or compiled.search(text.encode("utf-8", "surrogatepass")) is not None


@lru_cache(maxsize=1024)
def _compile(pattern: str) -> Any:
    """Compile a pattern for UTF-8; None when RE2 does not accept it."""
    import re2

    options = re2.Options()
    options.log_errors, options.max_mem = False, _MAX_PATTERN_BYTES
    try:
        return re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError):
        return None
