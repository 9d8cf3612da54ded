"""Reserves ports for the next round until the workers take them over.

The sockets are bound but never listen. Both sides set SO_REUSEADDR (the frameworks' stores do), so a worker can bind
and listen on the same port, while the kernel gives it to no other program: launchers on one host do not race for free
ports.
"""

from __future__ import annotations

import socket


class PortReservation:
    """Ports of this host that no other program is given."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._used = False

    def ports(self, count: int) -> tuple[int, ...]:
        """The ports reserved for the next round, the same ones until ``use`` is called. Raises ``OSError``."""
        if self._used or len(self._sockets) != count:
            fresh = PortReservation()
            try:
                fresh._bind(count)
            except OSError:
                fresh.release()
                raise
            self.release()  # only now, so that the new ports differ from the old ones
            self._sockets = fresh._sockets
        return tuple(held.getsockname()[1] for held in self._sockets)

    def _bind(self, count: int) -> None:
        for _ in range(count):
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._sockets.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))

    def use(self) -> None:
        """A round has started with these ports; reserve others for the next one."""
        self._used = True

    def release(self) -> None:
        """Close the sockets that reserve the ports."""
        for held in self._sockets:
            held.close()
        self._sockets.clear()
        self._used = False
