"""Regenerates reports/quickstart and reports/memory-bound: three seeds, the two controls, and the memory-bound job.

In: the example jobs. Out: the committed reports; the run folders stay under runs/evidence/. Takes about ten minutes on
two cores. `make evidence` calls it; every number in the reports comes from the runs that it makes.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs") / "evidence"


@dataclass(frozen=True)
class Run:
    """One run: its folder's name, the job, and what it overrides."""

    name: str
    job: str
    overrides: tuple[str, ...] = ()


QUICKSTART = "examples/quickstart.yaml"
RUNS_OF_QUICKSTART = (
    Run("seed-0", QUICKSTART, ("seed=0",)),
    Run("seed-1", QUICKSTART, ("seed=1",)),
    Run("seed-2", QUICKSTART, ("seed=2",)),
    Run("learning-rate-0", QUICKSTART, ("algorithm.learning_rate=0",)),
    Run("shuffled-rewards", QUICKSTART, ("controls.shuffle_rewards=true",)),
)
MEMORY_BOUND = Run("memory-bound", "examples/memory-bound.yaml")


def main() -> int:
    """Run everything, then write the reports."""
    rlplan = str(Path(sys.executable).parent / "rlplan")
    for run in (*RUNS_OF_QUICKSTART, MEMORY_BOUND):
        folder = RUNS / run.name
        shutil.rmtree(ROOT / folder, ignore_errors=True)
        print(f"--- {run.name}", flush=True)
        subprocess.run([rlplan, "run", run.job, *run.overrides, "--out", str(folder)], cwd=ROOT, check=True)
    first, *others = (RUNS / run.name for run in RUNS_OF_QUICKSTART)
    compare = [argument for folder in others for argument in ("--compare", str(folder))]
    for folder, extra, out in ((first, compare, "quickstart"), (RUNS / MEMORY_BOUND.name, [], "memory-bound")):
        target = ROOT / "reports" / out
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run([rlplan, "report", str(folder), *extra, "--out", f"reports/{out}"], cwd=ROOT, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
