"""`rlplan explain`: why a plan is as it is and what would change it; or why a measured step took so long."""

from typing import Annotated

import typer

from rlplan_cli.options import AsJson, JobArguments, with_grouped_options

NAME = "explain"

WhatIf = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="What if? Each by itself, and together.", show_default=False),
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--field", metavar="MEANING=NAME:UNIT", help="Of a log of your own: rollout=gen_ms:ms.", show_default=False
    ),
]
MoreDevices = Annotated[bool, typer.Option("--more-gpus", help="Ask for 2, 4, 8 and 16 times the devices too.")]


@with_grouped_options
def command(
    job: JobArguments,
    changes: WhatIf = None,
    more_devices: MoreDevices = False,
    fields: Fields = None,
    as_json: AsJson = False,
) -> None:
    """Say what binds in a plan, and what would change it. Of a RUN or a LOG: whether its step is normal, and why not.

    RUN is a run folder. LOG is JSONL, CSV, trainer_state.json or the console of verl (.log), with the job that wrote it
    behind: rlplan explain metrics.jsonl job.yaml.
    """
    from rlplan_cli.commands.answers.measured import is_measured, show_measured

    if is_measured(job.source):
        show_measured(job, fields or (), as_json=as_json)
        return
    from rlplan.planner.answers.changes import check_changes
    from rlplan.planner.answers.explain import explain
    from rlplan_cli.render.explain import show_explanation
    from rlplan_cli.render.terminal import print_json
    from rlplan_cli.render.waiting import waiting
    from rlplan_cli.sources import read_question

    question = read_question(NAME, job)
    with waiting("asking") as listen:
        plan = question.answer()
        explanation = explain(plan, check_changes(plan.asked, changes or ()), more_devices=more_devices, listen=listen)
    if as_json:
        print_json(explanation.as_json())
    else:
        show_explanation(plan, explanation)
