"""Many runs leave nothing behind: no process, mount, file, control group or descriptor."""

import pytest

from benchmarks.bench_sandbox import left_behind, measure
from rlplan.runtime.sandbox.choice import open_sandbox
from rlplan.runtime.sandbox.programs import Case, Program

LITTERS = """
import os, time
open("/tmp/file", "w").write("x" * 100_000)
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
"""


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.nightly)])
def test_runs_leave_nothing_behind(count: int) -> None:
    before = left_behind()
    sandbox = open_sandbox("bubblewrap", 2)
    try:
        measure(sandbox, 2, count=count)
        for _ in range(count // 10):
            assert sandbox.run(Program(LITTERS, (Case(), Case()))).status == "done"
    finally:
        sandbox.close()
    assert left_behind() == before
