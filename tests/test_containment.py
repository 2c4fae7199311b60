"""A reader in a limited process gives data or a message, whatever the file makes it do."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlplan.containment import BUG, Budget, measure_budget, read_contained
from rlplan.errors import HostError, SpecError

FILE = Path("hostile.yaml")
SMALL = Budget(cpu_s=0.3, memory_bytes=128 << 20, answer_bytes=1 << 20)


@dataclass(frozen=True)
class Facts:
    sizes: dict[str, int]
    names: tuple[str, ...] = ()


def refuse(read: Callable[[], Any]) -> SpecError:
    with pytest.raises(SpecError) as refusal:
        read_contained(read, FILE, budget=SMALL)
    return refusal.value


def test_data_and_records_cross_the_pipe() -> None:
    assert read_contained(lambda: {"a": [1, 2.5, None, "x"]}, FILE) == {"a": [1, 2.5, None, "x"]}
    assert read_contained(lambda: Facts({"a": 1}, ("b",)), FILE, Facts) == Facts({"a": 1}, ("b",))


def test_an_error_keeps_its_kind_and_its_four_parts() -> None:
    def read() -> None:
        raise HostError("a", where="b", rule="c", way_out="d")

    with pytest.raises(HostError, match="a\n  where: b\n  rule: c\n  way out: d"):
        read_contained(read, FILE)


@pytest.mark.parametrize("busy", [lambda: 7 ** (10**9), lambda: next(i for i in iter(int, 1) if i)])
def test_a_reader_that_computes_without_end_is_stopped_even_within_one_operation(busy: Callable[[], Any]) -> None:
    assert "more than 0.3 s of processor time" in refuse(busy).what


def test_a_reader_that_takes_much_memory_is_stopped() -> None:
    assert "too much memory" in refuse(lambda: len(bytes(1 << 30))).what


def test_a_reader_that_ends_its_process_is_a_message() -> None:
    assert "ends its process" in refuse(lambda: os._exit(3)).what
    assert "ends its process" in refuse(lambda: signal.raise_signal(signal.SIGKILL)).what


def test_a_reader_that_answers_without_end_is_a_message() -> None:
    assert "1 MiB" in refuse(lambda: "x" * (2 << 20)).what


def test_deep_nesting_and_unexpected_errors_are_messages() -> None:
    def read() -> Any:
        return read()

    assert "nested too deep" in refuse(read).what
    assert BUG in refuse(lambda: {}["key"]).what


@pytest.mark.parametrize(
    "act",
    [
        lambda folder: (folder / "sprung").write_text("x"),
        lambda folder: subprocess.run(["touch", str(folder / "sprung")], check=True),
        lambda folder: os.system(f"touch {folder}/sprung"),
        lambda folder: socket.create_connection(("127.0.0.1", 9)),
        lambda folder: (folder / "sprung").mkdir(),
    ],
)
def test_a_reader_writes_nothing_starts_nothing_and_connects_to_nothing(
    tmp_path: Path, act: Callable[[Path], Any]
) -> None:
    assert "is not allowed in this process" in refuse(lambda: act(tmp_path)).what
    assert not list(tmp_path.iterdir())


def test_a_reader_prints_nothing_and_leaves_no_process(capfd: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children())
    sys.stdout.write("before ")
    read_contained(lambda: 1, FILE)
    sys.stdout.write("after")
    sys.stdout.flush()
    assert capfd.readouterr().out == "before after"
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ENOMEM])
def test_a_machine_that_starts_no_more_processes_is_a_message(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def fork() -> int:
        raise OSError(error, os.strerror(error))

    before = psutil.Process().num_fds()
    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(
        HostError, match=r"no process can be started to read a file: .+\n  where: .+\n  rule: .+\n  way"
    ):
        read_contained(lambda: 1, FILE)
    assert psutil.Process().num_fds() == before


def test_a_large_file_has_a_larger_budget(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_bytes(bytes(4 << 20))
    assert measure_budget(tmp_path / "run.log").cpu_s == Budget().cpu_s + 2
    assert measure_budget(tmp_path / "missing") == Budget()
