"""Checkpoints of parameter servers: written by some, read by others, never used when anything is wrong with them."""

from __future__ import annotations

import errno
import json
import os
import secrets
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edl.adapters.files import PlainFiles
from edl.adapters.remote_files import RemoteFiles, open_files
from edl.checkpoint.directory.manifest import Sum
from edl.errors import CheckpointError
from edl.ports import Files
from ps.checkpoint import manifest as layout
from ps.checkpoint.directory import CheckpointDirectory
from ps.checkpoint.manifest import CHAIN, MANIFEST_FILE, PartReport, flat
from ps.checkpoint.reader import Loaded, merged
from ps.checkpoint.writer import WriteRate
from ps.hashing import buckets_of
from ps.protocol.messages import CheckpointOrder, Orders
from ps.rows import Rows
from ps.spec import BUCKETS, Optimizer, TableSpec, UpdateRule, differences
from tests.support.checkpoint_rows import (
    DENSE,
    TABLES,
    USER,
    Held,
    files_below,
    finish,
    orders,
    rows_of,
    split,
    taken,
    union,
)

ALL = np.ones(BUCKETS, np.uint8)
RUN = "ps/job/checkpoint-0000000001"


def keys_of(count: int, seed: int = 1) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count))


def some(count: int = 3000, seed: int = 1) -> dict[str, Rows]:
    return {"user": rows_of(USER, keys_of(count, seed), seed), DENSE.name: rows_of(DENSE, np.arange(50), seed)}


def checkpoint(
    files: Files, number: int, rows: dict[str, Rows], *, servers: int = 2, job: str = "job", **options: int
) -> str:
    directories = [
        CheckpointDirectory(files, job, 1 + one, file_bytes=options.get("file_bytes", 1 << 20))
        for one in range(servers)
    ]
    owned = split(servers, number)
    told = [one.write(number, 1, own, taken(rows)) for one, own in zip(directories, owned, strict=True)]
    return str(json.loads(finish(directories, number, told, json.dumps({"step": 10 * number})))["run"])


def restored(files: Files, run: str, servers: int = 1) -> dict[str, dict[int, bytes]]:
    several = [Held() for _ in range(servers)]
    for held, mine in zip(several, split(servers, 99), strict=True):
        CheckpointDirectory(files, "job").restore(run, mine, held.load)
    return union(several)


@pytest.fixture(params=["path", "store"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return open_files(str(tmp_path) if request.param == "path" else f"memory://{secrets.token_hex(8)}")


@pytest.fixture
def plain(tmp_path: Path) -> Files:
    return open_files(str(tmp_path))


# --- whole checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("file_bytes", [1, 20_000, 1 << 30])
def test_two_write_and_three_and_one_read(files: Files, file_bytes: int) -> None:
    rows = some()
    run = checkpoint(files, 1, rows, file_bytes=file_bytes)
    for servers in (1, 3):
        assert restored(files, run, servers) == Held(rows).rows


def test_what_is_found(files: Files) -> None:
    assert CheckpointDirectory(files, "job").find().top == 0
    rows = some(100)
    checkpoint(files, 1, rows)
    run = checkpoint(files, 5, rows)
    CheckpointDirectory(files, "job", 9).write(7, 1, ALL, taken(rows))
    found = CheckpointDirectory(files, "job").find()
    assert (found.top, [one.number for one in found.checkpoints], found.refused) == (7, [5, 1], ())
    assert (found.checkpoints[0].run, found.checkpoints[0].step, found.checkpoints[0].tables) == (run, 50, TABLES)
    assert json.loads(found.checkpoints[0].extra) == {"step": 50}
    assert CheckpointDirectory(files, "another").find() == CheckpointDirectory(files, "third").find()


def test_tables_without_rows_and_pservers_without_buckets(plain: Files) -> None:
    directories = [CheckpointDirectory(plain, "job", one) for one in (1, 2)]
    told = [
        directories[0].write(1, 1, ALL, taken({"user": rows_of(USER, keys_of(0))})),
        directories[1].write(1, 1, 0 * ALL, taken(some(50))),
    ]
    run = json.loads(finish(directories, 1, told))["run"]
    assert restored(plain, run) == {} and len(CheckpointDirectory(plain, "job").find().checkpoints) == 1


def test_any_tool_can_read_the_files(plain: Files, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    rows = some()
    run = checkpoint(plain, 1, rows, servers=1)
    name = next(one for one in files_below(tmp_path) if one.endswith(".safetensors"))
    arrays = safetensors.load_file(tmp_path / name)
    order = np.argsort(arrays["user/keys"])
    for column in ("keys", "weights", "state", "frequency", "updates", "seen"):
        assert np.array_equal(arrays[f"user/{column}"][order], getattr(rows["user"], column)), column
    assert arrays[f"{DENSE.name}/state"].shape == (50, 0)
    buckets = buckets_of(arrays["user/keys"])
    assert np.array_equal(np.repeat(*arrays["user/index"].T), buckets) and run in name


def test_a_bucket_written_twice_or_never_makes_a_checkpoint_invalid(plain: Files) -> None:
    directories = [CheckpointDirectory(plain, "job", one) for one in (1, 2)]
    owned = split(2)
    rows = some(100)
    told = [one.write(1, 1, own, taken(rows)) for one, own in zip(directories, owned, strict=True)]
    with pytest.raises(CheckpointError, match="were not written by any pserver"):
        finish(directories, 1, told[:1])
    with pytest.raises(CheckpointError, match="was written by pserver 1 and by 2"):
        finish(directories, 1, [told[0], replace(PartReport.decode(told[1]), buckets=((0, BUCKETS),)).encode()])
    with pytest.raises(CheckpointError, match="not a pserver's report"):
        finish(directories, 1, [told[0], "{}"])
    assert not CheckpointDirectory(plain, "job").find().checkpoints
    finish(directories, 1, told)
    with pytest.raises(CheckpointError, match="another run of this job"):
        finish(directories, 1, told)


def test_an_incomplete_part_prevents_the_marker(plain: Files, tmp_path: Path) -> None:
    directory = CheckpointDirectory(plain, "job", 1)
    told = directory.write(1, 1, ALL, taken(some(100)))
    (tmp_path / RUN / next(n for n in os.listdir(tmp_path / RUN) if n.endswith("safetensors"))).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="has 5 bytes instead of"):
        finish([directory], 1, [told])
    with pytest.raises(CheckpointError, match="history"):
        directory.complete(*_of_another_history(told))


def _of_another_history(told: str) -> tuple[CheckpointOrder, Orders]:
    return CheckpointOrder(1, "complete", parts=(told,)), orders(history=2)


# --- what is wrong with them -----------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [cut_short, flip, remove])
@pytest.mark.parametrize("kind", ["checkpoint.json", "json", "safetensors"])
def test_a_torn_checkpoint_is_not_used_but_the_one_before(
    plain: Files, tmp_path: Path, harm: Callable[[Path], None], kind: str
) -> None:
    rows = some()
    older = checkpoint(plain, 1, rows)
    newer = checkpoint(plain, 2, some(seed=7))
    names = sorted(path for path in (tmp_path / newer).iterdir() if path.name.endswith(kind))
    harm(next(path for path in names if (path.name == "checkpoint.json") == (kind == "checkpoint.json")))
    said: list[str] = []
    found = CheckpointDirectory(plain, "job", say=said.append).find()
    if kind == "safetensors" and harm is flip:
        assert [one.run for one in found.checkpoints] == [newer, older]
        directory = CheckpointDirectory(plain, "job")
        with pytest.raises(CheckpointError, match=r"checkpoint-0000000002: the checksum of .* differs"):
            directory.restore(newer, ALL, Held().load)
        found = directory.find()
    assert [one.run for one in found.checkpoints] == [older] and found.top == 2
    assert restored(plain, older) == Held(rows).rows
    if not (kind == "checkpoint.json" and harm is remove):
        assert "checkpoint-0000000002: " in found.refused[0], found.refused


@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 10 else pytest.mark.soak) for n in range(30)])
def test_no_flipped_bit_goes_unnoticed(plain: Files, tmp_path: Path, seed: int) -> None:
    rows = some(300)
    run = checkpoint(plain, 1, rows, servers=1)
    draw = np.random.default_rng(seed)
    paths = sorted((tmp_path / run).iterdir())
    path = paths[seed % len(paths)]
    data = bytearray(path.read_bytes())
    data[draw.integers(len(data))] ^= 1 << int(draw.integers(8))
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        CheckpointDirectory(plain, "job").restore(run, ALL, Held().load)


def test_the_checksum_tells_where(plain: Files, tmp_path: Path) -> None:
    run = checkpoint(plain, 1, some(80_000), servers=1, file_bytes=1 << 30)
    path = next(path for path in (tmp_path / run).iterdir() if path.name.endswith("safetensors"))
    data = bytearray(path.read_bytes())
    data[3 << 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="bytes 3145728 to 4194304, differs"):
        CheckpointDirectory(plain, "job").restore(run, ALL, Held().load)


def test_only_what_is_needed_is_read(plain: Files, tmp_path: Path) -> None:
    """Damage elsewhere is for those whose rows it hits."""
    run = checkpoint(plain, 1, some(80_000), servers=1, file_bytes=1 << 30)
    path = next(path for path in (tmp_path / run).iterdir() if path.name.endswith("safetensors"))
    data = bytearray(path.read_bytes())
    data[5 << 19] ^= 1  # amid the state of later buckets
    path.write_bytes(data)
    mine = np.zeros(BUCKETS, np.uint8)
    mine[:100] = 1
    held = Held()
    CheckpointDirectory(plain, "job").restore(run, mine, held.load)
    with pytest.raises(CheckpointError, match="differs"):
        CheckpointDirectory(plain, "job").restore(run, 1 - mine, Held().load)
    assert {int(buckets_of(np.array([key]))[0]) for key in held.rows["user"]} == set(range(100))


def test_another_jobs_checkpoint_under_this_jobs_name(plain: Files, tmp_path: Path) -> None:
    checkpoint(plain, 1, some(100), job="other")
    (tmp_path / "ps" / "other").rename(tmp_path / "ps" / "job")
    found = CheckpointDirectory(plain, "job").find()
    assert not found.checkpoints and "written by job other, not by job" in found.refused[0]


def test_a_newer_format_is_refused_by_name(plain: Files, tmp_path: Path) -> None:
    path = tmp_path / checkpoint(plain, 1, some(100)) / "checkpoint.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))  # said before damage is
    assert "format 2, newer than this edl knows" in CheckpointDirectory(plain, "job").find().refused[0]


def test_a_marker_broken_off_in_a_store_was_never_written() -> None:
    files = RemoteFiles(f"memory://{secrets.token_hex(8)}")
    run = checkpoint(files, 1, some(100))
    files.write(f"{run}/checkpoint.json", [files.read(f"{run}/checkpoint.json")[:-20]])
    found = CheckpointDirectory(files, "job").find()
    assert (found.top, found.checkpoints, found.refused) == (1, (), ())


def test_another_model_is_refused_table_by_table() -> None:
    saved = (USER, DENSE, TableSpec("item", 8))
    assert not differences(saved, saved)
    assert not differences(saved, (replace(USER, optimizer=replace(USER.optimizer, lr=9.0)), DENSE))
    assert not differences(saved, (*saved, TableSpec("new", 8)))
    text = differences(saved, (replace(USER, dim=16), replace(DENSE, optimizer=Optimizer(UpdateRule.ADAM)), saved[2]))
    assert text.splitlines() == [
        "table user: dim 16 here, 4 there (here: the script, there: the checkpoint)",
        f"table {DENSE.name}: optimizer.rule adam here, sgd there (here: the script, there: the checkpoint)",
    ]
    renamed = differences(saved, (USER, DENSE, TableSpec("items", 8)))
    assert "table items: in the script, not in the checkpoint" in renamed
    assert "table item: in the checkpoint, not in the script" in renamed


# --- changes only ----------------------------------------------------------------------------------------------------


class Growing:
    """Pservers that take a checkpoint now and then, with what has changed since the last one."""

    def __init__(self, files: Files, seed: int) -> None:
        self.files = files
        self.draw = np.random.default_rng(seed)
        self.directories = [CheckpointDirectory(files, "job", one, file_bytes=40_000) for one in (1, 2)]
        self.owner = self.draw.integers(0, 2, BUCKETS)
        self.rows: dict[int, int] = {}
        """Key and seed of its row."""
        self.changed: set[int] = set()
        self.gone: set[int] = set()
        self.whole: set[int] = set()
        self.number = 0
        self.base = ""

    def train(self, count: int) -> None:
        fresh = self.draw.integers(0, 500, count).tolist()
        for key in fresh:
            self.rows[key] = int(self.draw.integers(1 << 30))
        lost = [key for key in list(self.rows) if self.draw.random() < 0.1]
        for key in lost:
            del self.rows[key]
        self.changed |= set(fresh)
        self.gone |= set(lost)
        if self.draw.random() < 0.7:
            moved = self.draw.integers(0, BUCKETS, 300)
            self.owner[moved] = 1 - self.owner[moved]
            self.whole |= set(moved.tolist())

    def all(self, keys: set[int]) -> dict[str, Rows]:
        ordered = sorted(keys)
        one = [rows_of(USER, np.array([key]), self.rows[key]) for key in ordered]
        if not one:
            return {"user": rows_of(USER, np.empty(0, np.int64))}
        names = ("keys", "weights", "state", "frequency", "updates", "seen")
        return {"user": Rows(*(np.concatenate([getattr(row, name) for row in one]) for name in names))}

    def checkpoint(self, *, fails: bool = False) -> str:
        self.number += 1
        told = []
        for place, directory in enumerate(self.directories):
            since = directory.since(self.base)
            some = set(self.rows)
            if since is not None:
                inside = {key for key in self.rows if int(buckets_of(np.array([key]))[0]) in self.whole}
                some = (self.changed & set(self.rows)) | inside
            gone = {"user": np.array(sorted(self.gone), np.int64)} if since is not None else {}
            rows = taken(self.all(some), gone, frozenset(self.whole))
            told.append(directory.write(self.number, 1, (self.owner == place).astype(np.uint8), rows, since=since))
        if fails:
            return ""
        self.changed, self.gone, self.whole = set(), set(), set()
        self.base = str(json.loads(finish(self.directories, self.number, told))["run"])
        return self.base


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 8))])
def test_a_chain_of_changes_equals_a_whole_checkpoint(plain: Files, seed: int) -> None:
    growing = Growing(plain, seed)
    growing.train(400)
    chains = []
    for number in range(14):
        growing.train(int(growing.draw.integers(0, 60)))
        if growing.draw.random() < 0.2:
            growing.checkpoint(fails=True)
        run = growing.checkpoint()
        chains.append(len(CheckpointDirectory(plain, "job").chain(run)))
        assert restored(plain, run, 1 + number % 3) == Held(growing.all(set(growing.rows))).rows
    assert max(chains) > 2 and chains.count(1) > 1, chains
    assert max(chains) <= CHAIN + 1


def test_a_chain_ends_after_so_many_checkpoints(plain: Files) -> None:
    growing = Growing(plain, 3)
    growing.draw = np.random.default_rng(5)
    growing.train(500)
    lengths = []
    for _ in range(CHAIN + 3):
        growing.changed, growing.gone, growing.whole = set(), set(), set()
        lengths.append(len(CheckpointDirectory(plain, "job").chain(growing.checkpoint())))
    assert lengths == [*range(1, CHAIN + 2), 1, 2]


def test_a_changed_key_that_went_and_came_back() -> None:
    def rows(*keys: int, seed: int) -> Rows:
        return rows_of(USER, np.array(keys), seed)

    none = np.empty(0, np.int64)
    found = merged([(none, rows(1, 2, 3, seed=1)), (np.array([1, 2]), rows(2, seed=2)), (np.array([3]), None)])
    assert found is not None and found.keys.tolist() == [2]
    assert np.array_equal(found.weights, rows(2, seed=2).weights)
    assert merged([(none, rows(1, seed=1)), (np.array([1]), None)]) is None


def test_a_checkpoint_whose_base_is_damaged_is_not_used(plain: Files, tmp_path: Path) -> None:
    growing = Growing(plain, 1)
    growing.train(300)
    first = growing.checkpoint()
    growing.changed, growing.gone, growing.whole = {next(iter(growing.rows))}, set(), set()
    second = growing.checkpoint()
    assert len(CheckpointDirectory(plain, "job").chain(second)) == 2
    cut_short(next(path for path in (tmp_path / first).iterdir() if path.name.endswith("safetensors")))
    found = CheckpointDirectory(plain, "job").find()
    assert (
        not found.checkpoints
        and len(found.refused) == 2
        and "its base ps/job/checkpoint-0000000001" in found.refused[0]
    )


# --- how many stay ---------------------------------------------------------------------------------------------------


def test_old_checkpoints_are_deleted_unless_needed(plain: Files, tmp_path: Path) -> None:
    growing = Growing(plain, 2)
    growing.train(500)
    for _ in range(6):
        growing.changed, growing.gone, growing.whole = set(), set(), set()
        growing.checkpoint()
    folders = sorted(path.name for path in (tmp_path / "ps" / "job").iterdir())
    assert folders == [f"checkpoint-{number:010d}" for number in range(1, 7)], "all are one chain"
    for number in range(7, 10):
        growing.number, growing.base = number - 1, ""
        growing.checkpoint()
    folders = sorted(path.name for path in (tmp_path / "ps" / "job").iterdir())
    assert folders == [f"checkpoint-{number:010d}" for number in (7, 8, 9)]


def test_the_one_restored_from_stays_until_there_are_enough_others(plain: Files) -> None:
    directory = CheckpointDirectory(plain, "job", 1, keep=2)
    for number in (1, 2, 3):
        finish([directory], number, [directory.write(number, 1, ALL, taken(some(50)))])
    another = CheckpointDirectory(plain, "job", 2, keep=2)
    another.restore(directory.run(2), ALL, Held().load)
    kept = []
    for number in (4, 5):
        finish([another], number, [another.write(number, 2, ALL, taken(some(50)))], history=2)
        kept.append([one.number for one in CheckpointDirectory(plain, "job").find().checkpoints])
    assert kept == [[4, 3, 2], [5, 4]]


def test_broken_off_ones_go_when_they_are_old(plain: Files, tmp_path: Path) -> None:
    directory = CheckpointDirectory(plain, "job", 1, keep=2)
    directory.write(1, 1, ALL, taken(some(50)))
    (tmp_path / "ps" / "job" / "mine").mkdir(parents=True)
    for number in (2, 3, 4):
        finish([directory], number, [directory.write(number, 1, ALL, taken(some(50)))])
    directory.write(5, 1, ALL, taken(some(50)))
    folders = sorted(path.name for path in (tmp_path / "ps" / "job").iterdir())
    assert folders == ["checkpoint-0000000003", "checkpoint-0000000004", "checkpoint-0000000005", "mine"]


class StubbornFiles(PlainFiles):
    """Nothing can be deleted from the first checkpoint: it belongs to another user."""

    def remove(self, name: str) -> None:
        if name.startswith(RUN):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.path(name))
        super().remove(name)


def test_one_that_cannot_be_deleted_keeps_no_other_and_is_named_once(tmp_path: Path) -> None:
    said: list[str] = []
    directory = CheckpointDirectory(StubbornFiles(tmp_path), "job", 1, keep=2, say=said.append)
    for number in (1, 2, 3, 4, 5):
        finish([directory], number, [directory.write(number, 1, ALL, taken(some(50)))])
    folders = sorted(path.name[-1] for path in (tmp_path / "ps" / "job").iterdir())
    assert folders == ["1", "4", "5"]
    (line,) = said
    assert f"cannot delete the checkpoint {tmp_path / RUN}: Permission denied" in line


def test_what_links_lead_to_is_not_deleted(tmp_path: Path) -> None:
    """The first checkpoint was moved elsewhere, and the second one holds a link."""
    place, archive = tmp_path / "place", tmp_path / "archive"
    directory = CheckpointDirectory(PlainFiles(place), "job", 1, keep=2)
    for number in (1, 2):
        finish([directory], number, [directory.write(number, 1, ALL, taken(some(50)))])
    (place / RUN).rename(archive)
    (place / RUN).symlink_to(archive)
    files = files_below(archive)
    (place / directory.run(2) / "extra").symlink_to(archive)
    for number in (3, 4):
        finish([directory], number, [directory.write(number, 1, ALL, taken(some(50)))])
    assert sorted(path.name[-1] for path in (place / "ps" / "job").iterdir()) == ["3", "4"]
    assert files_below(archive) == files


# --- the rest --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_put_is_an_error(plain: Files) -> None:
    run = checkpoint(plain, 1, some(500))

    def put(piece: Loaded) -> None:
        if piece.shard == 9:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        CheckpointDirectory(plain, "job").restore(run, ALL, put)


def test_writing_keeps_the_pace(plain: Files) -> None:
    waits: list[float] = []
    clock = [100.0]

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock[0] += seconds

    directory = CheckpointDirectory(plain, "job", 1, pace=WriteRate(1e6, wait, lambda: clock[0]), file_bytes=100_000)
    told = PartReport.decode(directory.write(1, 1, ALL, taken(some(20_000))))
    assert sum(waits) == pytest.approx(told.bytes / 1e6, rel=0.1)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write to the checkpoint directory"):
        CheckpointDirectory(open_files(str(tmp_path / "file")), "job", 1).write(1, 1, ALL, taken(some(10)))


def test_ranges_go_there_and_back() -> None:
    owned = split(3)[1]
    from ps.checkpoint.manifest import ranges

    assert flat(ranges(np.flatnonzero(owned).tolist())) == np.flatnonzero(owned).tolist()


def test_no_pserver_remembers_deleted_checkpoints(plain: Files) -> None:
    """Only one of them deletes. A checkpoint's checksums take some bytes for each MiB of rows."""
    rows = some(300)
    directories = [CheckpointDirectory(plain, "job", number) for number in (1, 2)]
    for number in range(1, 10):
        owned = split(2, number)
        told = [one.write(number, 1, own, taken(rows)) for one, own in zip(directories, owned, strict=True)]
        run = str(json.loads(finish(directories, number, told))["run"])
        assert [one.since(run) for one in directories] == [number, number]
    there = {f"ps/job/{entry.name}" for entry in plain.entries("ps/job") if entry.folder}
    assert len(there) == 3
    assert all(set(one._seen) <= there for one in directories)


def test_checkpoints_under_their_former_name_are_read_and_deleted(plain: Files, tmp_path: Path) -> None:
    """Earlier versions of edl wrote folders ``cut-N`` with ``cut.json``, and the number under the key ``cut``."""
    rows = some(500)
    run = tmp_path / checkpoint(plain, 3, rows, servers=1)
    part = next(path for path in run.glob("server-*.json"))
    former = part.read_bytes().replace(b'"checkpoint": 3', b'"cut": 3')
    part.write_bytes(former)
    found = layout.parse_manifest((run / MANIFEST_FILE).read_bytes())
    found = replace(found, parts={part.name: Sum(len(former), zlib.crc32(former))})
    text = layout.manifest_text(found).rpartition(b',\n "crc32"')[0].replace(b'"checkpoint": 3', b'"cut": 3')
    text += b"\n}\n"
    text = text[:-3] + b',\n "crc32": "%08x"\n}\n' % zlib.crc32(text)
    (run / MANIFEST_FILE).unlink()
    (run / "cut.json").write_bytes(text)
    old = run.rename(run.with_name("cut-0000000003"))
    newest = CheckpointDirectory(plain, "job").find()
    assert (newest.top, [one.run for one in newest.checkpoints]) == (3, ["ps/job/cut-0000000003"])
    content = restored(plain, "ps/job/cut-0000000003")
    assert content and content == restored(plain, checkpoint(plain, 4, rows))
    for number in (5, 6):
        checkpoint(plain, number, rows)
    assert not old.exists(), "like any other checkpoint, when three newer ones are complete"
