"""Rendezvous: the socket at which the ranks of a group meet, open from the moment that its port is known.

In: an address. Out: a port, and the socket itself, once. Left out: the meeting (deepspeed_engine.py, lock_step.py).
"""

import socket

from rlplan.errors import HostError


class Rendezvous:
    """Rank 0's listening socket; nobody else gets its port before the ranks have met."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def open(self, address: str, port: int) -> int:
        """Listen; gives the port. 0 takes any free port. Raises: HostError when the port is taken."""
        self._listener = socket.socket()
        try:
            self._listener.bind((address, port))
        except OSError as error:
            raise HostError(
                f"port {port} cannot be used: {error.strerror}",
                where="hardware.rendezvous_port",
                rule="a free port, or 0 for any",
                way_out="set it to 0, or end what listens there",
            ) from None
        self._listener.listen()
        return int(self._listener.getsockname()[1])

    def take(self) -> int | None:
        """The socket's descriptor, which is the taker's from now on; None on the other ranks."""
        listener, self._listener = self._listener, None
        return None if listener is None else listener.detach()
