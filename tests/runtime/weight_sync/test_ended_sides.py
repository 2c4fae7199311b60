"""Who waits for the other side of a channel learns at once that it has ended."""

import fcntl
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from rlplan.memory.weight_sync.packets import plan_packets
from rlplan.runtime.weight_sync.channel import Endpoint, GivenUpError, Update
from rlplan.runtime.weight_sync.sender import PolicySender
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.runtime.weight_sync.transports.disk import SENDER as SENDER_FILE
from rlplan.runtime.weight_sync.transports.disk import DiskInlet, Sender, _process_namespace
from rlplan.vocabulary import Transport
from tests.factories import ROOT
from tests.runtime.weight_sync.test_transports import MODEL, Weights
from tests.waiting import limit_time

READER = """
import sys, time
from rlplan.runtime.weight_sync.transports.arena import ControlPage
page = ControlPage(sys.argv[1], int(sys.argv[2]), 1)
print("up", flush=True)
time.sleep(600)
"""


def test_a_sender_learns_at_once_that_a_reader_has_been_killed(tmp_path: Path) -> None:
    packets = plan_packets(MODEL.parameters, 4, 1)
    sender = PolicySender(packets, torch.float32)
    offered = sender.offer(Endpoint(Transport.SHARED_MEMORY, 1))
    command = [sys.executable, "-c", READER, offered.path, str(len(packets))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"up\n"
        killer = threading.Timer(0.3, reader.kill)
        killer.start()
        try:
            with limit_time(2.0), pytest.raises(GivenUpError, match=rf"has ended \(process {reader.pid}\) in update 1"):
                sender.send(WeightSource(Weights(0, torch.float32)), Update(1, 1, True, 300.0))
        finally:
            killer.join()
    sender.close()


SENDER = """
import sys, time
from pathlib import Path
from rlplan.memory.weight_sync.packets import plan_packets
from rlplan.runtime.weight_sync.channel import Endpoint, Update
from rlplan.runtime.weight_sync.transports.disk import DiskOutlet
from rlplan.vocabulary import Transport
from tests.factories import make_model
outlet = DiskOutlet(Endpoint(Transport.DISK, 1, path=sys.argv[1]), plan_packets(make_model().parameters, 4, 1))
outlet.begin(Update(1, 1, True, 300.0))
print("up", flush=True)
time.sleep(600)
"""


def test_a_reader_of_files_learns_at_once_that_the_sender_has_been_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SENDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"up\n"
        inlet = DiskInlet(Endpoint(Transport.DISK, 1, path=str(tmp_path)), plan_packets(MODEL.parameters, 4, 1), 0)
        inlet.begin(Update(1, 1, True, 300.0))
        killer = threading.Timer(0.3, sender.kill)
        killer.start()
        try:
            with limit_time(2.0), pytest.raises(GivenUpError, match=rf"has ended \(process {sender.pid}\) in version"):
                inlet.take(0)
        finally:
            killer.join()
    inlet.close()


def own_sender(folder: Path) -> Path:
    """The file of a sender that lives: this process."""
    (folder / SENDER_FILE).write_text(f"{os.getpid()} {_process_namespace()}")
    return folder / SENDER_FILE


def test_a_sender_that_the_kernel_does_not_show_is_taken_for_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    sender = Sender(own_sender(tmp_path))
    assert sender.find_ended() is None
    sender.close()


def test_a_process_with_more_than_a_thousand_files_open_sees_its_sender_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    shown = os.pidfd_open(os.getpid())
    try:
        monkeypatch.setattr(os, "pidfd_open", lambda pid: fcntl.fcntl(shown, fcntl.F_DUPFD_CLOEXEC, 1024))
        sender = Sender(own_sender(tmp_path))
        assert sender.find_ended() is None
        sender.close()
    finally:
        os.close(shown)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
