"""Async rollouts: generation runs beside training, and a step takes complete groups instead of waiting for a whole
batch.

In: the StepGraph of a synchronous step. Out: the same with async rollouts: `generate` waits for nothing and nothing
waits for it; `take_rollouts` stands where a step's rollouts come from. Left out: which rollouts may be begun and which
are taken (simulate/staleness.py, one rule for the simulator and the runtime).
"""

from dataclasses import replace

from rlplan.dataflow.graph import AsyncRollouts, Call, StepGraph
from rlplan.vocabulary import ActionKind, Phase, Role


def with_async_rollouts(graph: StepGraph, max_staleness: int, *, interrupts: bool) -> StepGraph:
    """The same step, with generation up to `max_staleness` versions ahead. interrupts: see `graph.AsyncRollouts`."""
    generate = next(call for call in graph.step if call.kind is ActionKind.GENERATE)
    take = Call("take_rollouts", ActionKind.TAKE_ROLLOUTS, Role.POLICY, Phase.ROLLOUT)
    rest = [
        replace(call, after=tuple(take.id if name == generate.id else name for name in call.after))
        for call in graph.step
        if call is not generate
    ]
    async_rollouts = AsyncRollouts(generate.id, max_staleness, interrupts)
    return replace(graph, step=(generate, take, *rest), async_rollouts=async_rollouts)
