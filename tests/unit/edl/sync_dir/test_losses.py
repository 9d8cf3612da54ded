"""What stays of the checkpoints of several nodes when some of them are lost: indexes, rounds and clocks, without disks
and connections."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from edl.sync_dir.cut import LastMoment, LostNode, incomplete
from edl.sync_dir.index import FileIndex, FileRecord, parent_of
from edl.sync_dir.losses import Losses
from edl.types import NodeId

A, B = (NodeId("a"), "life"), (NodeId("b"), "life")


def test_the_moment_of_a_node_is_the_latest_one_that_is_known() -> None:
    known = Losses()
    known.reached(A, LastMoment(20, 5))
    known.start(1, [A], [A], now_ns=7)
    known.reached(A, LastMoment(10, 6, frozenset({1})))
    known.gathered([], 30)
    assert known.lost([]) == [LostNode(A[0], LastMoment(20, 6, frozenset({1})), since_ns=7)]
    known.gathered([A, B], 30)
    assert known.lost([]) == [LostNode(A[0], LastMoment(30, 6, frozenset({1})), since_ns=7)]


def test_a_node_is_lost_with_its_launcher_until_the_next_workers_start() -> None:
    known = Losses()
    again = (A[0], "another life")
    for one in (A, B, again):
        known.reached(one, LastMoment(20))
    known.gathered([], 30)
    known.start(1, [A, B], [A, B, again], now_ns=7)
    assert known.lost([A, B]) == []
    for _ in range(2):
        assert known.lost([again, B]) == [LostNode(A[0], LastMoment(20), since_ns=7)]
    known.start(2, [again, B], [again, B], now_ns=8)
    assert known.started == 2
    assert known.lost([]) == [LostNode(A[0], LastMoment(20), since_ns=8), LostNode(B[0], LastMoment(20), since_ns=7)]
    known.start(3, [], [], now_ns=9)
    assert known.ahead_ns() == {}


def test_only_who_was_in_the_last_world_can_have_files_that_are_missing() -> None:
    known = Losses()
    for one in (A, B):
        known.reached(one, LastMoment(20))
    known.start(1, [A], [A, B], now_ns=7)
    assert known.unsure([A], 21) and known.unsure([A, B], 21)
    assert not known.unsure([A], 20)
    assert not known.unsure([B], 21)


def test_a_node_that_was_not_in_the_last_world_does_not_know_who_was_lost_in_it() -> None:
    known = Losses()
    known.reached(A, LastMoment(20))
    known.start(3, [A], [A], now_ns=7)
    known.heard(4)
    known.heard(2)
    known.gathered([], 30)
    assert known.lost([]) == []
    known.start(5, [A], [A], now_ns=9)
    for number in (6, 7):
        known.gathered([], 30)
        assert known.lost([]) == [LostNode(A[0], LastMoment(20), since_ns=9)]
        known.heard(number)  # it was faster
        known.start(number, [A], [A], now_ns=11)


@dataclass
class Node:
    """A launcher with its workers."""

    name: NodeId
    life: str
    ahead_ns: int
    """Its clock is ahead of the true time."""
    index: FileIndex
    known: Losses = field(default_factory=Losses)
    written: list[str] = field(default_factory=list)
    """Finished files that its next scan enters."""
    scanned_ns: int = 0
    """All that was finished until then is in its index, by its clock."""
    entered: dict[tuple[NodeId, str], int] = field(default_factory=dict)

    @property
    def launcher(self) -> tuple[NodeId, str]:
        return self.name, self.life

    def records(self) -> list[FileRecord]:
        return [record for record in self.index.records() if not record.removed]

    def folders(self) -> dict[str, list[FileRecord]]:
        found = defaultdict(list)
        for record in self.records():
            found[parent_of(record.path)].append(record)
        return found


class Job:
    """Nodes that save a part each to one folder per step, whenever they get to it. A round begins when nodes have been
    lost or have joined. Time passes with all that they do."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ns = 1000
        self.count = 0
        self.round = 0
        self.alive: list[Node] = []
        self.away: list[Node] = []
        """Lost ones."""
        self.members: dict[int, set[NodeId]] = {}
        """By round, the nodes that take part."""
        self.whole: set[str] = set()
        """Folders that all nodes once had with all parts."""
        self.clocks: dict[NodeId, int] = {}
        for _ in range(3):
            self.join()

    def time(self, node: Node) -> int:
        self.now_ns += 1
        return self.now_ns + node.ahead_ns

    def join(self) -> None:
        """Another node comes, or a lost one comes back: as it was, or with another launcher and its old disk or not."""
        if self.away and self.random.random() < 0.5:
            node = self.away.pop(self.random.randrange(len(self.away)))
            if self.random.random() < 0.6:
                self.count += 1
                kept = node.records() if self.random.random() < 0.5 else []
                node = Node(node.name, f"life {self.count}", node.ahead_ns, FileIndex(node.name))
                for record in kept:
                    node.index.found(record.path, record.size, record.mtime_ns, record.mode)
        else:
            self.count += 1
            name = NodeId(f"n{self.count}")
            node = Node(name, "life", self.random.randrange(-500, 500), FileIndex(name))
        self.clocks[node.name] = node.ahead_ns
        self.alive.append(node)

    # --- while workers run -------------------------------------------------------------------------------------------

    def step_of(self, folder: str) -> tuple[int, int]:
        number, step = folder.rpartition("/")[2].split("-")[1:]
        return int(number), int(step)

    def save(self, node: Node, number: int) -> None:
        """The node finishes its part of its next checkpoint in a round."""
        own = [one.path for one in node.records() if one.version.node == node.name] + node.written
        step = max((self.step_of(parent_of(one)) for one in own), default=(0, 0))
        node.written.append(f"0/step-{number}-{step[1] + 1 if step[0] == number else 1}/{node.name}")

    def scan(self, node: Node) -> None:
        node.scanned_ns = self.time(node)
        for path in node.written:
            node.index.wrote(path, 1, 1, 0o644, self.time(node))
        node.written.clear()

    def ask(self, node: Node, other: Node) -> None:
        asked_ns, now_ns = self.time(node), self.time(other)
        head, records = other.index.head, other.index.since(node.entered.get(other.launcher, 0))
        answered_ns = self.time(node)
        if self.random.random() < 0.3:
            return  # the copy of the files breaks off
        for record in records:
            node.index.learn(record)
        node.entered[other.launcher] = head
        moment = LastMoment(asked_ns - (now_ns - other.scanned_ns), now_ns - (asked_ns + answered_ns) // 2)
        node.known.reached(other.launcher, moment)
        node.known.heard(other.known.started)

    def act(self) -> None:
        kind, node = self.random.random(), self.random.choice(self.alive)
        if kind < 0.3:
            self.save(node, self.round)
        elif kind < 0.6:
            self.scan(node)
        elif len(self.alive) > 1:
            self.ask(*self.random.sample(self.alive, 2))
        self.note_whole()

    def note_whole(self) -> None:
        common = set.intersection(*({record.path for record in node.records()} for node in self.alive))
        for folder in {parent_of(path) for path in common}:
            if self.is_whole(folder, {path for path in common if parent_of(path) == folder}):
                self.whole.add(folder)

    def is_whole(self, folder: str, paths: set[str]) -> bool:
        return paths == {f"{folder}/{name}" for name in self.members[self.step_of(folder)[0]]}

    # --- between rounds ----------------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Some nodes vanish. Those that are only cut off write on for a while."""
        for node in self.random.sample(self.alive, self.random.randrange(len(self.alive))):
            self.alive.remove(node)
            self.away.append(node)
            for _ in range(self.random.choice((0, 0, 9))):
                self.save(node, self.round)
                self.scan(node)

    def exchange(self) -> None:
        for node in self.alive:
            for other in self.alive:
                if other is not node:
                    for record in other.index.since(0):
                        node.index.learn(record)
                    node.known.reached(other.launcher, LastMoment(0, other.ahead_ns - node.ahead_ns))
                    node.known.heard(other.known.started)

    def begin_round(self) -> None:
        """As ``DirectorySync.alike``, on all nodes. It may have to begin anew."""
        while True:
            self.round += 1
            losses: list[tuple[Node, LostNode]] = []
            for node in self.alive:
                self.scan(node)
            self.exchange()
            self.exchange()
            for node in self.random.sample(self.alive, len(self.alive)):
                losses += self.judge(node)
                if self.random.random() < 0.5:
                    self.exchange()  # others hear of it before they decide
            if self.random.random() < 0.7 or len(self.alive) == 1:
                break
            self.lose()
        self.exchange()
        self.exchange()
        self.members[self.round] = {node.name for node in self.alive}
        launchers = {node.launcher for node in self.alive}
        for node in self.alive:
            node.known.start(self.round, launchers - {node.launcher}, launchers, self.time(node))
            node.index.adopt()
        self.check(losses)
        self.clean()

    def judge(self, node: Node) -> list[tuple[Node, LostNode]]:
        launchers = {one.launcher for one in self.alive}
        node.known.gathered(launchers, self.time(node))
        node.index.begin(self.round)
        lost = node.known.lost(launchers)
        for one in lost:
            for folder in incomplete(node.index.records(), one, {**node.known.ahead_ns(), node.name: 0}):
                node.index.set_aside(folder)
        return [(node, one) for one in lost]

    def check(self, losses: list[tuple[Node, LostNode]]) -> None:
        first = self.alive[0]
        for node in self.alive:
            assert {one.path: one.version for one in node.records()} == {
                one.path: one.version for one in first.records()
            }
        set_aside = {record.folder for record in first.index.records() if record.folder}
        assert not set_aside & first.folders().keys()
        assert not set_aside & self.whole
        for judge, lost in losses:
            newest, late = None, []
            for folder, records in sorted(first.folders().items(), key=lambda item: self.step_of(item[0])):
                if all(self.is_late(record, judge, lost) for record in records):
                    late.append(folder)
                else:
                    newest = folder
            if newest is not None and newest in self.whole:
                assert late == [], (judge.name, lost, newest)

    def is_late(self, record: FileRecord, judge: Node, lost: LostNode) -> bool:
        """Whether a file of another node certainly appeared after the last moment known of a lost one."""
        writer = record.writer
        if writer is None or writer == lost.node:
            return False
        return record.appeared_ns - self.clocks[writer] > lost.last.until_ns - judge.ahead_ns + 3

    def clean(self) -> None:
        """Scripts remove what is not whole, and old checkpoints."""
        folders = self.alive[0].folders()
        kept = sorted(folders.keys() & self.whole, key=self.step_of)[-3:]
        for folder, records in folders.items():
            if folder not in kept:
                for record in records:
                    self.random.choice(self.alive).index.removed(record.path)
        self.exchange()
        self.exchange()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(4))
def test_no_checkpoint_stays_that_may_lack_files_of_a_lost_node(chunk: int) -> None:
    """And none gets lost that all nodes had; and all nodes have the same ones."""
    for seed in range(chunk * 100, (chunk + 1) * 100):
        job = Job(seed)
        for _ in range(5):
            job.begin_round()
            for _ in range(job.random.randrange(40)):
                job.act()
            if job.random.random() < 0.8:
                job.lose()
            while job.random.random() < 0.5 and len(job.alive) < 5:
                job.join()
