"""Options that several commands share, and what they mean."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from rlplan_cli import completion

JobOrPlan = Annotated[Path, typer.Argument(help="A job file (.yaml), a plan (.json) or a bundle.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Overrides, such as workload.num_steps=5.", show_default=False, autocompletion=completion.overrides
    ),
]
Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]", help="A job file (.yaml), a plan (.json) or a bundle; or use --model.", show_default=False
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="A hub id, a model folder or a config.json.", show_default=False, autocompletion=completion.models
    ),
]
AlgorithmName = Annotated[
    str | None,
    typer.Option("--algorithm", help="grpo (the default), ppo, dpo ...", autocompletion=completion.algorithms),
]
Gpus = Annotated[
    str | None,
    typer.Option(help="How many of which GPU, such as 8xH100.", show_default=False, autocompletion=completion.gpus),
]
Framework = Annotated[
    str | None,
    typer.Option(
        "--for",
        help="The framework that runs it: verl, trl, openrlhf, slime, nemo-rl, rlplan; verl@0.9 names a release.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
ForeignFile = Annotated[
    Path, typer.Argument(help="A script, or a YAML or JSON file, of another stack.", show_default=False)
]
Hardware = Annotated[
    str,
    typer.Option(
        help="The GPUs: H100, as many as the file says, or 8xH100.", show_default=False, autocompletion=completion.gpus
    ),
]
SourceName = Annotated[str | None, typer.Option("--source", help="Whose it is, where it is not to be told.")]
Outside = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE of a variable of the script, or of one of its keys.", show_default=False),
]


@dataclass(frozen=True)
class JobArguments:
    """Which job is meant: a file with overrides, or a model, an algorithm and GPUs by name."""

    source: Source = None
    overrides: Overrides = None
    model: Model = None
    algorithm: AlgorithmName = None
    gpus: Gpus = None
    framework: Framework = None


@dataclass(frozen=True)
class ForeignArguments:
    """Which configuration of another stack is meant, and on what GPUs."""

    file: ForeignFile
    overrides: Overrides = None
    hardware: Hardware = ""
    model: Model = None
    source: SourceName = None
    outside: Outside = None


def with_grouped_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter is a group of options, for typer: it makes an option of each parameter, so each
    field of the group becomes one.
    """
    first, *others = inspect.signature(command).parameters.values()
    group = first.annotation
    fields = inspect.signature(group).parameters

    @wraps(command)
    def flat(**values: Any) -> None:
        asked = group(**{name: values.pop(name) for name in fields})
        command(asked, **values)

    parameters = [*fields.values(), *others]
    made: Any = flat
    made.__signature__ = inspect.Signature(parameters)
    made.__annotations__ = {one.name: one.annotation for one in parameters}  # typer reads both
    return flat
