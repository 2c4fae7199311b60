"""`rlplan init`: writes a new job with comments, which `rlplan plan` accepts without changes."""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlplan.errors import RlplanError, SpecError
from rlplan_cli.options import AlgorithmName, AsJson, Gpus, Model, flatten_options
from rlplan_cli.render.terminal import note, print_json, show_error

if TYPE_CHECKING:
    from rlplan.spec.files.new_job import Answers

NAME = "init"
OPTIONS = {"train.jsonl": "data", "heldout.jsonl": "heldout"}
"""The option that takes the user's own file, by the name of the example file that it replaces."""
REWARD_KINDS = ("answer", "math", "code", "function")

Job = Annotated[Path, typer.Argument(help="The job file to write.")]
Data = Annotated[Path | None, typer.Option(help="Your prompts. Default: arithmetic examples.")]
Heldout = Annotated[Path | None, typer.Option(help="Your prompts for evaluation.")]
Reward = Annotated[str | None, typer.Option(help=f"The reward: {', '.join(REWARD_KINDS)}.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the job file; other files are kept.")]


@dataclass(frozen=True)
class NewJob:
    """The new job's settings on the command line."""

    job: Job = Path("job.yaml")
    gpus: Gpus = None
    model: Model = None
    algorithm: AlgorithmName = None
    data: Data = None
    heldout: Heldout = None
    reward: Reward = None


@flatten_options
def command(asked: NewJob, force: Force = False, as_json: AsJson = False) -> None:
    """Write a new job with comments. Asks questions if no option is given."""
    from rlplan.sources import read_options
    from rlplan.spec.base import explain_write_errors
    from rlplan.spec.files.job_schema import NAME as SCHEMA
    from rlplan.spec.files.new_job import ROWS, new_job

    job, data = asked.job, asked.data
    named = {"policy": asked.model, "hardware": asked.gpus, "algorithm": asked.algorithm}
    reading = read_options(named, ())
    options: dict[str, Any] = {
        "hardware": reading.keys.get("hardware"),
        "model": reading.keys.get("policy"),
        "algorithm": reading.keys.get("algorithm"),
        "reward": asked.reward,
    }
    answers = replace(_detect_answers(), **{key: value for key, value in options.items() if value is not None})
    if data is None and not any(options.values()) and sys.stdin.isatty():
        answers, data = _ask_all(answers, data)
    _check_reward(answers.reward)
    answers = replace(
        answers,
        name=job.stem if job.stem.isidentifier() else answers.name,
        **_read_data(job.parent, data, asked.heldout),
    )
    files = new_job(answers, job.name)
    existing = [name for name in files if name not in (job.name, SCHEMA) and (job.parent / name).exists()]
    if not force:
        _check_room(job, existing)
    elif ROWS in existing:
        files = new_job(replace(answers, prompt_column=_prompt_column(job.parent / ROWS)), job.name)
    files = {name: text for name, text in files.items() if name not in existing}
    with explain_write_errors(job):
        job.parent.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (job.parent / name).write_text(text, encoding="utf-8")
    paths = [str(job.parent / name) for name in files]
    if as_json:
        print_json({"schema_version": 1, "files": paths})
        return
    print("\n".join(paths))
    for words in reading.assumed:
        note(f"assumed: {words}")
    _show_verdict(job)
    note(f"`rlplan plan {job}` shows whether it fits and how fast it is; `rlplan run {job} --report` runs it")


def _show_verdict(job: Path) -> None:
    """Say at once where a new job for GPUs does not fit, with commands that make it fit."""
    from rlplan.sources import JobWords
    from rlplan.sources import read_question as read
    from rlplan_cli.render.answer import MOST_REMEDIES, read_command
    from rlplan_cli.render.plan import describe_remedy

    try:
        plan = read("plan", JobWords(str(job))).answer()
    except RlplanError as error:
        show_error(error)
        return
    note(f"{plan.verdict.value} on {plan.devices}")
    for remedy in plan.remedies[:MOST_REMEDIES]:
        command = read_command(*shlex.split(remedy.change), typed=("plan", str(job)))
        note(f"  {command}  ({describe_remedy(remedy)})")


def _detect_answers() -> "Answers":
    """Default answers for this machine: its GPUs, or its cores and 80 % of its memory."""
    from rlplan.runtime.host.detect import detect
    from rlplan.spec.files.new_job import CPU, Answers

    detected = detect()
    gpus, host = detected.gpus, detected.host
    profiles = {gpu.profile for gpu in gpus}
    hardware = f"{len(gpus)}x{gpus[0].profile}" if len(profiles) == 1 and None not in profiles else CPU
    return Answers(hardware=hardware, memory_bytes=host.memory_bytes * 4 // 5, num_cores=host.num_cores)


def _read_data(folder: Path, data: Path | None, heldout: Path | None) -> dict[str, Any]:
    """Read the user's data: paths relative to the job, and the column of the prompts if the job must name it.

    Raises: SpecError when a file is missing or cannot be read.
    """
    answers: dict[str, Any] = {}
    for key, path in (("data", data), ("heldout", heldout)):
        if path is None:
            continue
        if not path.exists():
            raise SpecError(
                f"{path} does not exist",
                where=f"--{key}",
                rule="a file with rows, or the folder of a data set",
                way_out=f"correct the path, or leave --{key} out to get example rows",
            )
        answers[key] = os.path.relpath(path, folder)  # a job's paths are relative to its file
    if data is not None and (column := _prompt_column(data)):
        answers["prompt_column"] = column
    return answers


def _prompt_column(data: Path) -> str | None:
    """Guess the column with the prompts if the file has no known layout. Raises: SpecError, HostError."""
    from rlplan.runtime.data.layouts import BadRowError, Columns, detect_layout, guess_prompt_column
    from rlplan.runtime.data.tables import read_table

    _, first = next(read_table(data), (0, ""))
    if isinstance(first, str):
        return None  # a row that cannot be read; a run reports it with its number
    try:
        detect_layout(set(first), Columns())
    except BadRowError:
        return guess_prompt_column(first) or None
    return None


def _ask_all(answers: "Answers", data: Path | None) -> "tuple[Answers, Path | None]":
    """Ask for the answers in a terminal. An empty line takes the default, which is shown in brackets."""
    from rlplan.spec.files.new_job import CPU_MODEL, GPU_MODEL
    from rlplan.spec.typed import read_hardware, read_model

    hardware = _ask("Hardware (8xH100, a 4090, cpu)", answers.hardware, lambda text: read_hardware(text, "--gpus", []))
    hardware = read_hardware(hardware, "--gpus", [])
    default_model = CPU_MODEL if hardware == "cpu-host" else GPU_MODEL
    model = _ask("Model (a hub id, a name, a folder)", default_model, lambda text: read_model(text, "--model", []))
    model = read_model(model, "--model", [])
    question = "Your prompts (a file; empty for arithmetic examples)"
    path = _ask(question, "", lambda text: text and _read_data(Path(), Path(text), None))
    reward = _ask(f"Reward ({', '.join(REWARD_KINDS)})", answers.reward, _check_reward)
    return replace(answers, hardware=hardware, model=model, reward=reward), Path(path) if path else data


def _ask(question: str, default: str, check: Callable[[str], object]) -> Any:
    """Ask until an answer passes the check; print the error of every other answer."""
    while True:
        answer: str = typer.prompt(question, default=default, show_default=bool(default), err=True)
        try:
            check(answer)
        except SpecError as error:
            show_error(error)
        else:
            return answer


def _check_reward(kind: str) -> None:
    if kind not in REWARD_KINDS:
        raise SpecError(
            f"unknown reward '{kind}'",
            where="--reward",
            rule=f"one of {', '.join(REWARD_KINDS)}",
            way_out="`rlplan docs rewards` explains each",
        )


def _check_room(job: Path, existing: list[str]) -> None:
    """Check that no file would be overwritten. existing: the job's other files that exist. Raises: SpecError."""
    if not job.exists() and not existing:
        return
    way_out = f"use another folder: rlplan init {job.parent / 'new' / job.name}"
    if job.exists():
        way_out += "; or --force to overwrite the job file and keep the other files"
    elif existing[0] in OPTIONS:
        options = " ".join(f"--{OPTIONS[name]} {job.parent / name}" for name in existing if name in OPTIONS)
        way_out = f"{options} uses the existing file; or {way_out}"
    raise SpecError(
        f"{job if job.exists() else job.parent / existing[0]} already exists",
        where="command line",
        rule="existing files are not overwritten",
        way_out=way_out,
    )
