"""The real placement machine with real bucket machines, and messages delivered at once."""

from __future__ import annotations

import json
from collections import deque
from typing import Any, TypeVar

from edl.job_records import Training
from edl.master import service as sv
from edl.master.service import Caller
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.records import Member, World
from ps.coordinator.invariants import violations
from ps.coordinator.machine import PlacementMachine
from ps.coordinator.state import CoordinatorLimits
from ps.protocol import messages
from ps.protocol.deltas import members_after, orders_after
from ps.server import bucket_machine as hd
from ps.server.bucket_machine import BucketMachine
from ps.spec import TableSpec

TABLE = TableSpec("users", 8)
Kind = TypeVar("Kind")


class Cluster:
    """A job with a placement machine, pservers and trainers."""

    def __init__(self, training: Training | None = None, *, buckets: int = 8, **limits: Any) -> None:
        self.training = training or Training(servers=(2, 4))
        self.buckets = buckets
        self.limits = CoordinatorLimits(gather_s=0.0, **limits)
        self.now_s = 10.0
        self.store: dict[str, bytes] = {}
        self.bucket_machines: dict[str, BucketMachine] = {}
        self.orders: dict[str, messages.Orders] = {}
        """The newest that each pserver was given."""
        self.machines: dict[str, str] = {}
        self.found: messages.FoundCheckpoints | messages.CheckpointPhaseDone = messages.FoundCheckpoints(0)
        """What a search for checkpoints finds, or why it fails."""
        self._unread: set[str] = set()
        """Pservers whose last search has failed: they search again with the next orders."""
        self.bad: set[str] = set()
        """Runs that cannot be restored."""
        self.lasting = False
        """Because of the pserver."""
        self.notes: list[str] = []
        self.told: list[tuple[Caller, Any]] = []
        self.failed = ""
        self.wake_s = 0.0
        self.checkpoints = True
        """Pservers do what a checkpoint asks for."""
        self.key_content: dict[str, object] = {}
        """Further content of the pservers' keys."""
        self._events: deque[sv.Event] = deque()
        self._busy = False
        self.machine = self.new_machine()

    def new_machine(self) -> PlacementMachine:
        """Replace the Master."""
        self.machine = PlacementMachine(self.training, buckets=self.buckets, limits=self.limits)
        self.wake_s = 0.0
        self._do(self.machine.load(dict(self.store), self.now_s))
        for name in list(self.bucket_machines):
            self.feed(sv.KeyPut(name, self._value(name)))
            self.feed(sv.LineUp(name))
            self._effects(name, self.bucket_machines[name].step(hd.MasterLine()))
        return self.machine

    def new_machine_without_keys(self) -> None:
        """Replace the Master while no pserver has a key, although all live."""
        machines, self.bucket_machines = self.bucket_machines, {}
        self.new_machine()
        self.bucket_machines = machines

    # --- pservers ----------------------------------------------------------------------------------------------------

    def _value(self, name: str, **more: object) -> bytes:
        return json.dumps({"host": self.machines[name], "port": 1, "secret": "s", **self.key_content, **more}).encode()

    def add(self, name: str, machine: str = "") -> BucketMachine:
        """A pserver registers, its line stands, it says hello."""
        key = f"servers/{name}"
        self.machines[key] = machine or name
        self.bucket_machines[key] = BucketMachine(key, buckets=self.buckets)
        self.feed(sv.KeyPut(key, self._value(key)))
        self.feed(sv.LineUp(key))
        self._effects(key, self.bucket_machines[key].step(hd.MasterLine()))
        return self.bucket_machines[key]

    def drain(self, name: str) -> None:
        self.feed(sv.KeyPut(f"servers/{name}", self._value(f"servers/{name}", draining=True)))

    def kill(self, name: str) -> None:
        """A pserver dies: it hangs up, and later its lease ends."""
        key = f"servers/{name}"
        del self.bucket_machines[key]
        self.feed(sv.LineDown(key, False))
        self.feed(sv.KeyGone(key))

    def lose_key(self, name: str) -> None:
        """The lease of a pserver that lives ends, so the Master hangs up."""
        self.feed(sv.KeyGone(f"servers/{name}"))

    def register_again(self, name: str) -> None:
        """Its launcher has another lease."""
        key = f"servers/{name}"
        self.feed(sv.KeyPut(key, self._value(key)))
        self.feed(sv.LineUp(key))
        self._effects(key, self.bucket_machines[key].step(hd.MasterLine()))

    def say(self, name: str, word: Any) -> None:
        """Deliver a message of a pserver to the Master."""
        self.feed(sv.HelperSaid(f"servers/{name}", messages.encode(word)))

    def _effects(self, name: str, effects: tuple[hd.Effect, ...]) -> None:
        """Copies are made and marks acknowledged at once."""
        bucket_machine = self.bucket_machines[name]
        for effect in effects:
            match effect:
                case hd.SendToMaster(word):
                    self.feed(sv.HelperSaid(name, messages.encode(word)))
                case hd.Copy(follower, number, buckets):
                    self._effects(name, bucket_machine.step(hd.ImageAcked(follower, number, buckets)))
                case hd.MarkStream(follower, number):
                    self._effects(name, bucket_machine.step(hd.MarkAcked(follower, number)))
                case hd.SendRelease(follower, buckets, version):
                    for other, one in self.bucket_machines.items():
                        if one.number == follower:
                            self._effects(other, one.step(hd.Released(bucket_machine.number, version, buckets)))
                case hd.RestoreBuckets(checkpoint, _) if checkpoint.run in self.bad:
                    told = messages.CheckpointPhaseDone(checkpoint.number, "restore", "damaged", lasting=self.lasting)
                    self.feed(sv.HelperSaid(name, messages.encode(told)))
                case hd.RestoreBuckets(checkpoint, buckets):
                    self._effects(name, bucket_machine.step(hd.Restored(checkpoint.number, buckets)))

    def members(self, node: str) -> list[str]:
        """Members of the job, according to all messages that this trainer received."""
        epoch, found = 0, tuple[messages.TrainerMember, ...]()
        for caller, word in self.told:
            if caller.node != node:
                continue
            if isinstance(word, messages.Joined | messages.PlacementUpdate):
                epoch, found = word.epoch, word.members
            elif isinstance(word, messages.MembersChanged):
                assert word.since == epoch, "nothing has been missed"
                epoch, found = word.epoch, members_after(found, word.came, word.went)
        return [one.name for one in found]

    def _orders(self, name: str, orders: messages.Orders | messages.OrdersChanged) -> None:
        before = self.bucket_machines[name].orders
        if isinstance(orders, messages.OrdersChanged):
            assert self.orders[name].placement.version == orders.base, "nothing has been missed"
            orders = orders_after(self.orders[name], orders)
        self.orders[name] = orders
        self._effects(name, self.bucket_machines[name].step(hd.OrdersCame(orders)))
        checkpoint = orders.checkpoint
        done = before is not None and before.checkpoint == checkpoint and name not in self._unread
        if checkpoint is None or done:
            return
        self._unread.discard(name)
        if checkpoint.phase == "find":
            if isinstance(self.found, messages.CheckpointPhaseDone):
                self._unread.add(name)
            self.feed(sv.HelperSaid(name, messages.encode(self.found)))
        elif checkpoint.phase != "restore" and self.checkpoints:
            told = json.dumps({"run": f"checkpoint-{checkpoint.number}"}) if checkpoint.phase == "complete" else name
            self.feed(
                sv.HelperSaid(
                    name, messages.encode(messages.CheckpointPhaseDone(checkpoint.number, checkpoint.phase, "", told))
                )
            )

    # --- trainers ----------------------------------------------------------------------------------------------------

    def world(self, *nodes: str, number: int = 1) -> None:
        members = tuple(
            Member(NodeId(node), Incarnation(1), node, 1, Rank(rank), ()) for rank, node in enumerate(nodes)
        )
        self.feed(sv.WorldBegan(World(Round(number), members, 0)))

    def tell(self, node: str, word: Any) -> None:
        """Deliver a message of a trainer to the Master."""
        self.feed(sv.Said(Caller(NodeId(node), 0), Round(1), messages.encode(word)))

    def heard(self, node: str, kind: type[Kind]) -> list[Kind]:
        """Messages of this kind that a trainer received."""
        return [word for caller, word in self.told if caller.node == node and isinstance(word, kind)]

    def trainer(self, node: str, nonce: str = "", tables: tuple[TableSpec, ...] = (TABLE,)) -> int:
        """One joins and begins; its number."""
        self.tell(node, messages.Join(nonce or node, tables))
        number = self.heard(node, messages.Joined)[-1].number
        self.tell(node, messages.Begin(number))
        return number

    # --- the Master's shell ------------------------------------------------------------------------------------------

    def feed(self, event: sv.Event) -> None:
        """One after the other, whatever comes of each."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events and not self.failed:
                self._do(self.machine.step(self._events.popleft(), self.now_s))
                assert self.failed or violations(self.machine.state) == []
        finally:
            self._busy = False

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.wake_s and self.wake_s <= end_s and not self.failed:
            self.now_s = max(self.now_s, self.wake_s)
            self.wake_s = 0.0
            self.feed(sv.Tick())
        self.now_s = end_s

    def _do(self, effects: tuple[sv.Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case sv.Keep(name, b""):
                    self.store.pop(name, None)
                case sv.Keep(name, value):
                    self.store[name] = value
                case sv.AddToHistory(text):
                    self.notes.append(text)
                case sv.TellWorker(caller, body):
                    self.told.append((caller, messages.decode(body)))
                case sv.WakeAt(at_s):
                    self.wake_s = min(at_s, self.wake_s or at_s)
                case sv.Fail(text):
                    self.failed = text
        for effect in effects:
            if isinstance(effect, sv.Send) and effect.name in self.bucket_machines:
                self._orders(effect.name, messages.decode(effect.body))

    def started(self, *names: str) -> Cluster:
        """Pservers are there and buckets are placed."""
        for name in names:
            self.add(name)
        self.pass_time(2.0)
        assert self.machine.state.stage == "placed"
        return self
