"""Output and stacks of any node, from its launcher over gRPC on loopback, found in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from edl.adapters.transport import MasterServer
from edl.agent.workers.recent_output import RecentOutput
from edl.errors import StoreUnavailable, UsageError
from edl.launch.node_output import NodeOutput
from edl.ports import Put
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import Incarnation, JobId, NodeId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.node_requests import OptionValues, OutputLine, OutputLines, OutputRequest, StacksRequest
from edl.wire.records import NodeInfo

KEYS = JobKeys(JobId("job"))
RIGHT, WRONG = "right", "wrong"
"""Tokens."""


class Node:
    """A launcher with one worker."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.recent = RecentOutput()
        self.server = MasterServer(lambda: RIGHT)

    def output(self, request: OutputRequest) -> OutputLines:
        return self.recent.read(request)

    async def stacks(self, request: StacksRequest) -> OutputLines:
        return OutputLines((OutputLine(0, 1, True, f"stacks of {self.name}"),), 1)

    def options(self) -> OptionValues:
        return OptionValues(())


def play(scenario: Callable[[NodeOutput, Node, MemoryStore], Awaitable[None]], token: str = RIGHT) -> None:
    """Nodes ``n-1``, which the scenario gets, and ``n-10``."""

    async def whole() -> None:
        store, nodes = MemoryStore(FakeClock()), [Node("n-10"), Node("n-1")]
        for node in nodes:
            port = await node.server.start("127.0.0.1")
            node.server.serve_node(node)
            info = NodeInfo(NodeId(node.name), Incarnation(1), "127.0.0.1", port, 1)
            await store.write((Put(KEYS.node(info.node), plain.dumps(info)),))
        try:
            await scenario(NodeOutput(store, KEYS, lambda: token, None), nodes[1], store)
        finally:
            for node in nodes:
                await node.server.stop()

    asyncio.run(whole())


def test_lines_and_stacks_of_the_node_that_is_named() -> None:
    async def scenario(output: NodeOutput, node: Node, store: MemoryStore) -> None:
        node.recent.add(0, 0, 1, False, [b"first", b"second"])
        found = await output.output("n-1", OutputRequest(lines=1))
        assert [line.text for line in found.lines] == ["second"]
        node.recent.add(0, 0, 1, False, [b"third"])
        later = await output.output("n-1", OutputRequest(after=found.next))
        assert [line.text for line in later.lines] == ["third"]
        assert [line.text for line in (await output.stacks("n-1")).lines] == ["stacks of n-1"]
        assert [line.text for line in (await output.stacks("n-10")).lines] == ["stacks of n-10"]

    play(scenario)


def test_a_node_that_is_not_there() -> None:
    async def scenario(output: NodeOutput, node: Node, store: MemoryStore) -> None:
        for name in ("n", "n-", "n-2", "n-1/x"):
            with pytest.raises(UsageError, match="is registered"):
                await output.stacks(name)

    play(scenario)


def test_a_launcher_or_a_store_that_does_not_answer() -> None:
    async def scenario(output: NodeOutput, node: Node, store: MemoryStore) -> None:
        await node.server.stop()
        with pytest.raises(StoreUnavailable, match="launcher of node n-1 does not answer"):
            await output.stacks("n-1")
        store.available = False
        with pytest.raises(StoreUnavailable):
            await output.stacks("n-10")

    play(scenario)


def test_the_launcher_checks_the_token() -> None:
    async def scenario(output: NodeOutput, node: Node, store: MemoryStore) -> None:
        with pytest.raises(StoreUnavailable, match="unauthenticated"):
            await output.output("n-1", OutputRequest())

    play(scenario, token=WRONG)
