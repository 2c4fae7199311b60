"""Edits: each file of a bundle is compared with its plan, and the first difference is an error.

In: the data that the plan gives for a file, and the file's data. Out: nothing, or a SpecError with both values. Data of
a file is never used; a run uses the data that the plan gives.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.planner.plan import Plan
from rlplan.spec.base import shorten_value
from rlplan.version import __version__

KeyPath = tuple[str, ...]
"""Keys from a file's top level downwards; positions in a list are numbers."""


def check_unchanged(folder: Path, file: str, plan: Plan, expected: Any, actual: Any) -> None:
    """Compare a file, named by its path in the bundle, with the plan. Raises: SpecError for different data."""
    difference = _find_difference(expected, actual, ())
    if difference is None:
        return
    key, what = difference
    path = ".".join(shorten_value(part, 40).strip("'\"") for part in key) or "(top level)"
    is_job_key = file == "execution.json" and key[:1] == ("job",) and len(key) > 1
    raise SpecError(
        f"{file}: {path} {what}",
        where=f"{folder / file}: {path}",
        rule="a bundle runs what its plan.json gives." + _describe_version(plan),
        way_out=f"`{emit_again(folder)}` restores the file; to change the value, "
        + (f"set {'.'.join(key[1:])} in the job and emit it" if is_job_key else "change the job and emit it"),
    )


def _find_difference(expected: Any, actual: Any, key: KeyPath) -> tuple[KeyPath, str] | None:
    """Find the first difference and describe both values; None where there is none."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for name, value in expected.items():
            if name not in actual:
                return (*key, name), f"is missing, the plan gives {_quote(value)}"
            if (below := _find_difference(value, actual[name], (*key, name))) is not None:
                return below
        added = next((name for name in actual if name not in expected), None)
        if added is None:
            return None
        return (*key, added), f"is {_quote(actual[added])}, the plan gives no such key.{did_you_mean(added, expected)}"
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        differences = (_find_difference(*pair, (*key, str(index))) for index, pair in pairs)
        return next((difference for difference in differences if difference is not None), None)
    return None if _is_same(expected, actual) else (key, f"is {_quote(actual)}, the plan gives {_quote(expected)}")


def emit_again(folder: Path, into: str = "") -> str:
    """The command that writes a bundle again from its own plan, in place or into another folder."""
    return shlex.join(["rlplan", "emit", str(folder / "plan.json"), "-o", into or str(folder)])


def _describe_version(plan: Plan) -> str:
    if plan.rlplan_version == __version__:
        return ""
    return f" (The plan was written by rlplan {shorten_value(plan.rlplan_version)}, this is {__version__}.)"


def _is_same(expected: Any, actual: Any) -> bool:
    """Equality in JSON: `true` differs from 1, and 1 equals 1.0."""
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return expected == actual
    return type(expected) is type(actual) and expected == actual


def _quote(value: Any) -> str:
    """Format a value as in the JSON file, shortened where it is long."""
    is_plain = value is None or isinstance(value, bool | float)
    return json.dumps(value) if is_plain else shorten_value(value, 100)
