"""Keys of older versions: the error for each names its new key.

In: a parsed job file. Out: nothing, or a SpecError. Left out: keys that never existed (base.py suggests similar ones).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.frameworks.profile import UnknownFrameworkError, split_label

RENAMED: dict[str, str] = json.loads(Path(__file__).with_name("renamed.json").read_text("utf-8"))
"""New key by old key."""


def refuse_old_keys(data: Any) -> None:
    """Raises: SpecError where a job has a key or the schema version of an older version."""
    if not isinstance(data, Mapping):
        return
    for old, new in _old_keys(data):
        raise SpecError(
            f"unknown key '{old}': it is {new} now",
            where=old,
            rule="keys of a job: docs/job.md",
            way_out=_framework_settings(data, old) if old in ("target", "source") else _suggest_key(data.get(old), new),
        )
    version = data.get("schema_version")
    if version == 1:
        raise SpecError(
            "schema_version is 1",
            where="schema_version",
            rule="this rlplan reads jobs of version 2; CHANGELOG.md lists renamed keys",
            way_out="schema_version: 2, or leave it out",
        )


def _suggest_key(value: Any, new: str) -> str:
    """The new key with the old value; a bare number of GPUs gets a usual kind."""
    if new == "hardware" and isinstance(value, int):
        return f"write {new}: {value}xH100, with your kind of GPU"
    return f"write {new}: {value}" if isinstance(value, str) and "\n" not in value else f"write {new}"


def _framework_settings(data: Mapping[str, Any], old: str) -> str:
    """The overrides that replace the old keys `target` and `source`."""
    trainer, stack = (str(data.get(key) or "") for key in ("target", "source"))
    backends = {"rlplan": "", "fsdp": "fsdp2", "fsdp2": "fsdp2", "megatron": "megatron", "deepspeed": "deepspeed"}
    names = [_known_name(stack), _known_name(trainer) if trainer not in ("", "deepspeed") else ""]
    name, backend = next(filter(None, names), ""), backends.get(trainer, "")
    settings = [f"framework={name}"] if name else []
    settings += [f"training.backend={backend}"] if backend else []
    return f"write {' '.join(settings)}" if settings else f"leave {old} out, or write framework=verl"


def _known_name(label: str) -> str:
    """The framework of a label; empty if it is unknown."""
    try:
        return split_label(label)[0]
    except UnknownFrameworkError:
        return ""


def _old_keys(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for old, new in RENAMED.items():
        *parents, last = old.split(".")
        part: Any = data
        for parent in parents:
            part = part.get(parent) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and last in part:
            yield old, new
