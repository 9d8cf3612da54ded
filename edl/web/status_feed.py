"""The live status: read once a second for all readers together, and sent to them only where it has changed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

from edl.tasks import end
from edl.wire import json_messages
from edl.wire.status import JobStatus, NodeView

_FIELDS = tuple(field.name for field in dataclasses.fields(JobStatus) if field.name != "nodes")


@dataclasses.dataclass(frozen=True, slots=True)
class StatusChange:
    """The difference between two statuses."""

    fields: dict[str, Any]
    """New values of the fields of ``JobStatus`` that differ, except ``nodes``."""
    nodes: tuple[NodeView, ...]
    """Nodes that are new or differ."""
    gone: tuple[str, ...]
    """Names of nodes that are no longer there."""


def change_of(old: JobStatus, new: JobStatus) -> StatusChange:
    """What turns the old status into the new one, up to the order of the nodes, which follows from their positions."""
    fields = {name: getattr(new, name) for name in _FIELDS if getattr(new, name) != getattr(old, name)}
    before = {node.node: node for node in old.nodes}
    nodes = tuple(node for node in new.nodes if before.pop(node.node, None) != node)
    return StatusChange(fields, nodes, tuple(before))


class StatusFeed:
    """Server-sent events ``status``, a whole ``JobStatus``, and ``change``, a ``StatusChange`` to the event before.

    Readers have no queues. One that has missed a change, because it is slow or new, gets the whole status.
    """

    def __init__(self, read: Callable[[], JobStatus | None], interval_s: float) -> None:
        """``read``: the current status; None: this launcher is not the Master, and the streams end. ``interval_s``:
        least time in seconds between two events."""
        self._read = read
        self._interval_s = interval_s
        self._readers = 0
        self._reading: asyncio.Task[None] | None = None
        self._status: JobStatus | None = None
        self._number = 0
        """Counts the statuses that differ."""
        self._whole = ""
        """The event of the current status; empty until a reader needs it."""
        self._change = ""
        """The event of the last change; empty: there was none since the feed began."""
        self._published = asyncio.Event()
        self._last = False
        """Whether the current status is the last one."""

    async def follow(self) -> AsyncIterator[str]:
        """Events from now on, until there is no status any more, or the last one has been sent."""
        self._readers += 1
        try:
            if self._reading is None:
                self._status, self._change, self._whole = self._read(), "", ""
                self._number += 1
                self._reading = asyncio.get_running_loop().create_task(self._read_on())
            seen = 0
            while self._status is not None:
                if seen != self._number:
                    missed = seen != self._number - 1 or not self._change
                    seen = self._number
                    yield self._event() if missed else self._change
                elif self._last:
                    return
                else:
                    await self._published.wait()
        finally:
            self._readers -= 1
            if not self._readers:
                self._publish()  # for ``conclude``
            if not self._readers and self._reading is not None:
                reading, self._reading = self._reading, None
                await end(reading)

    async def conclude(self) -> None:
        """Send the current status as the last one, and wait until all readers have got it or are gone."""
        self._last = True
        self._renew()
        self._publish()
        while self._readers:
            await self._published.wait()

    def _event(self) -> str:
        """The event of the whole status."""
        if not self._whole:
            self._whole = _event("status", self._status)
        return self._whole

    async def _read_on(self) -> None:
        """Read the status until there is none, or no reader."""
        try:
            while self._status is not None:
                await asyncio.sleep(self._interval_s)
                if self._renew():
                    self._publish()
        finally:
            if self._reading is asyncio.current_task():  # else there may be a successor already
                self._status = None
                self._publish()

    def _renew(self) -> bool:
        """Read the status; returns whether it has changed."""
        old, new = self._status, self._read()
        if new == old:
            return False
        self._status, self._whole = new, ""
        if new is not None:
            self._number += 1
            self._change = _event("change", change_of(old, new)) if old is not None else ""
        return True

    def _publish(self) -> None:
        """Wake all readers."""
        published, self._published = self._published, asyncio.Event()
        published.set()


def _event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {json_messages.encode(value).decode()}\n\n"
