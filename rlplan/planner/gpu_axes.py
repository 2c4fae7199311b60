"""Parallel layouts that a target can run: which ranks share a sequence, a layer, the layers, the experts.

In: a BudgetSpec, a model, GPUs that train. Out: (ulysses, tp, pp, cp, ep) tuples; sizes of engines.
Left out: whether a layout fits (gpu_roles.py) and how fast it is (gpu_times.py).

Sizes that are left open are powers of two. What runs beside every layer (tp, ulysses) stays within MAX_BESIDE ranks.
"""

from functools import lru_cache

from rlplan.spec.budget import BudgetSpec
from rlplan.spec.model import ModelSpec

ENGINE_TP = 32
"""Ranks of one engine beyond which `auto` does not go."""
MAX_BESIDE = 8
"""GPUs of a host: beyond it the exchange inside each layer leaves NVLink (arXiv:2104.04473, takeaway 1)."""


def powers(largest: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to `largest`."""
    return tuple(2**power for power in range(largest.bit_length()))


def can_hold_engine(model: ModelSpec, tp: int) -> bool:
    """Whether vLLM divides the model's heads over so many ranks."""
    return model.num_heads % tp == 0


def parallel_axes(budget: BudgetSpec, model: ModelSpec, training: int) -> tuple[tuple[int, ...], ...]:
    """Every (ulysses, tp, pp, cp, ep) that the target has and the model divides by."""
    wanted = budget.training
    return _axes(budget.target, model.num_heads, training, wanted.ulysses, wanted.tp, wanted.pp, wanted.cp, wanted.ep)


@lru_cache(maxsize=256)
def _axes(
    target: str, heads: int, training: int, ulysses: int | str, *others: int | str
) -> tuple[tuple[int, ...], ...]:
    ways = [size for size in powers(min(MAX_BESIDE, training)) if heads % size == 0]
    shared = tuple(ways) if ulysses == "auto" else (int(ulysses),)
    tps = tuple(ways) if others[0] == "auto" and target == "rlplan" else (1 if others[0] == "auto" else int(others[0]),)
    rest = tuple(1 if size == "auto" else int(size) for size in others[1:])
    return tuple((u, tp, *rest) for u in shared for tp in tps if heads % (u * tp) == 0)
