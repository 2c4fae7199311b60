"""`rlplan solve KEY JOB`: finds the largest value of a key that still fits."""

from dataclasses import dataclass
from typing import Annotated

import typer

from rlplan_cli.options import AlgorithmName, AsJson, Gpus, JobArguments, Model, Overrides, Source, flatten_options

NAME = "solve"

Key = Annotated[str, typer.Argument(metavar="KEY", help="max_response_len, num_samples_per_prompt or max_num_seqs.")]


@dataclass(frozen=True)
class KeyOfJob:
    """A key, and the job's arguments."""

    key: Key
    source: Source = None
    overrides: Overrides = None
    model: Model = None
    algorithm: AlgorithmName = None
    gpus: Gpus = None


@flatten_options
def command(asked: KeyOfJob, as_json: AsJson = False) -> None:
    """Find the largest length or number of sequences that still fits."""
    from rlplan.planner.answers.solve import expand_key, solve
    from rlplan_cli.render.solve import show_solution
    from rlplan_cli.render.terminal import print_json
    from rlplan_cli.render.waiting import waiting
    from rlplan_cli.sources import read_question

    key = expand_key(asked.key)
    job = JobArguments(asked.source, asked.overrides, asked.model, asked.algorithm, asked.gpus)
    question = read_question(NAME, job)
    with waiting("solving") as listen:
        solution = solve(question.job, key, listen)
    if as_json:
        print_json(solution.as_json())
    else:
        show_solution(solution)
