"""A long run with a fault every five steps: it ends as one without faults, and nothing in its driver grows.

The faults are of workers and of Ray's own processes, so that one driver lives through all of them: about 100 in 500
steps (`RLPLAN_SOAK_FAULTS` makes another number of them).
"""

import os
import random
from pathlib import Path
from statistics import median

import psutil
import pytest

from rlplan.units import MIB
from tests.runtime.conftest import finish, start
from tests.trust.faults.fault_matrix import Fault, FaultyRun, Outcome, assign_steps
from tests.trust.faults.points import POINTS
from tests.trust.faults.test_fault_matrix import assert_same, job

EVERY = 5
VICTIMS = {"engine": 8, "scorer": 8, "trainer": 3, "raylet": 1, "gcs": 1}
"""Relative number of faults of each: losing one of the last three restarts every process."""
KINDS = {"SIGKILL": 6, "segfault": 3, "exit": 3, "SIGSTOP": 1}
MAX_GROWTH_BYTES = 64 * MIB
"""Growth of the driver, from the second quarter of the run to the last."""
MAX_MORE_DESCRIPTORS = 8


def drawn(count: int) -> list[Fault]:
    """Faults by a seed."""
    draw = random.Random(22)

    def one(weights: dict[str, int]) -> str:
        return draw.choices(list(weights), list(weights.values()))[0]

    return assign_steps(
        [Fault(one(VICTIMS), draw.choice(list(POINTS)), one(KINDS), "synchronous") for _ in range(count)], EVERY
    )


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_a_hundred_faults_in_one_run_leave_no_trace(tmp_path: Path) -> None:
    faults = drawn(int(os.environ.get("RLPLAN_SOAK_FAULTS", "100")))
    resources: list[tuple[int, int, int]] = []

    def note(outcome: Outcome) -> None:
        assert outcome.ending != "HANGS", outcome
        assert faulty.process is not None
        driver = psutil.Process(faulty.process.pid)
        arenas = len([*Path("/dev/shm").glob(f"rlplan-{driver.pid}-*")])
        resources.append((driver.memory_info().rss, driver.num_fds(), arenas))
        print(outcome, *resources[-1])

    arguments = job("synchronous", faults)
    faulty = FaultyRun(arguments, faults, tmp_path / "run")
    run = faulty.play(note)
    assert run.exit_code == 0, run.stderr[-4000:]
    assert faulty.errors == [], "it goes on by itself"
    quarter = len(resources) // 4
    (bytes_1, files_1, _), (bytes_2, files_2, arenas) = (
        _medians(resources[quarter : 2 * quarter]),
        _medians(resources[-quarter:]),
    )
    print(f"driver: {bytes_1 / MIB:.0f} to {bytes_2 / MIB:.0f} MiB, {files_1:.0f} to {files_2:.0f} descriptors")
    assert bytes_2 - bytes_1 <= MAX_GROWTH_BYTES
    assert files_2 - files_1 <= MAX_MORE_DESCRIPTORS
    assert arenas == 0
    assert '"kind": "leak"' not in (tmp_path / "run" / "alarms.jsonl").read_text()
    whole = finish(start(*arguments, "--out", str(tmp_path / "whole")), tmp_path / "whole")
    assert_same("synchronous", run, whole)


def _medians(resources: list[tuple[int, int, int]]) -> list[float]:
    return [median(column) for column in zip(*resources, strict=True)]
