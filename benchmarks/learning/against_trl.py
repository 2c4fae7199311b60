"""GRPO's learning curve beside TRL's: the same policy, prompts, rewards and settings, in the same seeds.

In: examples/algorithms/grpo.yaml, without KL and correction, which TRL has only with vLLM. Out: reports/learning/:
trl.json, trl.png and the page. `python -m benchmarks.learning.against_trl [--seeds 0 1 2] [--keep] [--in-process]`: two
minutes a seed and side on two cores. --keep takes runs that are there already; --in-process lays TRL beside our
algorithm alone, as curves_in_process.py runs it.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.learning.curves import run_or_keep
from benchmarks.learning.curves_in_process import run
from benchmarks.learning.page import write_page
from benchmarks.learning.record import EVERY, JOBS, SEEDS, Beside, write_comparison
from benchmarks.runs.timed_runs import ROOT, RUNS
from benchmarks.trl.comparison import make_environment

AS_TRL = ("algorithm.kl_coef=0", "algorithm.importance=none", f"workload.evaluate_every={EVERY}")
"""Where our example does more than TRL's trainer."""
BATCH_SIZE = 128
DEADLINE_S = 1800


def main() -> int:
    """Run both sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--in-process", action="store_true")
    asked = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    python = Path(sys.executable) if find_spec("trl") else make_environment(RUNS / "trl-venv")
    cases = {seed: (*AS_TRL, f"seed={seed}") for seed in asked.seeds}
    theirs = [run_trl(python, RUNS / f"learning-of-trl-seed-{s}", case, asked.keep) for s, case in cases.items()]
    if asked.in_process:
        ours = [run("grpo", "", case).accuracy for case in cases.values()]
    else:
        ours = [run_or_keep(f"learning-beside-trl-seed-{s}", JOBS["grpo"], c, asked.keep) for s, c in cases.items()]
    beside = Beside(EVERY, tuple(ours), tuple(theirs), in_process=asked.in_process)
    write_comparison(beside)
    write_page()
    return 0 if all(point.agrees for point in beside.points) else 1


def run_trl(python: Path, folder: Path, overrides: tuple[str, ...], keep: bool) -> tuple[float, ...]:
    """TRL's curve. python: an interpreter that has TRL."""
    settings = {
        "job": str(JOBS["grpo"]),
        "overrides": [*overrides],
        "out": str(folder / "out"),
        "every": EVERY,
        "batch_size": BATCH_SIZE,
        "num_threads": os.cpu_count(),
    }
    asked, result = folder / "settings.json", folder / "result.json"
    if not (keep and result.exists() and json.loads(asked.read_text("utf-8")) == settings):
        folder.mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)
        asked.write_text(json.dumps(settings), "utf-8")
        print(f"--- {folder.name}", flush=True)
        script = ROOT / "benchmarks" / "trl" / "learning_side.py"
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        done = subprocess.run(
            [python, script, asked],
            check=True,
            timeout=DEADLINE_S,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        result.write_text(done.stdout.splitlines()[-1] + "\n", "utf-8")
    return tuple(json.loads(result.read_text("utf-8"))["accuracy"])


if __name__ == "__main__":
    sys.exit(main())
