"""The sockets of a process group, and how to shut them down.

gloo and torch's store offer no way to interrupt a call that waits for a peer. If edl shuts down the socket, they see it
as closed by the peer, so every call on it fails at once. Nor can NCCL be interrupted while it sets up a communicator:
it waits for peers on a listening socket and ignores callers that hang up, but gives up when ``accept`` fails.
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
"""A descriptor and the kernel's name of its socket, because descriptor numbers are reused."""

_POKE_TIMEOUT_S = 0.2
_CALLING = 2
"""TCP_SYN_SENT: an outgoing connection that has not been answered yet."""
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_WORD = struct.Struct("=I")
_SACKED = struct.Struct("=28xI")
"""``tcpi_sacked`` of ``struct tcp_info``, which holds the length of the queue in the case of a listener."""
_NCCL_QUEUE = 16384
"""The backlog that NCCL passes to ``listen``; the kernel caps it."""
_SOMAXCONN = "/proc/sys/net/core/somaxconn"
_ANY = ("0.0.0.0", "::")  # noqa: S104  compared with, not bound to


def sockets() -> frozenset[Socket]:
    """All open sockets of this process, of any kind."""
    found = []
    for name in os.listdir(FOLDER):
        with contextlib.suppress(OSError):  # closed meanwhile, such as the descriptor used to list the folder
            link = os.readlink(f"{FOLDER}/{name}")
            if link.startswith("socket:"):
                found.append((int(name), link))
    return frozenset(found)


def connections(addresses: Addresses) -> frozenset[Socket]:
    """The open connections of a group."""
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
        # Listed afterwards: the kernel gives a listener's port to no other connection, but it may reuse the port of a
        # closed listener, for example of a group that could not be formed.
        open_now = _listening()
        found |= {one for one, port in accepted.items() if port in open_now}
    if calling:
        called = _called()
        found |= {one for link, (one, here) in calling.items() if addresses.called(here, called.get(link))}
    return frozenset(found)


def _listening() -> frozenset[int]:
    """Ports on which this process listens."""
    return frozenset(opened.getsockname()[1] for _, opened in _each(sockets()) if _listens(opened))


def listeners(addresses: Addresses) -> frozenset[Socket]:
    """The sockets on which this process accepts connections from a group's ranks."""
    found = set()
    for one, opened in _each(sockets()):
        here, _ = _ends(opened)
        if here is not None and addresses.listens(here) and _listens(opened):
            found.add(one)
    return frozenset(found)


def listeners_of_nccl(before: frozenset[Socket]) -> frozenset[Socket]:
    """The sockets on which NCCL waits for peers, among those that were not open before. It listens on the address of
    one interface, with a longer queue than servers ask for."""
    found = set()
    queue = min(_NCCL_QUEUE, _longest_queue())
    for one, opened in _each(sockets() - before):
        here, _ = _ends(opened)
        if here is not None and _listens(opened) and here[0] not in _ANY and _queue(opened) == queue:
            found.add(one)
    return frozenset(found)


def _longest_queue() -> int:
    with contextlib.suppress(OSError, ValueError), open(_SOMAXCONN) as file:
        return int(file.read())
    return _NCCL_QUEUE


def _queue(listener: socket.socket) -> int:
    """The most connections that the kernel holds for a listener until they are accepted."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SACKED.size)
    return int(_SACKED.unpack(info)[0]) if len(info) == _SACKED.size else 0


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
    """The targets of unanswered outgoing connections; only the kernel's table lists them."""
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
    """Parse an address: ``0100007F:1F90`` is 127.0.0.1:8080, 4-byte words in the byte order of this machine."""
    host, _, port = text.partition(":")
    packed = b"".join(_WORD.pack(int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return endpoint(socket.inet_ntop(family, packed), int(port, 16))


def deafen(chosen: Iterable[Socket]) -> list[socket.socket]:
    """End the receiving side of those sockets that are TCP connections; ``hang_up`` does the rest.

    This takes two steps, because gloo drops a message that it could not write before it has read the end of the
    connection, and a caller that waits for that message would wait forever. So writing stays possible, here and on the
    other side: the returned sockets keep the connections open when gloo closes them.
    """
    deaf = []
    for _, opened in _each(chosen):
        if not _listens(opened):
            with contextlib.suppress(OSError):  # not connected, or the peer closed it first
                opened.shutdown(socket.SHUT_RD)
            deaf.append(opened.dup())
    return deaf


def hang_up(deaf: Iterable[socket.socket]) -> None:
    """Close these connections for both sides.

    A socket that was not connected may have become a listener of gloo, which ends the whole process when ``accept``
    fails, so listeners are left alone.
    """
    for opened in deaf:
        if not _listens(opened):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        opened.close()


def poke(chosen: Iterable[Socket], pairs: int) -> None:
    """Free a gloo group that waits for peers on these sockets: connect in place of the peers, once for each pair, and
    close the connection.

    The first eight bytes that gloo sends name the pair; a group numbers its pairs from 0.
    """
    for _, listener in _each(chosen):
        name = listener.getsockname()
        for pair in range(pairs):
            with contextlib.suppress(OSError), socket.socket(listener.family, socket.SOCK_STREAM) as caller:
                caller.settimeout(_POKE_TIMEOUT_S)
                caller.connect(name)
                caller.sendall(struct.pack("=q", pair))


def shut(chosen: Iterable[Socket]) -> None:
    """Make ``accept`` fail on these listeners, now and later."""
    for _, listener in _each(chosen):
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def _each(chosen: Iterable[Socket]) -> Iterator[tuple[Socket, socket.socket]]:
    """A duplicated descriptor for each TCP socket, closed afterwards; sockets that no longer exist are left out."""
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
