"""Uids of sandboxes: each belongs to one sandbox of this host at a time.

The kernel counts processes by uid (RLIMIT_NPROC): of two runs with the same uids, a program of one that starts as many
as it may would leave none to the other. A uid is claimed by binding an abstract Unix socket of its name, so that it is
free again whenever its process ends, however that ends.
In: how many. Out: ClaimedUids. Left out: runs in network namespaces of their own, which do not see each other's names.
"""

import contextlib
import errno
import socket
import weakref

from rlplan.errors import HostError

FIRST_UID, NUM_UIDS = 61_200, 1_000
"""Uids from here on are unused on the usual systems."""


class ClaimedUids:
    """So many uids, until `close`. Raises: HostError where too few are left."""

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
                f"{count} uids for sandboxes are needed, {len(self.numbers)} are left",
                where=f"uids {FIRST_UID} to {FIRST_UID + NUM_UIDS - 1}",
                rule="every sandbox of this host has a uid of its own",
                way_out="end other runs on this host, or lower limits.num_reward_workers",
            )

    def close(self) -> None:
        """Others may have them now."""
        self._release()


def _claim(number: int) -> socket.socket | None:
    """None where another process has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0rlplan-sandbox-uid-{number}")
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim
