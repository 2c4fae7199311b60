"""Options that several commands share, and what they mean."""

from pathlib import Path
from typing import Annotated

import typer

JobOrPlan = Annotated[Path, typer.Argument(help="A job file (.yaml), a plan (.json) or a bundle.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides, such as workload.num_steps=5.", show_default=False),
]
Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]", help="A job file (.yaml), a plan (.json) or a bundle; or use --model.", show_default=False
    ),
]
Model = Annotated[
    str | None, typer.Option(help="A hub id of the catalogue, a model folder or a config.json.", show_default=False)
]
AlgorithmName = Annotated[str | None, typer.Option("--algorithm", help="grpo (the default), ppo, dpo ...")]
Gpus = Annotated[str | None, typer.Option(help="How many of which GPU, such as 8xH100.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
