"""What two scans say of a directory that changes while it is read."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from edl.sync_dir.settling import FileStamp, Moment, Settled, TreeScan, settle

A = FileStamp(1, 10, 100, 0o644, 100)
B = FileStamp(2, 20, 200, 0o644, 200)


def test_a_file_counts_when_two_scans_agree() -> None:
    seen = TreeScan({"0/a": A}, 141, 150)
    assert settle({}, TreeScan(), seen, ()) == Moment([], True, 100)
    assert settle({}, seen, TreeScan({"0/a": A}, 151, 160), ()) == Moment([Settled("0/a", A)], False, 151)


def test_a_file_that_is_known_is_no_change_even_after_a_rename_onto_it() -> None:
    seen = TreeScan({"0/a": replace(A, ctime_ns=900)}, 941, 950)
    assert settle({"0/a": A}, seen, seen, ()) == Moment([], False, 941)


def test_changes_come_in_the_order_in_which_they_were_made() -> None:
    seen = TreeScan({"0/b": B, "0/a": A}, 291, 300)
    assert settle({}, seen, seen, ()).changes == [Settled("0/a", A), Settled("0/b", B)]


def test_a_finished_file_waits_for_one_that_was_finished_before_it() -> None:
    """The first scan read ``shard`` before its end, and ``metadata``, which is written last, when both were there."""
    shard, metadata = replace(A, size=11, ctime_ns=140), replace(B, ctime_ns=150)
    before = TreeScan({"0/shard": A, "0/metadata": metadata}, 151, 160)
    now = TreeScan({"0/shard": shard, "0/metadata": metadata}, 161, 170)
    assert settle({}, before, now, ()) == Moment([], True, 140)
    assert settle({}, now, now, ()).changes == [Settled("0/shard", shard), Settled("0/metadata", metadata)]


def test_an_open_file_neither_counts_nor_delays_others() -> None:
    seen = TreeScan({"0/log": A, "0/b": B}, 291, 300)
    assert settle({}, seen, seen, {"0/log"}) == Moment([Settled("0/b", B)], False, 291)


def test_a_removal_counts_after_what_was_written_before_it() -> None:
    known = {"0/old": A}
    new = FileStamp(3, 5, 250, 0o644, 250)
    # The first scan saw the removal, but not yet the file that was written before it.
    before, now = TreeScan({}, 251, 260), TreeScan({"0/new": new}, 271, 280)
    assert settle(known, before, now, ()) == Moment([], True, 0)
    assert settle(known, now, now, ()).changes == [Settled("0/new", new), Settled("0/old", None)]


class Writer:
    """A directory that changes while it is scanned, and a node that learns of it from the scans."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1
        self.files: dict[str, FileStamp] = {}
        self.changed: dict[str, int] = {}
        """When each path was last changed."""
        self.removals: list[tuple[int, str]] = []
        self.known: dict[str, FileStamp] = {}
        self.before = TreeScan()
        self.until = 0

    def act(self) -> None:
        self.now += 1
        path = f"0/{self.random.randrange(4)}"
        if self.random.random() >= 0.25:
            self.files[path] = FileStamp(self.now, self.now, self.now, 0o644, self.now)
        elif self.files.pop(path, None):
            self.removals.append((self.now, path))
        self.changed[path] = self.now

    def scan(self, busy: float) -> int:
        """Scan and learn; returns the time of the newest change that counts now, 0 if there is none."""
        seen, begun = {}, self.now
        for number in self.random.sample(range(4), 4):
            while self.random.random() < busy:
                self.act()
            if f"0/{number}" in self.files:
                seen[f"0/{number}"] = self.files[f"0/{number}"]
        self.now += 1
        newest, now = 0, TreeScan(seen, begun, self.now)
        moment = settle(self.known, self.before, now, ())
        self.until = moment.until_ns
        for change in moment.changes:
            if change.stamp is not None:
                self.known[change.path] = change.stamp
                newest = max(newest, change.stamp.ctime_ns)
                continue
            del self.known[change.path]
            ended = self.before.ended_ns
            newest = max([newest, *(at for at, path in self.removals if path == change.path and at <= ended)])
        self.before = now
        return newest


@pytest.mark.parametrize("chunk", range(4))
def test_what_was_finished_before_a_change_counts_with_it(chunk: int) -> None:
    """Against the directory itself: a thousand writers that change files while they are scanned. A version that was
    overwritten or removed before it could count is as if it had never been."""
    for seed in range(chunk * 250, (chunk + 1) * 250):
        writer = Writer(seed)
        for _ in range(8):
            newest = writer.scan(writer.random.choice((0.0, 0.2, 0.5)))
            for path, at in writer.changed.items():
                assert at > newest or writer.known.get(path) == writer.files.get(path), (seed, path)
                assert at >= writer.until or writer.known.get(path) == writer.files.get(path), (seed, path)
        writer.scan(0.0)
        writer.scan(0.0)
        assert writer.known == writer.files, seed
