"""One job on three hosts, each with its own address and its own shared memory."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlplan.emit.bundle import write_bundle
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.trace import Trace
from tests.factories import make_plan
from tests.runtime.cluster.hosts import Hosts, cluster_of
from tests.runtime.conftest import ROOT, alive
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

RLPLAN = [sys.executable, "-c", "from rlplan_cli.app import main; main()"]


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with cluster_of(3, 4, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def run(hosts: Hosts, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        hosts.command(0, *RLPLAN, *words, "--address", hosts.address),
        cwd=ROOT, env=hosts.environment, capture_output=True, text=True, timeout=scale_seconds(200),
    )  # fmt: skip


def spread_bundle(folder: Path, num_hosts: int, num_devices: int = 3, **overrides: Any) -> Path:
    """Trainers on the first hosts, the engine on the last; weights go from host to host."""
    plan = make_plan(
        **{
            "hardware.num_devices": num_devices,
            "hardware.num_hosts": num_hosts,
            "placement.placement": "disaggregated",
            "placement.transport": "gloo",
            "workload.mini_batch_size": 12,
            "workload.num_prompts_per_step": 3,
            "workload.num_steps": 2,
            "workload.num_heldout_prompts": 8,
            **overrides,
        }
    )
    write_bundle(plan, folder)
    return folder


def test_two_hosts_train_a_third_generates_and_nothing_is_left_behind(three_hosts: Hosts, tmp_path: Path) -> None:
    before = set(three_hosts.pids())
    bundle = spread_bundle(tmp_path / "bundle", 3)
    done = run(three_hosts, "run", str(bundle), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows][:3] == [0, 1, 2]
    assert max(row.get("sync/logprob_difference_max", 0.0) for row in rows) < 1e-4
    trace = Trace.read(tmp_path / "run" / "trace.jsonl")
    names = ("policy_trainer/0", "policy_trainer/1", "rollout_engine/0")
    assert {span.process for span in trace.spans} >= set(names)
    for name, address in zip(names, three_hosts.addresses, strict=True):
        log = (tmp_path / "run" / "logs" / f"{name.replace('/', '-')}.log").read_text()
        assert f"on host {address}\n" in log
    wait_until(lambda: not [pid for pid in set(three_hosts.pids()) - before if alive([pid]) and _is_worker(pid)], 20)


@pytest.mark.nightly
def test_two_engines_get_adapters_alone_from_two_trainers_on_another_host(three_hosts: Hosts, tmp_path: Path) -> None:
    asked = {
        "placement.num_generation_devices": 2,
        "rollout.num_engines": 2,
        "training.lora": {"rank": 4},
        "placement.sync_content": "adapter",
        "algorithm.learning_rate": 1e-2,
    }
    bundle = spread_bundle(tmp_path / "bundle", 2, 4, **asked)
    done = run(three_hosts, "run", str(bundle), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows][:3] == [0, 1, 2]
    assert max(row.get("sync/logprob_difference_max", 0.0) for row in rows) < 1e-4
    hosts = {name: _host(tmp_path / "run", name) for name in ("policy_trainer/0", "policy_trainer/1")}
    engines = {name: _host(tmp_path / "run", name) for name in ("rollout_engine/0", "rollout_engine/1")}
    assert len(set(hosts.values())) == len(set(engines.values())) == 1
    assert set(hosts.values()) != set(engines.values())


def _host(folder: Path, process: str) -> str:
    log = (folder / "logs" / f"{process.replace('/', '-')}.log").read_text()
    (address,) = re.findall(r"on host (\S+)\n", log)
    return str(address)


def _is_worker(pid: int) -> bool:
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and path.read_bytes().startswith(b"ray::WorkerProcess")


def test_more_hosts_than_there_are_are_refused_before_anything_starts(three_hosts: Hosts, tmp_path: Path) -> None:
    bundle = spread_bundle(tmp_path / "bundle", 4, 4)
    done = run(three_hosts, "run", str(bundle), "--out", str(tmp_path / "run"))
    assert done.returncode == 4, done.stderr
    assert "the plan needs 4 hosts, the cluster has 3" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cluster_that_does_not_answer_is_named(three_hosts: Hosts, tmp_path: Path) -> None:
    bundle = spread_bundle(tmp_path / "bundle", 1)
    command = ("run", str(bundle), "--out", str(tmp_path / "run"), "--address", "10.77.0.9:6379")
    done = subprocess.run(
        three_hosts.command(0, *RLPLAN, *command),
        cwd=ROOT, env=three_hosts.environment, capture_output=True, text=True, timeout=scale_seconds(120),
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "no Ray cluster answers at 10.77.0.9:6379" in done.stderr
