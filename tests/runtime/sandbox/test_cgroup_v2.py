"""Control groups of version 2: what is written where they hold memory, and a namespace in which they do not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlplan.runtime.sandbox import tree_limits
from rlplan.runtime.sandbox.tree_limits import TreeGroup
from rlplan.units import MIB
from tests.factories import ROOT

IN_THE_NAMESPACE = """
from pathlib import Path
from rlplan.runtime.sandbox.bubblewrap import Bubblewrap
from rlplan.runtime.sandbox.choice import check_sandbox
from rlplan.runtime.sandbox.programs import Case, Limits, Program
sandbox = Bubblewrap(1, Limits(memory_bytes=1 << 28))
holds_memory = "memory" in Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
hogs = sandbox.run(Program("x = [bytearray(b'x' * (1 << 20)) for _ in range(1 << 12)]", (Case(),)))
print(check_sandbox(sandbox), "looks" in sandbox.cannot_hold or holds_memory, hogs.cases[0].status)
sandbox.close()
print(list(Path("/sys/fs/cgroup").glob("rlplan-sandbox-*")))
"""


def test_a_group_of_version_2_limits_memory_swap_and_cpu_and_tells_its_own_limit_from_the_host_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder replaces the kernel's; its files follow Documentation/admin-guide/cgroup-v2.rst."""
    monkeypatch.setattr(tree_limits, "_V2", tmp_path)
    monkeypatch.setattr(tree_limits, "_V1", tmp_path / "memory")
    group = TreeGroup(256 * MIB)
    files = {path.name: path.read_text() for path in group.folder.iterdir()}
    assert files == {"memory.max": str(256 * MIB), "memory.swap.max": "0", "cpu.max": "100000 100000"}
    assert group.has_quota
    events = group.folder / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\noom_group_kill 0\n")
    group.begin()
    assert group.read_outcome() == (False, False), "what was before does not count"
    events.write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 2\noom_group_kill 0\n")
    assert group.read_outcome() == (True, False), "the host's want of memory"
    events.write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 3\noom_group_kill 0\n")
    assert group.read_outcome() == (True, True)


@pytest.mark.nightly
def test_in_a_namespace_of_version_2_the_sandbox_holds_with_groups_or_by_looking_on() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root mounts a hierarchy of control groups")
    inside = f'mount -t cgroup2 none /sys/fs/cgroup && exec "{sys.executable}" -c "$0"'
    command = ["unshare", "--mount", "--cgroup", "sh", "-c", inside, IN_THE_NAMESPACE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines[1:] == ["[]"], done.stderr
    assert lines[0].startswith("None True "), lines
    assert lines[0].split()[-1] in ("error", "missing", "killed"), lines
