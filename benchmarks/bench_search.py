"""Cost of a candidate of the GPU search: from its roles' tables, with their making, and as a whole ledger.

Prints microseconds and ratios within one run, for machines differ. Run by `make bench`.
"""

import time
from collections.abc import Callable
from itertools import islice

from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.setting import read_setting
from rlplan.spec.files.job_file import job_from
from rlplan.spec.resolved import settle

CASES = (
    ("Qwen/Qwen2.5-7B", "grpo", "8xH100"),
    ("meta-llama/Llama-3.1-70B", "ppo", "64xH100"),
    ("Qwen/Qwen3-30B-A3B", "grpo", "16xH200"),
)
REPEATS = 5
WHOLE = 20


def main() -> None:
    """One line a case."""
    for model, algorithm, gpus in CASES:
        print(f"{model}, {algorithm}, {gpus}: {_measure(model, algorithm, gpus)}")


def _measure(model: str, algorithm: str, gpus: str) -> str:
    budget = settle(job_from({"policy": model, "algorithm": algorithm, "hardware": gpus}))
    setting = read_setting(budget)
    search = GpuSearch(budget, setting)
    candidates = list(islice(search.space, 2000))
    cold = _seconds(lambda: [search.score(candidate) for candidate in candidates], 1) / len(candidates)
    warm = _seconds(lambda: [search.score(candidate) for candidate in candidates], REPEATS) / len(candidates)
    scored = [search.score(candidate) for candidate in candidates[:WHOLE]]
    whole = _seconds(lambda: [search.build_plan(candidate) for candidate in scored], REPEATS) / len(scored)
    return (
        f"{len(candidates)} candidates; {1e6 * warm:.0f} us each from tables, {cold / warm:.1f} times that with their "
        f"making, {whole / warm:.0f} times that as a ledger"
    )


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """The shortest of some runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
