"""`rlplan simulate`: runs the steps of a plan in simulated time, with sampled response lengths."""

from pathlib import Path
from typing import Annotated

import typer

from rlplan_cli.options import AsJson, JobArguments, flatten_options

NAME = "simulate"

Steps = Annotated[int, typer.Option(min=1, help="Number of steps to simulate.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sampled lengths.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write the result, with its trace, to this JSON file.")]


@flatten_options
def command(job: JobArguments, steps: Steps = 20, seed: Seed = 0, out: Out = None, as_json: AsJson = False) -> None:
    """Simulate the steps of a plan, with sampled response lengths."""
    import json

    from rlplan.planner.answers.simulated_plan import simulate_plan
    from rlplan.planner.executable import check_fits
    from rlplan.spec.base import explain_write_errors
    from rlplan_cli.render.serving import answer_served
    from rlplan_cli.render.simulation import show_simulation
    from rlplan_cli.render.terminal import note, print_json
    from rlplan_cli.render.waiting import waiting
    from rlplan_cli.sources import read_question

    question = read_question(NAME, job)
    if question.serves:
        answer_served(question, as_json=as_json, has_load=True)
        return
    with waiting("simulating"):
        plan = question.answer()
        check_fits(plan)
        result = simulate_plan(plan, num_steps=steps, seed=seed)
    if out is not None:
        with explain_write_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(result.as_json()) + "\n", encoding="utf-8")
    if as_json:
        print_json(result.as_json())
    else:
        show_simulation(plan, result)
    if out is not None:
        note(f"result written to {out}")
