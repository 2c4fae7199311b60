"""Losses that Ray does not tell of, or late: noticed in time, and what is lost comes back."""

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.runtime.conftest import alive, finish, list_descendants, start
from tests.waiting import wait_until

NOTICED_S = 15.0
"""Seconds from a death, or from the end of the stall time."""
RECOVERED_S = 60.0
"""Seconds from the detection to the next step."""
ONE_DEVICE = ("hardware.num_devices=1", "workload.num_heldout_prompts=8", "preflight.rehearses=false")


def _victim(name: str, driver: int, folder: Path) -> int:
    if name == "scorer":
        (log,) = (folder / "logs").glob("scorer-*.log")
        return int(re.findall(r" is process (\d+)", log.read_text())[-1])
    (pid,) = [pid for pid in list_descendants(driver) if psutil.Process(pid).name().startswith(name)]
    return pid


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("scorer", signal.SIGSTOP),
        ("raylet", signal.SIGKILL),
        ("gcs_server", signal.SIGTERM),  # it closes its port, and never ends
    ],
)
def test_what_is_lost_is_noticed_in_time_and_comes_back(name: str, number: signal.Signals, tmp_path: Path) -> None:
    folder, stall_s = tmp_path / "run", round(scale_seconds(12.0))
    overrides = ("checkpoints.every=1", "workload.num_steps=8", f"limits.stall_timeout_s={stall_s}", *ONE_DEVICE)
    process = start("run", "examples/quickstart.yaml", *overrides, "--out", str(folder))
    metrics, alarms = folder / "metrics.jsonl", folder / "alarms.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, 120)
    children = list_descendants(process.pid)
    os.kill(_victim(name, process.pid, folder), number)
    lost_s = time.monotonic()
    wait_until(lambda: '"restart"' in alarms.read_text() or process.poll() is not None, 300)
    noticed_s = time.monotonic() - lost_s
    before = metrics.read_text().count("\n")  # going back may take a row away
    wait_until(lambda: metrics.read_text().count("\n") > before or process.poll() is not None, 300)
    recovered_s = time.monotonic() - lost_s - noticed_s
    print(f"{name}, {number.name}: noticed after {noticed_s:.1f} s, recovered after {recovered_s:.1f} s more")
    run = finish(process, folder)
    assert run.exit_code == 0, run.stderr
    kinds = [json.loads(line)["kind"] for line in alarms.read_text().splitlines()]
    assert 1 <= kinds.count("restart") <= (1 if name == "scorer" else 2), "a worker's end may be heard before Ray's"
    assert [row["step"] for row in run.metrics if row["step"] > 0] == list(range(1, 9))
    assert noticed_s <= scale_seconds(NOTICED_S) + (stall_s if number is signal.SIGSTOP else 0)
    assert recovered_s <= scale_seconds(RECOVERED_S)
    assert alive(children) == []
