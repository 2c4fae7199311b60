"""`rlplan schema`: writes the JSON Schema of job files, for editors."""

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the schema to this file.")] = None,
) -> None:
    """Print the JSON Schema of job files, for editors.

    An editor with yaml-language-server uses it if the first line of a job is
    `# yaml-language-server: $schema=job.schema.json`.
    """
    from rlplan.spec.base import explain_write_errors
    from rlplan.spec.files.job_schema import HEADER, job_schema
    from rlplan_cli.render.terminal import note

    text = json.dumps(job_schema(), indent=1) + "\n"
    if out is None:
        print(text, end="")
        return
    with explain_write_errors(out):
        out.write_text(text, encoding="utf-8")
    note(f"schema written to {out}; make this the first line of a job beside it: {HEADER.format(out.name)}")
