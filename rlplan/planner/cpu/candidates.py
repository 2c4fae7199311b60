"""Candidates on a CPU host: every layout that a job leaves open and the runtime can execute.

In: a ResolvedJob. Out: choices, and impossible ones with the reason. Left out: their seconds (search.py).

The order here breaks ties and decides if a profile has no rates. Hybrid comes first because all devices train.
Colocated comes last because its engine restarts in each step. ZeRO-2 comes before the other stages.
"""

from itertools import chain

from rlplan.dataflow.choice import Choice
from rlplan.planner import rules
from rlplan.planner.plan_parts import Considered
from rlplan.planner.resolve import read_choice
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Placement

AUTO_ZERO_STAGES = (2, 1, 3, 0)
"""Stages by increasing memory, except stage 3: it comes late because it communicates most."""
ORDER = (Placement.HYBRID, Placement.DISAGGREGATED, Placement.COLOCATED)
ORDER_WORDS = f"{', '.join(ORDER)}, each with ZeRO {', '.join(map(str, AUTO_ZERO_STAGES))}"
"""Preference among equally fast layouts."""


def list_choices(job: ResolvedJob) -> tuple[tuple[Choice, ...], tuple[Considered, ...]]:
    """List (choices, impossible): buildable choices, and the others with reasons."""
    wanted = tuple(Placement) if job.placement.placement == "auto" else (Placement(job.placement.placement),)
    stages = AUTO_ZERO_STAGES if job.training.zero_stage == "auto" else (job.training.zero_stage,)
    choices, impossible = [], []
    for placement in sorted(wanted, key=ORDER.index):
        first = read_choice(job, placement, stages[0])
        reason = next(chain(rules.find_job_refusals(job), rules.find_choice_refusals(job, first)), "")
        if reason:  # these rules do not depend on the stage
            impossible.append(Considered(placement, reason))
            continue
        for stage in stages:
            choice = read_choice(job, placement, stage)
            if reason := rules.find_stage_refusal(job, choice):
                impossible.append(Considered(placement, reason, stage))
            else:
                choices.append(choice)
    return tuple(choices), tuple(impossible)
