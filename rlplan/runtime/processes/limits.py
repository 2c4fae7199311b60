"""Limits: how much a process that reads what a stranger made may take; set by itself, after its imports.

In: bytes. Out: a process whose further allocations fail, or end it. Left out: seconds, which the caller watches.
"""

import resource
from pathlib import Path


def limit_memory(more: int) -> None:
    """Let this process map at most so many bytes more than it has mapped, and leave no core file."""
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + more if hard == resource.RLIM_INFINITY else min(hard, mapped + more)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
