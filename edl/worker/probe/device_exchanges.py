"""Exchanges between the devices of nodes, after those of bytes: in which order, for how long, and what they prove."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from edl.wire.health import HealthChecked
from edl.wire.health_records import ProbeOrder
from edl.worker.probe.exchange import DeviceLinks, NotBegun

SHARE = 1 / 3
"""Share of the time for all exchanges that is kept for those between devices if a node does not send its bytes."""
LEAST_S = 1.0
"""An exchange that would have less time than this is not begun."""
UNFINISHED = "the exchange between the devices did not end"


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """Time limits by the monotonic clock; ``until_s`` is about the same moment on all nodes."""

    bytes_until_s: float
    """Until then, bytes are exchanged; a peer may begin with its devices as late as this."""
    until_s: float

    @classmethod
    def between(cls, now_s: float, until_s: float) -> ExchangeTimes:
        """Divide the time that is left."""
        return cls(until_s - SHARE * max(0.0, until_s - now_s), until_s)

    def limit_s(self, now_s: float, left: int) -> float:
        """Most seconds for the next of ``left`` exchanges: its part of the time in which both sides are there."""
        from_s = max(now_s, self.bytes_until_s)
        return max(LEAST_S, from_s - now_s + (self.until_s - from_s) / left)


def between_devices(
    ordered: ProbeOrder,
    checked: HealthChecked,
    stores: Mapping[str, int],
    between: DeviceLinks,
    times: ExchangeTimes,
    clock: Callable[[], float],
) -> Iterator[HealthChecked]:
    """Exchange data between the devices, with all peers whose bytes have arrived and that have devices too. Yields the
    answer that holds if the next exchange never ends, and at last the whole one.

    One exchange follows the other, on all nodes in the same order, so that none waits for another in a circle. A peer
    that does not begin, or for which no time is left, has no result: its bytes alone do not prove its devices, and it
    may be held up by the devices of a third node. ``checked``: with the results of the bytes."""
    hosts = {peer.node: peer.host for peer in ordered.order.peers}
    found = {link.node: link for link in checked.links}
    todo = [node for node, link in found.items() if not link.error and stores.get(node)]
    pairs = sorted((min(ordered.node, node), max(ordered.node, node)) for node in todo)
    arrived = {node: found.pop(node) for node in todo}
    remarks = list(checked.remarks)

    def answer() -> HealthChecked:
        links = tuple(found[link.node] for link in checked.links if link.node in found)
        return dataclasses.replace(checked, links=links, remarks=tuple(remarks))

    for index, (first, second) in enumerate(pairs):
        node = second if first == ordered.node else first
        now_s = clock()
        if times.until_s - now_s < LEAST_S:
            remarks.append(f"no time was left for an exchange with the devices of {node}")
            continue
        found[node] = dataclasses.replace(arrived[node], error=UNFINISHED)
        yield answer()
        name = f"{ordered.order.number}/{ordered.order.stage}/{first}/{second}"
        rank, limit_s = (0 if first == ordered.node else 1), times.limit_s(now_s, len(pairs) - index)
        try:
            between.exchange(name, rank, hosts[node], stores[node], limit_s)
        except NotBegun as error:
            del found[node]
            remarks.append(f"no exchange with the devices of {node}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a broken device makes its library raise
            found[node] = dataclasses.replace(
                arrived[node], error=f"between the devices: {type(error).__name__}: {error}"
            )
        else:
            found[node] = arrived[node]
    yield answer()
