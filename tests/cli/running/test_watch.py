"""`rlplan watch` shows how a run stands, at any width, and ends with it and as it did."""

import json
import threading
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rlplan_cli.render.running import watching

from rlplan.runtime.run_folder.following import Follower
from rlplan.runtime.run_folder.run_lock import LOCK_NAME
from tests.cli.conftest import Call
from tests.runtime.run_folder.test_following import add, memory_line, status
from tests.runtime.run_folder.test_following import run as run

METRICS = {"reward/mean": 0.5, "kl/mean": 0.001, "policy/entropy": 1.0, "evaluate/greedy_accuracy": 0.25}


def do_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        add(folder, "metrics.jsonl", {"step": step, **METRICS})
        add(folder, "timings.jsonl", {"step": step, "step_s": 2.0, "throughput/tokens_per_sec": 1234.0})
        add(
            folder,
            "trace.jsonl",
            memory_line("policy_trainer/0", 1 << 29),
            memory_line("policy_trainer/0", 5 << 30, "peak"),
        )


def test_a_run_is_watched_to_its_end(rlplan: Call, run: Path) -> None:
    status(run, "running")
    do_steps(run, 1)

    def end() -> None:
        time.sleep(0.5)
        do_steps(run, 2, 3)
        (run / LOCK_NAME).unlink()
        status(run, "finished", 0)

    ender = threading.Thread(target=end)
    ender.start()
    answer = rlplan("watch", run, "--every", "0.2")
    ender.join()
    assert answer.exit_code == 0, answer.err
    steps = [line for line in answer.out.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in steps] == ["step 1/3", "step 2/3", "step 3/3"]
    assert "reward 0.500  tokens/s 1,234" in steps[0]
    assert "finished  small: step 3 of 3" in answer.out


@pytest.mark.parametrize("width", [80, 140])
def test_a_frame_keeps_to_the_terminal_and_has_memory_against_the_plan(
    run: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    status(run, "running")
    do_steps(run, 1, 2)
    add(run, "alarms.jsonl", {"step": 2, "text": "it grows"})
    console = Console(width=width, force_terminal=True, record=True, file=StringIO())
    monkeypatch.setattr(watching, "stdout", console)
    follower = Follower(run)
    with watching.WatchDisplay(follower.plan, is_shown=True) as display:
        display.show(follower.read_new())
    console.export_text()
    console.print(display.frame(follower.standing))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for word in ("running", "step 2 of 3", "left", "reward", "tokens/s", "1,234", "held-out", "25.0%", "it grows"):
        assert word in text
    assert ("entropy" in text) == (width == 140)
    row = next(line for line in lines if "policy_trainer/0" in line)
    assert "512 MiB" in row
    assert "5.00 GiB" in row


def test_one_look_at_a_run_that_goes_on_has_an_exit_code_of_its_own(rlplan: Call, run: Path) -> None:
    status(run, "running")
    do_steps(run, 1)
    once, limited = rlplan("watch", run, "--once"), rlplan("watch", run, "--limit", "0.3", "--every", "0.2")
    assert (once.exit_code, limited.exit_code) == (1, 1)
    assert "running  small: step 1 of 3" in once.out
    seen = rlplan("watch", run, "--json")
    assert seen.exit_code == 1
    value = json.loads(seen.out)
    assert (value["schema_version"], value["state"], value["step"]) == (1, "running", 1)
    assert value["steps"][0]["reward/mean"] == 0.5


def test_the_page_of_a_run_reloads_while_it_goes_on(rlplan: Call, run: Path) -> None:
    status(run, "running")
    do_steps(run, 1, 2)
    page = run / "report" / "index.html"
    assert rlplan("report", run).exit_code == 0
    assert 'http-equiv="refresh"' in page.read_text()
    status(run, "finished", 0)
    assert rlplan("report", run).exit_code == 0
    assert 'http-equiv="refresh"' not in page.read_text()


def test_watching_ends_as_the_run_did(rlplan: Call, run: Path, tmp_path: Path) -> None:
    (run / LOCK_NAME).unlink()
    status(run, "interrupted", 75, "stopped by SIGTERM")
    answer = rlplan("watch", run)
    assert answer.exit_code == 75
    assert "the run has ended: stopped by SIGTERM" in answer.err
    status(run, "running")
    assert rlplan("watch", run).exit_code == 5
    assert "is not a run folder" in rlplan("watch", tmp_path).err
    assert rlplan("watch", tmp_path / "nowhere").exit_code == 2
