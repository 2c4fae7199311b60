"""How many GPUs: the numbers that are worth trying where fewer than all may do, and which of them is best.

In: a search over all GPUs. Out: the search over the best number. Left out: prices, which are alike for every GPU, so
that dollars are GPU-seconds; what is said of GPUs that are left idle (notes.py).

Fewer GPUs are faster where all of them do not lie evenly on hosts, where an engine's or a trainer's ranks do not divide
them, where one host more brings a slow network, or where more of them share a host's memory.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlplan.planner.gpu.scored_candidates import BUFFERS
from rlplan.planner.setting import GpuSetting

if TYPE_CHECKING:
    from rlplan.planner.gpu.search import GpuSearch
    from rlplan.planner.plan import Plan

MAX_HOSTS = 16
"""Up to so many hosts every number of whole ones is tried."""
FASTER = 1 - 1e-9
"""Of equally fast plans the one on more GPUs is taken, which is the one of all that were asked for."""


def list_gpu_counts(setting: GpuSetting) -> tuple[int, ...]:
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
    if search.job.objective not in ("gpus", "cost"):
        return _on_fastest_count(search)
    searches = [search.restrict_gpus(count) for count in list_gpu_counts(search.setting)]
    searches = [count_search for count_search in searches if count_search.space.arrangements]
    for rank in (0, 1):
        best, least = None, float("inf")
        for count_search in searches:
            candidate = next(count_search.open_stream(rank).read_until(least / count_search.setting.num_gpus), None)
            if candidate is None:
                continue
            if search.job.objective == "gpus":
                return count_search
            spent = candidate.timing.seconds * count_search.setting.num_gpus
            if spent < least * (1 - 1e-9):
                best, least = count_search, spent
        if best is not None:
            return best
    return search


def _on_fastest_count(search: "GpuSearch") -> "GpuSearch":
    """The search on the number of GPUs with the shortest step, of what fits as well: more GPUs are never slower."""
    whole = search.find_best().plan if search.lies_evenly and search.space.arrangements else None
    for rank in (0, 1):
        is_whole = whole is not None and whole.fit.rank == rank
        best, limit = None, whole.seconds * FASTER if whole is not None and is_whole else float("inf")
        least = float("inf")  # on fewer than the best
        for fewer in _fewer(search):
            if not is_whole and whole is not None and not _may_fit_better(fewer, search, whole):
                continue
            seconds, bound = (
                fewer.find_fastest(rank, limit) if fewer.floor_seconds < limit else (None, fewer.floor_seconds)
            )
            least = min(least, bound)
            if seconds is not None:
                best, limit, least = fewer, seconds * FASTER, float("inf")
        if best is not None or is_whole:
            chosen = best or search
            chosen.least_on_fewer = float("inf") if search.setting.has_pools else least
            return chosen
    return search


def fastest_on_fewer(search: "GpuSearch", limit: float) -> float:
    """Seconds of the fastest plan on fewer GPUs that surely fits, where these are below a limit; else the limit."""
    for fewer in _fewer(search):
        if fewer.floor_seconds < limit and fewer.find_fastest(0, limit)[0] is not None:
            limit = min(limit, fewer.find_simplest().seconds)
    return limit


def _may_fit_better(fewer: "GpuSearch", search: "GpuSearch", whole: "Plan") -> bool:
    """Whether something may fit on fewer GPUs that does not on all: where they share a host's memory, where more ranks
    can share a tensor than divide all of them, or where little is missing. Else a rank holds no less there.
    """
    short = whole.shortage
    if search.setting.has_pools or short is None or any(shortage.is_of_host for shortage in whole.shortages):
        return True
    if short.needed_bytes - short.available_bytes <= BUFFERS:
        return True
    fewer_gpus, all_gpus = fewer.setting.num_gpus, search.setting.num_gpus
    return fewer_gpus & -fewer_gpus > all_gpus & -all_gpus


def _fewer(search: "GpuSearch") -> Iterator["GpuSearch"]:
    """Searches on fewer GPUs, those on more first: on one host and on two any number that is evenly on them, on more
    full hosts. Of two pools: the other order, and each pool alone.
    """
    setting, full = search.setting, search.per_node
    if setting.has_pools:
        yield from search.list_other_pools()
        return
    whole = setting.num_gpus
    counts = range(whole - 1, 0, -1) if whole <= MAX_HOSTS * full else reversed(list_gpu_counts(setting)[:-1])
    for count in counts:
        if count % full == 0 or (count < 2 * full and count % search.count_hosts(count) == 0):
            yield search.restrict_gpus(count)
