"""The choice of a sandbox: one that passed its self-test, or none at all."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlplan.errors import HostError, SpecError
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rewards.reward_pool import RewardPool
from rlplan.runtime.sandbox.bubblewrap import Bubblewrap, make_tree_groups
from rlplan.runtime.sandbox.choice import Bare, check_sandbox, open_sandbox
from rlplan.runtime.sandbox.programs import Case, Limits, Program
from rlplan.runtime.sandbox.seccomp import _ARGUED, _CLONE3, build_deny_list, read_denied_calls
from rlplan.runtime.sandbox.tree_limits import TreeGroup, TreeWatch, remove_stale_groups
from rlplan.runtime.sandbox.values import UnreadableValueError, decode
from rlplan.units import MIB
from tests.factories import make_job

HOG = (
    "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(100 * 2**20)\n"
    "        time.sleep(20)\ntime.sleep(20)"
)


def test_without_a_sandbox_the_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "sandlock", None)  # as if it were not installed
    job = make_job(rewards=[{"kind": "code_executor"}])
    with pytest.raises(HostError, match=r"no sandbox works on this host.*bwrap is not installed") as caught:
        RewardPool(job)
    assert "only in a sandbox" in caught.value.rule
    reward_pool = RewardPool(job, "none")
    assert reward_pool.sandbox is not None
    assert reward_pool.sandbox.name == "none"
    reward_pool.close()


def test_a_sandbox_that_does_not_hold_fails_its_self_test() -> None:
    fault = check_sandbox(Bare(1))
    assert fault is not None
    assert "read /etc/passwd" in fault
    assert "connected" in fault


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SpecError, match=r"there is no sandbox 'bublewrap'.*\n.*\n  rule: .*Did you mean 'bubblewrap'"):
        open_sandbox("bublewrap", 1)


def test_a_broken_sandbox_is_its_own_fault_and_not_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = open_sandbox("bubblewrap", 1)
    monkeypatch.setattr(sandbox, "_bwrap", "/usr/bin/false")
    report = sandbox.run(Program("print(1)", (Case(),)))
    sandbox.close()
    assert report.status == "broken"
    assert report.cases[0].status == "missing"


def test_memory_of_the_whole_tree_is_limited_also_without_a_control_group() -> None:
    limits = Limits(case_s=scale_seconds(10.0), total_s=scale_seconds(30.0), memory_bytes=300 * MIB)
    sandbox = Bubblewrap(1, limits)
    groups, sandbox._groups = sandbox._groups, []
    try:
        report = sandbox.run(Program(HOG, (Case(),), limits))
    finally:
        sandbox._groups = groups
        sandbox.close()
    assert report.status == "memory"
    assert report.seconds < limits.case_s - 2


def test_processes_may_end_while_they_are_looked_at() -> None:
    watch = TreeWatch(1 << 40, 1e9)
    for _ in range(30):
        tree = subprocess.Popen(["/bin/sh", "-c", "/bin/true & /bin/true & /bin/true"])
        while tree.poll() is None:
            assert not watch(tree.pid)
        assert not watch(tree.pid)


def test_groups_of_a_driver_that_was_killed_are_swept() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes control groups here")
    code = "from rlplan.runtime.sandbox.tree_limits import TreeGroup; print(TreeGroup(1 << 28).folder)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    own_group = TreeGroup(1 << 28)
    remove_stale_groups()  # another run beside this one may have been first
    assert output
    assert not Path(output).exists()
    assert own_group.folder.is_dir()
    own_group.close()
    assert not own_group.folder.exists()


def test_two_sandboxes_of_a_process_have_groups_of_their_own() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes control groups here")
    first_groups, other = (make_tree_groups(2, 1 << 28) for _ in range(2))
    try:
        assert len({group.folder for group in (*first_groups, *other)}) == 4
    finally:
        for group in (*first_groups, *other):
            group.close()


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_denied_calls_have_the_kernel_s_numbers(machine: str) -> None:
    """Oracle: the kernel's headers, which a C compiler brings along; calls newer than these are left out."""
    text = HEADERS[machine].read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    ours = read_denied_calls(machine) | _ARGUED[machine] | {"clone3": _CLONE3}
    compared = {name: number for name, number in ours.items() if name in known}
    assert compared == {name: known[name] for name in compared}
    assert len(compared) > 0.8 * len(ours)


def test_the_filter_is_whole_instructions_and_jumps_stay_inside() -> None:
    for machine in HEADERS:
        code = build_deny_list(machine)
        assert len(code) % 8 == 0
        count = len(code) // 8
        assert count < 4096, "the kernel's limit"
        for index in range(count):
            operation, if_true, if_false = code[8 * index], code[8 * index + 2], code[8 * index + 3]
            if operation & 0x07 == 0x05:
                assert index + 1 + max(if_true, if_false) < count


@pytest.mark.parametrize("data", [b"", b"i;", b"s9:a", b"l3;nn", b"u-1;", b"nn", b"e1;l0;", b"l1;" * 200 + b"n", b"x"])
def test_bytes_that_are_no_value_are_refused(data: bytes) -> None:
    with pytest.raises(UnreadableValueError):
        decode(data)
