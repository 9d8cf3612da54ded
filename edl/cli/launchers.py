"""Asks the launchers of a job's nodes themselves: the Master knows where they are, and has no output of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import click
import grpc.aio

from edl.adapters.transport import NodeClient
from edl.cli.find import LOOK_FAILURES, NoAnswer, Where
from edl.cli.job_end import JobEnd
from edl.cli.output_text import nodes_to_ask
from edl.cli.polling import Finder
from edl.wire.node_requests import OutputLines, OutputRequest, StacksRequest
from edl.wire.records import NodeInfo

Show = Callable[[str, OutputLines], None]
"""Prints the lines of a node."""
MOST_FAILURES = 12
"""Consecutive failures to find the job after which following its output ends."""


class Launchers:
    """Connections to the launchers of some nodes, of all if neither nodes nor ranks are given."""

    def __init__(self, where: Where, nodes: Sequence[str], ranks: tuple[int, ...]) -> None:
        self._finder = Finder(where)
        self._nodes = nodes
        self._ranks = ranks
        self._clients: dict[NodeInfo, NodeClient] = {}
        self._next: dict[NodeInfo, int] = {}
        self._end = JobEnd(self._finder.connect)
        self._failures = 0

    async def find(self) -> None:
        """Look up the nodes and their addresses. Raises ``EdlError``: there is no Master, no such node or rank, or
        there are too many nodes."""
        async with self._finder.connect() as client:
            status = await client.status()
            self._end.see(status)
            found = nodes_to_ask(client.launchers, status, self._nodes, self._ranks)
            known = self._clients
            self._clients = {info: known[info] if info in known else client.launcher(info) for info in found}
        for info in known.keys() - self._clients.keys():
            self._next.pop(info, None)
            await known[info].close()

    async def find_again(self) -> bool:
        """Look up the nodes again; returns whether the job has ended. Between two worlds, or without a Master, the
        nodes stay the same. Raises the error if that lasts."""
        try:
            await self.find()
            self._failures = 0
        except LOOK_FAILURES as error:
            self._failures += 1
            if self._end.ending_of(error):
                return True
            if self._failures >= MOST_FAILURES:
                raise
        return False

    async def rest(self, seconds: float) -> bool:
        """Pause, at most until the job has ended; returns whether it has."""
        return await self._end.rest(asyncio.sleep(seconds)) is not None

    async def show_output(self, lines: int, show: Show, *, required: bool = False) -> bool:
        """Show the lines that were not shown before, at first the last ``lines`` of each worker; returns whether there
        are any. ``required``: raise ``NoAnswer`` if no launcher answers, and warn of those that do not."""

        async def ask(info: NodeInfo, client: NodeClient) -> OutputLines:
            found = await client.output(OutputRequest(self._ranks, lines, self._next.get(info, 0)))
            self._next[info] = found.next
            return found

        return await self._ask_all(ask, show, required)

    async def show_stacks(self, show: Show) -> bool:
        """Show the stacks of all workers; returns whether there are any. Raises ``NoAnswer`` if no launcher answers."""
        return await self._ask_all(lambda info, client: client.stacks(StacksRequest(self._ranks)), show, required=True)

    async def _ask_all(
        self, ask: Callable[[NodeInfo, NodeClient], Awaitable[OutputLines]], show: Show, required: bool
    ) -> bool:
        """Send the same request to all launchers and show their answers; returns whether there was any line."""
        calls = (ask(info, client) for info, client in self._clients.items())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        silent = []
        for info, answer in zip(self._clients, answers, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                silent.append(f"the launcher of node {info.node} does not answer ({answer.code().name.lower()})")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                show(info.node, answer)
        if required and silent and len(silent) == len(self._clients):
            raise NoAnswer(f"{silent[0]}. It may be about to end; see edl status")
        for text in silent if required else ():
            click.echo(f"edl: {text}", err=True)
        return any(isinstance(answer, OutputLines) and answer.lines for answer in answers)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._end.aclose()
        for client in self._clients.values():
            await client.close()
