"""Finding: one thing that was looked at on this machine."""

from dataclasses import dataclass
from importlib import metadata
from typing import Literal

State = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    """What it is, such as `torch` or `memory`."""

    state: State
    """How it stands."""

    found: str
    """What is there, for people."""

    fix: str = ""
    """What to do; empty when all is well."""


def judged(subject: str, is_fine: bool, found: str, fix: str, otherwise: State = "missing") -> Finding:
    """What was found, with what mends it where it is not fine."""
    return Finding(subject, "ok", found) if is_fine else Finding(subject, otherwise, found, fix)


def installed_version(name: str) -> str | None:
    """Of a package, by its metadata: nothing is imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
