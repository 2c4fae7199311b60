"""How many GPUs: the numbers that are worth trying where fewer than all may do, and which of them is best.

In: a search over all GPUs. Out: the search over the best number. Left out: prices, which are alike for every GPU, so
that dollars are GPU-seconds.
"""

from typing import TYPE_CHECKING

from rlplan.planner.setting import GpuSetting

if TYPE_CHECKING:
    from rlplan.planner.gpu.search import GpuSearch

MAX_HOSTS = 16
"""Up to so many hosts every number of whole ones is tried."""


def gpu_counts(setting: GpuSetting) -> tuple[int, ...]:
    """Numbers of GPUs to try, fewer first: powers of two, divisors of all, and whole hosts while they are few."""
    whole, host = setting.num_gpus, setting.gpus_per_host
    if setting.has_pools:
        return (whole,)
    counts = {2**power for power in range(whole.bit_length())} | {n for n in range(1, whole + 1) if whole % n == 0}
    if whole <= MAX_HOSTS * host:
        counts |= set(range(host, whole + 1, host))
    return tuple(sorted(counts))


def on_best_count(search: "GpuSearch") -> "GpuSearch":
    """The search on the number of GPUs that the objective likes best; itself where nothing fits on any.

    `gpus`: the fewest on which something surely fits, else in expectation. `cost`: the least GPU-seconds a step, for
    every step trains on as many tokens; of equal ones the fewer GPUs.
    """
    searches = [search.on(count) for count in gpu_counts(search.setting)]
    searches = [one for one in searches if one.space.arrangements]
    for rank in (0, 1):
        best, least = None, float("inf")
        for one in searches:
            stream = one.stream(rank)
            stream.limit = least / one.setting.num_gpus
            found = next(iter(stream), None)
            if found is None:
                continue
            if search.job.objective == "gpus":
                return one
            spent = found.timing.seconds * one.setting.num_gpus
            if spent < least * (1 - 1e-9):
                best, least = one, spent
        if best is not None:
            return best
    return search
