"""A JSON Schema of job files, with which editors offer completion, hover texts and validation.

In: the specs and the docstrings under their fields. Out: a JSON Schema (draft 2020-12), all dotted keys. Left out:
rules between keys, which `rlplan plan` checks; overrides.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from rlplan.spec.algorithms import ALGORITHMS
from rlplan.spec.base import Spec
from rlplan.spec.hardware.catalogue import SHORT_NAMES, profile_paths
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import load_catalogue

NAME = "job.schema.json"
HEADER = "# yaml-language-server: $schema={}"
"""First line of a job file, which tells an editor where the schema is, relative to the job."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """The schema of a job file, including short forms.

    >>> job_schema()["properties"]["hardware"]["anyOf"][1]
    {'$ref': '#/$defs/HardwareSpec'}
    """
    schema = JobSpec.model_json_schema()
    parts = schema["$defs"]
    _describe(schema, JobSpec)
    for spec in _specs_below(JobSpec):
        _describe(parts.get(spec.__name__, {}), spec)
    parts["PolicySpec"]["properties"]["path"] |= _suggest(load_catalogue())
    parts["AlgorithmSpec"]["properties"]["name"] |= _suggest(ALGORITHMS)
    parts["HardwareSpec"]["properties"]["profile"] |= _suggest([*profile_paths(), *SHORT_NAMES])
    _allow(schema, "policy", _suggest(load_catalogue()))
    _allow(schema, "algorithm", _suggest(ALGORITHMS))
    _allow(schema, "hardware", {"type": "string", "examples": ["8xH100", "8xH100 + 8xL40S", "cpu-host"]})
    schema["properties"]["stages"] = {
        "description": "Several jobs in one file. Each stage holds the keys that differ from the rest of the file.",
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {key: {"$ref": f"#/properties/{key}"} for key in schema["properties"]},
        },
    }
    return {"$schema": DIALECT, **schema, "title": "A job of rlplan"}


def _suggest(names: Any) -> dict[str, Any]:
    """A schema of any text, for which an editor suggests `names`."""
    return {"anyOf": [{"enum": [*names]}, {"type": "string"}]}


def _allow(schema: dict[str, Any], key: str, short: dict[str, Any]) -> None:
    """Allow a short form of a key in addition to the long one."""
    long_form = schema["properties"][key]
    annotations = {name: long_form[name] for name in ("default", "description") if name in long_form}
    schema["properties"][key] = {"anyOf": [short, {"$ref": long_form["$ref"]}], **annotations}


def _specs_below(spec: type[Spec]) -> Iterator[type[Spec]]:
    """The specs in the fields of a spec, at any depth."""
    left, seen = [spec], {spec}
    while left:
        for field in left.pop().model_fields.values():
            for inner in _list_specs(field.annotation):
                if inner not in seen:
                    seen.add(inner)
                    left.append(inner)
                    yield inner


def _list_specs(annotation: Any) -> Iterator[type[Spec]]:
    if inspect.isclass(annotation) and issubclass(annotation, Spec):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _list_specs(part)


def _describe(part: dict[str, Any], spec: type[Spec]) -> None:
    """Turn the docstring under each field into its description, and drop pydantic's titles."""
    part.pop("title", None)
    for base in spec.__mro__:
        if base in (Spec, object) or not issubclass(base, Spec):
            continue
        for name, text in _docstrings(base).items():
            if name in part.get("properties", {}):
                part["properties"][name].setdefault("description", text)
    for field in part.get("properties", {}).values():
        field.pop("title", None)
        if isinstance(field.get("default"), dict):  # the part's own fields have these defaults
            del field["default"]


def _docstrings(spec: type[Spec]) -> dict[str, str]:
    """The text under each field of a class.

    >>> from rlplan.spec.parts.data import DataSpec
    >>> _docstrings(DataSpec)["answer_column"]
    'Column of the answers, if the data set has none of the known layouts.'
    """
    source = ast.parse(inspect.getsource(sys.modules[spec.__module__])).body
    body = next(node.body for node in source if isinstance(node, ast.ClassDef) and node.name == spec.__name__)
    return {
        field.target.id: " ".join(textwrap.dedent(text.value.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def job_keys() -> dict[str, tuple[str, ...]]:
    """Every dotted key of a job, with its allowed words if it is an enumeration."""
    return dict(_list_keys(JobSpec, ""))


def _list_keys(spec: type[Spec], prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, field in spec.model_fields.items():
        parts = [*_parts(field.annotation)]
        inner = [part for part in parts if isinstance(part, type) and hasattr(part, "model_fields")]
        if len(inner) == 1:
            yield from _list_keys(inner[0], f"{prefix}{name}.")
        elif not inner:
            words = tuple(part for part in parts if isinstance(part, str))
            yield f"{prefix}{name}", ("true", "false") if bool in parts else words


def _parts(annotation: object) -> Iterator[object]:
    """The types and literal words of an annotation."""
    arguments = getattr(annotation, "__args__", ())
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _parts(argument)
