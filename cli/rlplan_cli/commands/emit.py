"""`rlplan emit PLAN -o DIR`: write the bundle that will run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rlplan_cli.options import AsJson, JobOrPlan, Overrides
from rlplan_cli.render.terminal import note

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
    from rlplan.api import emit

    written = emit(plan, out, overrides or (), target=target)
    if as_json:
        print(json.dumps(written.as_json()))
    else:
        print("\n".join(str(out / name) for name in written.files))
        readme = out / "README.md"
        note(f"{readme} says how to start it" if readme.exists() else f"run it with `rlplan run {out}`")
