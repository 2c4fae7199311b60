"""Uids of sandboxes: each uid belongs to one sandbox of the host at a time.

The kernel counts processes per uid (RLIMIT_NPROC). If two runs shared a uid, a program of one could use up the process
limit of the other. A process claims a uid by binding an abstract Unix socket with its number, which the kernel releases
however the process ends.

In: a count. Out: ClaimedUids. Left out: runs in separate network namespaces, which do not see each other's sockets.
"""

import contextlib
import errno
import socket
import weakref

from rlplan.errors import HostError

FIRST_UID, NUM_UIDS = 61_200, 1_000
"""The range of claimed uids, which common systems leave unused."""


class ClaimedUids:
    """`count` uids, held until `close`. Raises: HostError when too few are left."""

    def __init__(self, count: int) -> None:
        self.numbers: list[int] = []
        claims = contextlib.ExitStack()
        self._release = weakref.finalize(self, claims.close)
        for number in range(FIRST_UID, FIRST_UID + NUM_UIDS):
            if len(self.numbers) < count and (claim := _claim(number)) is not None:
                claims.enter_context(claim)
                self.numbers.append(number)
        if len(self.numbers) < count:
            self.close()
            raise HostError(
                f"sandboxes need {count} uids, and {len(self.numbers)} are free",
                where=f"uids {FIRST_UID} to {FIRST_UID + NUM_UIDS - 1}",
                rule="every sandbox of this host has a uid of its own",
                way_out="end other runs on this host, or lower limits.num_reward_workers",
            )

    def close(self) -> None:
        self._release()


def _claim(number: int) -> socket.socket | None:
    """The socket that claims a uid; None when another process holds it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0rlplan-sandbox-uid-{number}")
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim
