"""A simulated trainer: joins, pushes until every part is acknowledged, stops for checkpoints, starts over when told.

Its own shell is made by hand; the pool of connections below it is the one that ships.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edl.job_records import Mode
from edl.master.service import Caller, Said
from edl.testing.sim.process import BareProcess
from edl.testing.sim.sockets import SimSockets
from edl.testing.sim.threads import SimThreads
from edl.types import NodeId, Round
from ps.client.pool import ConnectionPool, PserverAnswer, PserverCall
from ps.errors import Denied
from ps.protocol import messages, requests
from ps.protocol.deltas import members_after
from ps.protocol.frames import FrameOp
from ps.protocol.handshake import TRAINER, CallerHello
from tests.sim.ps_net import Net
from tests.sim.ps_server import SECRET

if TYPE_CHECKING:
    from tests.sim.ps_world import PsSim

THINKS_S = 0.3
WAIT_S = 0.5
"""How long a pserver may wait for others before it answers."""


class Trainer:
    """A trainer process in one slot."""

    def __init__(self, sim: PsSim, node: str, nonce: int) -> None:
        self.sim, self.node, self.nonce = sim, node, f"{node}-{nonce}"
        self.caller = Caller(NodeId(node), 0)
        self.process: BareProcess[Net] = BareProcess(sim.net, self.nonce)
        sim.net.add_host(self.nonce)
        self.threads = SimThreads(self.process, sim.net.timeline, sim.net.rng, self._thread_failed)
        self.sockets = SimSockets(self.process, self.threads, sim.net.listening)
        self.pool: ConnectionPool | None = None
        self.number = 0
        self.placement = messages.PlacementMap()
        self.owner: list[int] = []
        self.epoch = 0
        self.members: tuple[messages.TrainerMember, ...] = ()
        self.counts = False
        self.wants_in = True
        self.is_member = False
        """As far as it has been told."""
        self.seq = self.step = self.at = 0
        self.parts: dict[int, tuple[int, ...]] = {}
        """Of the push that is under way: what is not acknowledged yet."""
        self.whole: dict[int, tuple[int, ...]] = {}
        self.owes: set[int] = set()
        """Sync mode: pservers that have not answered this step; also those that came to own something meanwhile."""
        self.answers: set[int] = set()
        self.underway = False
        """Something of this push is applied."""
        self.asked: dict[int, float] = {}
        """When each pserver was asked last, and has not answered."""
        self.waits: set[int] = set()
        """Sync mode: pservers that wait for other trainers."""
        self.busy = False
        self.halt = 0
        self.at_checkpoint: messages.AtCheckpoint | None = None
        self.ask = 0
        self.saved = self.refused = 0
        self.acked = 0
        self.join()

    # --- the Master --------------------------------------------------------------------------------------------------

    def say(self, word: Any) -> None:
        self.sim.master.said(Said(self.caller, Round(self.sim.round), messages.encode(word)))

    def join(self) -> None:
        if self.alive and not self.number:
            self.say(messages.Join(self.nonce, self.sim.tables))
            self.sim.run_later(self, self.join, after_s=1.0)

    def again(self) -> None:
        """The stream to the Master is a new one: what was said may be lost."""
        if not self.alive:
            return
        self.say(messages.Join(self.nonce, self.sim.tables))
        if self.number:
            self.say(messages.GetPlacement(0))
            if self.wants_in:
                self.say(messages.Begin(self.number))
            if self.at_checkpoint is not None:
                self.say(self.at_checkpoint)
            if self.ask:
                self.say(messages.Save(self.ask))

    def hear(self, body: str) -> None:
        word = messages.decode(body)
        match word:
            case messages.Joined():
                if not self.number:
                    self.number, self.step = word.number, word.step
                    hello = CallerHello(TRAINER, word.number, self.nonce)
                    self.pool = ConnectionPool(hello, SECRET, None, self.threads, self.sockets)
                    self.epoch, self.members = word.epoch, word.members
                    self.take(word.placement)
                    self.say(messages.Begin(self.number))
                    self.sim.run_later(self, self.think)
                elif word.number == self.number:
                    self.hear_update(messages.PlacementUpdate(word.token, word.placement, word.epoch, word.members))
            case messages.PlacementUpdate() | messages.PlacementChanged() | messages.MembersChanged():
                self.hear_update(word)
            case messages.RequestRefused(kind, text, ask):
                if kind == "stale":
                    self.end()
                elif kind == "save" and ask == self.ask:
                    self.ask, self.refused = 0, self.refused + 1
                elif kind != "save":
                    raise AssertionError(text)
            case messages.Halt(checkpoint):
                self.halt, self.waits = checkpoint, set()
            case messages.NameData(checkpoint):
                self.say(messages.DataNamed(checkpoint, (("data", str(checkpoint)),)))
            case messages.GoOn(checkpoint):
                if self.halt <= checkpoint:
                    self.halt, self.at_checkpoint = 0, None
            case messages.CheckpointSaved(ask, _, run):
                if ask == self.ask:
                    self.ask, self.saved = 0, self.saved + 1
                    self.sim.disk.must_have(run)

    def hear_update(self, word: messages.PlacementUpdate | messages.PlacementChanged | messages.MembersChanged) -> None:
        if isinstance(word, messages.PlacementUpdate | messages.PlacementChanged):
            self.take(word.placement)
        if isinstance(word, messages.PlacementUpdate) and word.epoch >= self.epoch:
            self.epoch, self.members = word.epoch, word.members
        elif isinstance(word, messages.MembersChanged) and word.since == self.epoch:
            self.epoch, self.members = word.epoch, members_after(self.members, word.came, word.went)
        elif isinstance(word, messages.MembersChanged) and word.epoch > self.epoch:
            self.say(messages.GetPlacement(-1))
        self.follow()

    def follow(self) -> None:
        """The membership may be another one."""
        mine = [one for one in self.members if one.number == self.number]
        self.is_member = bool(mine)
        if mine and self.number and self.wants_in and not self.counts:
            self.counts = True
            self.step = max(self.step, mine[0].step)
        self.work()

    def take(self, placement: messages.PlacementMap) -> None:
        if self.pool is not None:
            self.pool.follow(one.number for one in placement.servers)
        if self.number and placement.history != self.placement.history and self.placement.version:
            if placement.history > self.placement.history:
                self.end()
            return
        if placement.version > self.placement.version:
            self.placement = placement
            self.owner = list(messages.unpack(placement.owner, self.sim.buckets))

    @property
    def alive(self) -> bool:
        return self.process.alive

    def kill(self) -> None:
        """The process is gone."""
        self.process.end()
        self.threads.end()
        self.sockets.opened.close()

    def end(self) -> None:
        """The process ends; its launcher starts another one."""
        if self.alive:
            self.kill()
            self.sim.trainer_ended(self)

    def _thread_failed(self, name: str, error: BaseException) -> None:
        self.sim.net.note(f"{self.nonce}: thread {name} ended with {error!r}")

    def leave(self) -> None:
        """No more to do. Said until the Master has heard it."""
        self.wants_in = self.counts = False
        if self.alive and self.is_member:
            self.say(messages.LeaveMembership(self.number))
            self.sim.run_later(self, self.leave, after_s=5.0)

    # --- training ----------------------------------------------------------------------------------------------------

    def think(self) -> None:
        """Pause between two steps."""
        if not self.alive:
            return
        self.sim.run_later(self, self.think, after_s=self.sim.net.rng.expovariate(1 / THINKS_S))
        if self.busy:
            self.work()
        elif self.halt:
            if self.at_checkpoint is None:
                self.stop_for_checkpoint()
            elif self.sim.net.rng.random() < 0.05:
                self.say(self.at_checkpoint)
        elif self.counts and self.placement.version and all(self.owner):
            if not self.ask and self.sim.wants_checkpoints and self.sim.net.rng.random() < 0.01:
                self.sim.asks += 1
                self.ask = self.sim.asks
                self.say(messages.Save(self.ask))
            self.begin_push()

    def stop_for_checkpoint(self) -> None:
        self.at_checkpoint = messages.AtCheckpoint(self.halt, self.step, f'"{self.node}"')
        self.waits = set()
        self.say(self.at_checkpoint)

    def begin_push(self) -> None:
        rng = self.sim.net.rng
        self.seq += 1
        self.busy, full = True, self.sim.ledger.full
        self.whole = {
            bucket: tuple(row for row in sorted({rng.randrange(2), rng.randrange(2)}) if not full((bucket, row)))
            for bucket in sorted({rng.randrange(self.sim.buckets) for _ in range(rng.randint(1, 4))})
        }
        self.parts = dict(self.whole)
        self.answers, self.underway = set(), False
        self.asked, self.waits = {}, set()
        self.work()

    def work(self) -> None:
        """Ask every pserver that has not answered; end the step when all have."""
        if not self.alive or not self.busy or self.at_checkpoint is not None:
            return
        now_s = self.sim.net.now_s
        by_server: dict[int, dict[int, tuple[int, ...]]] = {}
        for bucket, rows in self.parts.items():
            by_server.setdefault(self.owner[bucket], {})[bucket] = rows
        living = {one.number for one in self.placement.servers}
        if self.sim.training.mode is Mode.SYNC:
            self.owes = (living & set(self.owner)) - self.answers
        for number in self.owes:
            by_server.setdefault(number, {})
        if not by_server:
            self.busy = False
            self.step = max(self.step, self.at) + 1  # a newcomer goes on where the others are
            self.acked += 1
            self.sim.was_acknowledged(self, self.whole)
            return
        if self.underway or not self.halt:
            self.waits = set()  # something of this push is applied: the rest will be
        if self.halt and self.waits >= by_server.keys():
            self.stop_for_checkpoint()  # those it waits for have stopped, and nothing of this push is applied
            return
        for number, parts in by_server.items():
            if now_s < self.asked.get(number, 0.0) or number in self.waits:
                continue
            self.asked[number] = now_s + 4 * WAIT_S
            self.request(number, parts)

    def request(self, number: int, parts: dict[int, tuple[int, ...]]) -> None:
        sim = self.sim
        server = next((one for one in self.placement.servers if one.number == number), None)
        if server is None or self.pool is None:
            self.lost(number)
            return
        push = (self.number, self.seq)
        heads, body = requests.push([sim.ledger.part(parts, push)] if any(parts.values()) else [])
        head = {
            "trainer": self.number, "seq": self.seq, "step": self.step, "base": -1, "version": self.placement.version,
            "history": self.placement.history, "epoch": self.epoch, "scale": 1.0, "parts": heads, "ends": True,
        }  # fmt: skip
        if self.answers:
            head["complete"] = True  # another pserver has applied this step
        seq, history, sent = self.seq, self.placement.history, dict(parts)

        def landed(answer: PserverAnswer) -> None:
            if sim.net.rng.random() < sim.loss:
                self.threads.start(self._interrupt, number, name="loss")
                answer = PserverAnswer(error=ConnectionError("the answer is lost"))
            self.process.run(self.landed, number, seq, sent, history, answer)

        self.pool.ask("push", server, PserverCall(FrameOp.PUSH, head, body, None, 4 * WAIT_S, WAIT_S), landed)

    def _interrupt(self, number: int) -> None:
        if self.pool is not None:
            self.pool.interrupt("push", [number])

    def lost(self, number: int) -> None:
        """No answer has come from a pserver."""
        self.asked[number] = self.sim.net.now_s + 0.1
        if self.sim.net.rng.random() < 0.3:
            self.say(messages.GetPlacement(self.placement.version))

    def landed(
        self, number: int, seq: int, parts: dict[int, tuple[int, ...]], history: int, answer: PserverAnswer
    ) -> None:
        """A pserver has answered, or cannot be reached."""
        if not self.alive or history != self.placement.history:
            return
        if answer.frame is None:
            if seq == self.seq and self.busy:
                if isinstance(answer.error, Denied):
                    self.end()
                else:
                    self.lost(number)
            return
        head, op = answer.head, answer.frame.op
        if "placement" in head:
            self.hear_update(messages.decode(head["placement"]))
        self.at = max(self.at, int(head.get("step", 0)))
        if op is FrameOp.REFUSED:
            self.sim.net.fail(f"a push was refused: {head}")
        what = {
            FrameOp.OK: "ok",
            FrameOp.MOVED: "moved",
            FrameOp.BUSY: "later",
            FrameOp.STALE: "stale",
            FrameOp.ROLLED_BACK: "stale",
        }.get(op)
        if op is FrameOp.WAIT:
            what = {"copies": "slow", "trainers": "wait", "release": "later"}[head["for"]]
        self.answered(number, seq, parts, what or "")

    def answered(self, number: int, seq: int, parts: dict[int, tuple[int, ...]], what: str) -> None:
        if seq != self.seq or not self.busy:
            return
        self.asked.pop(number, None)
        if what == "wait" and self.halt:
            self.waits.add(number)
        self.underway = self.underway or what in ("ok", "slow")
        if what == "ok":
            for bucket in parts:
                self.parts.pop(bucket, None)
            self.answers.add(number)
        elif what == "stale":
            self.end()
            return
        elif what == "moved":
            self.say(messages.GetPlacement(self.placement.version))
            self.asked[number] = self.sim.net.now_s + 0.05
        self.work()
