"""Lists of files that grow by a segment for each rescan: the same as if made at once, without going over all each time.

Costs are counted, not timed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service import file_list
from data_service.file_list import FileList, ListSegment, ListVersion
from data_service.leases import file_additions
from data_service.leases.chunked_values import ChunkedValues
from data_service.leases.state import DataSet
from data_service.manifest import Manifest, ManifestBuilder
from data_service.protocol.file_list_messages import Listed, ListFiles
from edl.errors import DataError

MANY = 300


def manifest(first: int, files: int = 1, format: str = "csv", known: int = -1) -> Manifest:
    """Files of two shards each."""
    builder = ManifestBuilder(format)
    for number in range(first, first + files):
        builder.file(f"part-{number}", 100 + number)
        builder.shard(0, 50, 50 if format == "ipc" else known)
        builder.shard(50, 60, 10 if format == "ipc" else known)
    return builder.build()


def grown(segments: int = MANY, epochs: int = 7) -> FileList:
    files = FileList()
    for number in range(segments):
        part = manifest(number)
        files.append(part.encode(), number // epochs, named=number % 3 == 1, decoded=part)
    return files


def rows(of: Manifest) -> list[object]:
    return [of.digest, of.format, of.records, of.files, [of.ref(index) for index in range(len(of))]]


class Counted:
    """Counts calls of a function, or what ``weigh`` says of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, weigh: Callable[..., int]) -> None:
        self.total = 0
        real = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            self.total += weigh(*arguments)
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, counted)


class Copied(bytes):
    """Counts the bytes that are cut out of it."""

    total: list[int]

    def __getitem__(self, index: Any) -> Any:
        return self._cut(super().__getitem__(index))

    def partition(self, separator: Any) -> Any:
        return tuple(map(self._cut, super().partition(separator)))

    def _cut(self, part: Any) -> Any:
        if isinstance(part, bytes):
            self.total.append(len(part))
            part = Copied(part)
            part.total = self.total
        return part


# --- what many small segments cost -----------------------------------------------------------------------------------


def test_decoding_copies_each_byte_once_or_twice() -> None:
    data = Copied(grown().encode())
    data.total = []
    assert len(FileList.decode(data)) == 2 * MANY
    assert sum(data.total) <= 2 * len(data)


def test_a_manifest_is_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FileList.decode(grown().encode())
    made = Counted(monkeypatch, Manifest, "__init__", lambda self, format, paths, *_: len(paths))
    assert files.manifest.file_count == MANY
    assert made.total == 2 * MANY, "each part, and the whole"
    assert files.manifest is files.manifest


def test_appending_makes_no_manifest_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    files, parts = grown(), [manifest(MANY + number) for number in range(MANY)]
    made = Counted(monkeypatch, Manifest, "__init__", lambda self, format, paths, *_: len(paths))
    for part in parts:
        files.append(part.encode(), 0, decoded=part)
        files.sizes()
    assert made.total <= 2 * MANY
    assert rows(files.manifest) == rows(FileList.decode(files.encode()).manifest)


class Epoch(int):
    """Counts how often it is compared."""

    compared = 0

    def _counting(self, name: str, other: int) -> Any:
        Epoch.compared += 1
        return getattr(int, name)(self, other)

    def __le__(self, other: int) -> Any:
        return self._counting("__le__", other)

    def __lt__(self, other: int) -> Any:
        return self._counting("__lt__", other)

    def __gt__(self, other: int) -> Any:
        return self._counting("__gt__", other)


def test_an_epoch_is_found_by_halves() -> None:
    files = FileList([ListSegment(Epoch(number), False, number, str(number), b"") for number in range(1024)])
    Epoch.compared = 0
    assert files.at(777) == ListVersion(777, "777", 778)
    assert Epoch.compared <= 11


def listed(files: FileList) -> DataSet:
    data = DataSet("d", ChunkedValues())
    data.files = files
    return data


def test_parts_of_a_list_are_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_additions, "PART_BYTES", 1000)
    data = listed(grown())
    encoded = data.listed.encode()
    heads = Counted(monkeypatch, json, "dumps", lambda *_: 1)
    found = b""
    while True:
        answer = file_additions.list_files(data, ListFiles(1, "d", len(found)))
        assert isinstance(answer, Listed) and answer.total == len(encoded)
        found += answer.data
        if not answer.data:
            break
    assert found == encoded
    assert heads.total <= MANY
    data.listed.append(manifest(MANY).encode(), 0)
    answer = file_additions.list_files(data, ListFiles(1, "d", len(found)))
    assert isinstance(answer, Listed) and answer.data == data.listed.segments[-1].encode()


def test_own_paths_are_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    files = grown()
    decoded = Counted(monkeypatch, Manifest, "decode", lambda *_: 1)
    assert list(files.own_paths()) == [f"part-{number}" for number in range(MANY) if number % 3 != 1]
    assert decoded.total == 0


# --- the same as the simple way --------------------------------------------------------------------------------------

kinds = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans(), st.integers(-1, 5)), max_size=8)
"""Of each segment: files, epochs further, whether by name, records of its shards if known."""


TYPES = {"x": "double", "größe\n": "string"}


def made_of(segments: list[tuple[int, int, bool, int]], format: str = "csv") -> FileList:
    files, first, epoch = FileList(), 0, 0
    for count, further, by_name, known in segments:
        part = manifest(first, count, format, known)
        first, epoch = first + count, epoch + further
        types = TYPES if format == "csv" and not files.segments else None
        files.append(part.encode(), epoch, named=by_name, decoded=part if count % 2 else None, types=types)
    return files


@given(kinds, st.sampled_from(["csv", "ipc"]), st.data())
def test_a_list_is_the_same_however_it_came_to_be(
    segments: list[tuple[int, int, bool, int]], format: str, data: st.DataObject
) -> None:
    """Grown, decoded, or decoded in parts that are added to another list, and asked for in between or not."""
    files = made_of(segments, format)
    encoded = files.encode()
    assert encoded == b"".join(one.encode() for one in files.segments) and files.encoded_bytes == len(encoded)
    again = FileList.decode(encoded)
    assert again.segments == files.segments
    assert again.types == (TYPES if format == "csv" and segments else {})
    begin, size = (data.draw(st.integers(0, len(encoded) + 3)) for _ in range(2))
    assert files.encoded_part(begin, size) == again.encoded_part(begin, size) == encoded[begin : begin + size]
    for epoch in range(12 if segments else 0):
        number = 1
        while number < len(files.segments) and files.segments[number].epoch <= epoch:
            number += 1
        assert files.at(epoch) == files.version(number)
    if not segments:
        return
    part = FileList.decode(files.segments[0].encode())
    for one in files.segments[1:]:
        if data.draw(st.booleans()):
            assert part.manifest.digest == part.digest and part.sizes() == dict(part.manifest.paths_and_sizes())
        part.segments += FileList.decode(one.encode()).segments
    builder, own = ManifestBuilder(format), []
    for segment in files.segments:
        alone = Manifest.decode(segment.blob)
        own += [path for path, _ in alone.paths_and_sizes() if not segment.named]
        for file in alone.files:
            builder.file(file.path, file.size_bytes)
            for ref in map(alone.ref, range(file.first, file.first + file.shards)):
                builder.shard(ref.begin, ref.end, ref.records)
    for one_list in (files, again, part):
        assert rows(one_list.manifest)[1:] == rows(builder.build())[1:]
        assert one_list.manifest.digest == files.digest
        assert one_list.sizes() == dict(builder.build().paths_and_sizes())
        assert list(one_list.own_paths()) == own


@pytest.mark.parametrize("attempt", range(20))
def test_a_list_is_put_together_once_by_many_threads(attempt: int) -> None:
    files, found = FileList.decode(grown(40 + attempt).encode()).shared(threading.RLock()), list[int]()
    threads = [threading.Thread(target=lambda: found.append(files.manifest.file_count)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [40 + attempt] * 4 and len(files.sizes()) == 40 + attempt


# --- damage ----------------------------------------------------------------------------------------------------------


def head(**changed: Any) -> bytes:
    first = grown(1).segments[0]
    fields = {"epoch": 0, "named": 0, "shards": 2, "digest": first.digest, "bytes": len(first.blob), **changed}
    return file_list._MAGIC + json.dumps(fields).encode() + b"\n" + first.blob


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (head()[:-1], "bytes is incomplete"),
        (head(bytes=-1), "bytes is incomplete"),
        (head() + b"x", "does not begin with"),
        (head() + head()[:9], "does not begin with"),
        (head(bytes="many"), "cannot read a list"),
        (head() + head(shards=1), "is incomplete"),
    ],
)
def test_what_is_not_a_list_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        FileList.decode(data)


@pytest.mark.parametrize("changed", [{"digest": "0" * 32}, {"shards": 3}, {"epoch": -1}])
def test_a_segment_that_is_another_is_noticed_whenever_the_list_is_used(changed: Any) -> None:
    files = grown(3)
    one = files.segments[1]
    bad = FileList([files.segments[0], replace(one, **changed)])
    for _ in range(2):
        for use in (lambda: bad.manifest, bad.sizes, lambda: list(bad.own_paths()), lambda: bad.append(one.blob, 9)):
            with pytest.raises(DataError, match="segment 1 does not match its digest"):
                use()


def test_files_of_another_format_do_not_join() -> None:
    with pytest.raises(DataError, match="files of format ipc cannot join ones of format csv"):
        FileList.decode(grown(2).encode()).append(manifest(7, format="ipc").encode(), 0)
