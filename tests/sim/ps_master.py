"""The Master's shell in the simulation: steps the real machine, keeps, then says; it dies at any moment."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from edl.master import service as sv
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.messages import Member, World
from ps.coordinator.invariants import violations
from ps.coordinator.machine import PlacementMachine
from ps.server.bucket_machine import MasterLine
from tests.sim.ps_net import Pipe, Violation
from tests.sim.ps_node import Node

if TYPE_CHECKING:
    from tests.sim.ps_world import PsSim


class Line:
    """Between one Master's life and one pserver."""

    def __init__(self, master: Master, node: Node) -> None:
        self.master, self.node, self.life = master, node, master.life
        self.up = False
        self.down: Pipe | None = None

    def open(self) -> None:
        sim, node = self.master.sim, self.node
        if self.life != self.master.life or self.master.lines.get(node.name) is not self or self.up:
            return
        if not node.alive:
            if sim.refuses(node):
                self.master.feed(sv.LineDown(node.name, True))
            sim.net.at(0.5, self.open)
            return
        if not sim.linked(node, None, master=True):
            sim.net.at(0.5, self.open)
            return
        self.up = True
        self.down = Pipe(sim.net, lambda body: sim.run(node, node.hear, body))
        node.up_pipe = Pipe(sim.net, lambda body: self.master.heard(self, body))
        self.master.feed(sv.LineUp(node.name))
        sim.run_later(node, self.greet)

    def greet(self) -> None:
        if self.up and self.life == self.master.life:
            self.node.event(MasterLine())
            self.master.sim.disk.say_again(self.node)

    def cut(self) -> None:
        if not self.up:
            return
        self.up = False
        for pipe in (self.down, self.node.up_pipe):
            if pipe is not None:
                pipe.close()
        if self.life == self.master.life and self.master.lines.get(self.node.name) is self:
            self.master.feed(sv.LineDown(self.node.name, False))
            self.master.sim.net.at(0.2, self.open)


class Master:
    """One after the other, over one store."""

    def __init__(self, sim: PsSim) -> None:
        self.sim = sim
        self.store: dict[str, bytes] = {}
        self.keys: dict[str, bytes] = {}
        self.nodes: dict[str, Node] = {}
        self.lines: dict[str, Line] = {}
        self.life = 0
        self.machine: PlacementMachine | None = None
        self.failed = ""
        self.notes: list[str] = []
        self.wake_s = 0.0
        self.dies = ""
        """How this life ends with the next event: ``before`` or ``between``."""
        self.world = World(Round(0), (), 0)
        self.most_bytes = 0

    # --- lives -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.life += 1
        sim = self.sim
        self.machine = PlacementMachine(sim.training, buckets=sim.buckets, limits=sim.limits)
        self.wake_s = 0.0
        self.lines = {}
        self._do(self.machine.load(dict(self.store), sim.net.now_s))
        for name, value in list(self.keys.items()):
            self.feed(sv.KeyPut(name, value))
        if self.world.members:
            self.feed(sv.WorldBegan(self.world, taken_over=True))
        for name in list(self.keys):
            self.connect(name)
        for trainer in sim.trainers():
            sim.run_later(trainer, trainer.again)

    def die(self) -> None:
        self.machine = None
        self.life += 1
        self.dies = ""
        for line in self.lines.values():
            line.cut()
        self.lines = {}
        self.sim.net.at(self.sim.net.rng.uniform(0.1, 3.0), self.start)

    # --- what happens ------------------------------------------------------------------------------------------------

    def key_put(self, node: Node, draining: bool = False) -> None:
        node.draining = draining
        value = {"host": node.machine, "port": 1, "machine": node.machine, "draining": draining}
        self.keys[node.name] = json.dumps(value).encode()
        self.nodes[node.name] = node
        self.feed(sv.KeyPut(node.name, self.keys[node.name]))
        if node.name not in self.lines:
            self.connect(node.name)

    def key_gone(self, name: str) -> None:
        if self.keys.pop(name, None) is not None:
            line = self.lines.pop(name, None)
            if line is not None:
                line.cut()
            self.feed(sv.KeyGone(name))

    def connect(self, name: str) -> None:
        if self.machine is not None:
            self.lines[name] = Line(self, self.nodes[name])
            self.lines[name].open()

    def heard(self, line: Line, body: str) -> None:
        if line.life == self.life and self.lines.get(line.node.name) is line:
            self.feed(sv.Heard(line.node.name, body))

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
        if self.machine is None or self.failed:
            return
        effects = self.machine.step(event, self.sim.net.now_s)
        over = any(isinstance(effect, sv.Fail) for effect in effects)
        wrong = [] if over else violations(self.machine.state)
        if wrong:
            raise Violation(f"after {type(event).__name__}: {wrong[0]}")
        dies, self.dies = self.dies, ""
        if dies == "before":
            self.die()
            return
        self._do(effects, told=not dies)
        self.sim.stepped(self.machine)
        if dies:
            self.die()

    def _do(self, effects: tuple[sv.Effect, ...], told: bool = True) -> None:
        sim = self.sim
        for effect in effects:
            if isinstance(effect, sv.Keep):
                self.most_bytes = max(self.most_bytes, len(effect.value))
                self.store[effect.name] = effect.value
            elif isinstance(effect, sv.Fail):
                self.failed = effect.text
            elif isinstance(effect, sv.Note):
                self.notes.append(effect.text)
            elif isinstance(effect, sv.WakeAt) and told:
                sim.net.at(max(0.0, effect.at_s - sim.net.now_s), self._tick, self.life)
        for effect in effects if told else ():
            if isinstance(effect, sv.Send):
                line = self.lines.get(effect.name)
                if line is not None and line.up and line.down is not None:
                    line.down.send(effect.body)
                    if sim.net.rng.random() < 0.05:
                        line.down.send(effect.body)
            elif isinstance(effect, sv.Tell) and not effect.body.startswith('{"word":"Waits"'):  # for people only
                sim.tell(effect.caller, effect.body, self.life)

    def _tick(self, life: int) -> None:
        if life == self.life:
            self.feed(sv.Tick())
