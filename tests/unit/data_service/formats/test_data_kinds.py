"""Columns of lists that differ in length; and which errors leave a shard out, and which do not."""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service.formats import open_reader
from data_service.formats.arrays import take, to_numpy
from data_service.formats.options import FormatOptions
from data_service.formats.ragged import Ragged, RaggedColumn, joined
from data_service.scan import scan
from edl.errors import DataError, DataFunctionError, SettingError, UnreachableData, UnsupportedData
from tests.support.data_fixture import ArrayData, Bench

RECORDS = 60
LISTS = [[number] * (number % 5) for number in range(RECORDS)]


def write(path: Path, table: pa.Table, kind: str) -> str:
    if kind == "ipc":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, 16)
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=16)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return str(path)


def suffix(kind: str) -> str:
    return {"ipc": "arrow", "parquet": "parquet", "jsonl": "jsonl"}[kind]


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.begin(1)
    return bench


# --- lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ipc", "parquet", "jsonl"])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"shuffle_shards": 3}])
def test_lists_come_as_values_and_offsets(bench: Bench, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    table = pa.table({"id": range(RECORDS), "ids": pa.array(LISTS, pa.list_(pa.int64()))})
    path = write(tmp_path / f"a.{suffix(kind)}", table, kind)
    data = ArrayData(bench, 0, "d", path, batch_size=7, shard_records=16, shard_bytes=500, **options)
    seen = {}
    for batch in data:
        lists = batch["ids"]
        assert isinstance(lists, Ragged) and lists.offsets.dtype == np.int64 and lists.values.dtype == np.int64
        assert lists.values.flags.writeable and len(lists.offsets) == len(batch["id"]) + 1
        for place, record in enumerate(batch["id"].tolist()):
            seen[record] = lists.values[lists.offsets[place] : lists.offsets[place + 1]].tolist()
    assert [seen[record] for record in range(RECORDS)] == LISTS
    assert not bench.flaws


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kind", [pa.int64(), pa.float32()], ids=str)
def test_nulls_in_and_of_lists_of_one_size_are_filled(kind: pa.DataType, offset: int) -> None:
    lists = [[9, 9], [1, None], None, [3, 4]]
    column = pa.chunked_array([pa.array(lists[1 - offset :], pa.list_(kind, 2)).slice(offset)])
    values = to_numpy(pa.table({"a": column}), {"a": 7})["a"]
    assert values.dtype == kind.to_pandas_dtype()
    assert values.tolist() == [[1, 7], [7, 7], [3, 4]]
    nested = pa.array([[[1, None], None], None, [[5, 6], [7, 8]]], pa.list_(pa.list_(kind, 2), 2))
    assert to_numpy(pa.table({"a": nested}), {"a": 0})["a"].tolist() == [
        [[1, 0], [0, 0]],
        [[0, 0], [0, 0]],
        [[5, 6], [7, 8]],
    ]
    ragged = to_numpy(pa.table({"a": pa.array([[[1, None]], None, [None]], pa.list_(pa.list_(kind, 2)))}), {"a": 2})
    assert ragged["a"].values.tolist() == [[1, 2], [2, 2]]
    assert ragged["a"].offsets.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("values", "kind", "fill", "expected"),
    [
        ([True, None], pa.bool_(), 0, [True, False]),
        ([True, None], pa.bool_(), "true", [True, True]),
        (["a", None], pa.string(), 7, ["a", "7"]),
        ([b"ab", None], pa.binary(2), b"zz", [[97, 98], [122, 122]]),
    ],
    ids=["0 for a boolean", "a word for a boolean", "a number for a text", "bytes"],
)
def test_what_is_filled_in_gets_the_type_of_the_column(
    values: list[Any], kind: pa.DataType, fill: object, expected: list[Any]
) -> None:
    assert to_numpy(pa.table({"a": pa.array(values, kind)}), {"a": fill})["a"].tolist() == expected


def test_what_cannot_be_filled_in_is_named() -> None:
    lists = pa.table({"a": pa.array([[1, None]], pa.list_(pa.int64(), 2))})
    with pytest.raises(UnsupportedData, match="column a has type int64: 'x' cannot replace its nulls"):
        to_numpy(lists, {"a": "x"})
    with pytest.raises(UnsupportedData, match=r"column a is int64 and has 1 nulls.*fill=\{'a': 0\}"):
        to_numpy(lists)
    with pytest.raises(UnsupportedData, match=r"column a is fixed_size_binary.*fill=\{'a': b'…'\}"):
        to_numpy(pa.table({"a": pa.array([None], pa.binary(2))}))


def test_lists_may_be_filled_up(bench: Bench, tmp_path: Path) -> None:
    table = pa.table({"id": range(RECORDS), "ids": pa.array(LISTS, pa.list_(pa.int64()))})
    path = write(tmp_path / "a.arrow", table, "ipc")
    for batch in ArrayData(bench, 0, "d", path, batch_size=8, pad={"ids": -1}):
        lengths = batch["id"] % 5
        assert batch["ids"].shape == (len(lengths), lengths.max())
        for record, row in zip(batch["id"], batch["ids"], strict=True):
            assert row.tolist() == [record] * (record % 5) + [-1] * (lengths.max() - record % 5)
    with pytest.raises(SettingError, match=r"pad={'ids': 'x'}: must map column names to numbers"):
        ArrayData(bench, 0, "d", path, batch_size=8, pad={"ids": "x"})


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.int8()), pa.list_(pa.list_(pa.int16(), 2))])
def test_lists_of_all_kinds_in_pieces(kind: pa.DataType) -> None:
    pairs = pa.types.is_fixed_size_list(kind.value_type)
    lists = [[[n, n] if pairs else n] * (n % 3) for n in range(20)]
    whole = pa.chunked_array([pa.array(lists[:7], kind), pa.array(lists[7:7], kind), pa.array(lists[7:], kind)])
    column = to_numpy(pa.table({"a": whole.slice(2, 15)}))["a"]
    assert isinstance(column, RaggedColumn) and len(column) == 15
    values, offsets = column.public()
    back = [values[begin:end].tolist() for begin, end in itertools.pairwise(offsets)]
    assert back == lists[2:17]
    chosen = take(pa.table({"a": whole}), np.array([19, 0, 5, 5]))["a"].public()
    assert [len(lists[n]) for n in (19, 0, 5, 5)] == np.diff(chosen.offsets).tolist()
    both = joined([column[3:3], column[10:], column[:2]])
    assert np.diff(both.offsets).tolist() == [len(one) for one in (*lists[12:17], *lists[2:4])]


def test_nulls_in_lists() -> None:
    lists = pa.array([[1, None], None, [], [3]], pa.list_(pa.int64()))
    with pytest.raises(UnsupportedData, match=r"column a is list.*1 nulls.*fill="):
        to_numpy(pa.table({"a": lists}))
    values, offsets = to_numpy(pa.table({"a": lists}), {"a": -7})["a"].public()
    assert (values.tolist(), offsets.tolist()) == ([1, -7, 3], [0, 2, 2, 2, 3])
    texts = to_numpy(pa.table({"a": [["x", "y"], ["z"]]}))["a"].public()
    assert (texts.values.tolist(), texts.offsets.tolist()) == (["x", "y", "z"], [0, 2, 3])


def test_lists_become_tensors(tmp_path: Path) -> None:
    import torch

    import edl.torch as edl

    table = pa.table({"ids": pa.array(LISTS, pa.list_(pa.int64()))})
    data = edl.Data("d", write(tmp_path / "a.arrow", table, "ipc"), batch_size=RECORDS, shuffle=False)
    (batch,) = data
    assert torch.equal(batch["ids"].values, torch.tensor([one for part in LISTS for one in part]))
    bag = torch.nn.EmbeddingBag(RECORDS, 2, mode="sum", include_last_offset=True)
    assert bag(batch["ids"].values, batch["ids"].offsets).shape == (RECORDS, 2)
    data.close()


@pytest.mark.parametrize("name", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "paddle")])
def test_a_transform_may_return_any_array(tmp_path: Path, name: str) -> None:
    framework: Any = pytest.importorskip(f"edl.{name}")
    some = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = {"mirrored": some[:, ::-1], "foreign": some.astype(">f4"), "mean": some.mean(), "row": np.zeros(1, "i4,f4")}
    path = write(tmp_path / "a.arrow", pa.table({"x": [1, 2]}), "ipc")
    data = framework.Data("d", path, batch_size=2, transform=lambda batch: made)
    (batch,) = data
    assert batch["mirrored"].tolist() == some[:, ::-1].tolist() and batch["foreign"].tolist() == some.tolist()
    assert batch["mean"] == 2.5 and batch["row"] is made["row"]
    data.close()


# --- kinds of errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ipc", "parquet", "jsonl"])
@pytest.mark.parametrize("column", [[{"a": 1}] * 4, [[[1]], [[1, 2]], [[]], [[3]]]])
def test_columns_without_arrays_end_the_script_and_are_not_skipped(
    bench: Bench, tmp_path: Path, kind: str, column: list[Any]
) -> None:
    path = write(tmp_path / f"a.{suffix(kind)}", pa.table({"x": range(4), "odd": column}), kind)
    with pytest.raises(UnsupportedData, match=rf"a\.{suffix(kind)}: column odd has type .*Leave it out"):
        next(iter(ArrayData(bench, 0, "d", path, batch_size=2)))
    assert not bench.flaws and not any("could not read" in note for note in bench.notes)
    assert len(next(iter(ArrayData(bench, 0, "e", path, batch_size=2, columns=["x"])))["x"]) == 2


def test_nulls_without_fill_end_the_script(bench: Bench, tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", pa.table({"x": [1, None, 3]}), "ipc")
    with pytest.raises(UnsupportedData, match=r"a\.arrow, shard 0: column x is int64 and has 1 nulls.*fill="):
        next(iter(ArrayData(bench, 0, "d", path, batch_size=2)))
    assert not bench.flaws


def user(bench: Bench, tmp_path: Path, read: Callable[[str, int, int], Any]) -> ArrayData:
    (tmp_path / "any.bin").write_bytes(b"x")
    shards: Any = lambda file: [(first, first + 10, 10) for first in range(0, 30, 10)]  # noqa: E731
    reading = FormatOptions(read=read, shards=shards)
    return ArrayData(bench, 0, "d", str(tmp_path / "any.bin"), format="user", options=reading, batch_size=5)


def failing(error: BaseException) -> Callable[[str, int, int], Any]:
    def read(file: str, begin: int, end: int) -> Any:
        if begin == 10:
            raise error
        return {"id": np.arange(begin, end)}

    return read


def test_a_defect_of_the_users_function_ends_the_script(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(DataFunctionError, match=r"any\.bin, shard 1 .*KeyError: 'x'.* raise edl\.errors\.DataError"):
        list(user(bench, tmp_path, failing(KeyError("x"))))
    assert not bench.flaws


def test_damage_that_the_users_function_finds_leaves_the_shard_out(bench: Bench, tmp_path: Path) -> None:
    data = user(bench, tmp_path, failing(DataError("any.bin, record 12: no picture")))
    assert sum(len(batch["id"]) for batch in data) == 20 and "no picture" in bench.flaws["data/d"]


def test_a_file_out_of_reach_is_never_left_out(bench: Bench, tmp_path: Path) -> None:
    """It is tried again after some seconds; the job ends when nobody has reached it after so many attempts."""

    class Stop(Exception):
        pass

    failures: list[str] = []
    bench.failed = failures.append
    data = user(bench, tmp_path, failing(OSError(errno.ENETUNREACH, "no route")))

    def check(number: int) -> None:
        bench.now_s += 1.0
        if failures:
            raise Stop

    data.bench_context.check = check  # type: ignore[method-assign]
    found = []
    with pytest.raises(Stop):
        for batch in data:
            found += batch["id"].tolist()
    data._detach()
    assert sorted(found) == [*range(10), *range(20, 30)], "the others come meanwhile"
    assert "no worker can access" in failures[0] and "(3 attempts: worker 0 on n: " in failures[0]
    assert not bench.flaws and not bench.machine.sets["d"].quarantine


def test_an_error_with_a_number_is_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"x": range(9)}), "parquet")
    ref = scan(path).ref(0)
    with pytest.raises(UnreachableData, match=r"a\.parquet, shard 0 .*cannot be reached: .*Check the mounts"):
        reader = open_reader("parquet")

        def refuse(file: str, **options: Any) -> Any:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(reader.storage, "open", refuse)
        reader.read(ref)
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9] + b"damaged!!")
    with pytest.raises(DataError, match="cannot be read") as caught:
        open_reader("parquet").read(ref)
    assert type(caught.value) is DataError
