"""Files that remote readers cannot reach, or that are not those that were listed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc

from data_service.filesystems import Storage
from data_service.formats import open_reader
from data_service.remote.client import Pool
from data_service.scan import scan
from edl.errors import DataError, UnreachableData
from tests.unit.data_service.remote.test_flight import (
    RECORDS,
    ipc_shard,
    refs_of,
    remote_reader,
    serving,
    table_of,
    written,
)


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_file_that_a_reader_cannot_reach_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The Master skips damaged shards, and ends the job for those that nobody can reach."""
    ref, here = ipc_shard(tmp_path)
    wanted = here.read(ref)

    def away(self: Storage, path: str, *, mapped: bool = False) -> Any:
        raise OSError(code, "the mount is gone")

    monkeypatch.setattr(Storage, "open", away)  # this process has the file open already; the readers do not
    with serving(2) as (pool, _):
        reader = remote_reader(pool, local=here, policy="prefer")
        assert reader.read(ref).equals(wanted)
        assert (reader.counts.takeovers, reader.counts.local_shards) == (2, 1)
        with pytest.raises(UnreachableData, match=r"no reader can open it: .*r0 at .*the mount is gone.*r1 at "):
            remote_reader(pool).read(ref)


def test_a_file_that_has_changed_since_it_was_listed_is_refused_as_with_local_reading(tmp_path: Path) -> None:
    path = written(tmp_path, "ipc")
    ref = refs_of(scan(str(path)))[0]
    longer = table_of().set_column(2, "name", pa.array([f"another record {n}" for n in range(RECORDS)]))
    with ipc.new_file(path, longer.schema) as writer:
        writer.write_table(longer, max_chunksize=64)
    with pytest.raises(DataError, match=r"has [\d,]+ bytes, but had [\d,]+ when it was listed") as alone:
        open_reader("ipc").read(ref)
    with serving() as (pool, _):
        for reader in (remote_reader(pool), remote_reader(Pool(), local=open_reader("ipc"), policy="prefer")):
            with pytest.raises(DataError) as found:
                reader.read(ref)
            assert str(found.value) == str(alone.value)
