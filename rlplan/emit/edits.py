"""Edits: a bundle's file is compared with what its plan gives, and refused at the first difference.

In: what the plan gives for a file, and what stands in it. Out: nothing, or a SpecError with both values. Nothing of a
file is used because it stands there: what runs is what the plan gives.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.planner.plan import Plan
from rlplan.spec.base import shorten
from rlplan.version import __version__

KeyPath = tuple[str, ...]
"""Keys from a file's top level down; the place in a list as a number."""


def check_unchanged(folder: Path, file: str, plan: Plan, given: Any, found: Any) -> None:
    """Raises: SpecError where a file, by its path in the bundle, holds other data than the plan gives."""
    difference = _difference(given, found, ())
    if difference is None:
        return
    key, what = difference
    path = ".".join(shorten(part, 40).strip("'\"") for part in key) or "(top level)"
    of_job = file == "execution.json" and key[:1] == ("job",) and len(key) > 1
    raise SpecError(
        f"{file}: {path} {what}",
        where=f"{folder / file}: {path}",
        rule="a bundle runs what its plan.json gives." + _other_version(plan),
        way_out=f"`{emit_again(folder)}` writes it as the plan gives it; to choose otherwise, "
        + (f"set {'.'.join(key[1:])} in the job and emit that" if of_job else "change the job and emit that"),
    )


def _difference(given: Any, found: Any, key: KeyPath) -> tuple[KeyPath, str] | None:
    """(where, both values in words) of the first difference; None where there is none."""
    if isinstance(given, dict) and isinstance(found, dict):
        for name, value in given.items():
            if name not in found:
                return (*key, name), f"is missing, the plan gives {_shown(value)}"
            if (below := _difference(value, found[name], (*key, name))) is not None:
                return below
        added = next((name for name in found if name not in given), None)
        if added is None:
            return None
        return (*key, added), f"is {_shown(found[added])}, the plan gives no such key.{did_you_mean(added, given)}"
    if isinstance(given, list) and isinstance(found, list) and len(given) == len(found):
        below_each = (_difference(*pair, (*key, str(n))) for n, pair in enumerate(zip(given, found, strict=True)))
        return next((below for below in below_each if below is not None), None)
    return None if _is_same(given, found) else (key, f"is {_shown(found)}, the plan gives {_shown(given)}")


def emit_again(folder: Path, into: str = "") -> str:
    """The command that writes a bundle again from its own plan, over itself or into another folder."""
    return shlex.join(["rlplan", "emit", str(folder / "plan.json"), "-o", into or str(folder)])


def _other_version(plan: Plan) -> str:
    if plan.rlplan_version == __version__:
        return ""
    return f" (The plan is of rlplan {shorten(plan.rlplan_version)}, this is {__version__}.)"


def _is_same(given: Any, found: Any) -> bool:
    """Equal as JSON: `true` is no 1, and 1 is 1.0."""
    if isinstance(given, bool) or isinstance(found, bool):
        return given is found
    if isinstance(given, int | float) and isinstance(found, int | float):
        return given == found
    return type(given) is type(found) and given == found


def _shown(value: Any) -> str:
    """JSON as it stands in the file, cut where it is long."""
    is_plain = value is None or isinstance(value, bool | float)
    return json.dumps(value) if is_plain else shorten(value, 100)
