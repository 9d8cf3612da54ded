"""Sends a response in parts as they come: the history, and the live status."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from aiohttp import web

from edl.web.settings import HttpLimits
from edl.wire import json_messages
from edl.wire.status import HistoryEntry

T = TypeVar("T")


async def stream(
    request: web.BaseRequest,
    response: web.StreamResponse,
    parts: AsyncIterator[T],
    text_of: Callable[[T], str],
    heartbeat: str,
    limits: HttpLimits,
) -> None:
    """Send the text of each part, and the heartbeat every ``heartbeat_s`` without parts. A client that does not read
    within ``send_s`` is disconnected."""
    waiting: asyncio.Future[T] | None = None
    try:
        while True:
            if waiting is None:
                waiting = asyncio.ensure_future(parts.__anext__())
            done, _ = await asyncio.wait({waiting}, timeout=limits.heartbeat_s)
            text = heartbeat
            if done:
                try:
                    text = text_of(waiting.result())
                except StopAsyncIteration:
                    break
                finally:
                    waiting = None
            await asyncio.wait_for(response.write(text.encode()), limits.send_s)
        await asyncio.wait_for(response.write_eof(), limits.send_s)
    except asyncio.TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait({waiting})


async def page_of(entries: AsyncIterator[HistoryEntry], before: int, last: int) -> AsyncIterator[HistoryEntry]:
    """The newest ``last`` entries with numbers below ``before``, oldest first; 0: no limit."""
    kept: collections.deque[HistoryEntry] = collections.deque(maxlen=last or None)
    try:
        async for entry in entries:
            if before and entry.number >= before:
                break
            kept.append(entry)
    finally:
        await close(entries)
    for entry in kept:
        yield entry


def line(entry: HistoryEntry) -> str:
    """An entry as a line of JSON."""
    return f"{json_messages.encode(entry).decode()}\n"


def event(entry: HistoryEntry) -> str:
    """An entry as a server-sent event."""
    return f"id: {entry.number}\nevent: {entry.kind}\ndata: {line(entry)}\n"


async def close(parts: AsyncIterator[T]) -> None:
    """End an iterator that may be a generator."""
    end = getattr(parts, "aclose", None)
    if end is not None:
        await end()
