"""Watches of the store that an elected Master runs: they turn changes of keys into events for its queue.

A watch that ends puts its error into the queue: a Master that does not see nodes or helpers join and leave must step
down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edl.errors import StoreError
from edl.master import events as ev
from edl.master import service as sv
from edl.master.hosting import Hosted
from edl.master.stored import readable
from edl.ports import ChangeKind, HelperConnections, Store
from edl.types import NodeId
from edl.wire.records import NodeInfo


async def watch_nodes(
    store: Store,
    prefix: str,
    revision: int,
    present: Sequence[NodeInfo],
    put: Callable[[ev.Event | Exception], None],
    log: Callable[[str], None],
) -> None:
    """Report the nodes that register and whose leases end after ``revision``. ``present``: those registered then."""
    known = {info.node: info.incarnation for info in present}
    try:
        async for change in store.watch(prefix, revision):
            node = NodeId(change.entry.key[len(prefix) :])
            if change.kind is ChangeKind.PUT:
                values = {change.entry.key: change.entry.value}
                for info in readable(NodeInfo, values, prefix, log):
                    known[node] = info.incarnation
                    put(ev.NodeRegistered(info))
            elif node in known:
                put(ev.NodeExpired(node, known.pop(node)))
    except StoreError as error:
        put(error)


async def watch_helpers(
    store: Store,
    prefix: str,
    revision: int,
    put: Callable[[Hosted | Exception], None],
    connections: HelperConnections | None,
) -> None:
    """Report the helpers whose keys appear and disappear after ``revision``, and keep connections to them."""
    try:
        async for change in store.watch(prefix, revision):
            whole = change.entry.key[len(prefix) :]
            service, _, name = whole.partition("/")
            if change.kind is ChangeKind.PUT:
                put(Hosted(service, sv.KeyPut(name, change.entry.value)))
                if connections is not None:
                    connections.put(whole, change.entry.value)
            else:
                if connections is not None:
                    connections.gone(whole)
                put(Hosted(service, sv.KeyGone(name)))
    except StoreError as error:
        put(error)
