"""Cases of one program: each begins anew, nothing of one is at work in the next, and together they say only so much."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rewards.code_tests import read_tests
from rlplan.runtime.sandbox.choice import open_sandbox
from rlplan.runtime.sandbox.programs import Case, CaseResult, Limits, Program, Sandbox
from rlplan.runtime.sandbox.values import UnreadableValueError, decode
from rlplan.units import MIB
from tests.waiting import limit_time, own_processes, wait_until

BEATS = """
import os, sys, time
if input() == "leave":
    if os.fork() == 0:
        os.setsid()
        while True:
            try:
                open("/tmp/beat", "w").close()
            except OSError:
                pass
            time.sleep(0.005)
    while not os.path.exists("/tmp/beat"):
        time.sleep(0.005)
else:
    time.sleep(0.1)
    print(os.listdir("/tmp"))
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    opened = open_sandbox("bubblewrap", 1, Limits())
    yield opened
    opened.close()


def test_what_a_case_leaves_running_is_gone_before_the_next_begins(sandbox: Sandbox) -> None:
    report = sandbox.run(Program(BEATS, (Case(b"leave\n"), Case(b"look\n"))))
    assert [case.status for case in report.cases] == ["ok", "ok"]
    assert report.cases[1].output == b"[]\n"


def test_closing_ends_a_program_at_once_and_nothing_is_left() -> None:
    others = own_processes().keys()
    sandbox = open_sandbox("bubblewrap", 1, Limits(case_s=60.0, total_s=60.0))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sandbox.run, Program("import time; time.sleep(50)", (Case(),)))
        wait_until(lambda: own_processes().keys() - others, 30, pause_s=0.01)
        time.sleep(0.2)
        with limit_time(3):
            sandbox.close()
            report = future.result(scale_seconds(5))
    assert (report.status, report.cases[0].status) == ("broken", "missing")
    assert own_processes().keys() <= others


def test_cases_share_no_module_and_no_variable(sandbox: Sandbox) -> None:
    source = "import math\nprint(getattr(math, 'seen', 'new'))\nmath.seen = 'old'"
    report = sandbox.run(Program(source, (Case(), Case(), Case())))
    assert [case.output for case in report.cases] == [b"new\n"] * 3


LOOKS = """
import gc, sys
def f(x):
    frame, seen = sys._getframe(), set()
    while frame:
        for each in (*frame.f_locals.values(), *frame.f_globals.values()):
            seen |= {word for word in ("first", "second", "third") if word + "-input" in repr(each)}
        frame = frame.f_back
    for each in gc.get_objects():
        if type(each) in (dict, list, tuple):
            seen |= {word for word in ("first", "second", "third") if word + "-input" in repr(each)}
    return sorted(seen)
"""


def test_a_case_is_not_given_what_another_one_is_given(sandbox: Sandbox) -> None:
    """Where one test encodes and the next one decodes, its neighbour's input would be what is right."""
    calls = tuple(Case(call=f"f({word!r})") for word in ("first-" + "input", "second-" + "input", "third-" + "input"))
    source = LOOKS.replace('word + "-input"', 'word + "-" + "input"')
    report = sandbox.run(Program(source, calls))
    assert [decode(case.output) for case in report.cases] == [["first"], ["second"], ["third"]]


def test_cases_after_one_that_failed_are_not_run_where_the_first_failure_decides(sandbox: Sandbox) -> None:
    cases = (Case(call="f(1)"), Case(call="f(0)"), Case(call="f(2)" + " " * 200_000), Case(call="f(3)"))
    report = sandbox.run(Program("def f(x): return 1 // x", cases), stops_early=True)
    assert (report.status, [case.status for case in report.cases]) == ("done", ["ok", "error", "missing", "missing"])


def test_many_cases_together_may_say_only_so_much(sandbox: Sandbox) -> None:
    """A thousand cases of a mebibyte would lie in the driver's memory."""
    limits = Limits(total_output_bytes=4 * MIB)
    before = psutil.Process().memory_info().rss
    report = sandbox.run(Program("print('x' * 1_000_000)", (Case(),) * 40, limits))
    assert [case.status for case in report.cases] == ["ok"] * 4 + ["output"] * 36
    assert sum(len(case.output) for case in report.cases) <= limits.total_output_bytes
    assert psutil.Process().memory_info().rss - before < 4 * limits.total_output_bytes


def test_keys_that_were_made_to_collide_do_not_hold_the_driver_up() -> None:
    keys = [k * (2**61 - 1) for k in range(50_000)]
    assert len(set(map(hash, keys))) == 1
    body = b"".join(b"i%x;" % key for key in keys)
    begun = time.process_time()
    with pytest.raises(UnreadableValueError, match="same hash"):
        decode(b"e50000;" + body)
    with pytest.raises(UnreadableValueError, match="same hash"):
        decode(b"m25000;" + body.replace(b";", b";n", 25_000)[: len(body) + 25_000])
    assert time.process_time() - begun < scale_seconds(2)
    assert decode(b"e3;i1;i2;i3;") == {1, 2, 3}


def test_an_integer_that_no_float_can_hold_is_wrong_and_ends_nothing() -> None:
    (check,) = read_tests('["assert abs(f(2) - 0.5) < 1e-3"]')
    assert not check.holds((CaseResult("ok", b"i" + hex(10**400).encode() + b";"),))
    (check,) = read_tests('["assert math.isclose(f(2), 0.5)"]')
    assert not check.holds((CaseResult("ok", b"i-" + hex(10**400).encode() + b";"),))


@pytest.mark.parametrize("value", [None, True, 0, -7, 1.5, 1 + 2j, "é\ud800", b"\x00", [1, (2, {3})], {"a": [None]}])
def test_plain_values_come_back_as_they_were(sandbox: Sandbox, value: object) -> None:
    (case,) = sandbox.run(Program("def f(): return " + ascii(value), (Case(call="f()"),))).cases
    assert case.status == "ok"
    assert decode(case.output) == value
    assert type(decode(case.output)) is type(value)


def test_one_sandbox_at_a_time_has_a_uid_of_its_own(sandbox: Sandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives uids away")
    report = sandbox.run(Program("import os; print(os.getuid(), os.getgid(), os.getgroups())", (Case(),)))
    assert report.cases[0].output.startswith(b"65534 65534 ")
