"""Remote files whose client fails: whatever it raises says nothing about their content."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service.filesystems import RemoteFilesUnreachable, Storage
from data_service.formats import open_reader
from data_service.manifest import ShardRef
from data_service.scan import scan
from edl.errors import DataError, UnreachableData
from tests.support.data_fixture import write_ipc

URL = "memory://edl-away"
ROWS = 100


class ClientError(Exception):
    """Of a library that has its own exceptions, as botocore has."""


ERRORS = [
    OSError("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 6"),
    PermissionError("Forbidden"),
    ClientError("An error occurred (SlowDown)"),
    ValueError("Cannot seek streaming HTTP file"),
    EOFError("the server has closed the connection"),
]
"""What clients raise, none with an error number."""


def write_parquet(path: Path) -> None:
    pq.write_table(pa.table({"id": range(ROWS)}), path)


def write_arrow(path: Path) -> None:
    write_ipc(path, 0, ROWS)


def write_lines(path: Path) -> None:
    path.write_text("".join(json.dumps({"id": number}) + "\n" for number in range(ROWS)))


def write_packed(path: Path) -> None:
    write_lines(path)
    path.write_bytes(gzip.compress(path.read_bytes()))


WRITERS: dict[str, Callable[[Path], None]] = {
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "a.jsonl": write_lines,
    "a.jsonl.gz": write_packed,
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    for name, write in WRITERS.items():
        write(tmp_path / name)
        system.pipe_file(f"/edl-away/{name}", (tmp_path / name).read_bytes())
    yield system
    system.rm("/edl-away", recursive=True)


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


def read(name: str, ref: ShardRef) -> pa.Table:
    kind = {"parquet": "parquet", "arrow": "ipc"}.get(name.rpartition(".")[2], "jsonl")
    return open_reader(kind).read(ref)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("call", ["read", "open", "connect"])
def test_a_store_that_is_away_is_no_damaged_file(
    store: Any, monkeypatch: pytest.MonkeyPatch, name: str, call: str, error: Exception
) -> None:
    ref = scan(f"{URL}/{name}").ref(0)
    if call == "read":
        monkeypatch.setattr(type(store.open(f"/edl-away/{name}")), "read", failing(error))
        monkeypatch.setattr(type(store), "cat_file", failing(error))
    elif call == "open":
        for method in ("open", "cat_file", "size"):
            monkeypatch.setattr(type(store), method, failing(error))
    elif isinstance(error, ValueError):
        pytest.skip("it means that the URL is invalid")
    else:
        monkeypatch.setattr("fsspec.core.url_to_fs", failing(error))
    with pytest.raises(UnreachableData, match=rf"{name}, shard 0 .*cannot be reached: .*no data is skipped"):
        read(name, ref)
    monkeypatch.undo()
    assert read(name, ref).num_rows == ROWS


def test_an_open_file_can_be_read_when_its_store_is_back(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = scan(f"{URL}/a.parquet").ref(0)
    reader = open_reader("parquet")
    assert reader.read(ref).num_rows == ROWS
    monkeypatch.setattr(type(store.open("/edl-away/a.parquet")), "read", failing(ERRORS[0]))
    for _ in range(2):
        with pytest.raises(UnreachableData, match="AWS Error NETWORK_CONNECTION"):
            reader.read(ref)
    monkeypatch.undo()
    assert reader.read(ref).num_rows == ROWS


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_content_of_a_store_is_damaged(store: Any, name: str) -> None:
    ref = scan(f"{URL}/{name}").ref(0)
    whole = store.cat_file(f"/edl-away/{name}")
    store.pipe_file(f"/edl-away/{name}", whole[: len(whole) // 2])
    with pytest.raises(DataError) as caught:
        read(name, ref)
    assert type(caught.value) is DataError


def test_bytes_beyond_the_end(store: Any) -> None:
    storage, size = Storage(), store.size("/edl-away/a.jsonl")
    assert storage.read(f"{URL}/a.jsonl", size - 2, size + 7) == b"}\n"
    assert storage.read(f"{URL}/a.jsonl", size + 1, size + 7) == b""


def test_an_error_without_text_is_named(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(store), "size", failing(ClientError()))
    with pytest.raises(RemoteFilesUnreachable, match="ClientError"):
        Storage().size(f"{URL}/a.jsonl")
    with pytest.raises(FileNotFoundError):
        Storage().open(f"{URL}/none")
