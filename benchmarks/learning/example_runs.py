"""The examples of several stages, with tools and of 62 M parameters: whole runs in three seeds, beside controls.

In: examples/three-stage.yaml, tools.yaml, from-random-weights.yaml. Out: reports/learning/: examples.json and the page.
`python -m benchmarks.learning.example_runs [--examples tools] [--cases "seed 0"] [--keep]`: what is not asked for stays
as it is; --keep takes runs that are there and ended well. On two cores stages take three minutes a case, tools one, and
62 M parameters fifteen.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.learning.example_record import GOALS, RESUMED, ExampleCurve, keep_curves, read_run
from benchmarks.learning.page import write_page
from benchmarks.learning.record import LEARNING_RATE_0, SEEDS, SHUFFLED
from benchmarks.runs.timed_runs import ROOT, RUNS, start_job
from rlplan.errors import EXIT_RESUMABLE
from rlplan.runtime.checkpoints.manifest import POINTER

STILL = "algorithm.learning_rate=0"
SEED_CASES = {f"seed {seed}": (f"seed={seed}",) for seed in SEEDS}
CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "three-stage": SEED_CASES
    | {
        RESUMED: SEED_CASES["seed 0"],
        LEARNING_RATE_0: (STILL, "stages.ppo.algorithm.value_learning_rate=0"),
        SHUFFLED: ("stages.ppo.controls.shuffle_rewards=true", "stages.ppo.roles.value.path=null"),
    },
    "tools": SEED_CASES | {LEARNING_RATE_0: (STILL,), SHUFFLED: ("controls.shuffle_rewards=true",)},
    "from-random-weights": {
        "seed 0": SEED_CASES["seed 0"],
        SHUFFLED: ("stages.grpo.controls.shuffle_rewards=true",),
    },
}
"""Shuffled rewards of three stages need a value model that was no reward model, for its values alone would teach."""
REWARDED = {"three-stage": ("ppo",), "tools": ("",), "from-random-weights": ("grpo",)}
"""The stages of each example that shuffled rewards concern; what goes before them learns as ever."""


def main() -> int:
    """Run what is asked for; the report has everything that there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cases", nargs="+", default=[*SEED_CASES, RESUMED, LEARNING_RATE_0, SHUFFLED])
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    finished_curves = []
    for example in asked.examples:
        for case in (each for each in CASES[example] if each in asked.cases):
            curves = run(example, case, asked.keep)
            keep_curves(curves)
            write_page()
            finished_curves += curves
    for curve in finished_curves:
        print(curve.example, curve.stage, curve.case, *(f"{value:.1%}" for value in curve.values))
    return 0 if all(curve.has_passed for curve in finished_curves) else 1


def run(example: str, case: str, keep: bool) -> list[ExampleCurve]:
    """The curves of a case, one of each stage that it concerns."""
    name = f"learning-{example}-{case.replace(' ', '-')}"
    stages = [stage for each, stage in GOALS if each == example]
    if not (keep and all(_has_ended_well(RUNS / name / stage) for stage in stages)):
        if case == RESUMED:
            interrupt_and_resume(RUNS / name, f"examples/{example}.yaml", *CASES[example][case])
        else:
            start_job(name, f"examples/{example}.yaml", *CASES[example][case])
    concerned = REWARDED[example] if case == SHUFFLED else stages
    return [read_run(RUNS / name, example, stage, case) for stage in concerned]


def interrupt_and_resume(folder: Path, job: str, *overrides: str) -> Path:
    """Stop a run by SIGTERM when its second stage has a checkpoint, and let it go on. Raises: CalledProcessError."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "rlplan_cli", "run", job, *overrides]
    print(f"--- {folder.name}", flush=True)
    running = subprocess.Popen([*command, "--out", str(folder)], cwd=ROOT, stdout=subprocess.DEVNULL)
    pointer = folder / "reward" / "checkpoints" / POINTER
    while running.poll() is None and not pointer.exists():
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    if running.wait() != EXIT_RESUMABLE:
        raise subprocess.CalledProcessError(running.returncode, command)
    subprocess.run([*command, "--resume", str(folder)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def _has_ended_well(folder: Path) -> bool:
    status = folder / "status.json"
    return status.exists() and json.loads(status.read_text("utf-8"))["state"] == "finished"


if __name__ == "__main__":
    sys.exit(main())
