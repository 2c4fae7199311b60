"""`rlplan solve KEY JOB`: finds the largest value of a key that still fits."""

from dataclasses import replace
from typing import Annotated

import typer

from rlplan_cli.options import AsJson, JobArguments, flatten_options

NAME = "solve"

Key = Annotated[
    str, typer.Argument(metavar="KEY", help="max_response_len, num_samples_per_prompt, max_num_seqs or model.")
]


@flatten_options
def command(key: Key, job: JobArguments, as_json: AsJson = False) -> None:
    """Find the largest length or number of sequences that still fits."""
    from rlplan.planner.answers.solve import KEYS, LADDER, expand_key, solve
    from rlplan.sources import is_job_path
    from rlplan_cli.render.solve import show_solution
    from rlplan_cli.render.terminal import print_json
    from rlplan_cli.render.waiting import waiting
    from rlplan_cli.sources import read_question

    key = expand_key(key)
    if key == KEYS["model"] and not (job.source and is_job_path(job.source)):
        job = replace(job, model=LADDER[0])  # each model of the ladder replaces it
    question = read_question(NAME, job)
    with waiting("solving") as listen:
        solution = solve(question.job, key, listen)
    if as_json:
        print_json(solution.as_json())
    else:
        show_solution(solution)
