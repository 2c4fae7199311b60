"""`rlplan init`: a job to begin with, with comments, that `rlplan plan` takes as it stands."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlplan.errors import SpecError
from rlplan_cli.options import AlgorithmName, AsJson, Gpus, Model, with_grouped_options
from rlplan_cli.render.terminal import note, print_json, show_error

if TYPE_CHECKING:
    from rlplan.spec.files.new_job import Answers

NAME = "init"
OPTIONS = {"train.jsonl": "data", "heldout.jsonl": "heldout"}
"""By the name of a file that is written: the option that takes one of the user's own."""
REWARD_KINDS = ("answer", "math", "code", "function")

Job = Annotated[Path, typer.Argument(help="The job file that is written.")]
Data = Annotated[Path | None, typer.Option(help="Your prompts; without, some sums to begin with.", show_default=False)]
Heldout = Annotated[Path | None, typer.Option(help="Your prompts for evaluation.", show_default=False)]
Reward = Annotated[str | None, typer.Option(help=f"What judges: {', '.join(REWARD_KINDS)}.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Write the job file anew; what lies beside it stays.")]


@dataclass(frozen=True)
class NewJob:
    """What is said about the job on the command line."""

    job: Job = Path("job.yaml")
    gpus: Gpus = None
    model: Model = None
    algorithm: AlgorithmName = None
    data: Data = None
    heldout: Heldout = None
    reward: Reward = None


@with_grouped_options
def command(asked: NewJob, force: Force = False, as_json: AsJson = False) -> None:
    """Write a job to begin with, full of comments. Asks where nothing is said."""
    from rlplan.spec.base import writing
    from rlplan.spec.files.job_schema import NAME as SCHEMA
    from rlplan.spec.files.new_job import ROWS, new_job

    job, data = asked.job, asked.data
    given: dict[str, Any] = {
        "hardware": asked.gpus,
        "model": asked.model,
        "algorithm": asked.algorithm,
        "reward": asked.reward,
    }
    answers = replace(_of_this_machine(), **{key: value for key, value in given.items() if value is not None})
    if data is None and not any(given.values()) and sys.stdin.isatty():
        answers, data = _asked(answers, data)
    _check_reward(answers.reward)
    answers = replace(
        answers, name=job.stem if job.stem.isidentifier() else answers.name, **_of_data(job.parent, data, asked.heldout)
    )
    files = new_job(answers, job.name)
    there = [name for name in files if name not in (job.name, SCHEMA) and (job.parent / name).exists()]
    if not force:
        _check_room(job, there)
    elif ROWS in there:
        files = new_job(replace(answers, prompt_column=_prompt_column(job.parent / ROWS)), job.name)
    files = {name: text for name, text in files.items() if name not in there}
    with writing(job):
        job.parent.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (job.parent / name).write_text(text, encoding="utf-8")
    paths = [str(job.parent / name) for name in files]
    if as_json:
        print_json({"schema_version": 1, "files": paths})
        return
    print("\n".join(paths))
    note(f"`rlplan plan {job}` says whether it fits and how fast it is; `rlplan run {job} --report` runs it")


def _of_this_machine() -> "Answers":
    """What is taken unless something else is said: this machine's GPUs, or its cores and most of its memory."""
    from rlplan.runtime.host.detect import detect
    from rlplan.spec.files.new_job import CPU, Answers

    found = detect()
    profiles = {gpu.profile for gpu in found.gpus}
    known = f"{len(found.gpus)}x{found.gpus[0].profile}" if len(profiles) == 1 and None not in profiles else CPU
    host = found.host
    return Answers(hardware=known, memory_bytes=host.memory_bytes * 4 // 5, num_cores=host.num_cores)


def _of_data(folder: Path, data: Path | None, heldout: Path | None) -> dict[str, Any]:
    """The answers about the user's own data: paths relative to the job, and the prompts' column where it must be said.

    Raises: SpecError where a file is missing or cannot be read.
    """
    found: dict[str, Any] = {}
    for key, path in (("data", data), ("heldout", heldout)):
        if path is None:
            continue
        if not path.exists():
            raise SpecError(
                f"{path} does not exist",
                where=f"--{key}",
                rule="a file with rows, or the folder of a data set",
                way_out=f"correct the path, or leave --{key} out: the job begins with rows of its own",
            )
        found[key] = os.path.relpath(path, folder)
    if data is not None and (column := _prompt_column(data)):
        found["prompt_column"] = column
    return found


def _prompt_column(data: Path) -> str | None:
    """The column with the prompts, where no known layout has it. Raises: SpecError, HostError."""
    from rlplan.runtime.data.layouts import BadRowError, Columns, detect, likely_prompt
    from rlplan.runtime.data.tables import read_table

    _, first = next(read_table(data), (0, ""))
    if isinstance(first, str):
        return None  # which a run tells, row by row
    try:
        detect(set(first), Columns())
    except BadRowError:
        return likely_prompt(first) or None
    return None


def _asked(answers: "Answers", data: Path | None) -> "tuple[Answers, Path | None]":
    """The answer typed at a terminal; an empty line takes the default, which stands in brackets."""
    from rlplan.spec.files.job_forms import hardware_of
    from rlplan.spec.files.new_job import CPU_MODEL, GPU_MODEL

    hardware = _ask("Where does it run (8xH100, 1xrtx-4090, cpu-host)", answers.hardware, hardware_of)
    usual = CPU_MODEL if hardware_of(hardware)["profile"] == "cpu-host" else GPU_MODEL
    model = _ask("Which model (a hub id, or a folder)", usual, lambda text: None)
    ours = "Your prompts (a file; empty: some sums to begin with)"
    path = _ask(ours, "", lambda text: text and _of_data(Path(), Path(text), None))
    reward = _ask(f"What judges responses ({', '.join(REWARD_KINDS)})", answers.reward, _check_reward)
    return replace(answers, hardware=hardware, model=model, reward=reward), Path(path) if path else data


def _ask(question: str, usual: str, check: Callable[[str], object]) -> Any:
    """An answer that passes the check; what is wrong with another is said, and it is asked again."""
    while True:
        answer: str = typer.prompt(question, default=usual, show_default=bool(usual), err=True)
        try:
            check(answer)
        except SpecError as error:
            show_error(error)
        else:
            return answer


def _check_reward(kind: str) -> None:
    if kind not in REWARD_KINDS:
        raise SpecError(
            f"'{kind}' is no kind of reward",
            where="--reward",
            rule=f"one of {', '.join(REWARD_KINDS)}",
            way_out="`rlplan docs rewards` says what each does",
        )


def _check_room(job: Path, there: list[str]) -> None:
    """there: what the job would have beside it and has. Raises: SpecError where something would be written over."""
    if not job.exists() and not there:
        return
    way_out = f"another folder: rlplan init {job.parent / 'new' / job.name}"
    if job.exists():
        way_out += "; or --force, which writes the job file anew and leaves the files beside it"
    elif there[0] in OPTIONS:
        options = " ".join(f"--{OPTIONS[name]} {job.parent / name}" for name in there if name in OPTIONS)
        way_out = f"{options} takes what is there; or {way_out}"
    raise SpecError(
        f"{job if job.exists() else job.parent / there[0]} is there already",
        where="command line",
        rule="nothing of yours is written over",
        way_out=way_out,
    )
