"""How the data sets of a process reach the lease machine: over the worker's link to the Master or, in a script that
runs without a launcher, in the same process."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from data_service.leases.machine import LeaseMachine
from data_service.protocol import messages
from edl.adapters.clock import SystemClock
from edl.errors import ProtocolError, UnreachableData
from edl.master.service import AddToHistory, Caller, Effect, Event, Fail, Said, TellWorker, WorldBegan
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.records import Member, World
from edl.worker.link import Link
from edl.worker.session import note

_CLOCK = SystemClock()
SERVICE = "data"
"""Name of the Master's service."""
Listener = Callable[[Any], None]
"""A listener: takes each message for a data set; None when sent messages may be lost."""
LOCAL_NODE = NodeId("local")


class MasterTransport(Protocol):
    """A worker's connection to the lease machine."""

    def say(self, text: str, number: int) -> None:
        """Send a message as a worker of this round. Thread-safe. If it may be lost, listeners are called with None."""
        ...

    def listen(self, dataset: str, listener: Listener) -> None:
        """Set the listener for messages about a data set. It is called on any thread."""
        ...

    def listens(self, dataset: str, listener: Listener) -> bool:
        """Whether this is still the listener for a data set."""
        ...

    def forget(self, dataset: str, listener: Listener) -> None:
        """Remove this listener, unless another one has replaced it."""
        ...


class Dispatcher:
    """Dispatches incoming messages to the listeners of their data sets."""

    def __init__(self) -> None:
        self._listeners: dict[str, Listener] = {}

    def listen(self, dataset: str, listener: Listener) -> None:
        """Set the listener for messages about a data set."""
        self._listeners[dataset] = listener

    def listens(self, dataset: str, listener: Listener) -> bool:
        """Whether this is still the listener for a data set."""
        return self._listeners.get(dataset) == listener

    def forget(self, dataset: str, listener: Listener) -> None:
        """Remove this listener, unless another one has replaced it."""
        if self._listeners.get(dataset) == listener:
            del self._listeners[dataset]

    def hear(self, text: str | None) -> None:
        """Dispatch a message from the Master; None when another Master has taken over."""
        message: Any = None
        if text is not None:
            try:
                message = messages.decode(text)
            except ProtocolError as error:
                sys.stderr.write(f"edl: ignored an invalid message about data: {error}\n")
                return
        dataset = getattr(message, "dataset", "")
        # Some messages, such as the list of readers, are for all data sets.
        for listener in [self._listeners.get(dataset)] if dataset else list(self._listeners.values()):
            if listener is not None:
                listener(message)


class LinkTransport(Dispatcher):
    """Over the link to the agent, which forwards messages to the Master."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = weakref.ref(link)  # weak, because the link references its listeners
        link.listen(SERVICE, self.hear)

    def say(self, text: str, number: int) -> None:
        """Send a message through the agent; drop it if the link is gone."""
        link = self._link()
        if link is not None:
            link.call(SERVICE, text, number)


_transports: weakref.WeakKeyDictionary[Link, LinkTransport] = weakref.WeakKeyDictionary()


def transport_over(link: Link) -> LinkTransport:
    """The one transport over a link, for all data sets of this process."""
    if link not in _transports:
        _transports[link] = LinkTransport(link)
    return _transports[link]


class LocalTransport(Dispatcher):
    """To a lease machine in the same process, for a world of one worker that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = ""
        """Why the machine would end the job; empty while it would not."""
        self._machine = LeaseMachine()
        self._lock = threading.Lock()
        self._machine.load({}, _CLOCK.now_s())
        member = Member(LOCAL_NODE, Incarnation(0), "127.0.0.1", 1, Rank(0), ())
        self._step(WorldBegan(World(Round(1), (member,), 0)))

    def say(self, text: str, number: int) -> None:
        """Pass a message to the machine. Its answers are dispatched before this returns."""
        self._step(Said(Caller(LOCAL_NODE, 0), Round(number), text))

    def check(self) -> None:
        """Raise ``UnreachableData`` if the machine would end the job. The training thread calls it, because any thread
        may have sent the message that was the last straw."""
        if self.failed:
            raise UnreachableData(self.failed)

    def _step(self, event: Event) -> None:
        with self._lock:
            effects = self._machine.step(event, _CLOCK.now_s())
        for effect in effects:
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case TellWorker():
                self.hear(effect.body)
            case AddToHistory(text):  # also of skipped shards, so that no ``ReportFlaw`` has to repeat it
                note(text)
            case Fail(text):
                self.failed = self.failed or text
            case _:
                pass  # nothing outlives this process, and no other worker's deadline can expire
