"""A JSON Schema of job files, for editors: completion, hover and red lines while a job is written.

In: the specs and the docstrings under their fields. Out: a JSON Schema (draft 2020-12). Left out: rules between keys,
which `rlplan plan` checks; overrides.
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
"""The line atop a job file that tells an editor where its schema is, relative to the job."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """The schema of a job file, short forms among it.

    >>> job_schema()["properties"]["hardware"]["anyOf"][1]
    {'$ref': '#/$defs/HardwareSpec'}
    """
    schema = JobSpec.model_json_schema()
    parts = schema["$defs"]
    _describe(schema, JobSpec)
    for spec in _specs_below(JobSpec):
        _describe(parts.get(spec.__name__, {}), spec)
    parts["PolicySpec"]["properties"]["path"] |= _one_of(load_catalogue())
    parts["AlgorithmSpec"]["properties"]["name"] |= _one_of(ALGORITHMS)
    parts["HardwareSpec"]["properties"]["profile"] |= _one_of([*profile_paths(), *SHORT_NAMES])
    _allow(schema, "policy", _one_of(load_catalogue()))
    _allow(schema, "algorithm", _one_of(ALGORITHMS))
    _allow(schema, "hardware", {"type": "string", "examples": ["8xH100", "8xH100 + 8xL40S", "cpu-host"]})
    schema["properties"]["stages"] = {
        "description": "Several jobs in one file: each says what differs from what stands beside.",
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {key: {"$ref": f"#/properties/{key}"} for key in schema["properties"]},
        },
    }
    return {"$schema": DIALECT, **schema, "title": "A job of rlplan"}


def _one_of(names: Any) -> dict[str, Any]:
    """Any text, of which an editor offers these."""
    return {"anyOf": [{"enum": [*names]}, {"type": "string"}]}


def _allow(schema: dict[str, Any], key: str, short: dict[str, Any]) -> None:
    """A short form beside the long one."""
    found = schema["properties"][key]
    kept = {name: found[name] for name in ("default", "description") if name in found}
    schema["properties"][key] = {"anyOf": [short, {"$ref": found["$ref"]}], **kept}


def _specs_below(spec: type[Spec]) -> Iterator[type[Spec]]:
    """The specs that fields of a spec hold, at any depth."""
    left, seen = [spec], {spec}
    while left:
        for field in left.pop().model_fields.values():
            for one in _specs_in(field.annotation):
                if one not in seen:
                    seen.add(one)
                    left.append(one)
                    yield one


def _specs_in(annotation: Any) -> Iterator[type[Spec]]:
    if inspect.isclass(annotation) and issubclass(annotation, Spec):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _specs_in(part)


def _describe(part: dict[str, Any], spec: type[Spec]) -> None:
    """What stands under each field in the source becomes its description; pydantic's titles go."""
    part.pop("title", None)
    for base in spec.__mro__:
        if base in (Spec, object) or not issubclass(base, Spec):
            continue
        for name, text in _docstrings(base).items():
            if name in part.get("properties", {}):
                part["properties"][name].setdefault("description", text)
    for field in part.get("properties", {}).values():
        field.pop("title", None)
        if isinstance(field.get("default"), dict):  # which stands part by part where it is declared
            del field["default"]


def _docstrings(spec: type[Spec]) -> dict[str, str]:
    """The text under each field of a class.

    >>> from rlplan.spec.parts.data import DataSpec
    >>> _docstrings(DataSpec)["answer_column"]
    'The same, of the answers.'
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
