"""Options that several commands share."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from rlplan_cli import completion

JobOrPlan = Annotated[Path, typer.Argument(help="A job file (.yaml), a plan (.json) or a bundle.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Overrides such as workload.num_steps=5.", autocompletion=completion.overrides
    ),
]
Source = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB|WORDS", help="A job file (.yaml), a plan (.json), a bundle, or words: qwen3 8b grpo on 8xH100."
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A hub id, a model folder or a config.json.", autocompletion=completion.models),
]
AlgorithmName = Annotated[
    str | None, typer.Option("--algorithm", help="grpo (default), ppo, dpo ...", autocompletion=completion.algorithms)
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus", "--hardware", "-g", help="The GPUs, such as 8xH100, or cpu.", autocompletion=completion.gpus
    ),
]
Framework = Annotated[
    str | None,
    typer.Option(
        "--for",
        help="The framework that runs the job: verl, trl, openrlhf, slime, nemo-rl, rlplan; verl@0.9 for a release.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also show tables.")]
ForeignFile = Annotated[Path, typer.Argument(help="Another framework's script, or YAML or JSON file.")]
SourceName = Annotated[str | None, typer.Option("--source", help="Source framework, if it cannot be detected.")]
Outside = Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE for a variable or a key of the script.")]


@dataclass(frozen=True)
class JobArguments:
    """The job: a file with overrides, or a model, an algorithm and GPUs by name."""

    source: Source = None
    overrides: Overrides = None
    model: Model = None
    algorithm: AlgorithmName = None
    gpus: Gpus = None
    framework: Framework = None


@dataclass(frozen=True)
class ForeignArguments:
    """Another framework's configuration, and the GPUs to run it on."""

    file: ForeignFile
    overrides: Overrides = None
    gpus: Gpus = None
    model: Model = None
    source: SourceName = None
    outside: Outside = None


def flatten_options(command: Callable[..., None]) -> Callable[..., None]:
    """Turn each field of a command's dataclasses into a parameter of its own, from which typer makes an option."""
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if is_dataclass(parameter.annotation):
            kind: Any = parameter.annotation
            groups[parameter.name] = kind
            parameters += inspect.signature(kind).parameters.values()
        else:
            parameters.append(parameter)

    @wraps(command)
    def flat(**values: Any) -> None:
        filled = {
            name: kind(**{part.name: values.pop(part.name) for part in fields(kind)}) for name, kind in groups.items()
        }
        command(**filled, **values)

    flattened: Any = flat
    # typer reads the parameters from the signature, and their types from the annotations
    flattened.__signature__ = inspect.Signature(parameters)
    flattened.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat
