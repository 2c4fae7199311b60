"""Choices of a resolved job: every layout that it leaves open and the runtime can execute.

In: a ResolvedJob. Out: choices, and those that cannot be built with the reason.
Left out: time, by which search.py ranks them. Where steps are as fast, or a profile has no rates, this order
decides: hybrid before disaggregated, because it keeps every device busy in training; colocated last, because its engine
restarts in every step; ZeRO-2 before the other stages.
"""

from itertools import chain

from rlplan.dataflow.choice import Choice
from rlplan.planner import rules
from rlplan.planner.plan_parts import Considered
from rlplan.planner.resolve import choice_of
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Placement

AUTO_ZERO_STAGES = (2, 1, 3, 0)
"""Those that hold less first, but for stage 3, which sends the most."""
ORDER = (Placement.HYBRID, Placement.DISAGGREGATED, Placement.COLOCATED)
ORDER_WORDS = f"{', '.join(ORDER)}, each with ZeRO {', '.join(map(str, AUTO_ZERO_STAGES))}"
"""In which layouts that are as fast are taken."""


def list_choices(job: ResolvedJob) -> tuple[tuple[Choice, ...], tuple[Considered, ...]]:
    """(choices, impossible): what can be built, and what cannot with the reason."""
    wanted = tuple(Placement) if job.placement.placement == "auto" else (Placement(job.placement.placement),)
    stages = AUTO_ZERO_STAGES if job.training.zero_stage == "auto" else (job.training.zero_stage,)
    choices, impossible = [], []
    for placement in sorted(wanted, key=ORDER.index):
        first = choice_of(job, placement, stages[0])
        reason = next(chain(rules.job_refusals(job), rules.find_choice_refusals(job, first)), "")
        if reason:  # whatever the stage
            impossible.append(Considered(placement, reason))
            continue
        for stage in stages:
            choice = choice_of(job, placement, stage)
            if reason := rules.find_stage_refusal(job, choice):
                impossible.append(Considered(placement, reason, stage))
            else:
                choices.append(choice)
    return tuple(choices), tuple(impossible)
