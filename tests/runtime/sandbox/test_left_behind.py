"""Many runs leave nothing behind: no process, mount, file, control group or descriptor."""

import threading
import time

import pytest

from benchmarks.bench_sandbox import count_leftovers, measure
from rlplan.runtime.sandbox.choice import BACKENDS
from rlplan.runtime.sandbox.programs import DEFAULT_LIMITS, Case, Limits, Program, Report
from tests.repository.at_night import mark_nightly
from tests.runtime.sandbox.attacks import open_backend
from tests.waiting import orphans_come_here

LITTERS = """
import os, time
try:
    open("/tmp/file", "w").write("x" * 100_000)
except PermissionError:
    pass
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
"""


@pytest.mark.parametrize("count", mark_nightly((10, 1000), but=(10,)))
@pytest.mark.parametrize("name", BACKENDS)
def test_runs_leave_nothing_behind(name: str, count: int) -> None:
    sandbox = open_backend(name, 2, DEFAULT_LIMITS)
    sandbox.close()
    with orphans_come_here():
        before = count_leftovers()
        sandbox = open_backend(name, 2, DEFAULT_LIMITS)
        try:
            measure(sandbox, 2, count=count)
            for _ in range(count // 10):
                assert sandbox.run(Program(LITTERS, (Case(), Case()))).status == "done"
        finally:
            sandbox.close()
        assert count_leftovers() == before


@pytest.mark.parametrize("name", BACKENDS)
def test_what_runs_ends_when_the_sandbox_is_closed(name: str) -> None:
    """Oracle: the program sleeps for 60 s."""
    sandbox = open_backend(name, 1, Limits(case_s=60.0, total_s=60.0))
    reports: list[Report] = []
    program = Program("import time\ntime.sleep(60)", (Case(),))
    running = threading.Thread(target=lambda: reports.append(sandbox.run(program)))
    running.start()
    time.sleep(0.5)
    sandbox.close()
    running.join(20)
    assert [report.status for report in reports] == ["broken"]
    assert sandbox.run(program).detail == "it was closed"
