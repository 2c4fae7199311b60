"""Settings that hold for every test."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import settings
from rlplan_cli.__main__ import FEW_COLLECTIONS

from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.repository.side_by_side import FilesTogether, find_place

# The same examples on every machine, and no deadline: a busy core is no failure.
settings.register_profile("rlplan", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("nightly", settings.get_profile("rlplan"), max_examples=100)  # `make nightly` takes it
settings.load_profile("rlplan")
# Readline, which comes along where tests run side by side, writes a terminal's size there: tables would be narrow.
os.environ.pop("COLUMNS", None)
# Threads of programs that tests start sleep while they wait: spinning, they would keep cores from other programs.
os.environ["OMP_WAIT_POLICY"] = "passive"
# As in the command: with Python's own 700 a quarter of these processes' CPU is spent on looking for cycles.
gc.set_threshold(FEW_COLLECTIONS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: find_place(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler that assigns files to processes."""
    return FilesTogether(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Modules and items live to the end: nobody need look at them again."""
    gc.freeze()


def pytest_runtest_setup() -> None:
    """One thread for torch in this process: threads on cores that others want too wait for each other, computing."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    """A test's whole time, too, follows how slow the machine is."""
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=scale_seconds(settings.timeout)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the lines that `make test` shows again after both of its halves."""
    if path := os.environ.get("RLPLAN_TEST_RESULTS"):
        reports = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
        lines = [f"  {report.outcome}: {report.nodeid}" for report in reports]
        words = ", ".join(text for text, _ in terminalreporter.build_summary_stats_line()[0])
        with Path(path).open("a", encoding="utf-8") as results:
            results.write("\n".join([*lines, f"  {words}"]) + "\n")
