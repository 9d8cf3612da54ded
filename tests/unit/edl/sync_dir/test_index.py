"""Versions of files on several nodes, against plain dictionaries."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from edl.sync_dir.index import FileIndex, FileRecord, FileVersion
from edl.types import NodeId

A, B = NodeId("a"), NodeId("b")
FOLDER = "0/f"
NOW = 1000
PATHS = ("0/0", "0/1", "0/f/2", "0/f/3")


def test_a_later_write_wins_whatever_the_order_of_arrival() -> None:
    a, b, c = FileIndex(A), FileIndex(B), FileIndex(NodeId("c"))
    first = a.wrote("0/f", 1, 5, 0o644, NOW)
    b.learn(first)
    second = b.wrote("0/f", 2, 4, 0o644, NOW)  # its clock is behind
    for record in (second, first):
        c.learn(record)
    a.learn(second)
    assert a.get("0/f") == c.get("0/f") == second


def test_any_write_of_the_job_wins_over_a_file_that_was_there_before() -> None:
    a, b = FileIndex(A), FileIndex(B)
    old = b.found("0/f", 9, 10**19, 0o644)
    new = a.wrote("0/f", 1, 1, 0o644, NOW)
    assert not a.wants(old)
    assert b.wants(new)


def test_of_files_that_were_there_before_the_one_changed_last_wins() -> None:
    a, b = FileIndex(A), FileIndex(B)
    older, newer = a.found("0/f", 1, 10, 0o644), b.found("0/f", 1, 11, 0o644)
    assert a.wants(newer)
    assert not b.wants(older)


def test_old_files_that_workers_have_started_with_win_over_a_newcomers() -> None:
    a, b = FileIndex(A), FileIndex(B)
    b.learn(a.found("0/f", 1, 10, 0o644))
    for index in (a, b):
        index.adopt()
    assert a.get("0/f") == b.get("0/f")
    newcomer = FileIndex(NodeId("c")).found("0/f", 1, 99, 0o644)
    assert not a.wants(newcomer)
    assert a.wrote("0/f", 2, 5, 0o644, NOW).version > FileVersion(1, 99, B)


def test_what_the_job_wrote_keeps_its_version_when_its_workers_start_again() -> None:
    a, b = FileIndex(A), FileIndex(B)
    b.learn(a.wrote("0/f", 1, 10, 0o644, NOW))
    newest = b.wrote("0/f", 2, 20, 0o644, NOW)
    b.adopt()
    assert b.get("0/f") == newest and a.wants(newest)


def test_a_version_that_is_here_already_is_no_change() -> None:
    """Else two nodes would tell each other of it for ever."""
    a = FileIndex(A)
    for _ in range(2):
        a.learn(FileRecord("0/f", FileVersion(7, 0, B), 1, 1, 0o644))
    assert a.head == 1


def test_a_removal_is_a_version() -> None:
    a, b = FileIndex(A), FileIndex(B)
    b.learn(a.wrote("0/f", 1, 5, 0o644, NOW))
    gone = a.removed("0/f")
    assert b.wants(gone)
    b.learn(gone)
    assert b.total() == (0, 0)
    assert b.wrote("0/f", 2, 6, 0o644, NOW).version > gone.version


def test_changes_are_listed_from_a_number_on_and_each_path_once() -> None:
    a = FileIndex(A)
    first = a.wrote("0/f", 1, 5, 0o644, NOW)
    a.wrote("0/g", 1, 5, 0o644, NOW)
    number = a.head
    again = a.wrote("0/f", 2, 6, 0o644, NOW)
    assert a.since(number) == [again]
    assert [record.path for record in a.since(0)] == ["0/g", "0/f"]
    assert first not in a.since(0)
    assert a.since(a.head) == []


def test_an_older_version_is_not_entered_but_counts() -> None:
    a = FileIndex(A)
    a.learn(FileRecord("0/f", FileVersion(7, 0, B), 1, 1, 0o644))
    a.learn(FileRecord("0/f", FileVersion(3, 0, B), 1, 1, 0o644))
    assert a.head == 1
    assert a.wrote("0/g", 1, 1, 0o644, NOW).version.counter == 8


def test_a_folder_is_set_aside_with_what_was_in_it_before() -> None:
    a, b, c = FileIndex(A), FileIndex(B), FileIndex(NodeId("c"))
    old, beside = a.wrote("0/x/y/old", 1, 5, 0o644, NOW), a.wrote("0/xy", 1, 5, 0o644, NOW)
    b.learn(old)
    aside = b.set_aside("0/x")
    new = b.wrote("0/x/y/new", 1, 5, 0o644, NOW)
    for record in (new, aside, old, beside):
        c.learn(record)
    for record in (aside, new):
        a.learn(record)
    assert not any(index.wants(old) for index in (a, b, c))
    assert sorted(one.path for one in a.records()) == ["0/x/", "0/x/y/new", "0/xy"]
    assert sorted(one.path for one in c.records()) == ["0/x/", "0/x/y/new", "0/xy"]
    assert c.total() == (2, 2)


def test_a_round_wins_over_earlier_ones_also_where_nobody_knew_them() -> None:
    """A node is cut off, and comes back with what its workers went on to write."""
    a, b = FileIndex(A), FileIndex(B)
    for index in (a, b):
        index.begin(2)
    stale = [a.wrote("0/x/model", 1, 5, 0o644, NOW) for _ in range(9)][-1]
    b.begin(3)
    newest = b.wrote("0/x/model", 2, 4, 0o644, NOW)
    assert not b.wants(stale)
    assert a.wants(newest)
    a.wrote("0/y/model", 1, 5, 0o644, NOW)
    a.learn(b.set_aside("0/y"))
    assert [one.path for one in a.records()] == ["0/x/model", "0/y/"]


def test_later_versions_keep_when_the_file_appeared_as_far_as_its_clock_is_known() -> None:
    a, b = FileIndex(A), FileIndex(B)
    first = a.wrote("0/f", 1, 5, 0o644, 10)
    assert first.appeared_ns == 10
    assert a.wrote("0/f", 2, 6, 0o644, 20).appeared_ns == 10
    assert a.removed("0/f").appeared_ns == 10
    again = a.wrote("0/f", 3, 7, 0o644, 40)
    assert again.appeared_ns == 10
    b.learn(again)
    assert b.removed("0/f").appeared_ns == b.wrote("0/f", 4, 8, 0o644, 50).appeared_ns == 0
    a.found("0/old", 1, 5, 0o644)
    assert a.wrote("0/old", 1, 6, 0o644, 60).appeared_ns == 0
    a.set_aside("0/x")
    assert a.wrote("0/x/f", 1, 6, 0o644, 70).appeared_ns == 70


def test_the_writer_of_files_that_are_older_than_the_launchers_is_not_known() -> None:
    a = FileIndex(A)
    a.found("0/f", 1, 0, 0o644)  # its time says nothing
    a.adopt()
    assert [record.writer for record in a.records()] == [None]
    assert a.wrote("0/f", 1, 0, 0o644, NOW).writer == A


@dataclass
class ModelNode:
    """A node: its index, and its files as a dictionary from path to the version of the content."""

    name: NodeId
    index: FileIndex
    files: dict[str, FileVersion] = field(default_factory=dict)
    log: list[dict[str, FileVersion]] = field(default_factory=list)
    """Its own files after each of its own changes, if only it wrote."""
    entered: dict[NodeId, int] = field(default_factory=dict)

    def show(self, record: FileRecord) -> None:
        if record.folder:
            self.set_aside(record)
        elif record.removed:
            self.files.pop(record.path, None)
        else:
            self.files[record.path] = record.version

    def set_aside(self, record: FileRecord) -> None:
        older = [one for one, version in self.files.items() if one.startswith(record.path) and version < record.version]
        for path in older:
            del self.files[path]


class Nodes:
    """Nodes that write, ask one another, fail while they fetch, get lost, and join."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0
        self.size = 0
        self.nodes: list[ModelNode] = []
        for _ in range(3):
            self.join()

    def join(self) -> None:
        self.count += 1
        name = NodeId(f"n{self.count}")
        node = ModelNode(name, FileIndex(name))
        for path in self.random.sample(PATHS, self.random.randrange(3)):
            self.size += 1
            record = node.index.found(path, self.size, self.random.randrange(100), 0o644)
            node.files[record.path] = record.version
        node.log.append(dict(node.files))
        self.nodes.append(node)

    def write(self, node: ModelNode, *, own: bool) -> None:
        path = f"0/{node.name}.{self.random.randrange(3)}" if own else self.random.choice(PATHS)
        if path in node.files and self.random.random() < 0.3:
            node.index.removed(path)
            del node.files[path]
        else:
            self.size += 1
            node.files[path] = node.index.wrote(path, self.size, self.size, 0o644, NOW).version
        node.log.append(self.only(node.files, node.name))

    def ask(self, node: ModelNode, other: ModelNode) -> None:
        """Ask for changes; the answer may be lost, may be repeated, and the content may change before it is fetched."""
        head, records = other.index.head, other.index.since(node.entered.get(other.name, 0))
        if self.random.random() < 0.2:
            return
        wanted = [record for record in records if node.index.wants(record)]
        if self.random.random() < 0.3:
            self.write(other, own=True)
        if any(not one.removed and other.files.get(one.path) != one.version for one in wanted):
            return  # the other node says that it is gone; ask again later
        for record in wanted:
            node.show(record)
        for record in records:
            node.index.learn(record)
        if self.random.random() < 0.8:  # else it does not remember, and gets the same again
            node.entered[other.name] = head

    @staticmethod
    def only(files: dict[str, FileVersion], writer: NodeId) -> dict[str, FileVersion]:
        """The files that have the names of one node."""
        return {path: version for path, version in files.items() if path.startswith(f"0/{writer}.")}

    def act(self) -> None:
        kind = self.random.random()
        if kind < 0.03:
            node = self.random.choice(self.nodes)
            node.set_aside(node.index.set_aside(FOLDER))
        elif kind < 0.4:
            self.write(self.random.choice(self.nodes), own=self.random.random() < 0.7)
        elif kind < 0.94:
            node, other = self.random.sample(self.nodes, 2)
            self.ask(node, other)
        elif kind < 0.97 and len(self.nodes) > 2:
            self.nodes.remove(self.random.choice(self.nodes))
        elif len(self.nodes) < 5:
            self.join()

    def exchange(self) -> None:
        """Everybody gets everything, with nothing lost."""
        for _ in range(2 * len(self.nodes)):
            for node in self.nodes:
                for other in self.nodes:
                    if node is not other:
                        for record in other.index.since(0):
                            if node.index.wants(record):
                                node.show(record)
                            node.index.learn(record)


def newest(nodes: list[ModelNode]) -> dict[str, FileRecord]:
    """The merge of all indexes, by comparing versions only."""
    found: dict[str, FileRecord] = {}
    for node in nodes:
        for record in node.index.since(0):
            if record.path not in found or record.version > found[record.path].version:
                found[record.path] = record
    aside = found.pop(f"{FOLDER}/", None)
    return {
        path: record
        for path, record in found.items()
        if not (aside and path.startswith(aside.path) and record.version < aside.version)
    }


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(4))
def test_all_nodes_become_alike_and_show_moments_of_each_writer_until_then(chunk: int) -> None:
    for seed in range(chunk * 500, (chunk + 1) * 500):
        nodes = Nodes(seed)
        writers = {node.name: node for node in nodes.nodes}
        for _ in range(40):
            nodes.act()
            writers |= {node.name: node for node in nodes.nodes}
            for node in nodes.nodes:
                for name, writer in writers.items():
                    if name != node.name:
                        shown = nodes.only(node.files, name)
                        assert shown in ([{}] + [nodes.only(moment, name) for moment in writer.log]), (seed, name)
        merged = newest(nodes.nodes)  # all that anyone alive has received
        nodes.exchange()
        expected = {path: record.version for path, record in merged.items() if not record.removed}
        for node in nodes.nodes:
            assert node.files == expected, (seed, node.name)
