"""How the data sets of a process reach the machine that leases shards: over the worker's link to the Master, or, in a
script that runs without a launcher, in the same process."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from data_service.leases.machine import LeaseMachine
from data_service.protocol import messages
from edl.adapters.clock import SystemClock
from edl.errors import DataError
from edl.master.service import Caller, Effect, Event, Flaw, Said, Tell, WorldBegan
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.messages import Member, World
from edl.worker.link import Link

_CLOCK = SystemClock()
SERVICE = "data"
"""Name of the Master's service."""
Heard = Callable[[Any], None]
"""Takes each word for a data set; None when what was said may be lost."""
LOCAL_NODE = NodeId("local")


class Line(Protocol):
    """One worker's way to the machine."""

    def say(self, text: str, number: int) -> None:
        """Say something as a worker of this round; from any thread. May be lost, which ``Heard`` is then told."""
        ...

    def listen(self, dataset: str, heard: Heard) -> None:
        """Who takes what is said about a data set from now on. It is called on any thread."""
        ...

    def listens(self, dataset: str, heard: Heard) -> bool:
        """Whether it takes what is said about a data set, and nobody has begun to listen since."""
        ...

    def forget(self, dataset: str, heard: Heard) -> None:
        """Nobody takes it any more, unless somebody else has begun to listen."""
        ...


class Switchboard:
    """Gives words to whom they concern."""

    def __init__(self) -> None:
        self._heard: dict[str, Heard] = {}

    def listen(self, dataset: str, heard: Heard) -> None:
        """See ``Line``."""
        self._heard[dataset] = heard

    def listens(self, dataset: str, heard: Heard) -> bool:
        """See ``Line``."""
        return self._heard.get(dataset) == heard

    def forget(self, dataset: str, heard: Heard) -> None:
        """See ``Line``."""
        if self._heard.get(dataset) == heard:
            del self._heard[dataset]

    def hear(self, text: str | None) -> None:
        """A word from the Master, or None when there is another one."""
        word: Any = None
        if text is not None:
            try:
                word = messages.decode(text)
            except DataError as error:
                sys.stderr.write(f"edl: a word about data could not be used: {error}\n")
                return
        dataset = getattr(word, "dataset", "")
        # Some words, such as the list of readers, are for all.
        for heard in [self._heard.get(dataset)] if dataset else list(self._heard.values()):
            if heard is not None:
                heard(word)


class LinkLine(Switchboard):
    """Over the link to the agent, which passes words on to the Master."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = weakref.ref(link)  # the link holds what listens
        link.listen(SERVICE, self.hear)

    def say(self, text: str, number: int) -> None:
        """See ``Line``."""
        link = self._link()
        if link is not None:
            link.call(SERVICE, text, number)


_lines: weakref.WeakKeyDictionary[Link, LinkLine] = weakref.WeakKeyDictionary()


def line_over(link: Link) -> LinkLine:
    """The one line over a link, for all data sets of this process."""
    if link not in _lines:
        _lines[link] = LinkLine(link)
    return _lines[link]


class LocalLine(Switchboard):
    """To a machine in the same process, which serves a world of one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self._machine = LeaseMachine()
        self._lock = threading.Lock()
        self._machine.load({}, _CLOCK.now_s())
        member = Member(LOCAL_NODE, Incarnation(0), "127.0.0.1", 1, Rank(0), ())
        self._step(WorldBegan(World(Round(1), (member,), 0)))

    def say(self, text: str, number: int) -> None:
        """See ``Line``. What the machine answers is heard before this returns."""
        self._step(Said(Caller(LOCAL_NODE, 0), Round(number), text))

    def _step(self, event: Event) -> None:
        with self._lock:
            effects = self._machine.step(event, _CLOCK.now_s())
        for effect in effects:
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Tell):
            self.hear(effect.body)
        elif isinstance(effect, Flaw) and effect.text:
            sys.stderr.write(f"edl: {effect.text}\n")
