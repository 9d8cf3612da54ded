"""A relay between a client and a server, on which tests delay or drop what passes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

HOST = "127.0.0.1"


async def start_relay(
    port: int, *, pause_s: float = 0.0, late_s: float = 0.0, passes: Callable[[bytes], bool] = lambda data: True
) -> asyncio.Server:
    """Listen for clients of the server at this port.

    ``pause_s``: time before a client's connection is passed on. ``late_s``: time for which data are on their way, in
    each direction. ``passes``: whether data are passed on or dropped. The connections end with either side, and with
    the event loop.
    """

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if passes(data):
                    asyncio.get_running_loop().call_later(late_s, sink.write, data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            await asyncio.sleep(pause_s)
            far_reader, far_writer = await asyncio.open_connection(HOST, port)
            with contextlib.closing(far_writer):
                ways = [asyncio.ensure_future(pump(*way)) for way in ((reader, far_writer), (far_reader, writer))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()

    return await asyncio.start_server(relay, HOST, 0)
