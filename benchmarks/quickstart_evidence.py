"""Regenerates reports/quickstart and reports/memory-bound: three seeds, the two controls, and the memory-bound job.

In: the example jobs. Out: the committed reports, and the two charts that README shows, as Chromium draws them on their
pages; the run folders stay under runs/evidence/. Takes about ten minutes on two cores. `make evidence` calls it; every
number in the reports comes from the runs that it makes. `--report` alone reports on the runs that are there already.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages.chromium import Chromium, found

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
CHARTS = {
    "quickstart": {"learning.png": "Learning curves"},
    "memory-bound": {"memory.png": "Memory of the host over time"},
}
"""Pictures of each report: the file name, and how the label of its chart begins."""


def main() -> int:
    """Run everything, then write the reports."""
    assert found(), "README's pictures need Chromium: `make system-packages` installs it"
    rlplan = str(Path(sys.executable).parent / "rlplan")
    for run in () if sys.argv[1:] == ["--report"] else (*RUNS_OF_QUICKSTART, MEMORY_BOUND):
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
        photograph(target, CHARTS[out])
    return 0


def photograph(folder: Path, charts: Mapping[str, str]) -> None:
    """Pictures of a page's charts. charts: a file's name, and how the label of its chart begins."""
    with Chromium() as browser:
        browser.open(folder / "index.html", fine=True)
        browser.wait("document.querySelector('canvas') !== null", 60)
        browser.says("new Promise((done) => setTimeout(done, 300))")
        for name, label in charts.items():
            browser.picture(folder / name, of=f"document.querySelector('figure[aria-label^=\"{label}\"]')")


if __name__ == "__main__":
    sys.exit(main())
