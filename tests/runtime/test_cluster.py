"""One job on three hosts, each with its own address and its own shared memory."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplan.emit.bundle import write_bundle
from rlplan.trace import Trace
from tests.factories import make_plan
from tests.runtime.conftest import ROOT, alive
from tests.runtime.hosts import Hosts, cluster_of

pytestmark = pytest.mark.engine

RLPLAN = [sys.executable, "-c", "from rlplan_cli.app import main; main()"]


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with cluster_of(3, 4, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def run(hosts: Hosts, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        hosts.command(0, *RLPLAN, *words, "--address", hosts.address),
        cwd=ROOT, env=hosts.environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def spread_bundle(folder: Path, islands: list[list[int]]) -> Path:
    """Three ranks and an engine. Shared memory keeps the engine with the first rank; the other ranks are elsewhere."""
    plan = make_plan(
        **{
            "hardware.num_devices": 4,
            "placement.placement": "disaggregated",
            "placement.transport": "shared_memory",
            "workload.num_prompts_per_step": 3,
            "workload.mini_batch_size": 12,
            "workload.num_steps": 2,
            "workload.num_heldout_prompts": 8,
        }
    )
    write_bundle(plan, folder)
    ray = json.loads((folder / "ray.json").read_text())
    (folder / "ray.json").write_text(json.dumps({**ray, "islands": islands}))
    return folder


def test_ranks_on_three_hosts_train_one_policy_and_leave_nothing_behind(three_hosts: Hosts, tmp_path: Path) -> None:
    before = set(three_hosts.pids())
    bundle = spread_bundle(tmp_path / "bundle", [[0, 3], [1], [2]])
    done = run(three_hosts, "run", str(bundle), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows][:3] == [0, 1, 2]
    assert max(row.get("sync/logprob_difference_max", 0.0) for row in rows) < 1e-4
    trace = Trace.read(tmp_path / "run" / "trace.jsonl")
    assert {span.process for span in trace.spans} >= {f"policy_trainer/{rank}" for rank in range(3)}
    logs = "".join((tmp_path / "run" / "logs" / f"policy_trainer-{rank}.log").read_text() for rank in range(3))
    assert [address for address in three_hosts.addresses if f"host {address}" in logs] == list(three_hosts.addresses)
    deadline = time.monotonic() + 20
    while workers := [pid for pid in set(three_hosts.pids()) - before if alive([pid]) and _is_worker(pid)]:
        assert time.monotonic() < deadline, workers
        time.sleep(0.2)


def _is_worker(pid: int) -> bool:
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and path.read_bytes().startswith(b"ray::WorkerProcess")


def test_more_hosts_than_there_are_are_refused_before_anything_starts(three_hosts: Hosts, tmp_path: Path) -> None:
    bundle = spread_bundle(tmp_path / "bundle", [[0], [1], [2], [3]])
    done = run(three_hosts, "run", str(bundle), "--out", str(tmp_path / "run"))
    assert done.returncode == 4, done.stderr
    assert "the plan asks for 4 hosts, the cluster has 3" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cluster_that_does_not_answer_is_named(three_hosts: Hosts, tmp_path: Path) -> None:
    bundle = spread_bundle(tmp_path / "bundle", [[0, 1, 2, 3]])
    command = ("run", str(bundle), "--out", str(tmp_path / "run"), "--address", "10.77.0.9:6379")
    done = subprocess.run(
        three_hosts.command(0, *RLPLAN, *command),
        cwd=ROOT, env=three_hosts.environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "no Ray cluster answers at 10.77.0.9:6379" in done.stderr
