"""Readers: real files of every format, with the edges that real files have."""

from __future__ import annotations

import errno
import gzip
import importlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from data_service.filesystems import Storage
from data_service.formats import open_reader
from data_service.formats.arrays import check_types, from_numpy, take, to_numpy
from data_service.formats.options import FormatOptions, format_of, packing_of
from data_service.manifest import ShardRef
from data_service.scan import scan
from edl.errors import DataError, DataFunctionError, SettingError, UnreachableData, UnsupportedData
from tests.support.reader_files import (
    ROWS,
    WRITERS,
    numbers,
    read_all,
    refs,
    write_csv,
    write_ipc,
    write_jsonl,
    write_parquet,
    write_stream,
)


@pytest.mark.parametrize("name", WRITERS)
def test_shards_of_binary_formats_are_all_records_in_order(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, numbers())
    manifest = scan(str(tmp_path / name), shard_records=250)
    assert [(ref.begin, ref.end) for ref in refs(manifest)] == [(i, i + 200) for i in range(0, ROWS, 200)]
    assert read_all(manifest).equals(numbers())
    assert read_all(manifest, ["dense", "id"]).equals(numbers().select(["dense", "id"]))


def test_pieces_of_row_groups_are_small_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", numbers(), 500)
    monkeypatch.setattr("data_service.formats.parquet.PIECE_RECORDS", 30)
    for begin, end in ((0, 1000), (75, 80), (610, 999), (90, 610)):
        pieces = list(open_reader("parquet").pieces(ShardRef(0, str(tmp_path / "a.parquet"), begin, end, end - begin)))
        assert max(piece.num_rows for piece in pieces) <= 30
        assert pa.concat_tables(pieces).combine_chunks().equals(numbers().slice(begin, end - begin).combine_chunks())


@pytest.mark.parametrize("name", WRITERS)
def test_any_range_can_be_read(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, numbers())
    reader = open_reader(format_of(name))
    for begin, end in ((0, 0), (0, 1), (99, 101), (150, 850), (150, 160), (999, 1000), (1000, 1000), (0, 1000)):
        ref = ShardRef(0, str(tmp_path / name), begin, end, end - begin)
        assert reader.read(ref).equals(numbers().slice(begin, end - begin)), (begin, end)
        pieces = list(reader.pieces(ref))
        assert sum(piece.num_rows for piece in pieces) == end - begin
        assert not pieces or pa.concat_tables(pieces).equals(numbers().slice(begin, end - begin))


def test_large_uncompressed_batches_are_cut_evenly_and_others_not(tmp_path: Path) -> None:
    write_ipc(tmp_path / "a.arrow", numbers(), 1000)
    write_ipc(tmp_path / "b.arrow", numbers(), 1000, compression="lz4")
    write_parquet(tmp_path / "c.parquet", numbers(), 1000)
    assert [ref.records for ref in refs(scan(str(tmp_path / "a.arrow"), shard_records=300))] == [250] * 4
    assert [ref.records for ref in refs(scan(str(tmp_path / "b.arrow"), shard_records=300))] == [1000]
    assert [ref.records for ref in refs(scan(str(tmp_path / "c.parquet"), shard_records=300))] == [1000]


def test_a_mapped_file_is_not_copied(tmp_path: Path) -> None:
    write_ipc(tmp_path / "a.arrow", numbers(100_000), 50_000)
    reader = open_reader("ipc", ["dense", "id"])
    before = pa.total_allocated_bytes()
    table = reader.read(ShardRef(0, str(tmp_path / "a.arrow"), 50_000, 100_000, 50_000))
    arrays = to_numpy(table)
    assert pa.total_allocated_bytes() - before < 10_000
    assert arrays["dense"].shape == (50_000, 3)
    assert not arrays["dense"].flags.owndata
    assert not arrays["dense"].flags.writeable
    assert arrays["id"][0] == 50_000
    reader.close()
    assert arrays["dense"][-1, -1] == 299_999  # the mapping lives as long as the arrays


def test_a_mapped_stream_is_not_copied(tmp_path: Path) -> None:
    write_stream(tmp_path / "a.arrows", numbers(100_000), 50_000)
    before = pa.total_allocated_bytes()
    table = open_reader("ipc").read(ShardRef(0, str(tmp_path / "a.arrows"), 50_000, 100_000, 50_000))
    assert pa.total_allocated_bytes() - before < 10_000
    assert table.column("id")[0].as_py() == 50_000


@pytest.mark.parametrize("stream", [False, True])
def test_dictionaries_of_ipc(tmp_path: Path, stream: bool) -> None:
    table = pa.table({"kind": pa.array(["a", "b", None, "a"] * 100).dictionary_encode(), "id": range(400)})
    path = tmp_path / ("a.arrows" if stream else "a.arrow")
    (write_stream if stream else write_ipc)(path, table)
    found = read_all(scan(str(path), shard_records=100))
    assert found.column("kind").to_pylist() == table.column("kind").to_pylist()
    assert to_numpy(found)["kind"].tolist()[:4] == ["a", "b", None, "a"]


# --- what goes wrong -------------------------------------------------------------------------------------------------


def flip(path: Path, begin: int, end: int) -> None:
    data = bytearray(path.read_bytes())
    data[begin:end] = bytes(byte ^ 0xFF for byte in data[begin:end])
    path.write_bytes(data)


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_a_damaged_row_group_does_not_hurt_the_others(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.parquet"
    form: dict[str, Any] = {"compression": compression, "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(numbers(), path, row_group_size=250, **form)
    manifest = scan(str(tmp_path / "a.parquet"), shard_records=250)
    metadata = pq.ParquetFile(tmp_path / "a.parquet").metadata
    column = metadata.row_group(2).column(0)
    begin = column.data_page_offset + (60 if compression == "snappy" else 1000)  # plain numbers: only the sum tells
    flip(path, begin, begin + 30)
    reader = open_reader("parquet")
    for index in (0, 1, 3):
        assert reader.read(manifest.ref(index)).num_rows == 250
    with pytest.raises(DataError, match=r"a\.parquet, shard 2 \[500, 750\): cannot be read: .*Replace it"):
        reader.read(manifest.ref(2))
    with pytest.raises(DataError, match=r"a\.parquet, shard 2"):
        list(reader.pieces(manifest.ref(2)))


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_is_cut_short(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path, numbers())
    manifest = scan(str(path))
    whole = path.read_bytes()
    for size in (len(whole) // 2, len(whole) - 300, 7, 3):
        path.unlink()
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            open_reader(manifest.format).read(manifest.ref(0))
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            scan(str(path))


def test_damaged_offsets_of_texts_lead_nowhere(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * 10] * 1000})
    write_ipc(tmp_path / "a.arrow", table, 1000)
    manifest = scan(str(tmp_path / "a.arrow"))
    offset = (tmp_path / "a.arrow").read_bytes().index(np.int32(5000).tobytes())
    flip(tmp_path / "a.arrow", offset, offset + 4)
    with pytest.raises(DataError, match=r"a\.arrow, shard 0 .*cannot be read: .*ffset"):
        open_reader("ipc").read(manifest.ref(0))


@pytest.mark.parametrize("name", WRITERS)
def test_flipped_bytes_at_the_end_are_reported_or_harmless(tmp_path: Path, name: str) -> None:
    """Whatever is damaged in the metadata: a ``DataError`` or a table, never another error or a crash."""
    path = tmp_path / name
    WRITERS[name](path, numbers(100))
    whole = path.read_bytes()
    named = 0
    for offset in range(max(0, len(whole) - 1500), len(whole), 13):
        path.unlink()
        path.write_bytes(whole)
        flip(path, offset, offset + 3)
        try:
            read_all(scan(str(path)))
        except DataError as error:
            assert name in str(error)
            named += 1
    assert named > 10 or name == "a.arrows"  # the end of a stream is data


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    for name, writer in WRITERS.items():
        writer(tmp_path / name, numbers())
        manifest = scan(str(tmp_path / name))
        (tmp_path / name).unlink()
        with pytest.raises(DataError, match=r"shard 0 .*the file is missing"):
            open_reader(manifest.format).read(manifest.ref(0))


def test_a_file_that_was_replaced_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_ipc(path, numbers(100))
    reader = open_reader("ipc")
    before = reader.read(ShardRef(0, str(path), 0, 100, 100))
    write_ipc(tmp_path / "b", numbers(50))
    (tmp_path / "b").rename(path)
    with pytest.raises(DataError, match=r"has 50 records, which does not include shard 0 \[0, 100\).*changed after"):
        reader.read(ShardRef(0, str(path), 0, 100, 100))
    assert before.equals(numbers(100))


def test_lines_that_moved_since_the_scan(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n")
    second = scan(str(path), shard_bytes=1).ref(1)
    path.write_text("oneandh\nthree\n")
    with pytest.raises(DataError, match=r"no line begins at byte 4.*changed after"):
        open_reader("text").read(second)
    path.write_text("one\ntwoandaha\n")
    with pytest.raises(DataError, match=r"no line ends at byte 8.*changed after"):
        open_reader("text").read(second)
    path.write_text("one\n")
    with pytest.raises(DataError, match=r"has 4 bytes, but had 14 when it was listed.*changed after"):
        open_reader("text").read(second)
    with pytest.raises(DataError, match=r"has 4 bytes.*does not include shard"):
        open_reader("text").read(replace(second, size_bytes=-1))


@pytest.mark.parametrize("suffix", ["arrow", "parquet", "csv"])
def test_files_that_differ_are_named_with_the_column(tmp_path: Path, suffix: str) -> None:
    kind = format_of(f"a.{suffix}")

    def write(name: str, table: pa.Table) -> None:
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "csv":
            rows = [",".join(table.column_names), *(",".join(map(str, row.values())) for row in table.to_pylist())]
            path.write_text("\n".join(rows))
        else:
            (write_ipc if suffix == "arrow" else write_parquet)(path, table)

    write("a", pa.table({"x": [1, 2], "y": [1, 2]}))
    cases = [
        (pa.table({"x": [1.5, 2.5], "y": [1, 2]}), "column x is double, but int64 in .*a"),
        (pa.table({"x": [1, 2]}), "has no column y, which .*a"),
        (pa.table({"x": [1, 2], "y": [1, 2], "z": [1, 2]}), "has a column z, which .*a.* does not have"),
    ]
    reader = open_reader(kind)
    for number, (table, text) in enumerate(cases):
        write(f"b{number}", table)
        reader.schema(str(tmp_path / f"a.{suffix}"))
        with pytest.raises(DataError, match=rf"b{number}\.{suffix}: {text}"):
            reader.schema(str(tmp_path / f"b{number}.{suffix}"))
        if suffix == "csv":
            continue  # before a scan, types are settled over all files
        with pytest.raises(DataError, match=rf"b{number}\.{suffix}: {text}"):
            scan([str(tmp_path / f"a.{suffix}"), str(tmp_path / f"b{number}.{suffix}")])
    write("c", pa.table({"y": [5], "x": [6]}))  # another order is no difference
    assert read_all(scan(str(tmp_path / f"[ac].{suffix}"))).to_pylist()[-1] == {"x": 6, "y": 5}
    assert read_all(scan(str(tmp_path / f"b2.{suffix}")), ["z"]).column_names == ["z"]
    with pytest.raises(DataError, match=r"has no column w; available are x, y"):
        scan(str(tmp_path / f"a.{suffix}"), columns=["w"])


# --- remote, threads, few open files ---------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[Any]:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    yield system
    for path in system.find("/edl"):
        system.rm(path)


@pytest.mark.parametrize("name", [*WRITERS, "a.csv", "a.jsonl", "a.csv.gz"])
def test_remote_files(tmp_path: Path, store: Any, name: str) -> None:
    path = tmp_path / name
    if name in WRITERS:
        WRITERS[name](path, numbers())
    elif name == "a.jsonl":
        write_jsonl(path)
    else:
        write_csv(path)
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
    store.pipe_file(f"/edl/sub/{name}", path.read_bytes())
    for pattern in (f"memory://edl/sub/{name}", "memory://edl/", "memory://edl/*/a.*"):
        manifest = scan(pattern, shard_records=250, shard_bytes=1000)
        assert manifest.ref(0).file.startswith("memory://")
        local = scan(str(path), shard_records=250, shard_bytes=1000)
        assert [(r.begin, r.end) for r in refs(manifest)] == [(r.begin, r.end) for r in refs(local)]
        assert read_all(manifest).equals(read_all(local))
        assert read_all(manifest, ["id"]).equals(read_all(local, ["id"]))


def test_a_remote_file_that_is_gone_or_a_store_that_fails(tmp_path: Path, store: Any) -> None:
    write_parquet(tmp_path / "a.parquet", numbers())
    store.pipe_file("/edl/a.parquet", (tmp_path / "a.parquet").read_bytes())
    ref = scan("memory://edl/a.parquet").ref(0)
    store.rm("/edl/a.parquet")
    with pytest.raises(DataError, match=r"memory://edl/a\.parquet, shard 0 .*missing"):
        open_reader("parquet").read(ref)
    with pytest.raises(DataError, match="no such file"):
        scan("memory://edl/a.parquet")
    with pytest.raises(SettingError, match="nosuch"):
        scan("nosuch://edl/a.parquet")


def test_the_client_of_pyarrow_where_fsspec_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")

    def missing(*args: Any, **options: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # it would ask the network where it is
    system, inside = Storage({"anonymous": True, "region": "eu-north-1"})._connect("s3://bucket/folder/a.parquet")
    assert system.fs.type_name == "s3"
    assert (inside, system.unstrip_protocol(inside)) == ("bucket/folder/a.parquet", "s3://bucket/folder/a.parquet")
    arrow = importlib.import_module("fsspec.implementations.arrow")
    write_parquet(tmp_path / "a.parquet", numbers())
    write_csv(tmp_path / "a.csv")
    tree = fs.SubTreeFileSystem(str(tmp_path.parent), fs.LocalFileSystem())
    monkeypatch.setattr(fs, "S3FileSystem", lambda: tree)
    monkeypatch.setattr(arrow, "ArrowFSWrapper", type("Fake", (arrow.ArrowFSWrapper,), {"protocol": "s3"}))
    bucket = tmp_path.name
    for pattern in (f"s3://{bucket}/a.parquet", f"s3://{bucket}/*.parquet", f"s3://{bucket}/a.csv"):
        manifest = scan(pattern, shard_bytes=1000)
        assert manifest.ref(0).file.startswith(f"s3://{bucket}/a.")
        assert read_all(manifest, ["id"]).column("id").to_pylist() == list(range(ROWS))
    with pytest.raises(SettingError, match="needs a package"):
        Storage()._connect("abfs://bucket/a.parquet")


def test_few_files_stay_open(tmp_path: Path) -> None:
    for number in range(10):
        write_ipc(tmp_path / f"{number}.arrow", numbers(10))
    manifest = scan(str(tmp_path))
    reader = open_reader("ipc", options=FormatOptions(open_files=3))
    tables = [reader.read(ref) for ref in refs(manifest)]
    assert len(reader.open_files) == 3
    reader.close()
    assert all(table.equals(numbers(10)) for table in tables)


@pytest.mark.parametrize("name", [*WRITERS, "a.csv"])
def test_many_threads_read_at_once(tmp_path: Path, name: str) -> None:
    for number in range(4):
        path = tmp_path / f"{number}{name}"
        WRITERS[name](path, numbers()) if name in WRITERS else write_csv(path)
    manifest = scan(str(tmp_path), shard_records=100, shard_bytes=2000)
    reader = open_reader(manifest.format, ["id", "text"], options=FormatOptions(open_files=2))
    wanted = [reader.read(ref) for ref in refs(manifest)]
    start = threading.Barrier(8)

    def work(offset: int) -> bool:
        start.wait()
        order = [(index * 7 + offset) % len(manifest) for index in range(len(manifest))]
        return all(reader.read(manifest.ref(index)).equals(wanted[index]) for index in order)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# --- functions of the user -------------------------------------------------------------------------------------------


def list_tens(file: str) -> list[tuple[int, int, int]]:
    return [(begin, begin + 10, 10) for begin in range(0, 30, 10)]


def read_tens(file: str, begin: int, end: int) -> list[dict[str, Any]]:
    return [{"n": n, "file": file} for n in range(begin, end)]


def test_functions_of_the_user() -> None:
    options = FormatOptions(read=read_tens, shards=list_tens)
    manifest = scan(["db://table", "other"], "user", options=options)
    assert [(ref.file, ref.begin, ref.records) for ref in refs(manifest)][:4] == [
        ("db://table", 0, 10),
        ("db://table", 10, 10),
        ("db://table", 20, 10),
        ("other", 0, 10),
    ]
    assert read_all(manifest, ["n"], options).column("n").to_pylist() == 2 * list(range(30))


def test_functions_of_the_user_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text("def read(file, begin, end):\n    return {'n': [begin, end]}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    options = FormatOptions.of({"read": "theirs:read"})
    assert options.plain() == {"read": "theirs:read"}
    (tmp_path / "data.bin").write_bytes(b"12345")
    manifest = scan(str(tmp_path / "data.bin"), "user", options=options)
    assert read_all(manifest, options=options).column("n").to_pylist() == [0, 5]
    with pytest.raises(SettingError, match=r"read=theirs:nothing: cannot be imported"):
        open_reader("user", options=FormatOptions(read="theirs:nothing"))
    with pytest.raises(SettingError, match=r'read="package\.module:read_tens"'):
        FormatOptions(read=read_tens).plain()


def test_functions_that_fail_or_return_something_else() -> None:
    ref = ShardRef(3, "here", 0, 4, 4)

    def answer(found: Any) -> pa.Table:
        return open_reader("user", options=FormatOptions(read=lambda file, begin, end: found)).read(ref)

    assert answer({"a": np.zeros((4, 2, 3), np.float32)}).schema.field("a").type == pa.list_(
        pa.list_(pa.float32(), 3), 2
    )
    assert answer(pa.record_batch({"a": [1, 2, 3, 4]})).num_rows == 4
    with pytest.raises(DataFunctionError, match=r"here, shard 3 \[0, 4\): .* failed: TypeError: it returned int"):
        answer(7)
    with pytest.raises(DataError, match="3 records were read, but 4 were announced"):
        answer({"a": [1, 2, 3]})
    with pytest.raises(DataFunctionError, match=r"shard 3 .* failed: ZeroDivisionError.* raise edl.errors.DataError"):
        open_reader("user", options=FormatOptions(read=lambda file, begin, end: 1 // 0)).read(ref)
    for error, kind in (
        (OSError("image file is truncated"), DataError),
        (OSError(errno.EACCES, "not allowed"), UnreachableData),
        (TimeoutError(), UnreachableData),
        (DataError("record 3 is damaged"), DataError),
    ):

        def failing(file: str, begin: int, end: int, error: Exception = error) -> Any:
            raise error

        with pytest.raises(DataError) as caught:
            open_reader("user", options=FormatOptions(read=failing)).read(ref)
        assert type(caught.value) is kind
    with pytest.raises(SettingError, match="is needed for the format user"):
        open_reader("user")


# --- arrays ----------------------------------------------------------------------------------------------------------


def test_arrays_of_every_kind() -> None:
    table = pa.table(
        {
            "i": pa.array([1, 2, 3], pa.int16()),
            "f": [1.0, None, 3.0],
            "b": [True, False, True],
            "s": ["a", None, "ü"],
            "raw": [b"\0", b"", None],
            "day": pa.array([0, 1, None], pa.date32()),
            "at": pa.array([0, 1, 2], pa.timestamp("ms")),
            "fixed": pa.array([b"ab", b"cd", b"\0\0"], pa.binary(2)),
            "grid": from_numpy(np.arange(18).reshape(3, 2, 3)),
        }
    )
    found = to_numpy(table)
    assert {name: (str(array.dtype), array.shape) for name, array in found.items()} == {
        "i": ("int16", (3,)),
        "f": ("float64", (3,)),
        "b": ("bool", (3,)),
        "s": ("object", (3,)),
        "raw": ("object", (3,)),
        "day": ("datetime64[D]", (3,)),
        "at": ("datetime64[ms]", (3,)),
        "fixed": ("uint8", (3, 2)),
        "grid": ("int64", (3, 2, 3)),
    }
    assert found["s"].tolist() == ["a", None, "ü"] and found["raw"].tolist() == [b"\0", b"", None]
    assert np.isnan(found["f"][1]) and np.isnat(found["day"][2])
    assert np.array_equal(found["grid"], np.arange(18).reshape(3, 2, 3))
    part = to_numpy(table.slice(1, 2))
    assert np.array_equal(part["grid"], found["grid"][1:]) and np.array_equal(part["fixed"], found["fixed"][1:])
    chosen = take(table, np.array([2, 0, 2]))
    for name, array in chosen.items():
        assert array.flags.writeable
        assert array.tolist()[1] == found[name].tolist()[0]
        assert array.shape == (3, *found[name].shape[1:])
    pieces = pa.concat_tables([table, table])
    assert all(
        np.array_equal(a[3:], found[n], equal_nan=n == "f") for n, a in to_numpy(pieces).items() if n not in "day"
    )
    assert take(pieces, np.array([5, 0]))["i"].tolist() == [3, 1]
    assert {name: len(array) for name, array in to_numpy(table.slice(0, 0)).items()} == dict.fromkeys(found, 0)


def test_columns_without_arrays_are_named() -> None:
    for column in ([[[1]], [[1, 2]]], [{"a": 1}], pa.array([1], pa.decimal128(5, 2)), [[{"a": 1}]]):
        with pytest.raises(UnsupportedData, match=r"column odd has type .*Leave it out"):
            to_numpy(pa.table({"odd": column}))
        with pytest.raises(UnsupportedData, match=r"here.arrow: column odd has type .*Leave it out"):
            check_types(pa.table({"odd": column}).schema, "here.arrow")
    for column in ([1, None], [True, None], pa.array([[1, 2], None], pa.list_(pa.int64(), 2))):
        with pytest.raises(UnsupportedData, match=r"column odd is .* has 1 nulls.*fill="):
            to_numpy(pa.table({"odd": column}))
        with pytest.raises(UnsupportedData, match=r"column odd is .* has 1 nulls"):
            take(pa.table({"odd": column}), np.array([1]))
    assert to_numpy(pa.table({"n": [1, None]}), {"n": -1})["n"].tolist() == [1, -1]
    assert take(pa.table({"n": [1, None]}), np.array([1]), {"n": -1})["n"].tolist() == [-1]
    with pytest.raises(UnsupportedData, match="'x' cannot replace its nulls"):
        to_numpy(pa.table({"n": [1, None]}), {"n": "x"})


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_as_texts() -> None:
    texts = {
        "types": "a:float32,b:timestamp[ms]",
        "header": "false",
        "names": "a,b",
        "delimiter": "tab",
        "open_files": "3",
    }
    options = FormatOptions.of(texts)
    assert options == FormatOptions(
        types={"a": "float32", "b": "timestamp[ms]"}, header=False, names=("a", "b"), delimiter="\t", open_files=3
    )
    assert FormatOptions.of(json.loads(json.dumps(options.plain()))) == options
    assert FormatOptions().plain() == {}
    assert FormatOptions.of({"types": "at:time:int64", "header": "no", "delimiter": "semicolon"}) == FormatOptions(
        types={"at:time": "int64"}, header=False, delimiter=";"
    )
    for wrong in ({"nonsense": 1}, {"header": "maybe"}, {"types": "a"}, {"open_files": "0"}, {"delimiter": "ab"}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            FormatOptions.of(wrong)
    with pytest.raises(SettingError, match="without a header"):
        FormatOptions(names=("a",))


def test_formats_by_name() -> None:
    assert [
        format_of(name) for name in ("A.PARQUET", "x/a.csv.gz", "a.parquet.gz", "csv", "a.b/c", "s3://b/a.jsonl")
    ] == [
        "parquet",
        "csv",
        "",
        "",
        "",
        "jsonl",
    ]
    assert [packing_of(name) for name in ("a.csv", "a.csv.gz", "a.txt.zst")] == ["", "gzip", "zstd"]
    with pytest.raises(SettingError, match="no such format; available are ipc"):
        open_reader("xml")
    with pytest.raises(SettingError, match="each only once"):
        open_reader("csv", ["a", "a"])
