"""A simulated data set: files and shards without content, some unreadable, and the reader and source for a loader."""

from __future__ import annotations

import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_service.manifest import TYPELESS, Manifest, ManifestBuilder, ShardRef
from data_service.protocol.file_list_messages import NOW
from data_service.protocol.messages import INDEPENDENT, STEPS
from edl.errors import DataError, StateError
from edl.testing.sim.threads import SimThreads

NAME = "train"
FILE_RECORDS = 1000
"""Record numbers reserved for each file."""
FILE_BYTES = 100


@dataclass
class SimDataSet:
    """A data set's shards, and how they are read."""

    mode: str
    format: str
    files: dict[str, list[int]]
    """Sizes of the shards of each file, in records."""
    poison: set[str] = field(default_factory=set)
    """Keys of the shards that no node can read; see ``key``."""
    shuffle: bool = True
    seed: int = 0
    failures: int = 2
    batch_size: int = 2
    mixed: int = 2
    tail: str = "join"
    epochs: int = 2
    read_s: float = 0.01
    """Longest time in seconds to read a shard, outside of faults."""
    slow_until_s: float = 0.0
    slow_s: float = 0.0
    """Longest time in seconds to read a shard until ``slow_until_s``."""
    first: tuple[str, ...] = ()
    """The files that the script names. Others are added with ``edl data add``."""

    @property
    def types(self) -> Mapping[str, str]:
        """Types of columns that its files do not declare."""
        return {"id": "int64"} if self.format in TYPELESS else {}

    @classmethod
    def draw(cls, rng: random.Random, *, independent: bool) -> SimDataSet:
        """A small data set of a few files and shards, some of them empty or unreadable."""
        files = {f"file-{number}": _shards(rng) for number in range(rng.randint(1, 4))}
        files["file-0"][0] = max(1, files["file-0"][0])
        data = cls(INDEPENDENT if independent else STEPS, rng.choice(("ipc", "jsonl")), files)
        data.tail = rng.choice(("join", "join", "pad"))
        if (
            not independent and rng.random() < 0.15
        ):  # every worker has to find a shard of its own, or the epoch has no step
            data.files = {f"file-{number}": [rng.randint(1, 3) for _ in range(12)] for number in range(3)}
            data.tail = "drop"
        data.first = tuple(data.files)
        keys = [cls.key(path, begin) for path, begin in data._shard_places()][1:]
        if data.tail != "drop" and rng.random() < 0.3:
            data.poison = {key for key in keys if rng.random() < 0.2}
        data.shuffle, data.seed = rng.random() < 0.7, rng.randrange(100)
        data.failures, data.epochs = rng.randint(1, 3), rng.randint(1, 3)
        data.batch_size = 1 if data.tail == "drop" else rng.randint(1, 4)
        data.mixed, data.read_s = rng.choice((1, 2, 4)), rng.choice((0.002, 0.02, 0.2))
        return data

    @staticmethod
    def key(path: str, begin: int) -> str:
        """Name of the shard of ``path`` whose first record is ``begin``."""
        return f"{path}@{begin}"

    def _shard_places(self) -> Iterable[tuple[str, int]]:
        for path, sizes in self.files.items():
            begin = 0
            for size in sizes:
                if size:
                    yield path, begin
                begin += size

    def grow(self, rng: random.Random) -> str:
        """Add a file; returns its name."""
        path = f"file-{len(self.files)}"
        self.files[path] = _shards(rng)
        return path

    def manifest(self, paths: Iterable[str]) -> Manifest:
        """The manifest of these files."""
        builder = ManifestBuilder(self.format)
        for path in paths:
            builder.file(path, FILE_BYTES)
            begin = 0
            for size in self.files[path]:
                builder.shard(begin, begin + size, size if self.format == "ipc" else -1)
                begin += size
        return builder.build()

    def records(self, ref: ShardRef) -> range:
        """Numbers of a shard's records."""
        first = FILE_RECORDS * list(self.files).index(ref.file)
        return range(first + ref.begin, first + ref.end)

    def is_poison(self, ref: ShardRef) -> bool:
        """Whether this shard is unreadable."""
        return self.key(ref.file, ref.begin) in self.poison

    @property
    def most_steps(self) -> int:
        """Upper bound for the steps of one worker that reads an epoch alone."""
        return sum(sum(sizes) // self.batch_size + 2 for sizes in self.files.values())


def _shards(rng: random.Random) -> list[int]:
    return [rng.choice((0, 1, 2, 3, 5, 8)) for _ in range(rng.randint(1, 5))]


@dataclass
class SimTable:
    """``pyarrow.Table``, as far as a loader uses it."""

    records: range

    @property
    def num_rows(self) -> int:
        """Number of records in this range."""
        return len(self.records)

    def columns(self) -> dict[str, Any]:
        """The arrays of the columns."""
        return {"id": np.arange(self.records.start, self.records.stop)}


class SimReader:
    """``data_service.formats.Reader`` on a simulated thread."""

    def __init__(self, data: SimDataSet, threads: SimThreads) -> None:
        self._data = data
        self._threads = threads

    def read(self, ref: ShardRef) -> Any:
        """Return the records after some time. Raises ``DataError`` for an unreadable shard."""
        data, threads = self._data, self._threads
        slow = threads.timeline.now_s < data.slow_until_s
        threads.sleep(threads.random() * (data.slow_s if slow else data.read_s))
        if data.is_poison(ref):
            raise DataError(f"{ref.file}, shard {ref.index}: damaged")
        return SimTable(data.records(ref))

    def close(self) -> None:
        """Does nothing: there is no open file."""


class SimSource:
    """``data_service.loader.source.DataSource`` on simulated threads."""

    remote = ""
    rescan = ""
    rescan_s = 0.0
    when = NOW

    def __init__(self, data: SimDataSet, threads: SimThreads) -> None:
        self._data = data
        self._threads = threads

    def scan(
        self,
        check: Callable[[], None],
        say: Callable[[str], None],
        files: tuple[str, ...] = (),
        known: Any = None,
        format: str = "",
    ) -> Manifest:
        """The manifest of the files that are not known yet."""
        self._threads.sleep(self._threads.random() * 0.1)
        check()
        paths = files or self._data.first
        if known is None:
            return self._data.manifest(paths)
        known.seen.update(path for path in paths if path in known.sizes)
        return self._data.manifest(path for path in paths if path not in known.sizes)

    def types_of(self, manifest: Manifest, check: Callable[[], None]) -> Mapping[str, str]:
        """The types of columns that the files do not declare."""
        return self._data.types

    def typed(self, types: Mapping[str, str]) -> SimSource:
        """This source, whose readers need no types. Raises ``StateError`` if the list of files has lost them."""
        if types != self._data.types:
            raise StateError(f"a worker reads columns as {types}, not as {self._data.types}")
        return self

    def reader(self, format: str, rank: int) -> SimReader:
        """A reader of the shards."""
        return SimReader(self._data, self._threads)
