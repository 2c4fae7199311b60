"""The system calls that a sandboxed program may not make, as a BPF program for `bwrap --seccomp`.

In: a machine's name. Out: bytes of `struct sock_filter`. What is denied gives EPERM, so that a program may go on.
Left out: reasons against a kernel bug in an allowed call; nothing on a shared kernel helps there.
Numbers: Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

import errno
import struct

_X86_64 = {
    "ptrace": 101, "syslog": 103, "personality": 135, "vhangup": 153, "modify_ldt": 154, "pivot_root": 155,
    "_sysctl": 156, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166,
    "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
    "create_module": 174, "init_module": 175, "delete_module": 176, "quotactl": 179, "nfsservctl": 180,
    "lookup_dcookie": 212, "clock_settime": 227, "mbind": 237, "set_mempolicy": 238, "mq_open": 240, "kexec_load": 246,
    "add_key": 248, "request_key": 249, "keyctl": 250, "migrate_pages": 256, "unshare": 272, "vmsplice": 278,
    "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "kcmp": 312, "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    "shmget": 29, "shmat": 30, "semget": 64, "msgget": 68, "flock": 73, "sync": 162, "fadvise64": 221,
    "inotify_init": 253, "inotify_add_watch": 254, "inotify_init1": 294, "syncfs": 306, "setpriority": 141,
    "sched_setparam": 142, "sched_setscheduler": 144, "ioprio_set": 251, "sched_setattr": 314,
}  # fmt: skip
_AARCH64 = {
    "ptrace": 117, "syslog": 116, "personality": 92, "vhangup": 58, "pivot_root": 41, "adjtimex": 171, "chroot": 51,
    "acct": 89, "settimeofday": 170, "mount": 40, "umount2": 39, "swapon": 224, "swapoff": 225, "reboot": 142,
    "sethostname": 161, "setdomainname": 162, "init_module": 105, "delete_module": 106, "quotactl": 60,
    "nfsservctl": 42, "lookup_dcookie": 18, "clock_settime": 112, "mbind": 235, "set_mempolicy": 237, "mq_open": 180,
    "kexec_load": 104, "add_key": 217, "request_key": 218, "keyctl": 219, "migrate_pages": 238, "unshare": 97,
    "vmsplice": 75, "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264,
    "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
    "kcmp": 272, "finit_module": 273, "memfd_create": 279, "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282,
    "shmget": 194, "shmat": 196, "semget": 190, "msgget": 186, "flock": 32, "sync": 81, "fadvise64": 223,
    "inotify_add_watch": 27, "inotify_init1": 26, "syncfs": 267, "setpriority": 140, "sched_setparam": 118,
    "sched_setscheduler": 119, "ioprio_set": 30, "sched_setattr": 274,
}  # fmt: skip
_BOTH = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "process_mrelease": 448, "cachestat": 451,
    "set_mempolicy_home_node": 450, "statmount": 457, "listmount": 458,
    "open_tree_attr": 467,
}  # fmt: skip
_CLONE3 = 435

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ARGUED = {
    "x86_64": {"clone": 56, "socket": 41, "socketpair": 53, "ioctl": 16, "prlimit64": 302, "sched_setaffinity": 203},
    "aarch64": {
        "clone": 220,
        "socket": 198,
        "socketpair": 199,
        "ioctl": 29,
        "prlimit64": 261,
        "sched_setaffinity": 122,
    },
}
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWTIME | NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET."""
_AF_UNIX = 1
_TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI, TIOCLINUX."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _instruction(_RETURN, 0x00050000 | error)


def denied_calls(machine: str) -> dict[str, int]:
    """Names and numbers of the calls that are denied whatever their arguments."""
    return {"x86_64": _X86_64, "aarch64": _AARCH64}[machine] | _BOTH


def deny_list(machine: str) -> bytes:
    """The filter for a machine (`x86_64`, `aarch64`). Raises: KeyError for any other.

    Denied beside the list: new namespaces by clone, sockets but AF_UNIX, characters pushed into a terminal, the x32
    way of calling, limits and cores of any process but the caller (the runner has the same uid). clone3 does not exist
    (its flags cannot be read), so that libraries fall back to clone.
    """
    argued = _ARGUED[machine]
    program = [_instruction(_LOAD, _ARCH), _instruction(_EQUAL, _AUDIT_ARCH[machine], 1, 0)]
    program += [_instruction(_RETURN, _KILL), _instruction(_LOAD, _NUMBER)]
    if machine == "x86_64":
        program += [_instruction(_AT_LEAST, 0x40000000, 0, 1), _instruction(_RETURN, _KILL)]
    for number in denied_calls(machine).values():
        program += [_instruction(_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    program += [_instruction(_EQUAL, _CLONE3, 0, 1), _refuse(errno.ENOSYS)]
    injections = [
        each for code in _TERMINAL_INJECTION for each in (_instruction(_EQUAL, code, 0, 1), _refuse(errno.EPERM))
    ]
    for number, position, test in (
        (argued["clone"], 0, [_instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _refuse(errno.EPERM)]),
        (argued["socket"], 0, [_instruction(_EQUAL, _AF_UNIX, 1, 0), _refuse(errno.EPERM)]),
        (argued["socketpair"], 0, [_instruction(_EQUAL, _AF_UNIX, 1, 0), _refuse(errno.EPERM)]),
        (argued["ioctl"], 1, injections),
        (argued["prlimit64"], 0, [_instruction(_EQUAL, 0, 1, 0), _refuse(errno.EPERM)]),
        (argued["sched_setaffinity"], 0, [_instruction(_EQUAL, 0, 1, 0), _refuse(errno.EPERM)]),
    ):
        body = [_instruction(_LOAD, _ARGUMENT + 8 * position), *test, _instruction(_RETURN, _ALLOW)]
        program += [_instruction(_EQUAL, number, 0, len(body)), *body]
    program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


_LOCK = """
import ctypes
def _lock(code):
    class Filter(ctypes.Structure):
        _fields_ = [("size", ctypes.c_ushort), ("code", ctypes.c_char_p)]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(Filter(len(code) // 8, code)), 0, 0):
        raise OSError(ctypes.get_errno(), "no list of denied calls can be put on")
_lock({code!r})
"""


def locking(machine: str) -> str:
    """Code that puts the list on, from inside, before a program is there. Raises: KeyError for another machine."""
    return _LOCK.format(code=deny_list(machine))
