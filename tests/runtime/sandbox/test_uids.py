"""Uids of sandboxes: no two sandboxes of a host have the same. Numbers that no other test claims meanwhile are used."""

import os
import subprocess
import sys

import pytest

from rlplan.errors import HostError
from rlplan.runtime.sandbox import uids
from rlplan.runtime.sandbox.uids import ClaimedUids
from tests.factories import ROOT

OTHER_RUN = """
import sys
from rlplan.runtime.sandbox import uids
uids.FIRST_UID = int(sys.argv[1])
lock_run_folder = uids.ClaimedUids(3)
print(*lock_run_folder.numbers, flush=True)
input()
"""


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> int:
    """The first of ten numbers."""
    number = 1_000_000 + 100 * os.getpid()
    monkeypatch.setattr(uids, "FIRST_UID", number)
    monkeypatch.setattr(uids, "NUM_UIDS", 10)
    return number


def test_two_runs_have_different_uids_and_what_a_killed_one_had_is_free_again(first: int) -> None:
    command = [sys.executable, "-c", OTHER_RUN, str(first)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline().split() == [str(first + each) for each in range(3)]
        ours = ClaimedUids(2)
        other.kill()
    assert ours.numbers == [first + 3, first + 4]
    assert ClaimedUids(4).numbers == [first, first + 1, first + 2, first + 5]


def test_what_is_closed_or_forgotten_is_free_again(first: int) -> None:
    closed = ClaimedUids(2)
    closed.close()
    assert ClaimedUids(2).numbers == [first, first + 1]
    assert ClaimedUids(2).numbers == [first, first + 1]


def test_where_too_few_are_left_it_is_said_and_none_is_kept(first: int) -> None:
    with pytest.raises(HostError, match="sandboxes need 11 uids, and 10 are free") as caught:
        ClaimedUids(11)
    assert caught.value.exit_code == 4
    assert len(ClaimedUids(10).numbers) == 10
