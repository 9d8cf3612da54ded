"""Receives what the workers of this node report about collectives that they wait for."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edl.errors import ProtocolError
from edl.wire.collective_wait import ADDRESS_SUFFIX, LARGEST_BYTES, CollectiveWait, DumpRequest
from edl.wire.json_messages import decode, encode

FRESH_S = 10.0
"""An older report says nothing: its thread may have to wait for the interpreter's lock."""
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class _Report:
    wait: CollectiveWait
    at_s: float
    sender: str | bytes


class CollectiveReports:
    """Listens next to the worker server. ``address``: the worker server's, without the leading NUL."""

    def __init__(self, address: str, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._reports: dict[int, _Report] = {}
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._line.setblocking(False)
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            self._line.bind(f"\0{address}{ADDRESS_SUFFIX}")
        except OSError:
            self._line.close()
            raise

    def open(self) -> None:
        """Receive from now on. Requires a running event loop."""
        asyncio.get_running_loop().add_reader(self._line, self._readable)

    def close(self) -> None:
        """Stop receiving."""
        asyncio.get_running_loop().remove_reader(self._line)
        self._line.close()

    def waits(self) -> Mapping[int, CollectiveWait]:
        """What the workers wait for, by pid, as far as it is known at the moment."""
        oldest_s = self._now_s() - FRESH_S
        self._reports = {pid: report for pid, report in self._reports.items() if report.at_s >= oldest_s}
        return {pid: report.wait for pid, report in self._reports.items() if report.wait.state}

    def ask_dump(self, pid: int, path: str) -> bool:
        """Ask a worker to write its flight recorder's content to ``path``; returns whether it was asked. It writes
        within about a second, if at all."""
        report = self._reports.get(pid)
        if report is None:
            return False
        try:
            self._line.sendto(encode(DumpRequest(path)), report.sender)
        except OSError:
            return False
        return True

    def _readable(self) -> None:
        while True:
            try:
                data, extra, _, sender = self._line.recvmsg(LARGEST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:  # BlockingIOError: there is nothing more
                return
            found = [part for level, kind, part in extra if (level, kind) == _CREDENTIALS_OF]
            if not found or len(found[0]) < _CREDENTIALS.size or not sender:
                continue
            pid, uid, _ = _CREDENTIALS.unpack(found[0][: _CREDENTIALS.size])
            if uid == os.getuid():
                self._take(pid, data, sender)

    def _take(self, pid: int, data: bytes, sender: str | bytes) -> None:
        try:
            self._reports[pid] = _Report(decode(CollectiveWait, data), self._now_s(), sender)
        except ProtocolError:
            return  # a diagnosis: not worth a line in the log each second


_CREDENTIALS_OF = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
