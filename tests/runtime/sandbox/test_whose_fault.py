"""Blame: failures that a program causes score 0; failures of the sandbox or the host are `broken`, out of its reach.

Also here: the CPU that all processes of a program use together.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.sandbox import process
from rlplan.runtime.sandbox.bubblewrap import Bubblewrap, attribute_failure, compile_system_runner
from rlplan.runtime.sandbox.programs import Case, CaseResult, Limits, Program, Report
from rlplan.runtime.sandbox.tree_limits import TreeWatch
from rlplan.units import MIB
from tests.waiting import own_processes, wait_until

SPINS = """
import os
for _ in range(7):
    if os.fork() == 0:
        break
while True: pass
"""
SPINS_UNSEEN = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)" + SPINS


@pytest.fixture
def sandbox() -> Iterator[Bubblewrap]:
    opened = Bubblewrap(1)
    yield opened
    opened.close()


def test_all_processes_of_a_program_together_have_one_core(sandbox: Bubblewrap) -> None:
    if not sandbox._groups or not sandbox._groups[0].has_quota:
        pytest.skip("no control group for CPU may be made here")
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    report = sandbox.run(Program(SPINS, (Case(),), Limits(case_s=1.2)))
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begun
    assert (report.status, report.cases[0].status) == ("done", "timeout")
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert took <= 1.2 * seconds, "two cores would be twice as much"


@pytest.mark.parametrize("source", [SPINS, SPINS_UNSEEN])
def test_where_no_control_group_may_be_made_the_cpu_of_a_tree_is_looked_at(source: str) -> None:
    watch, statuses = TreeWatch(None, 0.5), []
    tree = subprocess.Popen([sys.executable, "-c", source], start_new_session=True)
    try:
        wait_until(lambda: statuses.append(watch(tree.pid)) or statuses[-1], 30, pause_s=0.02)
    finally:
        os.killpg(tree.pid, 9)
        tree.wait()
    assert statuses[-1] == "timeout"


def test_a_run_that_is_looked_at_ends_when_it_has_had_its_cpu(sandbox: Bubblewrap) -> None:
    groups, sandbox._groups = sandbox._groups, []
    try:
        assert sandbox.run(Program("print(1)", (Case(),))).cases[0].output == b"1\n"
        report = sandbox.run(Program(SPINS, (Case(), Case()), Limits(case_s=0.75, total_s=20.0)))
    finally:
        sandbox._groups = groups
    # on a busy machine the clock may be first
    assert report.status == "timeout" or [case.status for case in report.cases] == ["timeout"] * 2


def test_a_process_that_cannot_be_made_before_the_program_is_there_is_no_fault_of_its(sandbox: Bubblewrap) -> None:
    report = sandbox.run(Program("print(1)", (Case(),), Limits(num_processes=1)))
    assert report.status == "broken"
    assert "temporarily unavailable" in report.detail


COMES_UP_LATE = """
import posix, time
_setsid = posix.setsid
def _late():
    time.sleep(1.0)
    _setsid()
posix.setsid = _late
"""
"""Code before the runner that makes every case's process a second late, as on a loaded machine."""


def test_a_case_that_comes_up_late_has_all_of_its_time_and_of_the_whole_program_s(sandbox: Bubblewrap) -> None:
    sandbox._runner = compile_system_runner(COMES_UP_LATE)
    report = sandbox.run(Program("print(1)", (Case(),), Limits(case_s=0.3, total_s=0.5)))
    assert (report.status, report.cases[0].status, report.cases[0].output) == ("done", "ok", b"1\n"), report


NEVER_COMES_UP = COMES_UP_LATE.replace("1.0", "600.0")


def test_a_case_that_does_not_come_up_is_no_fault_of_the_program(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox._runner = compile_system_runner(NEVER_COMES_UP)
    monkeypatch.setattr(process, "START_S", 1.0)
    report = sandbox.run(Program("print(1)", (Case(),)))
    assert (report.status, report.detail) == ("broken", "the process of a case did not come up: timeout")


def test_a_runner_that_the_host_ends_is_no_fault_of_the_program(sandbox: Bubblewrap) -> None:
    others = {*own_processes()}
    sleeps = Program("import time; time.sleep(500)", (Case(),), Limits(case_s=600.0, total_s=600.0))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sandbox.run, sleeps)
        inside: list[psutil.Process] = []
        wait_until(
            lambda: inside.extend(each for each in own_processes().values() if _has_child(each, others)) or inside,
            20,
            pause_s=0.01,
        )
        inside[-1].kill()
        report = future.result(scale_seconds(10))
    assert (report.status, report.detail) == ("broken", "its runner ended without a verdict")


def _has_child(process: psutil.Process, others: set[int]) -> bool:
    """Whether this is a runner with a case at work: below bwrap, with a child of its own."""
    try:
        parent = process.parent()
        is_below = parent is not None and parent.name() == "bwrap" and process.name() != "bwrap"
        return process.pid not in others and is_below and bool(process.children())
    except psutil.Error:
        return False


KILLED, LOST = Report("killed", (CaseResult("missing"),)), Report("done", (CaseResult("killed"),))
WELL, LATE = Report("done", (CaseResult("ok", b"1"),)), Report("timeout", (CaseResult("missing"),))
NOT_UP = Report("timeout", (CaseResult("missing"),), process.NOT_BEGUN)


@pytest.mark.parametrize(
    ("report", "was_ended", "was_full", "status"),
    [
        (KILLED, False, False, "broken"),
        (KILLED, True, False, "broken"),  # by the host's want of memory: its own limit was not met
        (KILLED, True, True, "memory"),
        (LOST, False, False, "done"),  # it has killed itself
        (LOST, True, False, "broken"),
        (LOST, True, True, "done"),
        (WELL, True, False, "done"),
        (WELL, False, True, "done"),
        (LATE, False, False, "timeout"),
        (NOT_UP, False, False, "broken"),
    ],
)
def test_what_ended_a_program_says_whose_fault_it_is(
    report: Report, was_ended: bool, was_full: bool, status: str
) -> None:
    assert attribute_failure(report, was_ended, was_full).status == status


HOGS = """
import os
for _ in range(20):
    if os.fork() == 0:
        break
held = []
while True:
    try:
        held.append(bytearray(b"x" * 4_000_000))
    except MemoryError:
        pass
"""


def test_processes_that_hog_memory_until_they_are_killed_are_the_program_s_own_doing(sandbox: Bubblewrap) -> None:
    for _ in range(2):
        report = sandbox.run(Program(HOGS, (Case(),), Limits(case_s=1.5)))
        assert report.status in ("memory", "timeout", "done"), report
        assert report.status != "done" or report.cases[0].status != "ok"
    assert sandbox.run(Program("print(1)", (Case(),))).cases[0].output == b"1\n"


LINKS = """
import os, time
for number in range(400_000):
    os.symlink("x", f"/tmp/{number}")
print("made")
"""


def test_links_that_fill_the_kernel_s_memory_count_where_no_control_group_may_be_made(sandbox: Bubblewrap) -> None:
    groups, sandbox._groups = sandbox._groups, []
    try:
        few = sandbox.run(Program(LINKS.replace("400_000", "1_000"), (Case(),), Limits(memory_bytes=64 * MIB)))
        many = sandbox.run(Program(LINKS, (Case(),), Limits(memory_bytes=64 * MIB, case_s=30.0)))
    finally:
        sandbox._groups = groups
    assert few.cases[0].output == b"made\n", few
    assert many.status == "memory", many


def test_what_earlier_cases_leave_breaks_no_later_one(sandbox: Bubblewrap) -> None:
    """A program that is wrong in its second case would otherwise be out of the count at will."""
    source = """
import os, signal, time
if input() == "first":
    n = 0
    try:
        while True:
            open(f"/tmp/{n}", "wb").write(b"x" * 10**6)
            n += 1
    except OSError:
        pass
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
                for each in range(1, 65):
                    try: signal.signal(each, signal.SIG_IGN)
                    except (OSError, ValueError): pass
                while True: time.sleep(9)
        except OSError:
            break
else:
    print("wrong")
"""
    cases = (Case(b"first\n"), Case(b"second\n"))
    report = sandbox.run(Program(source, cases, Limits(case_s=10.0, total_s=40.0)))
    assert [case.status for case in report.cases] == ["ok", "ok"]
    assert report.cases[1].output == b"wrong\n"
