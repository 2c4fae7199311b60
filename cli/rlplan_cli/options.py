"""Options that several commands share, and what they mean."""

from pathlib import Path
from typing import Annotated

import typer

JobOrPlan = Annotated[Path, typer.Argument(help="A job file (.yaml) or a plan (.json).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides for a job file, such as workload.num_steps=5.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
