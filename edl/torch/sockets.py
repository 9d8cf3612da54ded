"""The sockets of a process group, and how to cut them from outside.

gloo and torch's store offer no way to interrupt a call that waits for a peer. A socket that is shut down under them
looks to them as if the peer had hung up, so every call on it fails at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator

FOLDER = "/proc/self/fd"
"""Where the kernel lists this process's descriptors. Linux only."""

Socket = tuple[int, str]
"""A descriptor and what the kernel calls the socket behind it, because numbers are used again."""

_POKE_TIMEOUT_S = 0.2


def sockets() -> frozenset[Socket]:
    """All sockets open now, of whatever kind."""
    found = []
    for name in os.listdir(FOLDER):
        with contextlib.suppress(OSError):  # closed since, such as the descriptor that listed the folder
            link = os.readlink(f"{FOLDER}/{name}")
            if link.startswith("socket:"):
                found.append((int(name), link))
    return frozenset(found)


def deafen(chosen: Iterable[Socket]) -> list[socket.socket]:
    """Let those of the sockets that are TCP connections read their end at once; ``hang_up`` does the rest.

    In two steps, because gloo forgets a message that it could not write before it has read the end of the connection,
    and whoever waits for that message waits on. So writing goes on being possible, here, and on the other side too:
    what is returned keeps the connection open when gloo closes it.
    """
    deaf = []
    for opened in _opened(chosen):
        if not _listens(opened):
            with contextlib.suppress(OSError):  # not connected, or the other side was quicker
                opened.shutdown(socket.SHUT_RD)
            deaf.append(opened.dup())
    return deaf


def hang_up(deaf: Iterable[socket.socket]) -> None:
    """End these connections for both sides.

    One that was nothing yet may have become a listener of gloo's, which ends the whole process when ``accept`` fails.
    """
    for opened in deaf:
        if not _listens(opened):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        opened.close()


def poke(chosen: Iterable[Socket], pairs: int, spared_port: int) -> None:
    """Free a gloo group that waits for peers to call: call in their stead, once for each of its pairs, and hang up.

    A caller of gloo's says with eight bytes which pair it is for; a group numbers its pairs from 0. ``spared_port``:
    a listening socket that is not gloo's.
    """
    for listener in _opened(chosen):
        name = listener.getsockname()
        if not _listens(listener) or name[1] == spared_port:
            continue
        for pair in range(pairs):
            with contextlib.suppress(OSError), socket.socket(listener.family, socket.SOCK_STREAM) as caller:
                caller.settimeout(_POKE_TIMEOUT_S)
                caller.connect(name)
                caller.sendall(struct.pack("=q", pair))


def _opened(chosen: Iterable[Socket]) -> Iterator[socket.socket]:
    """A descriptor of our own for each TCP socket, closed afterwards; those that are gone are left out."""
    for number, link in chosen:
        try:
            own = os.dup(number)
        except OSError:
            continue
        try:
            still = os.readlink(f"{FOLDER}/{own}") == link
            opened = socket.socket(fileno=own) if still else None
        except OSError:
            opened = None
        if opened is None:
            os.close(own)
            continue
        with opened:
            if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM:
                yield opened


def _listens(opened: socket.socket) -> bool:
    return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
