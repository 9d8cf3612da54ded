"""A TCP proxy that damages what passes through it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from edl.testing.memory_copies import Trouble

HOST = "127.0.0.1"
TIMEOUT_S = 20.0


class Proxy:
    """Passes on what goes to a port and back, and spoils it on one way after so many bytes."""

    def __init__(self, port: int, trouble: Trouble, upwards: bool, after: int) -> None:
        self._target = port
        self._trouble = trouble
        self._upwards = upwards
        self._after = after
        self._listener = socket.create_server((HOST, 0))
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.port: int = self._listener.getsockname()[1]
        self._begin(self._accept)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # closing it would leave the thread in accept
        self._threads[0].join(TIMEOUT_S)
        self._hang_up()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for one in (self._listener, *self._ends):
            one.close()

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._ends.append(near)
                far = socket.create_connection((HOST, self._target))
                self._ends.append(far)
                for source, sink, upwards in ((near, far, True), (far, near, False)):
                    self._begin(self._pass, source, sink, upwards == self._upwards)

    def _pass(self, source: socket.socket, sink: socket.socket, spoil: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                due = self._after - passed
                passed += len(data)
                if spoil and 0 <= due < len(data):
                    if self._trouble is Trouble.STALL:
                        return
                    if self._trouble is Trouble.TRUNCATE:
                        self._hang_up()
                        return
                    data[due] ^= 1
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _hang_up(self) -> None:
        for one in self._ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
