"""Columns of all kinds in loaders: types that files do not declare, texts, and transforms of the script."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edl.wire.records import NO_SETTINGS
from tests.support.data_fixture import ArrayData, Bench, on_threads, write_ipc

RECORDS = 600


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("mode", ["steps", "independent"])
@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_all_workers_read_columns_with_the_types_of_the_whole_data_set(
    bench: Bench, tmp_path: Path, format: str, mode: str
) -> None:
    """Not with those of the file that a worker happens to read first."""
    for file, value in enumerate((7, 7.5, 8)):
        records = [{"id": record, "x": value, "y": record + 0.5} for record in range(100 * file, 100 * (file + 1))]
        if format == "csv":
            lines = ["id,x,y", *(",".join(map(str, record.values())) for record in records)]
        else:
            lines = [
                json.dumps({name: record[name] for name in ("id", "x", "y")[: 2 + bool(file)]}) for record in records
            ]
        (tmp_path / f"{file}.{format}").write_text("\n".join(lines) + "\n")
    bench.begin(2)

    def read(rank: int) -> list[Any]:
        data = ArrayData(bench, rank, "d", str(tmp_path), batch_size=10, mode=mode, tail="join", shuffle_shards=1)
        return list(data.shares())

    found = on_threads(2, read)
    assert not bench.flaws
    batches = [batch for shares in found for batch, share in shares if share.samples]
    assert sorted(int(one) for batch in batches for one in batch["id"]) == list(range(300))
    assert {str(batch["x"].dtype) for batch in batches} == {"float64"}


@pytest.mark.parametrize("column", ["text", "bytes", "list"])
def test_the_bound_on_open_shards_counts_texts(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    """They are Python objects, of which an array only holds the addresses."""
    monkeypatch.setattr("data_service.loader.loader_config.MIXED_BYTES", 200_000)
    value = {"text": "x" * 1000, "bytes": b"x" * 1000, "list": ["x" * 500] * 2}[column]
    for shard in range(12):
        table = pa.table({"id": range(100 * shard, 100 * (shard + 1)), column: [value] * 100})
        pq.write_table(table, tmp_path / f"{shard:02}.parquet")
    bench.begin(1)
    data = ArrayData(bench, 0, "d", str(tmp_path), batch_size=20)
    batches = [[int(one) for one in batch["id"]] for batch in data]
    assert sorted(one for batch in batches for one in batch) == list(range(1200))
    assert max(len({record // 100 for record in batch}) for batch in batches) <= 3


def test_a_transform_may_change_its_arrays_in_place(bench: Bench, tmp_path: Path) -> None:
    """With 5 samples per step, rank 1 has two micro-batches and one that only pads the step."""
    bench.settings = replace(NO_SETTINGS, number=1, global_batch=5, local_batch=1)
    write_ipc(tmp_path / "0.arrow", 0, RECORDS)
    bench.begin(2)

    def transform(batch: dict[str, Any]) -> Any:
        batch["id"] += 10 * RECORDS
        return batch

    def read(rank: int) -> list[Any]:
        data = ArrayData(
            bench, rank, "d", str(tmp_path), batch_size=8, shard_records=25, tail="join", transform=transform
        )
        return [(batch["id"], share) for batch, share in data.shares()]

    found = on_threads(2, read)
    assert any(not share.samples for _, share in found[1])
    counted = [int(one) for shares in found for ids, share in shares if share.samples for one in ids]
    assert sorted(counted) == list(range(10 * RECORDS, 11 * RECORDS))
