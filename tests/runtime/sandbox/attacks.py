"""Escapes: programs that try to get at something outside of their sandbox, and say `ESCAPED` when they did.

They end well as soon as they have said so: a program that ends otherwise is given no output.
They stand in text files, each under its name; `{...}` is filled in by the test with what lies outside (`Outside`).
Bombs say nothing: the test looks at what the host has left.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
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


def open_backend(name: str, num_slots: int, limits: Limits) -> Sandbox:
    """A sandbox by name. Skips when the kernel is too old for the second one."""
    importlib.import_module("sandlock")
    try:
        return open_sandbox(name, num_slots, limits)
    except HostError as error:
        if name == "bubblewrap":
            raise
        pytest.skip(error.what)


@contextmanager
def open_each(num_slots: int, limits: Limits) -> Iterator[Callable[[str], Sandbox]]:
    """Opens sandboxes by name, each once; all are closed with the block.

    A fixture that has the name as its parameter would be made anew for every test with a name of its own beside it.
    """
    with ExitStack() as stack:

        @cache
        def one(name: str) -> Sandbox:
            return stack.enter_context(closing(open_backend(name, num_slots, limits)))

        yield one


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
        "hangs its terminal up": "153, 58",
        "takes a file system away": "166, 39, b'/nowhere', 0",
        "swaps to a file": "167, 224, b'/nowhere', 0",
        "ends swapping": "168, 225, b'/nowhere'",
        "names the host's domain": "171, 162, b'x', -1",
        "takes the processor's ports": "172, 1000, 4",
        "unloads a module": "176, 106, b'nothing-of-this-name', 0o4000",
        "loads a module from a file": "313, 273, -1, b'', 0",
        "loads a kernel from files": "320, 294, -1, -1, 0, 0, 0",
        "adjusts the clock": "159, 171, ctypes.byref((ctypes.c_long * 64)(0x8000))",
        "adjusts one of the clocks": "305, 266, 0, ctypes.byref((ctypes.c_long * 64)(0x8000))",
        "changes its table of segments": "154, 1000, 99, 0, 0",
        "binds its memory to a node": "237, 235, 0, 0, 99, 0, 0, 0",
        "sets where its memory comes from": "238, 237, 99, 0, 0",
        "sets the home of its memory": "450, 450, 1, 0, 0, 0",
        "moves a process's memory to another node": "256, 238, 0, 99, 0, 0",
        "moves pages of a process": "279, 239, os.getppid(), 0, 0, 0, 0, 0",
        "requests a key": "249, 218, b'user', b'x', 0, -3",
        "reads a keyring": "250, 219, 11, -3, 0, 0",
        "gives pages to a pipe": "278, 75, -1, 0, 0, 0",
        "watches all files of the host": "300, 262, 0, 0",
        "asks for a file's handle": "303, 264, -100, b'/', 0, 0, 0",
        "writes to its parent's memory": "311, 271, os.getppid(), 0, 0, 0, 0, 0",
        "attaches shared memory": "30, 196, -1, 0, 0",
        "opens semaphores": "64, 190, 4242, 1, 0",
        "opens a queue of messages": "68, 186, 4242, 0",
        "watches a file": "254, 27, -1, b'/', 2",
        "asks for a priority in real time": "142, 118, 0, 0",
        "asks for a deadline": "314, 274, 0, 0, 0",
        "goes first at the disk": "251, 30, 1, os.getppid(), 0x2000",
        "enters an io_uring": "426, 426, -1, 0, 0, 0, 0",
        "registers with an io_uring": "427, 427, -1, 0, 0, 0",
        "opens a tree of mounts": "428, 428, -100, b'/', 1",
        "changes a tree of mounts while it opens it": "467, 467, -100, b'/', 1, 0, 0",
        "configures a file system": "431, 431, -1, 0, 0, 0, 0",
        "mounts what it has configured": "432, 432, -1, 0, 0",
        "picks a file system": "433, 433, -100, b'/', 0",
        "changes a mount": "442, 442, -100, b'/', 0, ctypes.byref((ctypes.c_uint64 * 4)()), 32",
        "changes quotas by a descriptor": "443, 443, -1, 0, 0, 0",
        "frees a process's memory": "448, 448, -1, 0",
        "reads a mount's state": "457, 457, 0, 0, 0, 0",
        "lists the mounts": "458, 458, 0, 0, 0, 0",
        "makes a root of its own time": "272, 97, 0x80",
        "sets the host's time": "164, 170, 0, ctypes.byref((ctypes.c_int * 2)(99, 99))",
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
    "takes a file system away",
    "swaps to a file",
    "ends swapping",
    "names the host's domain",
    "binds its memory to a node",
    "sets where its memory comes from",
    "moves pages of a process",
    "requests a key",
    "gives pages to a pipe",
    "attaches shared memory",
    "opens semaphores",
    "opens a queue of messages",
    "watches a file",
    "asks for a priority in real time",
    "asks for a deadline",
    "registers with an io_uring",
    "configures a file system",
    "picks a file system",
    "opens a terminal",
)
"""The same, but a kernel's age or settings, or not being root, may refuse them without a sandbox too."""
