"""Measures what joining and leaving trainers cost the Master: the placement machine alone, whose messages are counted
but not sent.

    python -m benchmarks.ps crowd

All trainers join, then each begins to count, at different times (``--apart 1``: nothing is combined) or all within a
moment (``--apart 0``). Bytes are those of messages to trainers, of orders to pservers, and of data in the store.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from edl.job_records import Training
from edl.master import service as sv
from edl.master.service import Caller
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.records import Member, World
from ps.coordinator.machine import PlacementMachine
from ps.protocol import messages
from ps.protocol.deltas import orders_after
from ps.server import bucket_machine as hd
from ps.server.bucket_machine import BucketMachine
from ps.spec import TableSpec

TABLES = tuple(TableSpec(name, 16) for name in ("users", "items", "words"))


class Crowd:
    """A job whose pservers immediately execute their orders, and whose trainers have joined."""

    def __init__(self, trainers: int, pservers: int, apart_s: float = 1.0) -> None:
        self.training = Training(servers=(pservers, pservers))
        self.machine = PlacementMachine(self.training)
        self.now_s, self.apart_s, self.wake_s = 100.0, apart_s, 0.0
        self.words = self.bytes = 0
        """Sent since this was last set to 0."""
        self.by_kind: Counter[str] = Counter()
        self.cpu_s = 0.0
        self.kept: dict[str, bytes] = {}
        self.numbers: list[int] = []
        """The numbers of the trainers."""
        self._begun = 0
        self._events: deque[sv.Event] = deque()
        self._holdings: dict[str, BucketMachine] | None = {}
        self._take(self.machine.load({}, self.now_s))
        self._place(pservers)
        self._holdings = None  # from here on only the Master is measured
        self._join(trainers)

    def begin(self, count: int) -> None:
        """Let that many more trainers begin to count."""
        for number in range(self._begun, self._begun + count):
            self.now_s += self.apart_s
            self.feed(self.said(number, messages.Begin(self.numbers[number])))
        self._begun += count
        self.settle()

    def settle(self) -> None:
        """Advance time until nothing is due."""
        for _ in range(100):
            if not self.wake_s:
                break
            self.now_s, self.wake_s = max(self.now_s, self.wake_s), 0.0
            self.feed(sv.Tick())

    def said(self, number: int, word: Any) -> sv.Said:
        """Send a message of the trainer at this position."""
        return sv.Said(Caller(NodeId(f"node-{number}"), 0), Round(1), messages.encode(word))

    def feed(self, event: sv.Event) -> None:
        """Feed an event to the Master, and then the consequences one after the other."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            start = time.thread_time()
            effects = self.machine.step(self._events[0], self.now_s)
            self.cpu_s += time.thread_time() - start
            self._take(effects)
            self._events.popleft()

    def _place(self, pservers: int) -> None:
        assert self._holdings is not None
        for number in range(pservers):
            name = f"servers/node-{number}-0"
            value = json.dumps({"host": f"10.0.0.{number}", "port": 1000, "secret": "s", "machine": f"m{number}"})
            self.feed(sv.KeyPut(name, value.encode()))
            self._holdings[name] = BucketMachine(name)
            self._do(name, self._holdings[name].step(hd.MasterLine()))
        for _ in range(200):
            self.now_s += 0.05
            self.feed(sv.Tick())
        assert self.machine.state.whole and not self.machine.state.grid.in_motion(), "buckets have owners"

    def _join(self, trainers: int) -> None:
        nodes = [
            Member(NodeId(f"node-{number}"), Incarnation(1), "10.0.0.1", 1, Rank(number), ())
            for number in range(trainers)
        ]
        self.feed(sv.WorldBegan(World(Round(1), tuple(nodes), 0)))
        for number in range(trainers):
            self.now_s += self.apart_s
            self.feed(self.said(number, messages.Join(f"{number:032x}", TABLES)))
        self.settle()
        people = self.machine.state.people
        found = [people.at(Caller(NodeId(f"node-{number}"), 0)) for number in range(trainers)]
        self.numbers = [one.number for one in found if one is not None]
        assert len(self.numbers) == trainers, "all have been let in"

    def _take(self, effects: Sequence[sv.Effect]) -> None:
        for effect in effects:
            match effect:
                case sv.Keep(name, value):
                    self.kept[name] = value
                    self.by_kind["kept"] += len(value)
                case sv.WakeAt(at_s):
                    self.wake_s = min(at_s, self.wake_s or at_s)
                case sv.TellWorker(_, body):
                    self._told("trainers", body)
                case sv.Send(name, body):
                    self._told("pservers", body)
                    if self._holdings is not None:
                        self._order(name, body)
                case sv.Fail(text):
                    raise AssertionError(text)

    def _told(self, whom: str, body: str) -> None:
        self.words += 1
        self.bytes += len(body)
        self.by_kind[whom] += len(body)

    def _order(self, name: str, body: str) -> None:
        assert self._holdings is not None
        word = messages.decode(body)
        if not isinstance(word, messages.Orders):
            before = self._holdings[name].orders
            assert before is not None
            word = orders_after(before, word)
        self._do(name, self._holdings[name].step(hd.OrdersCame(word)))
        if word.checkpoint is not None and word.checkpoint.phase == "find":
            self.feed(sv.HelperSaid(name, messages.encode(messages.FoundCheckpoints(word.checkpoint.number))))

    def _do(self, name: str, effects: Sequence[hd.Effect]) -> None:
        assert self._holdings is not None
        bucket_machine = self._holdings[name]
        for effect in effects:
            match effect:
                case hd.SendToMaster(word):
                    self.feed(sv.HelperSaid(name, messages.encode(word)))
                case hd.Copy(follower, number, buckets):
                    self._do(name, bucket_machine.step(hd.ImageAcked(follower, number, buckets)))
                case hd.MarkStream(follower, number):
                    self._do(name, bucket_machine.step(hd.MarkAcked(follower, number)))
                case hd.SendRelease(follower, buckets, version):
                    for other, one in self._holdings.items():
                        if one.number == follower:
                            self._do(other, one.step(hd.Released(bucket_machine.number, version, buckets)))


@click.command("crowd")
@click.option("--trainers", default="128,256,512,1000", show_default=True)
@click.option("--pservers", default=16, show_default=True)
@click.option("--apart", default=1.0, show_default=True, help="Seconds between two that begin.")
def main(trainers: str, pservers: int, apart: float) -> None:
    """Messages, bytes and CPU time of the Master while trainers begin to count, and how they grow with their number."""
    table = Table(title=f"{pservers} pservers, trainers begin {apart:g} s apart, load {report.load_average():.1f}")
    for heading in (
        "trainers",
        "words",
        "MB to trainers",
        "MB to pservers",
        "MB kept",
        "CPU s",
        "bytes ~ n^",
        "CPU ~ n^",
    ):
        table.add_column(heading, justify="right")
    before: tuple[int, int, float] | None = None
    for count in map(int, trainers.split(",")):
        crowd = Crowd(count, pservers, apart)
        crowd.words = crowd.bytes = 0
        crowd.cpu_s = 0.0
        crowd.by_kind.clear()
        crowd.begin(count)
        powers = ("", "")
        if before is not None:
            wider = math.log(count / before[0])
            powers = (
                f"{math.log(crowd.bytes / before[1]) / wider:.2f}",
                f"{math.log(crowd.cpu_s / before[2]) / wider:.2f}",
            )
        before = count, crowd.bytes, crowd.cpu_s
        kinds = (f"{crowd.by_kind[name] / 1e6:.2f}" for name in ("trainers", "pservers", "kept"))
        table.add_row(f"{count:,}", f"{crowd.words:,}", *kinds, f"{crowd.cpu_s:.2f}", *powers)
        report.progress(f"{count} trainers: {crowd.bytes / 1e6:.1f} MB, {crowd.cpu_s:.2f} CPU s")
    Console(width=150).print(table)
