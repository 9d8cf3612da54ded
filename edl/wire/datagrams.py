"""Receives messages and descriptors from a ``SOCK_SEQPACKET`` socket whose other end may have ended."""

from __future__ import annotations

import array
import socket

from edl.wire.memory_file import LARGEST_BYTES


def receive(channel: socket.socket, most_descriptors: int = 0) -> tuple[bytes, list[int]]:
    """The next message, and the descriptors that came with it, which programs started later do not inherit; an empty
    message once the other end has closed. Raises ``BlockingIOError`` or ``TimeoutError`` if the socket does not wait
    for a message, or no longer.

    If the other end closes before it has read everything, the kernel reports a reset, once, and only then delivers the
    messages that were sent before.
    """
    descriptors = array.array("i")
    room = socket.CMSG_LEN(most_descriptors * descriptors.itemsize) if most_descriptors else 0
    while True:
        try:
            # Not recv_fds(), which drops its flags.
            data, extra, _, _ = channel.recvmsg(LARGEST_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            continue
        except (BlockingIOError, TimeoutError):
            raise
        except OSError:
            return b"", []
        for level, kind, content in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        return data, descriptors.tolist()
