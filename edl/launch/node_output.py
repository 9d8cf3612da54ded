"""Asks the launcher of any node for the output and the stacks of its workers, as ``edl logs`` does, for HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc.aio

from edl.adapters.identity import Identity
from edl.adapters.transport import NodeClient
from edl.errors import StoreUnavailable, UsageError
from edl.ports import Store
from edl.types import NodeId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.node_requests import OutputLines, OutputRequest, StacksRequest
from edl.wire.records import NodeInfo


class NodeOutput:
    """Finds nodes in the store, not at the Master, which has no part in this."""

    def __init__(self, store: Store, keys: JobKeys, token: Callable[[], str], identity: Identity | None) -> None:
        self._store = store
        self._keys = keys
        self._token = token
        self._identity = identity

    async def output(self, node: str, request: OutputRequest) -> OutputLines:
        """Recent lines of the node's workers. Raises ``UsageError`` for an unknown node, ``StoreUnavailable`` if the
        store or the launcher does not answer."""
        return await self._ask(node, lambda client: client.output(request))

    async def stacks(self, node: str) -> OutputLines:
        """The stacks of the node's living workers. Raises as ``output``."""
        return await self._ask(node, lambda client: client.stacks(StacksRequest()))

    async def _ask(self, node: str, question: Callable[[NodeClient], Awaitable[OutputLines]]) -> OutputLines:
        info = await self._find(node)
        client = NodeClient(info.host, info.port, self._token(), identity=self._identity)
        try:
            return await question(client)
        except grpc.aio.AioRpcError as error:
            code = error.code().name.lower()
            raise StoreUnavailable(f"the launcher of node {node} does not answer ({code}). See the events") from error
        finally:
            await client.close()

    async def _find(self, node: str) -> NodeInfo:
        key = self._keys.node(NodeId(node))
        for entry in (await self._store.read(key)).entries:
            if entry.key == key:
                return plain.loads(NodeInfo, entry.value)
        raise UsageError(f"no launcher of node {node} is registered")
