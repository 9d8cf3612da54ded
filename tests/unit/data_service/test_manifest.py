"""Lists of shards: what goes in comes out, and nonsense is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.manifest import FORMATS, Manifest, ManifestBuilder, ShardRef
from edl.errors import DataError


def small(format: str = "ipc", sizes: tuple[int, ...] = (10, 4), name: str = "part") -> Manifest:
    builder = ManifestBuilder(format)
    for number, size in enumerate(sizes):
        builder.file(f"{name}-{number}", 100 * size)
        for begin in range(0, size, 4):
            end = min(size, begin + 4)
            builder.shard(begin, end, end - begin if format == "ipc" else -1)
    return builder.build()


def test_shards_are_found_by_number() -> None:
    manifest = small()
    assert len(manifest) == 4
    assert [manifest.ref(index) for index in range(4)] == [
        ShardRef(0, "part-0", 0, 4, 4, 1000),
        ShardRef(1, "part-0", 4, 8, 4, 1000),
        ShardRef(2, "part-0", 8, 10, 2, 1000),
        ShardRef(3, "part-1", 0, 4, 4, 400),
    ]
    assert manifest.records == 14
    assert manifest.describe() == "2 files, 4 shards, 14 records"
    assert [(one.path, one.size_bytes, one.first, one.shards) for one in manifest.files] == [
        ("part-0", 1000, 0, 3),
        ("part-1", 400, 3, 1),
    ]
    with pytest.raises(IndexError):
        manifest.ref(4)


def test_records_of_lines_are_unknown() -> None:
    manifest = small("csv")
    assert (manifest.records, manifest.ref(0).records) == (-1, -1)


shards = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=5)


@given(st.sampled_from(FORMATS), st.lists(shards, max_size=4))
def test_encoded_and_decoded_it_is_the_same(format: str, files: list[list[tuple[int, int]]]) -> None:
    builder = ManifestBuilder(format)
    for number, ranges in enumerate(files):
        builder.file(f"näme/{number}\udc80", number)
        for begin, length in ranges:
            builder.shard(begin, begin + length, length if format in ("ipc", "parquet", "user") else -1)
    manifest = builder.build()
    again = Manifest.decode(manifest.encode())
    assert again.digest == manifest.digest
    assert [again.ref(i) for i in range(len(again))] == [manifest.ref(i) for i in range(len(manifest))]
    assert (again.files, again.records, again.format) == (manifest.files, manifest.records, manifest.format)


@given(st.integers(0, 400), st.integers(0, 255))
def test_damage_is_noticed(place: int, value: int) -> None:
    data = bytearray(small().encode())
    if place >= len(data) or data[place] == value:
        return
    data[place] = value
    try:
        manifest = Manifest.decode(bytes(data))
    except DataError as error:
        assert "scan the files again" in str(error)
    else:
        assert manifest.digest == small().digest  # a bit that says nothing, such as zlib's level


def test_the_digest_covers_everything() -> None:
    others = [small("csv"), small(sizes=(10, 5)), small(sizes=(10,)), small(name="other")]
    assert len({small().digest, *(other.digest for other in others)}) == 5
    assert small().digest == small().digest


def test_the_difference_is_named() -> None:
    before = small(sizes=(10, 4, 4))
    builder = ManifestBuilder("ipc")
    builder.file("part-0", 1100)
    builder.shard(0, 11, 11)
    builder.file("part-2", 400)
    builder.file("new", 1)
    assert before.difference(builder.build()) == (
        "1 file added: new; 1 file removed: part-1; 1 file with another size: part-0 (1,100 bytes instead of 1,000)"
    )
    assert before.difference(before) == ""
    assert before.difference(small("csv")) == "format csv instead of ipc"
    many = small(sizes=(1,) * 8)
    assert small(sizes=(1,)).difference(many).endswith("part-1, part-2, part-3, part-4, part-5 and 2 more")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(DataError, match="available are ipc, parquet"):
        ManifestBuilder("avro")
    builder = ManifestBuilder("ipc")
    with pytest.raises(DataError, match="before the first file"):
        builder.shard(0, 1, 1)
    builder.file("a", 10)
    with pytest.raises(DataError, match="a is listed twice"):
        builder.file("a", 10)
    with pytest.raises(DataError, match="from 5 to 4"):
        builder.shard(5, 4, -1)
    with pytest.raises(DataError, match="with 3 records"):
        builder.shard(0, 4, 3)
