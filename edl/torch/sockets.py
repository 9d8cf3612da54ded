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

from edl.torch.addresses import Addresses, Endpoint, endpoint

FOLDER = "/proc/self/fd"
"""Where the kernel lists this process's descriptors. Linux only."""

Socket = tuple[int, str]
"""A descriptor and what the kernel calls the socket behind it, because numbers are used again."""

_POKE_TIMEOUT_S = 0.2
_CALLING = 2
"""TCP_SYN_SENT: a caller that nobody has answered yet."""
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_WORD = struct.Struct("=I")


def sockets() -> frozenset[Socket]:
    """All sockets open now, of whatever kind."""
    found = []
    for name in os.listdir(FOLDER):
        with contextlib.suppress(OSError):  # closed since, such as the descriptor that listed the folder
            link = os.readlink(f"{FOLDER}/{name}")
            if link.startswith("socket:"):
                found.append((int(name), link))
    return frozenset(found)


def connections(addresses: Addresses) -> frozenset[Socket]:
    """The connections of a group that are open now."""
    found, accepted, calling = set(), {}, {}
    for one, opened in _each(sockets()):
        if _listens(opened):
            continue
        here, there = _ends(opened)
        if here is None:
            continue
        if addresses.called(here, there):
            found.add(one)
        elif addresses.accepted(here):
            accepted[one] = here[1]
        elif there is None and opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CALLING:
            calling[one[1]] = (one, here)
    if accepted:
        # Looked at afterwards: the kernel gives the port of a listener to no caller, but that of one that has been
        # closed, as by a group that could not be formed, to whoever comes next.
        open_now = _listening()
        found |= {one for one, port in accepted.items() if port in open_now}
    if calling:
        called = _called()
        found |= {one for link, (one, here) in calling.items() if addresses.called(here, called.get(link))}
    return frozenset(found)


def _listening() -> frozenset[int]:
    """Ports at which this process listens."""
    return frozenset(opened.getsockname()[1] for _, opened in _each(sockets()) if _listens(opened))


def listeners(addresses: Addresses) -> frozenset[Socket]:
    """The sockets at which a group's ranks call this one."""
    found = set()
    for one, opened in _each(sockets()):
        here, _ = _ends(opened)
        if here is not None and addresses.listens(here) and _listens(opened):
            found.add(one)
    return frozenset(found)


def _ends(opened: socket.socket) -> tuple[Endpoint | None, Endpoint | None]:
    try:
        here = endpoint(*opened.getsockname()[:2])
    except (OSError, ValueError):
        return None, None
    try:
        return here, endpoint(*opened.getpeername()[:2])
    except (OSError, ValueError):
        return here, None


def _called() -> dict[str, Endpoint]:
    """Whom the sockets call that nobody has answered yet; only the kernel's table tells."""
    found: dict[str, Endpoint] = {}
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table) as lines:
            next(lines, None)
            for line in lines:
                words = line.split()
                if int(words[3], 16) == _CALLING:
                    found[f"socket:[{words[9]}]"] = _parsed(words[2])
    return found


def _parsed(text: str) -> Endpoint:
    """``0100007F:1F90`` is 127.0.0.1:8080: words of four bytes in the order of this machine."""
    host, _, port = text.partition(":")
    packed = b"".join(_WORD.pack(int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return endpoint(socket.inet_ntop(family, packed), int(port, 16))


def deafen(chosen: Iterable[Socket]) -> list[socket.socket]:
    """Let those of the sockets that are TCP connections read their end at once; ``hang_up`` does the rest.

    In two steps, because gloo forgets a message that it could not write before it has read the end of the connection,
    and whoever waits for that message waits on. So writing goes on being possible, here, and on the other side too:
    what is returned keeps the connection open when gloo closes it.
    """
    deaf = []
    for _, opened in _each(chosen):
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


def poke(chosen: Iterable[Socket], pairs: int) -> None:
    """Free a gloo group that waits at these sockets for peers to call: call in their stead, once for each of its
    pairs, and hang up.

    A caller of gloo's says with eight bytes which pair it is for; a group numbers its pairs from 0.
    """
    for _, listener in _each(chosen):
        name = listener.getsockname()
        for pair in range(pairs):
            with contextlib.suppress(OSError), socket.socket(listener.family, socket.SOCK_STREAM) as caller:
                caller.settimeout(_POKE_TIMEOUT_S)
                caller.connect(name)
                caller.sendall(struct.pack("=q", pair))


def _each(chosen: Iterable[Socket]) -> Iterator[tuple[Socket, socket.socket]]:
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
                yield (number, link), opened


def _listens(opened: socket.socket) -> bool:
    return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
