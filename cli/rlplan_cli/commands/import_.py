"""`rlplan import`: converts a configuration of verl, TRL, OpenRLHF ... into a job file."""

from pathlib import Path
from typing import Annotated

import typer

from rlplan_cli.options import AsJson, ForeignArguments, flatten_options


@flatten_options
def command(
    asked: ForeignArguments,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the job to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Convert another framework's configuration into a job. Lists the keys without a counterpart; runs nothing."""
    from rlplan.foreign.check import import_job
    from rlplan.foreign.job_text import write_job_text
    from rlplan.spec.base import explain_write_errors
    from rlplan_cli.render.foreign import show_account
    from rlplan_cli.render.terminal import note, print_json
    from rlplan_cli.sources import read_foreign

    imported, job = import_job(*read_foreign(asked))
    text = write_job_text(imported, job)
    if out is not None:
        with explain_write_errors(out):
            out.write_text(text, encoding="utf-8")
    if as_json:
        print_json({"schema_version": 1, **imported.as_json(), "job": imported.data})
    elif out is None:
        print(text, end="")
    show_account(imported)
    if out is not None:
        note(f"job written to {out}; `rlplan plan {out}` plans it as {imported.settings.table.title} runs it")
