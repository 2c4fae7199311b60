"""Memory limit that a process sets for itself after its imports, before it reads an untrusted file.

In: bytes. Out: a process in which allocations over the limit fail. Left out: time limits, which the caller enforces.
"""

import resource
from pathlib import Path


def limit_memory(more: int) -> None:
    """Let this process map at most `more` bytes in addition to its current mappings, and write no core file."""
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + more if hard == resource.RLIM_INFINITY else min(hard, mapped + more)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def raise_open_files() -> None:
    """Allow this process as many open files as it may have; shells allow 1,024, and a connection is one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
