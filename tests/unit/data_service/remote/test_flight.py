"""Remote readers over loopback: the same records as local reading, despite dead, frozen and incomplete readers."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from data_service.formats import FormatReader, open_reader
from data_service.formats.options import FormatOptions
from data_service.manifest import Manifest, ShardRef
from data_service.remote import POLICIES, flight
from data_service.remote.client import Pool, RemoteReader
from data_service.remote.flight import ReaderServer, Ticket, batches_of
from data_service.scan import scan
from edl.arithmetic.permutation import Permutation
from edl.errors import DataError, DataFunctionError, SettingError, UnreachableData, UsageError

SECRET = "of this reader"
RECORDS = 1000
LONG = 50_000
FORMATS = ("ipc", "parquet", "csv", "jsonl", "text")
HERE = __name__ if __name__.startswith("tests") else "tests.unit.data_service.remote.test_flight"

NAMES = ("counted", "doubled", "fewer", "failing", "truncated", "disconnected", "odd", "absent", "SECRET")
FUNCTIONS = (*(f"{HERE}:{name}" for name in NAMES), "no.such.module:f")
"""Those that the readers here were started with."""

made: list[int] = []
"""Rows of each batch that ``counted`` has seen."""
gate = threading.Event()


def counted(batch: pa.RecordBatch) -> pa.RecordBatch:
    made.append(batch.num_rows)
    return batch


def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([2 * n for n in batch.column(0).to_pylist()], pa.int64())], ["twice"])


def fewer(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.slice(0, batch.num_rows - 1)


def failing(batch: pa.RecordBatch) -> pa.RecordBatch:
    raise ValueError("seven is not allowed")


def truncated(batch: pa.RecordBatch) -> pa.RecordBatch:
    raise OSError("image file is truncated")


def disconnected(batch: pa.RecordBatch) -> pa.RecordBatch:
    raise OSError(errno.ENETUNREACH, "no route")


def odd(file: str, begin: int, end: int) -> pa.Table:
    return pa.table({"id": list(range(begin, end))})


def table_of(count: int = RECORDS) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(range(count), pa.int64()),
            "x": pa.array([n / 3 for n in range(count)], pa.float64()),
            "name": [f"record {n}" for n in range(count)],
        }
    )


def written(folder: Path, format: str, count: int = RECORDS) -> Path:
    path, table = folder / f"data.{format}", table_of(count)
    if format == "ipc":
        with ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=64)
    elif format == "parquet":
        pq.write_table(table, path, row_group_size=100)
    elif format == "csv":
        lines = [f"{row['id']},{row['x']!r},{row['name']}" for row in table.to_pylist()]
        path.write_text("\n".join(["id,x,name", *lines]) + "\n")
    elif format == "jsonl":
        import json

        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        path = folder / "data.txt"
        path.write_text("".join(f"{name}\n" for name in table["name"].to_pylist()))
    return path


def refs_of(manifest: Manifest) -> list[ShardRef]:
    return [manifest.ref(index) for index in range(len(manifest))]


@contextmanager
def serving(count: int = 1, capacity: int = 16) -> Iterator[tuple[Pool, list[ReaderServer]]]:
    servers = [ReaderServer("127.0.0.1", 0, SECRET, capacity, FUNCTIONS) for _ in range(count)]
    pool = Pool()
    pool.update([[f"r{n}", "127.0.0.1", server.port, SECRET] for n, server in enumerate(servers)])
    try:
        yield pool, servers
    finally:
        pool.close()
        for server in servers:
            assert server.drain(10)


def ipc_shard(folder: Path) -> tuple[ShardRef, FormatReader]:
    return ShardRef(0, str(written(folder, "ipc")), 0, RECORDS, RECORDS), open_reader("ipc")


def long_shard(folder: Path, count: int = LONG, width: int = 1000) -> tuple[ShardRef, FormatReader]:
    """More than the buffers on the way can hold."""
    path, blob = folder / "long.ipc", pa.array([bytes(width)] * 10, pa.large_binary())
    schema = pa.schema([("blob", blob.type)])
    with ipc.new_file(path, schema) as writer:
        for _ in range(count // 10):
            writer.write_batch(pa.record_batch([blob], schema=schema))
    return ShardRef(0, str(path), 0, count, count), open_reader("ipc")


def remote_reader(pool: Pool, format: str = "ipc", **options: Any) -> RemoteReader:
    options.setdefault("policy", "only")
    return RemoteReader(pool, "set", format, timeout_s=options.pop("timeout_s", 10.0), **options)


# --- the same as here ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_reader_sends_is_what_the_file_holds(tmp_path: Path, format: str) -> None:
    path = written(tmp_path, format)
    manifest = scan(str(path), shard_records=300, shard_bytes=9000)
    here = open_reader(manifest.format)
    assert len(manifest) > 1
    with serving() as (pool, _):
        there = remote_reader(pool, manifest.format)
        for ref in refs_of(manifest):
            assert there.read(ref).equals(here.read(ref))
        assert there.counts.remote_shards == len(manifest)
        assert there.counts.local_shards == 0


def test_a_users_own_reader_function_is_called_there(tmp_path: Path) -> None:
    options = FormatOptions(read=f"{HERE}:odd")
    with serving() as (pool, _):
        there = remote_reader(pool, "user", options=options)
        path = tmp_path / "mine"
        path.write_bytes(b"x" * 10)
        assert there.read(ShardRef(0, str(path), 3, 7, -1))["id"].to_pylist() == [3, 4, 5, 6]


def test_a_function_without_a_name_cannot_be_sent() -> None:
    with pytest.raises(SettingError, match="cannot be sent to another process"):
        remote_reader(Pool(), "user", options=FormatOptions(read=odd))


@pytest.mark.parametrize("upto", [0, 1, 400, 999])
@pytest.mark.parametrize("key", [None, 17])
def test_batches_come_in_the_order_asked_for_and_from_the_record_asked_for(
    tmp_path: Path, upto: int, key: int | None
) -> None:
    ref, _ = ipc_shard(tmp_path)
    order = list(range(RECORDS)) if key is None else Permutation(RECORDS, key).block(0, RECORDS)
    with serving() as (pool, _):
        batches = list(remote_reader(pool).batches(ref, upto=upto, key=key, rows=64))
    assert [n for batch in batches for n in batch.column("id").to_pylist()] == order[upto:]
    assert max(batch.num_rows for batch in batches) <= 64


def test_columns_come_in_the_order_asked_for(tmp_path: Path) -> None:
    ref, _ = ipc_shard(tmp_path)
    with serving() as (pool, _):
        assert remote_reader(pool, columns=["name", "id"]).read(ref).column_names == ["name", "id"]


def test_a_shard_of_which_nothing_is_left_is_one_empty_batch_with_its_columns(tmp_path: Path) -> None:
    ref, here = ipc_shard(tmp_path)
    with serving() as (pool, _):
        (batch,) = remote_reader(pool).batches(ref, upto=RECORDS)
    assert batch.num_rows == 0
    assert batch.schema.equals(here.read(ref).schema)


def test_shards_that_are_expected_are_fetched_from_several_readers_at_once(tmp_path: Path) -> None:
    manifest = scan(str(written(tmp_path, "ipc")), shard_records=100)
    refs, here = refs_of(manifest), open_reader("ipc")
    with serving(3) as (pool, _):
        there = remote_reader(pool)
        for number, ref in enumerate(refs):
            there.expect(refs[number:])
            assert there.read(ref).equals(here.read(ref))
        assert there.counts.remote_shards == len(refs)
        there.close()


# --- decode ----------------------------------------------------------------------------------------------------------


def test_a_function_of_the_user_is_applied_there_and_here_alike(tmp_path: Path) -> None:
    ref, here = ipc_shard(tmp_path)
    with serving() as (pool, _):
        there = remote_reader(pool, decode=f"{HERE}:doubled").read(ref)
    alone = remote_reader(Pool(), decode=f"{HERE}:doubled", local=here, policy="prefer").read(ref)
    assert there.equals(alone)
    assert there["twice"].to_pylist() == [2 * n for n in range(RECORDS)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no.such.module:f", "cannot be imported here.*PYTHONPATH"),
        (f"{HERE}:absent", "cannot be imported here"),
        (f"{HERE}:SECRET", "is a str, not a function"),
        (f"{HERE}:fewer", "each record must stay one row"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(tmp_path: Path, name: str, text: str) -> None:
    ref, _ = ipc_shard(tmp_path)
    with serving() as (pool, _), pytest.raises(UsageError, match=text):
        remote_reader(pool, decode=name).read(ref)


@pytest.mark.parametrize("field", ["decode", "read", "shards"])
@pytest.mark.parametrize("name", ["cProfile:run", f"{HERE}:secret_door", "os:system"])
def test_code_that_a_ticket_names_runs_only_if_the_reader_was_started_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, name: str
) -> None:
    """Whoever has overheard a reader's secret can send any ticket: here one whose file is a program for cProfile."""
    imported: list[str] = []
    monkeypatch.setattr("importlib.import_module", imported.append)
    mark = tmp_path / "mark"
    attack = f"open({str(mark)!r}, 'w').close()"
    options = {"read": f"{HERE}:odd", field: name} if field != "decode" else {}
    ticket = Ticket("set", "user" if options else "ipc", 0, attack, 0, 1, -1, options=options)
    ticket = ticket if options else replace(ticket, decode=name)
    with serving() as (_, servers):
        client = fl.FlightClient(f"grpc://127.0.0.1:{servers[0].port}")
        call = fl.FlightCallOptions(headers=[(b"authorization", f"Bearer {SECRET}".encode())])
        with pytest.raises(fl.FlightServerError, match=f"{field}={name}: this reader was not started with that func"):
            client.do_get(fl.Ticket(ticket.encode()), call).read_all()
        client.close()
    assert not mark.exists() and not imported


@pytest.mark.parametrize(("file", "storage"), [
    ("simplecache::https://192.0.2.1/code.py", {"simplecache": {"cache_storage": "/site-packages"}}),
    ("simplecache://code.py", {"target_protocol": "https", "cache_storage": "/site-packages"}),
    ("reference://a", {"fo": {"version": 1, "templates": {"u": "{{ code }}"}, "refs": {}}}),
    ("/data/a", {"protocol": "reference"}),
    ("s3://a/b", {"client_kwargs": [{"target_options": {}}]}),
])  # fmt: skip
def test_a_ticket_leads_to_no_file_system_inside_another(file: str, storage: dict[str, Any]) -> None:
    ticket = Ticket("set", "text", 0, file, 0, 1, -1, storage=storage)
    with serving() as (_, servers):
        client = fl.FlightClient(f"grpc://127.0.0.1:{servers[0].port}")
        call = fl.FlightCallOptions(headers=[(b"authorization", f"Bearer {SECRET}".encode())])
        with pytest.raises(fl.FlightServerError, match="readers do not open files through other file systems"):
            client.do_get(fl.Ticket(ticket.encode()), call).read_all()
        client.close()


def test_a_reader_without_functions_says_how_to_start_it(tmp_path: Path) -> None:
    ref, _ = ipc_shard(tmp_path)
    server = ReaderServer("127.0.0.1", 0, SECRET)
    pool = Pool()
    pool.update([["r", "127.0.0.1", server.port, SECRET]])
    with pytest.raises(UsageError, match=f"it has none.*--reader-functions={HERE}:doubled"):
        remote_reader(pool, decode=f"{HERE}:doubled").read(ref)
    pool.close()
    assert server.drain(10)


def test_a_function_that_fails_on_a_record_is_reported_as_with_local_reading(tmp_path: Path) -> None:
    ref, here = ipc_shard(tmp_path)
    name = f"{HERE}:failing"
    with serving() as (pool, _), pytest.raises(UsageError, match="ValueError: seven is not allowed") as there:
        remote_reader(pool, decode=name).read(ref)
    with pytest.raises(DataFunctionError) as alone:
        list(batches_of(here.read(ref), None, 0, 0, failing, name))
    assert str(alone.value) in str(there.value)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    ("function", "error", "text"),
    [("truncated", DataError, "image file is truncated"), ("disconnected", UnreachableData, "no route.*mounts")],
)
def test_damaged_data_that_a_function_finds_are_no_defect_of_it(
    tmp_path: Path, function: str, error: type[DataError], text: str, local: bool
) -> None:
    ref, here = ipc_shard(tmp_path)
    name = f"{HERE}:{function}"
    options: dict[str, Any] = {"local": here, "policy": "prefer"} if local else {}
    with serving() as (pool, _), pytest.raises(DataError, match=f"decode={name} failed: OSError.*{text}") as there:
        remote_reader(pool, decode=name, **options).read(ref)
    assert type(there.value) is error


# --- errors ----------------------------------------------------------------------------------------------------------


def test_damaged_data_is_the_same_error_as_here_and_is_not_tried_elsewhere(tmp_path: Path) -> None:
    path = written(tmp_path, "csv")
    ref = refs_of(scan(str(path)))[0]
    path.write_text("id,x,name\n1,2\n")
    with pytest.raises(DataError) as alone:
        open_reader("csv").read(ref)
    with serving(3) as (pool, _), pytest.raises(DataError) as there:
        reader = remote_reader(pool, "csv", local=open_reader("csv"), policy="prefer")
        reader.read(ref)
    assert str(there.value) == str(alone.value)
    assert reader.counts.takeovers == 0


def test_a_file_that_no_reader_sees_is_read_here(tmp_path: Path) -> None:
    ref, here = ipc_shard(tmp_path)

    class Other:
        def read(self, missing: ShardRef) -> pa.Table:
            return here.read(ref)

        def close(self) -> None: ...

    gone = ShardRef(0, str(tmp_path / "not-there.ipc"), 0, RECORDS, RECORDS)
    with serving(2) as (pool, _):
        reader = remote_reader(pool, local=Other(), policy="prefer")
        assert reader.read(gone).num_rows == RECORDS
        assert reader.counts.local_shards == 1
        with pytest.raises(DataError, match=r"no reader can open it: .*r0 at .*r1 at .*not-there"):
            remote_reader(pool).read(gone)


def test_the_wrong_secret_opens_nothing(tmp_path: Path) -> None:
    ref, here = ipc_shard(tmp_path)
    with serving() as (pool, servers):
        for secret in ("", "wrong", SECRET[:-1], SECRET + "x"):
            client = fl.FlightClient(("127.0.0.1", servers[0].port))
            headers = [(b"authorization", f"Bearer {secret}".encode())] if secret else []
            ticket = Ticket("set", "ipc", 0, ref.file, 0, RECORDS, RECORDS).encode()
            with pytest.raises(fl.FlightUnauthenticatedError, match="wrong secret"):
                client.do_get(fl.Ticket(ticket), fl.FlightCallOptions(timeout=60, headers=headers))
            client.close()
        pool.update([["r0", "127.0.0.1", servers[0].port, "wrong"]])
        said: list[str] = []
        reader = remote_reader(pool, local=here, policy="prefer", say=said.append)
        assert reader.read(ref).num_rows == RECORDS
        assert reader.counts.local_shards == 1
        assert "wrong secret" in said[0]


def test_a_ticket_of_another_version_is_refused() -> None:
    for text in (b"", b"[]", b"{}", b'{"dataset": "a", "new": 1}', b"\xff"):
        with pytest.raises(UsageError, match="not a ticket"):
            Ticket.parse(text)


def test_a_ticket_survives_the_wire() -> None:
    ticket = Ticket(
        "set", "csv", 3, "/a/ü.csv", 5, 9, -1, 2, 1 << 63, 7, ("b", "a"), "m:f", {"header": False}, {"k": 1}
    )
    assert Ticket.parse(ticket.encode()) == ticket


# --- other readers ---------------------------------------------------------------------------------------------------


def test_without_readers_everything_is_read_here(tmp_path: Path) -> None:
    ref, here = ipc_shard(tmp_path)
    reader = remote_reader(Pool(), local=here, policy="prefer")
    assert reader.read(ref).equals(here.read(ref))
    assert reader.counts.local_shards == 1


def test_only_remote_waits_for_a_reader_to_come(tmp_path: Path) -> None:
    ref, here = ipc_shard(tmp_path)
    with serving() as (_, servers):
        empty = Pool()
        reader = remote_reader(empty)
        reader.expect([ref])
        empty.update([["r0", "127.0.0.1", servers[0].port, SECRET]])
        assert reader.read(ref).equals(here.read(ref))
        empty.close()


def test_a_reader_that_refuses_is_asked_now_and_then(tmp_path: Path) -> None:
    ref, here = ipc_shard(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    pool = Pool()
    pool.update([["r0", "127.0.0.1", port, SECRET]])
    reader = remote_reader(pool)
    reader.expect([ref])
    threading.Event().wait(1.0)
    assert 1 <= reader.counts.takeovers <= 8
    server = ReaderServer("127.0.0.1", 0, SECRET)
    pool.update([["r0", "127.0.0.1", server.port, SECRET]])
    assert reader.read(ref).equals(here.read(ref))
    pool.close()
    assert server.drain(10)


def test_callers_that_wait_for_a_reader_are_notified_when_the_pool_closes(tmp_path: Path) -> None:
    ref, _ = ipc_shard(tmp_path)
    pool = Pool()
    reader = remote_reader(pool)
    reader.expect([ref])
    pool.close()
    with pytest.raises(DataError, match="no remote reader is available"):
        reader.read(ref)


def test_a_reader_that_has_too_much_to_do_sends_the_trainer_elsewhere(tmp_path: Path) -> None:
    ref, here = long_shard(tmp_path)
    with serving(2, capacity=1) as (pool, servers):
        reader = remote_reader(pool, local=here, policy="prefer")
        streams = [reader.batches(ref, rows=1000) for _ in range(3)]
        for stream in streams:
            next(stream)
        assert (reader.counts.local_shards, reader.counts.takeovers) == (1, 0)
        for stream in streams:
            assert sum(batch.num_rows for batch in stream) == LONG - 1000
        for server in servers:  # every place has been given back
            assert server._free.acquire(blocking=False)
            server._free.release()


def test_a_stream_that_is_dropped_gives_its_place_back(tmp_path: Path) -> None:
    ref, _ = long_shard(tmp_path)
    with serving(capacity=1) as (pool, _):
        for _ in range(5):
            stream = remote_reader(pool).batches(ref, rows=1000)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        assert remote_reader(pool).read(ref).num_rows == LONG


def test_the_least_busy_reader_is_taken_and_equals_take_turns() -> None:
    pool = Pool()
    pool.update([[f"r{n}", "127.0.0.1", 1 + n, SECRET] for n in range(3)])
    taken = [pool.take() for _ in range(6)]
    assert sorted(link.where.id for link in taken if link) == ["r0", "r0", "r1", "r1", "r2", "r2"]
    assert taken[4] is not None
    pool.give(taken[4], failed=False)
    again = pool.take()
    assert again is taken[4]


def test_a_reader_that_fails_is_passed_over_for_longer_each_time() -> None:
    pool = Pool()
    pool.update([["r0", "127.0.0.1", 1, SECRET]])
    skipped = []
    for _ in range(3):
        link = pool.take(pressing=True)
        assert link is not None
        pool.give(link, failed=True)
        passes = 0
        while (link := pool.take()) is None:
            passes += 1
        link.streams -= 1  # without saying how it went
        skipped.append(passes)
    assert skipped == [2, 4, 8]
    link = pool.take()
    assert link is not None
    pool.give(link, failed=False)
    assert pool.take() is not None


def test_a_list_may_change_while_streams_run(tmp_path: Path) -> None:
    ref, _ = ipc_shard(tmp_path)
    with serving(2) as (pool, _):
        stream = remote_reader(pool).batches(ref, rows=10)
        first = next(stream)
        pool.update([])
        assert len(pool) == 0
        assert first.num_rows + sum(batch.num_rows for batch in stream) == RECORDS


class Breaking(ReaderServer):
    """Breaks its first streams off after some batches."""

    def __init__(self, after: int, times: int) -> None:
        super().__init__("127.0.0.1", 0, SECRET)
        self.after, self.times = after, times

    def _outgoing(self, text: bytes) -> Iterator[Any]:
        pieces = super()._outgoing(text)
        yield next(pieces)
        breaks, self.times = self.times > 0, self.times - 1
        for number, piece in enumerate(pieces):
            if breaks and number == self.after:
                pieces.close()  # type: ignore[attr-defined]
                raise flight.refusal(MemoryError("no room"))
            yield piece


@pytest.mark.parametrize("key", [None, 5])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_another_reader_goes_on_with_the_next_record(tmp_path: Path, key: int | None, after: int) -> None:
    ref, _ = ipc_shard(tmp_path)
    order = list(range(RECORDS)) if key is None else Permutation(RECORDS, key).block(0, RECORDS)
    servers = [Breaking(after, 1), Breaking(after, 1)]
    pool = Pool()
    pool.update([[f"r{n}", "127.0.0.1", server.port, SECRET] for n, server in enumerate(servers)])
    reader = remote_reader(pool)
    batches = list(reader.batches(ref, key=key, rows=50))
    assert [n for batch in batches for n in batch.column("id").to_pylist()] == order
    assert reader.counts.takeovers == 2
    pool.close()
    for server in servers:
        assert server.drain(10)


def test_an_error_that_comes_everywhere_makes_the_shard_unreadable(tmp_path: Path) -> None:
    ref, here = ipc_shard(tmp_path)
    server = Breaking(0, 100)
    pool = Pool()
    pool.update([["r0", "127.0.0.1", server.port, SECRET]])
    with pytest.raises(DataError, match=r"3 readers failed; the last one, reader r0 at .*MemoryError: no room"):
        remote_reader(pool).read(ref)
    assert remote_reader(pool, local=here, policy="prefer").read(ref).num_rows == RECORDS
    pool.close()
    assert server.drain(10)


def test_two_readers_that_see_different_files_are_noticed(tmp_path: Path) -> None:
    class Shorter(Breaking):
        def _outgoing(self, text: bytes) -> Iterator[Any]:
            pieces = ReaderServer._outgoing(self, text)
            yield next(pieces)
            for batch, _ in pieces:
                yield batch, b"999"

    ref, _ = ipc_shard(tmp_path)
    servers = [Breaking(1, 1), Shorter(0, 0)]
    pool = Pool(first=1)
    pool.update([[f"r{n}", "127.0.0.1", server.port, SECRET] for n, server in enumerate(servers)])
    with pytest.raises(DataError, match="has 999 records for one reader and 1000 for another"):
        list(remote_reader(pool).batches(ref, rows=50))
    pool.close()
    for server in servers:
        assert server.drain(10)


# --- back pressure ---------------------------------------------------------------------------------------------------


def test_a_reader_makes_only_a_few_batches_ahead_of_a_slow_trainer(tmp_path: Path) -> None:
    count = 150
    ref, _ = long_shard(tmp_path, count, 1_000_000)
    made.clear()
    with serving() as (pool, _):
        stream = remote_reader(pool, decode=f"{HERE}:counted", depth=2).batches(ref, rows=1)
        next(stream)
        still, before = 0, -1
        while still < 4:  # until nothing has been made for a second
            gate.wait(0.25)
            still, before = (still + 1, before) if sum(made) == before else (0, sum(made))
        assert 0 < sum(made) <= 40
        assert sum(batch.num_rows for batch in stream) == count - 1
    assert sum(made) == count


def test_the_timeout_must_be_more_than_nothing() -> None:
    with pytest.raises(SettingError, match="must be more than 0"):
        remote_reader(Pool(), timeout_s=0.0)
    with pytest.raises(SettingError, match="must be one of prefer, only"):
        remote_reader(Pool(), policy="always")
    assert POLICIES == ("prefer", "only")


def test_waiting_for_a_reader_can_be_interrupted_and_resumed(tmp_path: Path) -> None:
    ref, here = ipc_shard(tmp_path)
    with serving() as (_, servers):
        pool = Pool()
        reader = remote_reader(pool)
        reader.expect([ref])
        fetch = reader._expected[ref]
        reader.interrupt()
        with pytest.raises(DataError, match="waiting was cancelled"):
            fetch.future.result(10)
        pool.update([["r0", "127.0.0.1", servers[0].port, SECRET]])
        assert reader.read(ref).equals(here.read(ref))
        pool.close()
