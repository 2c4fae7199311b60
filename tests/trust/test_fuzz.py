"""Every reader takes hostile files: each ends in a value or a message, within 2 s and 512 MiB, and no more is done."""

import json
import subprocess
import sys

import pytest

from tests.factories import ROOT

TABLES = ("data: parquet", "data: arrow")


def run_fuzzer(count: int, seed: int, *names: str) -> tuple[list[str], int]:
    """(what was wrong, how many readers there were)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.trust.fuzz", str(count), str(seed), *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *faults, last = done.stdout.splitlines()
    return faults, json.loads(last)["readers"]


def test_no_reader_breaks_on_some_hostile_files() -> None:
    assert run_fuzzer(500, 1) == ([], 44)


def test_no_reader_of_tables_breaks_on_some_hostile_files() -> None:
    assert run_fuzzer(500, 1, *TABLES) == ([], 2)


@pytest.mark.nightly
@pytest.mark.timeout(5000)
def test_no_reader_breaks_on_20_000_hostile_files() -> None:
    assert run_fuzzer(20_000 // 44 + 1, 100) == ([], 44)


@pytest.mark.nightly
@pytest.mark.timeout(5000)
def test_no_reader_of_tables_breaks_on_20_000_hostile_files() -> None:
    assert run_fuzzer(20_000, 100, *TABLES) == ([], 2)
