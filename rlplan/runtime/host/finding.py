"""Finding: the result of one check of this machine."""

from dataclasses import dataclass
from importlib import metadata
from typing import Literal

State = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    subject: str
    """Name of the checked thing, such as `torch` or `memory`."""

    state: State
    found: str
    """The observed value, in words."""

    fix: str = ""
    """Command or advice that fixes it; empty when nothing is wrong."""


def judge(subject: str, is_fine: bool, value: str, fix: str, otherwise: State = "missing") -> Finding:
    """Build a finding that is `ok` or has a fix. otherwise: its state when it is not fine."""
    return Finding(subject, "ok", value) if is_fine else Finding(subject, otherwise, value, fix)


def installed_version(name: str) -> str | None:
    """Version of an installed package, or None. Only its metadata is read; nothing is imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
