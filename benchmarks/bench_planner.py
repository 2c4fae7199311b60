"""How long a plan takes from the shell, cold, and how much of it the search looked at.

Prints seconds of wall clock of `rlplan plan` (a process restarted, the fastest of some runs) beside what is asked
for on two quiet cores, candidates there are and were rated, and the seconds of the search alone. Run by `make bench`.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.plan_parts import SearchStats
from rlplan.planner.setting import read_setting
from rlplan.spec.files.job_file import job_from
from rlplan.spec.resolved import settle

REPEATS = 3
COMMAND = "from rlplan_cli.app import main; main()"
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """A question, and the seconds that its answer may take from the shell."""

    model: str
    algorithm: str
    gpus: str
    limit_s: float
    overrides: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The case in the words of the table."""
        return f"{self.model}, {self.algorithm}, {self.gpus} {' '.join(self.overrides)}".strip()


OPEN = (*(f"training.{axis}=auto" for axis in ("ulysses", "tp", "pp", "cp", "ep")), "rollout.max_num_seqs=auto")
CASES = (
    Case("Qwen/Qwen2.5-7B", "grpo", "8xH100", 0.6),
    Case("meta-llama/Llama-3.1-70B", "ppo", "64xH100", 1.0),
    Case("deepseek-ai/DeepSeek-V3", "grpo", "1024xH200", 2.0, ("workload.num_prompts_per_step=1024",)),
    Case("deepseek-ai/DeepSeek-V3", "grpo", "16384xH200", 5.0, ("workload.num_prompts_per_step=2048",)),
)


def main() -> None:
    """One line a case; and once more with every axis open, which nobody promised."""
    for case in CASES:
        print(
            f"{case.words}: {shell_seconds(case):.2f} s from the shell (at most {case.limit_s} s); {_time_search(case)}"
        )
    for case in CASES:
        opened = Case(case.model, case.algorithm, case.gpus, case.limit_s, (*case.overrides, *OPEN))
        print(f"{case.words}, every axis open: {shell_seconds(opened):.2f} s from the shell; {_time_search(opened)}")


def shell_seconds(case: Case) -> float:
    """Wall clock of the fastest of some runs."""
    asked = ["plan", "--model", case.model, "--algorithm", case.algorithm, "--gpus", case.gpus, *case.overrides]
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", COMMAND, *asked], check=True, capture_output=True, cwd=ROOT)
        best = min(best, time.perf_counter() - start)
    return best


def search_seconds(case: Case) -> tuple[float, SearchStats]:
    """Processor seconds of the search alone, and what it looked at."""
    spec = settle(job_from({"policy": case.model, "algorithm": case.algorithm, "hardware": case.gpus}, case.overrides))
    setting = read_setting(spec)
    start = time.process_time()
    stats = GpuSearch(spec, setting).run().stats
    return time.process_time() - start, stats


def _time_search(case: Case) -> str:
    seconds, stats = search_seconds(case)
    return f"{seconds:.2f} s the search, {stats.num_scored} of {stats.num_candidates:,} candidates rated"


if __name__ == "__main__":
    main()
