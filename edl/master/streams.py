"""The streams of the agents that follow one Master.

A decision is about the streams that the machine knew. Until it is written, an agent may break off and come
back on a new stream. Orders of that decision must not go there: the machine takes the ``Attach`` of the new stream for
all that the agent knew when it came, and brings it up to date from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from edl.errors import ProtocolError
from edl.master import events as ev
from edl.master import service as sv
from edl.master.hosting import Hosted
from edl.types import Incarnation, NodeId
from edl.wire.messages import AgentMessage, Attach, MasterMessage, ServiceFromWorker
from edl.wire.records import NodeInfo


@dataclass(slots=True)
class _AgentStream:
    attach: Attach
    outgoing: asyncio.Queue[MasterMessage | None]
    known: bool = False
    """Whether the machine has handled its ``Attach``."""


class AgentStreams:
    """The newest stream of each agent. Passes what agents say to ``heard``."""

    def __init__(
        self,
        heard: Callable[[ev.Event | Hosted], None],
        is_current: Callable[[NodeInfo], bool],
        log: Callable[[str], None],
    ) -> None:
        """``is_current``: whether no other incarnation of this node is known."""
        self._heard = heard
        self._is_current = is_current
        self._log = log
        self._newest: dict[tuple[NodeId, Incarnation], _AgentStream] = {}
        self._closed = False

    def __contains__(self, agent: object) -> bool:
        return agent in self._newest

    def decided(self, events: Iterable[ev.Event]) -> None:
        """The machine has handled these events; what it tells from now on is for the streams that they opened."""
        for event in events:
            if isinstance(event, ev.NodeAttached):
                info = event.attach.info
                stream = self._newest.get((info.node, info.incarnation))
                if stream is not None and stream.attach is event.attach:
                    stream.known = True

    def tell(self, node: NodeId, incarnation: Incarnation, message: MasterMessage) -> None:
        """Send what the machine has decided, unless the agent has come back on a stream unknown to the machine."""
        stream = self._newest.get((node, incarnation))
        if stream is not None and stream.known:
            stream.outgoing.put_nowait(message)

    def forward(self, info: NodeInfo, message: MasterMessage) -> None:
        """Send what does not depend on the machine's state, on whatever stream this agent has."""
        stream = self._newest.get((info.node, info.incarnation))
        if stream is not None:
            stream.outgoing.put_nowait(message)

    def close(self) -> None:
        """End all streams, and those that open later."""
        self._closed = True
        for stream in self._newest.values():
            stream.outgoing.put_nowait(None)

    async def join(self, said: AsyncIterator[AgentMessage]) -> AsyncIterator[MasterMessage]:
        """Serve one agent's stream until either side ends it. Yields the Master's messages."""
        outgoing: asyncio.Queue[MasterMessage | None] = asyncio.Queue()
        reader = asyncio.ensure_future(self._listen(said, outgoing))
        try:
            while (message := await outgoing.get()) is not None:
                yield message
        finally:
            reader.cancel()

    async def _listen(self, said: AsyncIterator[AgentMessage], outgoing: asyncio.Queue[MasterMessage | None]) -> None:
        info: NodeInfo | None = None
        try:
            async for message in said:
                if self._closed:  # this Master has stepped down meanwhile: the agent connects to the next one
                    return
                if isinstance(message, Attach):
                    if info is not None:
                        self._detach(info, outgoing)
                    info = message.info
                    self._attach(message, outgoing)
                elif info is not None and isinstance(message, ServiceFromWorker):
                    if self._is_current(info):
                        word = sv.Said(sv.Caller(info.node, message.slot), message.round, message.body)
                        self._heard(Hosted(message.service, word))
                elif info is not None:
                    self._heard(ev.NodeSaid(info.node, info.incarnation, message))
        except ProtocolError as error:
            self._log(f"closing the stream of {info.node if info else 'an unknown node'}: {error}")
        finally:
            if info is not None:
                self._detach(info, outgoing)
            outgoing.put_nowait(None)

    def _attach(self, attach: Attach, outgoing: asyncio.Queue[MasterMessage | None]) -> None:
        agent = attach.info.node, attach.info.incarnation
        before = self._newest.get(agent)
        self._newest[agent] = _AgentStream(attach, outgoing)
        if before is not None:  # end the earlier stream of the same agent
            before.outgoing.put_nowait(None)
        self._heard(ev.NodeAttached(attach))

    def _detach(self, info: NodeInfo, outgoing: asyncio.Queue[MasterMessage | None]) -> None:
        agent = info.node, info.incarnation
        stream = self._newest.get(agent)
        if stream is not None and stream.outgoing is outgoing:
            del self._newest[agent]
            self._heard(ev.NodeDetached(*agent))
