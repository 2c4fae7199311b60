"""`rlplan emit PLAN -o DIR`: write the bundle that will run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rlplan.emit.bundle import write_bundle
from rlplan.emit.launchers import LAUNCHERS, write_launcher
from rlplan_cli.options import AsJson, JobArguments, JobOrPlan, Overrides
from rlplan_cli.render.terminal import note

NAME = "emit"
Target = Annotated[
    str | None,
    typer.Option(
        help="Another stack's own files: verl, trl, openrlhf, slime, nemo-rl, vllm, deepspeed; or the bundle with what "
        "starts it: slurm, skypilot, kuberay.",
        show_default=False,
    ),
]


def command(
    plan: JobOrPlan,
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the bundle into this folder.")],
    overrides: Overrides = None,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Write the bundle that will run. Plan, DeepSpeed, vLLM and Ray configuration, and one launch command."""
    from rlplan_cli.sources import executable

    changes = tuple(overrides or ())
    if target is None:
        write_bundle(executable(NAME, plan, changes), out)
    elif target in LAUNCHERS:
        write_launcher(executable(NAME, plan, changes), target, out)
    else:
        _write_for(target, plan, changes, out)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    if as_json:
        print(json.dumps({"schema_version": 1, "folder": str(out), "files": files}))
    else:
        print("\n".join(str(out / name) for name in files))
        note(f"run it with `rlplan run {out}`" if target is None else f"{out}/README.md says how to start it")


def _write_for(target: str, plan: Path, overrides: tuple[str, ...], out: Path) -> None:
    """What another stack is started with."""
    from rlplan.foreign.export.folders import write_export
    from rlplan.planner.executable import check_fits
    from rlplan_cli.sources import read_question

    found = read_question(NAME, JobArguments(str(plan), list(overrides))).answer()
    check_fits(found)
    write_export(found, target, out, tuple(LAUNCHERS))
