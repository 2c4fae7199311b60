"""Edits: what a person changed in a bundle's file, held to the table of what may be changed.

In: what the plan gives for a file, and what stands in it. Out: what runs, or a SpecError at the first difference that
the table (editable.py) does not take. What runs is always what the plan gives, with the edits laid over it: nothing of
a file is used because it stands there.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from rlplan import __version__
from rlplan.emit.editable import EDITABLE, KeyPath, find_editable, job_key_of
from rlplan.errors import SpecError, did_you_mean
from rlplan.planner.plan import Plan
from rlplan.records import dataclass
from rlplan.spec.base import shorten


@dataclass(frozen=True, slots=True)
class Edits:
    """The edits of one file of a bundle."""

    folder: Path
    file: str
    """Its path in the folder, with `/`."""
    plan: Plan

    def laid_over(self, given: Any, found: Any, key: KeyPath = ()) -> Any:
        """What runs: what the plan gives, with the edits that are allowed. Raises: SpecError."""
        if isinstance(given, dict) and isinstance(found, dict):
            return self._of_mapping(given, found, key)
        if isinstance(given, list) and isinstance(found, list) and len(given) == len(found):
            pairs = enumerate(zip(given, found, strict=True))
            return [self.laid_over(one, other, (*key, str(index))) for index, (one, other) in pairs]
        if _is_same(given, found):
            return given
        row = find_editable(self.file, key)
        if row is not None and row.takes.takes(found):
            return found
        raise self._refused(key, f"is {_shown(found)}, the plan gives {_shown(given)}")

    def _of_mapping(self, given: dict[str, Any], found: dict[str, Any], key: KeyPath) -> dict[str, Any]:
        result = {}
        for name, value in given.items():
            if name not in found:
                raise self._refused((*key, name), f"is missing, the plan gives {_shown(value)}")
            result[name] = self.laid_over(value, found[name], (*key, name))
        for name in [name for name in found if name not in given]:
            row = find_editable(self.file, (*key, name))
            if row is None or not row.may_be_added or not row.takes.takes(found[name]):
                hint = did_you_mean(name, given)
                raise self._refused((*key, name), f"is {_shown(found[name])}, the plan gives no such key", hint)
            result[name] = found[name]
        return result

    def _refused(self, key: KeyPath, what: str, hint: str = "") -> SpecError:
        path = ".".join(shorten(part, 40).strip("'\"") for part in key)
        row, job_key = find_editable(self.file, key), job_key_of(self.file, key)
        if row is not None:
            rule = f"by hand it may be {row.takes}"
        else:
            mine = [one.key for one in EDITABLE if self.file == one.file or self.file.startswith(f"{one.file}/")]
            rule = "a bundle runs what its plan.json gives; by hand may be changed here: " + (", ".join(mine) or "none")
        change = f"; to choose otherwise, set {job_key} in the job and emit that" if job_key else ""
        return SpecError(
            f"{self.file}: {path or '(top level)'} {what}",
            where=f"{self.folder / self.file}: {path or '(top level)'}",
            rule=rule + "." + hint + _other_version(self.plan),
            way_out=f"`{emit_again(self.folder)}` writes it as the plan gives it{change}",
        )


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
