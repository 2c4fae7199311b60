"""Time against headroom: the layouts of which none is both faster and lighter.

In: a Budget. Out: Alternatives, the fastest first, each with more free memory than all before it.
Left out: steps more than twice as long as the best; other trades (tokens, dollars, GPUs: ask with another objective).
"""

from itertools import takewhile

from rlplan.planner.budget import Alternative, Budget
from rlplan.planner.gpu_search import GpuSearch

LONGEST = 2.0
"""Times the best step: what is slower is no trade that anybody makes for free memory."""
MAX_LOOKED_AT = 5_000


def with_pareto(budget: Budget) -> Budget:
    """The budget with its front: exact among the first MAX_LOOKED_AT candidates, which come in order of their steps."""
    front = find_pareto(GpuSearch(budget.spec, budget.setting), LONGEST * budget.timing.seconds)
    return budget.with_alternatives(budget.runners_up, front, budget.stats)


def find_pareto(search: GpuSearch, longest_s: float, limit: int = MAX_LOOKED_AT) -> tuple[Alternative, ...]:
    """Candidates that fit, in steps of at most `longest_s`, each with more room than every faster one."""
    front: list[Alternative] = []
    rated = takewhile(lambda one: one.timing.seconds <= longest_s, search.stream(0))
    for _, one in zip(range(limit), rated, strict=False):
        alternative = search.alternative(one)
        if not front or alternative.headroom_bytes > front[-1].headroom_bytes:
            front.append(alternative)
    return tuple(front)
