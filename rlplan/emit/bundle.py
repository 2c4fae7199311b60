"""The bundle: a folder with everything that a run needs, readable by people and by `rlplan run`.

    DIR/plan.json               the resolved plan with its ledger
    DIR/execution.json          schedule and job
    DIR/deepspeed/<role>.json   DeepSpeed config of each trained role, and of frozen roles with sharded weights
    DIR/vllm/<role>.json        engine arguments
    DIR/ray.json                the Ray placement
    DIR/launch.sh               the command that starts the run

In: a Plan. Out: those files; and back: `read_bundle(write_bundle(plan)) == execution_spec(plan)`.
All files but plan.json follow from plan.json. Reading a bundle generates them again and compares them with those in the
folder (edits.py), which are never used. Files that a plan does not generate are not opened.
"""

import json
from pathlib import Path
from typing import Any

from rlplan.emit.edits import check_unchanged, emit_again
from rlplan.emit.execution import ExecutionSpec, execution_spec
from rlplan.errors import EmitError, SpecError
from rlplan.planner.plan import Plan, read_plan, write_plan
from rlplan.reading import MAX_SPEC_BYTES, read_text
from rlplan.spec.base import explain_write_errors, read_json, shorten_value

LAUNCH_SCRIPT = """#!/usr/bin/env bash
# Runs this bundle, exactly as it stands, with the rlplan of the active environment.
set -euo pipefail
exec rlplan run "$(dirname "$0")" "$@"
"""
ENGINES = ("deepspeed", "vllm")
"""Folders with one file per role."""


def write_bundle(plan: Plan, folder: Path) -> None:
    """Write the bundle of a plan. Raises: EmitError when the folder holds something else, SpecError when writing
    fails."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "execution.json").exists():
        raise EmitError(
            f"{folder} is not empty and holds no bundle",
            where=str(folder),
            rule="a bundle is written into a new folder or over an older bundle",
            way_out="name another folder",
        )
    spec = execution_spec(plan)
    files = _render_files(spec, folder)
    for name in ("plan.json", *files):
        _refuse_links(folder, name)
    with explain_write_errors(folder):
        for engine in ENGINES:
            (folder / engine).mkdir(parents=True, exist_ok=True)
            # an older bundle in this folder may have had other roles
            for left_over in (folder / engine).glob("*.json"):
                left_over.unlink()
        write_plan(plan, folder / "plan.json")
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "launch.sh").chmod(0o755)


def _render_files(spec: ExecutionSpec, folder: Path) -> dict[str, str]:
    """Render every file but plan.json, by its path in the bundle. The text depends on the plan and the folder only."""
    portable = spec.model_copy(update={"job": spec.job.make_relative(folder)})
    return {
        "execution.json": _dump(json.loads(portable.model_dump_json(exclude={*ENGINES, "ray"}))),
        **{f"deepspeed/{role}.json": _dump(config) for role, config in spec.deepspeed.items()},
        **{f"vllm/{role}.json": _dump(arguments) for role, arguments in spec.vllm.items()},
        "ray.json": _dump(json.loads(spec.ray.model_dump_json())),
        "launch.sh": LAUNCH_SCRIPT,
    }


def read_bundle(folder: Path) -> ExecutionSpec:
    """Read a bundle and return its plan's ExecutionSpec. Raises: SpecError, EmitError."""
    if not all((folder / name).is_file() for name in ("plan.json", "execution.json")):
        raise SpecError(
            f"{folder} holds no bundle",
            where=str(folder / "execution.json"),
            rule="a bundle has plan.json, execution.json, deepspeed/, vllm/ and ray.json",
            way_out="make one with `rlplan emit plan.json -o DIR`",
        )
    _refuse_links(folder, "plan.json")
    plan = read_plan(folder / "plan.json")
    spec = execution_spec(plan, str(folder / "plan.json"))
    files = _render_files(spec, folder)
    _check_files(folder, files)
    for name, text in files.items():
        _check_file(plan, folder, name, text)
    return spec


def _check_file(plan: Plan, folder: Path, name: str, expected: str) -> None:
    """Compare a file with the plan. Raises: SpecError for a difference."""
    # room for formatting by hand, which does not change the data
    limit = MAX_SPEC_BYTES + 2 * len(expected.encode())
    if name == "launch.sh":
        _check_script(folder, read_text(folder / name, "the bundle's launch.sh", limit=limit))
        return
    data = read_json(folder / name, f"the bundle's {name}", limit=limit)
    check_unchanged(folder, name, plan, json.loads(expected), data)


def _check_script(folder: Path, script: str) -> None:
    """Compare launch.sh, which rlplan does not run, but people do. Raises: SpecError."""
    if script != LAUNCH_SCRIPT:
        lines = zip([*LAUNCH_SCRIPT.splitlines(), ""], [*script.splitlines(), ""], strict=False)
        number, (expected, actual) = next(
            ((number, pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1]), (1, ("", script))
        )
        raise SpecError(
            f"launch.sh: line {number} is {shorten_value(actual)}, the plan gives {shorten_value(expected)}",
            where=f"{folder / 'launch.sh'}: {number}",
            rule="all bundles have the same launch.sh",
            way_out=f"`{emit_again(folder)}` restores it; keep a script of your own outside the bundle",
        )


def _check_files(folder: Path, files: dict[str, str]) -> None:
    """Check that all files exist, and that there are no other engine configurations. Raises: SpecError."""
    for name in files:
        _refuse_links(folder, name)
        engine = name.rpartition("/")[0]
        if engine and not (folder / engine).is_dir():
            raise _unlike(folder, f"{engine}/ is missing from the bundle", engine)
        if not (folder / name).is_file():
            raise _unlike(folder, f"{name} is missing from the bundle", name)
    for engine in ENGINES:
        for path in sorted((folder / engine).glob("*.json")):
            name = f"{engine}/{path.name}"
            if name not in files:
                raise _unlike(folder, f"{name} is in the bundle, and the plan has no such file", name)


def _unlike(folder: Path, what: str, name: str) -> SpecError:
    return SpecError(
        what,
        where=str(folder / name),
        rule="one file for each trained role, one for the rollout engine, execution.json, ray.json and launch.sh",
        way_out=f"`{emit_again(folder)}` restores the bundle",
    )


def _refuse_links(folder: Path, name: str) -> None:
    """Refuse a link: reading would follow it to an unchecked file, and writing would overwrite its target. Raises:
    SpecError.
    """
    for place in (name, name.rpartition("/")[0]):
        if place and (folder / place).is_symlink():
            raise SpecError(
                f"{place} is a link to {shorten_value(str((folder / place).readlink()))}",
                where=str(folder / place),
                rule="a bundle's files and folders are real files and folders inside it",
                way_out=f"`{emit_again(folder, f'{folder}-again')}` writes a bundle without links",
            )


def _dump(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"
