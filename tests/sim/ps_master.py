"""The Master in the simulation: ``Hosting`` and the connections to pservers that ship, and a queue as in
``MasterShell``: it keeps what the service wants kept, then sends; it dies at any moment."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from edl.master import service as sv
from edl.master.hosting import Hosted, Hosting
from edl.testing.sim.process import BareProcess
from edl.testing.sim.sockets import SimStreams
from edl.types import FencingToken, Incarnation, NodeId, Rank, Round
from edl.wire.records import Member, World
from ps.coordinator.invariants import violations
from ps.coordinator.machine import PlacementMachine
from ps.net.master_connections import MasterConnectionsDeps, PserverConnections
from tests.sim.ps_net import Net
from tests.sim.ps_server import PORT, SECRET, Pserver

if TYPE_CHECKING:
    from tests.sim.ps_world import PsSim

LEASE_S = 3.0
HOST = "master"


class Life:
    """One Master. ``edl.ports.HelperListener`` of its connections."""

    def __init__(self, master: Master, process: BareProcess[Net]) -> None:
        self.master, self.process = master, process
        sim = master.sim
        self.machine = PlacementMachine(sim.training, buckets=sim.buckets, limits=sim.limits, secret=SECRET)
        self.hosting = Hosting([self.machine])
        self.streams = SimStreams(process, sim.net.listening)
        deps = MasterConnectionsDeps(
            LEASE_S, lambda text: None, HOST, refuses=self.streams.refuses, connect=self.streams.connect
        )
        self.connections = PserverConnections(deps, FencingToken(master.life), self)
        self._events: asyncio.Queue[Hosted] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._task = process.loop.create_task(self._run())

    def put(self, event: sv.Event, service: str | None = "ps") -> None:
        """Something has happened."""
        self._events.put_nowait(Hosted(service, event))

    def up(self, name: str) -> None:
        """See ``HelperListener``."""
        self.put(sv.LineUp(name.removeprefix("ps/")))

    def down(self, name: str, refused: bool) -> None:
        """See ``HelperListener``."""
        self.put(sv.LineDown(name.removeprefix("ps/"), refused))

    def heard(self, name: str, body: str) -> None:
        """See ``HelperListener``."""
        self.put(sv.HelperSaid(name.removeprefix("ps/"), body))

    async def _run(self) -> None:
        master = self.master
        helpers = {f"ps/{name}": value for name, value in master.keys.items()}
        self.hosting.load({f"ps/{name}": value for name, value in master.store.items()}, helpers, self.process.now_s())
        for name, value in helpers.items():
            self.connections.put(name, value)
        if master.world.members:
            self.put(sv.WorldBegan(master.world, taken_over=True))
        for trainer in master.sim.trainers():
            trainer.process.run(trainer.again)
        await self._serve("loading")
        while True:
            hosted = await self._events.get()
            self.hosting.take(hosted, self.process.now_s())
            await self._serve(type(hosted.event).__name__)

    async def _serve(self, event: str) -> None:
        """Keep what is to be kept, then send; see ``MasterShell``."""
        master, sim = self.master, self.master.sim
        self._set_timer()
        gathered = self.hosting.gathered()
        wrong = [] if gathered.failures or master.failed else violations(self.machine.state)
        if wrong:
            sim.net.fail(f"after {event}: {wrong[0]}")
        dies, master.dies = master.dies, ""
        if dies == "before":
            master.die()
            return
        if gathered.kept:
            await asyncio.sleep(sim.net.delay())
        for _, keep in gathered.kept:
            master.store[keep.name] = keep.value
        for failure in gathered.failures:
            master.failed = failure.text
        master.notes += [note.text for note in gathered.notes]
        sim.stepped(self.machine)
        if dies:
            master.die()
            return
        for _, sent in gathered.sent:
            self.connections.send(f"ps/{sent.name}", sent.body)
            if sim.net.rng.random() < 0.05:
                self.connections.send(f"ps/{sent.name}", sent.body)
        for _, word in gathered.to_workers:
            if not word.body.startswith('{"word":"Waits"'):  # for people only
                sim.tell(word.caller, word.body, master.life)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.hosting.due_s
        if due_s is not None:
            self._timer = self.process.loop.call_at(due_s, self.put, sv.Tick(), None)


class Master:
    """One after the other, over one store."""

    def __init__(self, sim: PsSim) -> None:
        self.sim = sim
        self.store: dict[str, bytes] = {}
        self.keys: dict[str, bytes] = {}
        self.life = 0
        self.now: Life | None = None
        self.failed = ""
        self.notes: list[str] = []
        self.dies = ""
        """How this life ends with the next event: ``before`` or ``between``."""
        self.world = World(Round(0), (), 0)
        self._processes: list[BareProcess[Net]] = []
        sim.net.add_host(HOST)

    @property
    def machine(self) -> PlacementMachine | None:
        """The machine of the present life."""
        return self.now.machine if self.now is not None else None

    # --- lives -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.life += 1
        process = BareProcess(self.sim.net, HOST)
        self._processes.append(process)
        process.run(self._begin, process)

    def _begin(self, process: BareProcess[Net]) -> None:
        self.now = Life(self, process)

    def die(self) -> None:
        life, self.now = self.now, None
        self.dies = ""
        if life is not None:
            life.process.end()
            life.streams.opened.close()
        self.sim.net.at(self.sim.net.rng.uniform(0.1, 3.0), self.start)

    def close(self) -> None:
        """The history is over."""
        for process in self._processes:
            process.loop.finish()

    # --- what happens ------------------------------------------------------------------------------------------------

    def key_put(self, pserver: Pserver, draining: bool = False) -> None:
        pserver.draining = draining
        value = {"host": pserver.host, "port": PORT, "machine": pserver.machine, "draining": draining, "secret": SECRET}
        self.keys[pserver.name] = json.dumps(value).encode()
        self.feed(sv.KeyPut(pserver.name, self.keys[pserver.name]))
        if self.now is not None:
            self.now.process.run(self.now.connections.put, f"ps/{pserver.name}", self.keys[pserver.name])

    def key_gone(self, name: str) -> None:
        if self.keys.pop(name, None) is not None:
            self.feed(sv.KeyGone(name))
            if self.now is not None:
                self.now.process.run(self.now.connections.gone, f"ps/{name}")

    def said(self, said: sv.Said) -> None:
        self.sim.net.at(self.sim.net.delay(), self.feed, said)

    def new_world(self) -> None:
        members = tuple(
            Member(NodeId(node), Incarnation(1), node, 1, Rank(index), ())
            for index, node in enumerate(sorted(self.sim.places))
        )
        self.world = World(Round(self.sim.round), members, 0)
        if members:
            self.feed(sv.WorldEnded(Round(self.sim.round - 1), "members change"))
            self.feed(sv.WorldBegan(self.world))

    def feed(self, event: sv.Event) -> None:
        if self.now is not None and not self.failed:
            self.now.process.run(self.now.put, event)
