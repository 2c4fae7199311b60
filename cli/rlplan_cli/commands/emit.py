"""`rlplan emit PLAN -o DIR`: writes the bundle that `rlplan run` executes, or another framework's configuration."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rlplan_cli.options import AsJson, JobOrPlan, Overrides
from rlplan_cli.render.terminal import note

Target = Annotated[
    str | None,
    typer.Option(
        help="Write another framework's files: verl, trl, openrlhf, slime, nemo-rl, vllm, deepspeed; or the bundle "
        "with a launcher: slurm, skypilot, kuberay."
    ),
]


def command(
    plan: JobOrPlan,
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the bundle into this folder.")],
    overrides: Overrides = None,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Write the bundle that runs a plan. It has DeepSpeed, vLLM and Ray configurations and a launch command."""
    from rlplan.api import emit

    written = emit(plan, out, overrides or (), target=target)
    if as_json:
        print(json.dumps(written.as_json()))
    else:
        print("\n".join(str(out / name) for name in written.files))
        readme = out / "README.md"
        note(f"{readme} explains how to start it" if readme.exists() else f"run it with `rlplan run {out}`")
