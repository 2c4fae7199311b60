"""Running ahead: generation goes on by itself, and a step takes what is complete instead of waiting for a whole batch.

In: the StepGraph of a synchronous step. Out: the same with a Lead: `generate` waits for nothing and nothing waits for
it; `take_rollouts` stands where a step's rollouts come from. Left out: which rollouts may be begun and which are taken
(simulate/staleness.py, one rule for the simulator and the runtime).
"""

from dataclasses import replace

from rlplan.dataflow.graph import Call, Lead, StepGraph
from rlplan.vocabulary import ActionKind, Phase, Role


def run_ahead(graph: StepGraph, max_staleness: int, *, interrupts: bool) -> StepGraph:
    """The same step, with generation up to `max_staleness` versions ahead. interrupts: see `graph.Lead`."""
    generate = next(call for call in graph.step if call.kind is ActionKind.GENERATE)
    take = Call("take_rollouts", ActionKind.TAKE_ROLLOUTS, Role.POLICY, Phase.ROLLOUT)
    rest = [
        replace(call, after=tuple(take.id if name == generate.id else name for name in call.after))
        for call in graph.step
        if call is not generate
    ]
    lead = Lead(generate.id, max_staleness, interrupts)
    return replace(graph, step=(generate, take, *rest), lead=lead)
