"""`rlplan emit PLAN -o DIR`: write the bundle that will run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rlplan.emit.bundle import write_bundle
from rlplan_cli.options import AsJson, JobOrPlan, Overrides
from rlplan_cli.render.terminal import note

NAME = "emit"


def command(
    plan: JobOrPlan,
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the bundle into this folder.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Write the bundle that will run. Plan, DeepSpeed, vLLM and Ray configuration, and one launch command."""
    from rlplan_cli.sources import executable

    write_bundle(executable(NAME, plan, tuple(overrides or ())), out)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    if as_json:
        print(json.dumps({"schema_version": 1, "folder": str(out), "files": files}))
    else:
        print("\n".join(str(out / name) for name in files))
        note(f"run it with `rlplan run {out}`")
