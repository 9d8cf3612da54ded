"""Hosts the Master's services: steps them, and collects their effects until the shell executes them. No I/O.

The shell first writes ``kept`` and the notes to the store, and only then sends the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from edl.master import service as sv
from edl.master.service import Service
from edl.master.state import Phase, Record
from edl.wire.records import NO_SETTINGS, Settings, World
from edl.wire.status import Count, ServiceView


@dataclass(frozen=True, slots=True)
class Hosted:
    """An event for one service, or for all of them (``service`` None)."""

    service: str | None
    event: sv.Event


class HelperEvents:
    """Passes the events of connections to helpers to the service that uses the helper; a ``HelperListener``."""

    def __init__(self, put: Callable[[Hosted], None]) -> None:
        self._put = put

    def up(self, name: str) -> None:
        """Called when a connection is open."""
        service, _, key = name.partition("/")
        self._put(Hosted(service, sv.LineUp(key)))

    def down(self, name: str, refused: bool) -> None:
        """Called when a connection has broken or cannot be opened."""
        service, _, key = name.partition("/")
        self._put(Hosted(service, sv.LineDown(key, refused)))

    def heard(self, name: str, body: str) -> None:
        """Called with each message of a helper."""
        service, _, key = name.partition("/")
        self._put(Hosted(service, sv.HelperSaid(key, body)))


@dataclass(slots=True)
class Gathered:
    """The collected effects of the services, each kind in order. ``str``: the name of the service."""

    to_workers: list[tuple[str, sv.TellWorker]] = field(default_factory=list)
    kept: list[tuple[str, sv.Keep]] = field(default_factory=list)
    notes: list[sv.AddToHistory] = field(default_factory=list)
    flaws: list[sv.ReportFlaw] = field(default_factory=list)
    sent: list[tuple[str, sv.Send]] = field(default_factory=list)
    failures: list[sv.Fail] = field(default_factory=list)
    answers: list[sv.Answered] = field(default_factory=list)

    def __len__(self) -> int:
        every = (self.to_workers, self.kept, self.notes, self.flaws, self.sent, self.failures, self.answers)
        return sum(len(some) for some in every)


class Hosting:
    """The services of one Master."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = {service.name: service for service in services}
        self._gathered = Gathered()
        self._world: World | None = None
        self._settings: Settings = NO_SETTINGS
        self._due: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._services)

    @property
    def names(self) -> frozenset[str]:
        """Names of the services."""
        return frozenset(self._services)

    @property
    def pending(self) -> int:
        """Number of collected effects."""
        return len(self._gathered)

    def gathered(self) -> Gathered:
        """Return and clear the collected effects."""
        gathered, self._gathered = self._gathered, Gathered()
        return gathered

    @property
    def due_s(self) -> float | None:
        """Time of the next tick; None: none is due."""
        return min(self._due.values(), default=None)

    def load(self, kept: Mapping[str, bytes], helpers: Mapping[str, bytes], now_s: float) -> None:
        """Start the services with what the last Master's services kept, and with the keys of living helpers. Names have
        the form ``<service>/<name>``."""
        for name, service in self._services.items():
            self._gather(name, service.load(_below(name, kept), now_s))
            for key, value in _below(name, helpers).items():
                self._gather(name, service.step(sv.KeyPut(key, value), now_s))

    def take(self, hosted: Hosted, now_s: float) -> None:
        """Step one service, or all of them. An event for an unknown service is dropped, because its sender runs another
        version of edl."""
        names = list(self._services) if hosted.service is None else [hosted.service]
        if isinstance(hosted.event, sv.Tick):
            names = [name for name in names if self._due.get(name, float("inf")) <= now_s]
            for name in names:
                del self._due[name]
        for name in names:
            if name in self._services:
                self._gather(name, self._services[name].step(hosted.event, now_s))

    def follow(self, record: Record, now_s: float, *, taken_over: bool = False) -> None:
        """Tell the services if a world has begun or ended according to the record, and if settings have changed."""
        if record.phase is Phase.FORMING and self._world is not None:
            return  # its workers may still be training up to the agreed step boundary: it ends with the next world
        trains = record.phase is Phase.RUNNING or record.switch is not None
        running = record.world if trains else None
        before, self._world = self._world, running
        if before is not None and (running is None or running.round != before.round):
            self.take(Hosted(None, sv.WorldEnded(before.round, record.reason)), now_s)
        if running is not None and (before is None or running.round != before.round):
            self.take(Hosted(None, sv.WorldBegan(running, taken_over)), now_s)
        if record.settings != self._settings:
            self._settings = record.settings
            self.take(Hosted(None, sv.SettingsHold(record.settings)), now_s)

    def views(self) -> tuple[ServiceView, ...]:
        """The services' counters for ``edl status``."""
        return tuple(
            ServiceView(
                name, one.name, one.text, tuple(Count(*item) for item in sorted(one.counts.items())), one.shares
            )
            for name, service in self._services.items()
            for one in service.report()
        )

    def _gather(self, name: str, effects: tuple[sv.Effect, ...]) -> None:
        gathered = self._gathered
        for effect in effects:
            match effect:
                case sv.TellWorker():
                    gathered.to_workers.append((name, effect))
                case sv.Keep():
                    gathered.kept.append((name, effect))
                case sv.AddToHistory():
                    gathered.notes.append(effect)
                case sv.ReportFlaw():
                    gathered.flaws.append(effect)
                case sv.Send():
                    gathered.sent.append((name, effect))
                case sv.Fail():
                    gathered.failures.append(effect)
                case sv.Answered():
                    gathered.answers.append(effect)
                case sv.WakeAt(at_s):
                    self._due[name] = min(at_s, self._due.get(name, at_s))


def _below(service: str, entries: Mapping[str, bytes]) -> dict[str, bytes]:
    prefix = f"{service}/"
    return {name[len(prefix) :]: value for name, value in entries.items() if name.startswith(prefix)}
