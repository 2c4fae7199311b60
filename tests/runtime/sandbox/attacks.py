"""Escapes: programs that try to get at something outside of their sandbox, and say `ESCAPED` when they did.

They end well as soon as they have said so: a program that ends otherwise is given no output.
They stand in text files, each under its name; `{...}` is filled in by the test with what lies outside (`Outside`).
Bombs say nothing: the test looks at what the host has left.
"""

import importlib
from pathlib import Path

import pytest

from rlplan.errors import HostError
from rlplan.runtime.sandbox.choice import open_sandbox
from rlplan.runtime.sandbox.programs import Limits, Sandbox

HERE = Path(__file__).parent
SAYS = """
import os
def escaped(*what):
    os.write(1, b"ESCAPED " + ascii(what)[:500].encode())
    os._exit(0)
"""
CALL = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def syscall(x86, arm, *arguments):
    number = x86 if platform.machine() == "x86_64" else arm
    result = libc.syscall(number, *arguments)
    return result, ctypes.get_errno()
def reached(result):
    # anything but a refusal counts: EPERM, EACCES, ENOSYS
    if result[0] >= 0 or result[1] not in (1, 13, 38):
        escaped(result)
"""
NETWORK = """
import socket
def attempt(make):
    try:
        make()
    except OSError:
        return
    escaped()
"""


def opened(name: str, num_slots: int, limits: Limits) -> Sandbox:
    """A sandbox by name. Skips where the kernel is too old for the second one; both are installed."""
    importlib.import_module("sandlock")
    try:
        return open_sandbox(name, num_slots, limits)
    except HostError as error:
        if name != "sandlock":
            raise
        pytest.skip(error.what)


def read_programs(name: str, before: str = "") -> dict[str, str]:
    """Programs of a text file by name."""
    parts = (HERE / name).read_text(encoding="utf-8").split("#: ")[1:]
    return {part.partition("\n")[0]: before + part.partition("\n")[2] for part in parts}


KERNEL = {
    name: SAYS + CALL + f"reached(syscall({arguments}))"
    for name, arguments in {
        "traces its parent": "101, 117, 16, os.getppid(), 0, 0",
        "reads its parent's memory": "310, 270, os.getppid(), 0, 0, 0, 0, 0",
        "makes a user namespace": "272, 97, 0x10000000",
        "clones into a new namespace": "56, 220, 0x10000011, 0, 0, 0, 0",
        "joins a namespace": "308, 268, 0, 0",
        "mounts": "165, 40, b'none', b'/tmp', b'tmpfs', 0, 0",
        "opens a file system": "430, 430, b'tmpfs', 0",
        "moves a mount": "429, 429, 0, b'', 0, b'', 0",
        "pivots its root": "155, 41, b'/', b'/'",
        "changes its root": "161, 51, b'/tmp'",
        "makes a file in memory": "319, 279, b'x', 0",
        "makes a secret file in memory": "447, 447, 0",
        "loads a BPF program": "321, 280, 0, 0, 0",
        "opens an io_uring": "425, 425, 8, 0",
        "handles its own page faults": "323, 282, 0",
        "joins the host's keyring": "250, 219, 1, 0",
        "adds a key": "248, 217, b'user', b'x', b'y', 1, -3",
        "watches the processor": "298, 241, 0, 0, -1, -1, 0",
        "steals a descriptor": "438, 438, 0, 0, 0",
        "opens by handle": "304, 265, -100, 0, 0",
        "reads the kernel's log": "103, 116, 3, 0, 0",
        "sets the clock": "227, 112, 0, 0",
        "names the host": "170, 161, b'x', 1",
        "loads a module": "175, 105, 0, 0, b''",
        "loads a kernel": "246, 104, 0, 0, 0, 0",
        "reboots": "169, 142, 0xfee1dead, 672274793, 0x4321fedc, 0",
        "turns randomisation off": "135, 92, 0x0040000",
        "compares processes": "312, 272, 1, 1, 0, 0, 0",
        "makes System V shared memory": "29, 194, 4242, 4096, 0o1666",
        "makes a message queue": "240, 180, b'x', 0o100, 0o600, 0",
        "changes its quotas": "179, 60, 0, 0, 0, 0",
        "keeps accounts": "163, 89, 0",
        "watches the host's files": "294, 26, 0",
        "holds a lock that the host would see": "73, 32, os.open(os.__file__, os.O_RDONLY), 6",
        "flushes the host's disks": "162, 81",
        "flushes one of the host's disks": "306, 267, os.open(os.__file__, os.O_RDONLY)",
        "drops what the host has cached": "221, 223, os.open(os.__file__, os.O_RDONLY), 0, 0, 4",
        "looks at what the host has cached": "451, 451, os.open(os.__file__, os.O_RDONLY), 0, 0, 0",
        "advises another process about its memory": "440, 440, -1, 0, 0, 21, 0",
        "opens a pair of sockets of a rare family": "53, 199, 30, 5, 0, ctypes.byref((ctypes.c_int * 2)())",
        "takes its runner's limits": ("302, 261, os.getppid(), 7, ctypes.byref((ctypes.c_ulong * 2)(64, 64)), 0"),
        "slows its runner down": "141, 140, 0, os.getppid(), 19",
        "idles its runner": "144, 119, os.getppid(), 5, ctypes.byref(ctypes.c_int(0))",
        "ties its runner to a core": "203, 122, os.getppid(), 8, ctypes.byref(ctypes.c_ulong(1))",
        "asks for real time": "144, 119, 0, 1, ctypes.byref(ctypes.c_int(50))",
        "takes its limits back": "160, 164, 6, ctypes.byref((ctypes.c_ulong * 2)(10**6, 10**6))",
        "gives itself capabilities": (
            "126, 91, ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), "
            "ctypes.byref((ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6))"
        ),
    }.items()
}


BOMBS = read_programs("bombs.txt")
ESCAPES = read_programs("escapes.txt", SAYS + CALL) | read_programs("network_escapes.txt", SAYS + NETWORK) | KERNEL

SHOWN_BARE = (
    "reads the host's password file",
    "reads a file of the host's that everybody may read",
    "reads it through a relative path",
    "finds homes, configuration or mounts",
    "reads the library that judges it",
    "hides a file for the next program",
    "keeps shared memory for the next program",
    "reads its own memory map",
    "reads the judge's memory",
    "reads what the host mounts",
    "reads the kernel's settings",
    "kills a process of the host",
    "starts a shell",
    "pushes keys into a terminal",
    "asks the kernel for what it may not ask, from a filter of its own",
    "could get a capability back",
    "connects to the host over TCP",
    "sends the host a datagram",
    "speaks netlink",
    "reaches an abstract socket",
    "listens",
    "joins a namespace",
    "makes a file in memory",
    "joins the host's keyring",
    "steals a descriptor",
    "opens by handle",
    "turns randomisation off",
    "watches the host's files",
    "holds a lock that the host would see",
    "drops what the host has cached",
    "advises another process about its memory",
    "opens a pair of sockets of a rare family",
    "takes its runner's limits",
    "slows its runner down",
    "idles its runner",
    "ties its runner to a core",
)
"""Attacks that do no harm on a host without a sandbox: there they succeed, so they really try something."""
SHOWN_WHERE_ALLOWED = (
    "lists root's home",
    "opens the memory or the disk",
    "becomes root",
    "joins root's group",
    "calls the kernel in its x32 way",
    "connects to the host over IPv6",
    "opens a raw socket",
    "opens a packet socket",
    "reads its parent's memory",
    "makes a user namespace",
    "clones into a new namespace",
    "opens a file system",
    "moves a mount",
    "changes its root",
    "makes a secret file in memory",
    "loads a BPF program",
    "opens an io_uring",
    "handles its own page faults",
    "watches the processor",
    "changes its quotas",
    "looks at what the host has cached",
    "asks for real time",
)
"""The same, but a kernel's age or settings, or not being root, may refuse them without a sandbox too."""
