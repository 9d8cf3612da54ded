"""Requests for the files of synchronised directories, served on the port for copies of snapshots (``copies``).

``changes`` is answered with a frame and a list. ``file`` is answered with the size, the bytes, and ``whole`` with their
CRC-32; with ``gone`` instead of the first or the last, if the file has changed meanwhile; or with ``no`` and a reason.
Files are sent in small pieces, so that neither side holds more than one of them in memory.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from edl.adapters.copy_connection import CopyConnection, CopyLimits, call, count_in, short
from edl.adapters.files import write_all
from edl.errors import CheckpointError, ProtocolError
from edl.ports import Clock, FileSource, LentFile

CHANGES = "changes"
FILE = "file"
_PIECE_BYTES = 256 * 1024
_PIECE_S = 30.0
"""Seconds that a piece may take."""
_LONGEST_LIST = 64 * 1024 * 1024


class TcpFileCopies:
    """Asks other launchers of the job over TCP; implements ``edl.ports.FileCopies``."""

    def __init__(self, token: Callable[[], str], clock: Clock, limits: CopyLimits | None = None) -> None:
        self._token = token
        self._clock = clock
        self._limits = limits or CopyLimits()

    def changes(self, host: str, port: int, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Ask for a node's changes: its report, and the list of them."""
        with call(host, port, self._token(), self._clock, self._limits) as line:
            line.send_frame({**request, "op": CHANGES})
            answer = line.receive_answer()
            size = count_in(answer, "size")
            if size > _LONGEST_LIST:
                raise ProtocolError(f"a list of {size} bytes is too long")
            line.within(line.time_for(size))
            return answer, line.read(size)

    def fetch(
        self, host: str, port: int, request: Mapping[str, Any], descriptor: int, arrived: Callable[[int], None]
    ) -> bool:
        """Fetch one file in small pieces, and compare its checksum. False: that node has it no longer."""
        with call(host, port, self._token(), self._clock, self._limits) as line:
            line.send_frame({**request, "op": FILE})
            answer = line.receive_answer()
            if "gone" in answer:
                return False
            left, crc32 = count_in(answer, "size"), 0
            while left:
                line.within(_PIECE_S)
                piece = line.read(min(left, _PIECE_BYTES))
                crc32 = zlib.crc32(piece, crc32)
                _write(descriptor, piece)
                left -= len(piece)
                arrived(len(piece))
            answer = line.receive_answer()
            if "gone" in answer:
                return False
            if answer.get("whole") != crc32:
                raise CheckpointError(f"a file was damaged in transit: checksum {crc32} instead of {short(answer)}")
            return True


def give_changes(line: CopyConnection, files: FileSource, request: Mapping[str, Any]) -> None:
    """Serve one request for changes."""
    frame, body = files.report(request)
    line.send_frame({**frame, "size": len(body)})
    line.within(line.time_for(len(body)))
    line.write(body)


def give_file(line: CopyConnection, files: FileSource, request: Mapping[str, Any]) -> None:
    """Serve one request for a file."""
    with contextlib.ExitStack() as loan:
        try:
            lent = loan.enter_context(files.lend(request))
        except CheckpointError as error:
            line.refuse(str(error))
            return
        if lent is None:
            line.send_frame({"gone": True})
            return
        _send(line, lent)


def _send(line: CopyConnection, lent: LentFile) -> None:
    line.send_frame({"size": lent.size})
    left, crc32 = lent.size, 0
    while left:
        piece = os.read(lent.descriptor, min(left, _PIECE_BYTES))
        if not piece:
            raise ProtocolError(f"the file has become shorter by {left} bytes while it was sent")
        crc32 = zlib.crc32(piece, crc32)
        line.within(_PIECE_S)
        line.write(piece)
        left -= len(piece)
    line.send_frame({"whole": crc32} if lent.unchanged() else {"gone": True})


def _write(descriptor: int, piece: bytes) -> None:
    try:
        write_all(descriptor, piece)
    except OSError as error:
        raise CheckpointError(f"cannot write here: {error.strerror}") from error
