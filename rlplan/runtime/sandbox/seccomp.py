"""The seccomp deny list for sandboxed programs, as a BPF program for `bwrap --seccomp`.

In: a machine's name. Out: bytes of `struct sock_filter`. A denied call fails with EPERM, so a program may continue.
The calls and their numbers are in syscalls.json. Left out: protection from kernel bugs in allowed calls.
"""

import errno
import json
import struct
from pathlib import Path

_CALLS = json.loads(Path(__file__).with_name("syscalls.json").read_text("utf-8"))
_ARGUED: dict[str, dict[str, int]] = _CALLS["argued"]
"""Calls that are denied for some arguments only."""
_CLONE3 = 435

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWTIME | NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET."""
_AF_UNIX = 1
_TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI, TIOCLINUX."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def _encode_instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _encode_instruction(_RETURN, 0x00050000 | error)


def read_denied_calls(machine: str) -> dict[str, int]:
    """Names and numbers of calls that are denied for all arguments."""
    calls: dict[str, int] = _CALLS["denied"][machine] | _CALLS["denied"]["both"]
    return calls


def build_deny_list(machine: str) -> bytes:
    """The filter for a machine (`x86_64`, `aarch64`). Raises: KeyError for any other.

    The filter also denies new namespaces through clone, sockets other than AF_UNIX, input injected into a terminal,
    and the x32 ABI. A process may change the limits and CPU affinity of itself only, as the runner has the same uid.
    clone3 fails with ENOSYS, because a filter cannot read its flags; libraries then fall back to clone.
    """
    argued = _ARGUED[machine]
    # Another architecture's call numbers would bypass the list, so a call through one kills the process.
    program = [_encode_instruction(_LOAD, _ARCH), _encode_instruction(_EQUAL, _AUDIT_ARCH[machine], 1, 0)]
    program += [_encode_instruction(_RETURN, _KILL), _encode_instruction(_LOAD, _NUMBER)]
    if machine == "x86_64":  # numbers from 0x40000000 on are the x32 ABI
        program += [_encode_instruction(_AT_LEAST, 0x40000000, 0, 1), _encode_instruction(_RETURN, _KILL)]
    for number in read_denied_calls(machine).values():
        program += [_encode_instruction(_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    program += [_encode_instruction(_EQUAL, _CLONE3, 0, 1), _refuse(errno.ENOSYS)]
    injections = [
        instruction
        for code in _TERMINAL_INJECTION
        for instruction in (_encode_instruction(_EQUAL, code, 0, 1), _refuse(errno.EPERM))
    ]
    # A jump of 0 in `test` runs the next instruction, which denies the call; a jump of 1 skips it.
    for number, position, test in (
        (argued["clone"], 0, [_encode_instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _refuse(errno.EPERM)]),
        (argued["socket"], 0, [_encode_instruction(_EQUAL, _AF_UNIX, 1, 0), _refuse(errno.EPERM)]),
        (argued["socketpair"], 0, [_encode_instruction(_EQUAL, _AF_UNIX, 1, 0), _refuse(errno.EPERM)]),
        (argued["ioctl"], 1, injections),
        (argued["prlimit64"], 0, [_encode_instruction(_EQUAL, 0, 1, 0), _refuse(errno.EPERM)]),
        (argued["sched_setaffinity"], 0, [_encode_instruction(_EQUAL, 0, 1, 0), _refuse(errno.EPERM)]),
    ):
        body = [_encode_instruction(_LOAD, _ARGUMENT + 8 * position), *test, _encode_instruction(_RETURN, _ALLOW)]
        program += [_encode_instruction(_EQUAL, number, 0, len(body)), *body]
    program.append(_encode_instruction(_RETURN, _ALLOW))
    return b"".join(program)


# prctl 38 is PR_SET_NO_NEW_PRIVS, without which only root may install a filter; 22, 2 is PR_SET_SECCOMP, FILTER.
_LOCK = """
import ctypes
def _lock(code):
    class Filter(ctypes.Structure):
        _fields_ = [("size", ctypes.c_ushort), ("code", ctypes.c_char_p)]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(Filter(len(code) // 8, code)), 0, 0):
        raise OSError(ctypes.get_errno(), "the seccomp filter cannot be installed")
_lock({code!r})
"""


def compose_filter_code(machine: str) -> str:
    """Code that installs the filter from inside, before the program is loaded. Raises: KeyError for other machines."""
    return _LOCK.format(code=build_deny_list(machine))
