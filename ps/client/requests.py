"""The requests of a trainer, pull, push and scan: how they are encoded and how their answers are decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import ProtocolError
from ps import rows
from ps.client.pool import PserverCall
from ps.client.routing import RoutingTable, SubRequest, Where
from ps.protocol import requests
from ps.protocol.frames import FrameOp
from ps.protocol.half_precision import WIRE_DTYPES, decode_half
from ps.protocol.requests import Wanted, padded
from ps.rows import Rows, TablePush
from ps.spec import TableSpec


@dataclass(slots=True)
class TablePull:
    """One table's part of a pull."""

    spec: TableSpec
    keys: NDArray[np.int64]
    """Distinct keys."""
    rows: NDArray[np.float32]
    """Output: one row for each key."""
    counts: NDArray[np.uint32] | None = None
    """Number of occurrences of each key; None if each occurs once."""
    dtype: str = "f4"
    """Number format of its rows on the network."""


@dataclass
class Pull:
    """A pull; fills ``rows`` of each fetch."""

    fetches: Sequence[TablePull]
    step: int
    epoch: int
    insert: bool
    applied: dict[int, int] = field(default_factory=dict)
    """Output: number of pushes that each pserver had applied when it first answered."""
    clocked: bool = False
    keys: Sequence[NDArray[np.int64]] = ()
    _placed: dict[int, bool] = field(default_factory=dict)
    """Whether a sub-request's rows were received directly into their final place."""

    def __post_init__(self) -> None:
        self.keys = [one.keys for one in self.fetches]

    def call(self, sub_request: SubRequest, route: RoutingTable) -> PserverCall:
        """Build the call for a sub-request."""
        wanted = []
        for part, where in sub_request.items:
            fetch = self.fetches[part]
            counts = fetch.counts[where] if fetch.counts is not None and self.insert else None
            wanted.append(Wanted(fetch.spec.name, fetch.keys[where], fetch.dtype, fetch.spec.dim, counts))
        parts, body = requests.pull(wanted)
        head = {
            "step": self.step, "insert": self.insert, "version": route.version, "history": route.history,
            "epoch": self.epoch, "parts": parts,
        }  # fmt: skip
        return PserverCall(FrameOp.PULL, head, body, self._into(sub_request))

    def _into(self, sub_request: SubRequest) -> Callable[[int, bytes], memoryview | None] | None:
        self._placed[id(sub_request)] = False
        (part, where), *others = sub_request.items
        if others or self.fetches[part].dtype != "f4" or not isinstance(where, slice):
            return None
        mine: Any = self.fetches[part].rows[where]
        place = memoryview(mine).cast("B")

        def into(size: int, head: bytes) -> memoryview | None:
            if size != place.nbytes:
                return None
            self._placed[id(sub_request)] = True
            return place

        return into

    def landed(self, sub_request: SubRequest, head: Mapping[str, Any], body: memoryview) -> None:
        """Handle the answer to a sub-request."""
        _note_applied(self.applied, sub_request, head)
        if self._placed.pop(id(sub_request), False):
            return
        fetches = [(self.fetches[part], where) for part, where in sub_request.items]
        _unpack(body, [(fetch.rows, where, fetch.dtype) for fetch, where in fetches])


@dataclass
class PushRequest:
    """A push: a step's gradients, or values written outside of steps."""

    parts: Sequence[TablePush]
    """Parts with distinct keys."""
    trainer: int
    seq: int
    step: int
    epoch: int
    dtypes: Sequence[str]
    """Number format of each part's values on the network."""
    scale: float
    bases: Mapping[int, int]
    """Number of pushes that each pserver had applied when it sent the rows that the gradients belong to."""
    clocked: bool
    redo: tuple[int, int] | None = None
    """Trainer and sequence number of the push that this one repeats."""
    back: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Output, by table: the pushed rows after the update."""
    back_dtypes: Mapping[str, str] = field(default_factory=dict)
    """Number format of these rows on the network, by table."""
    keys: Sequence[NDArray[np.int64]] = ()
    heads: list[Mapping[str, Any]] = field(default_factory=list)
    """Heads of the answers."""
    applied: dict[int, int] = field(default_factory=dict)
    """Output: number of pushes that each pserver had applied when it sent updated rows."""

    def __post_init__(self) -> None:
        self.keys = [one.keys for one in self.parts]

    def call(self, sub_request: SubRequest, route: RoutingTable) -> PserverCall:
        """Build the call for a sub-request."""
        some = [(self.parts[part], where) for part, where in sub_request.items]
        parts, body = requests.push(
            [TablePush(one.table, one.keys[where], one.grads[where], one.op) for one, where in some],
            [self.dtypes[part] for part, _ in sub_request.items],
        )
        head = {
            "trainer": self.trainer, "seq": self.seq, "step": self.step, "base": self.bases.get(sub_request.server, -1),
            "version": route.version, "history": route.history, "epoch": self.epoch, "scale": self.scale,
            "parts": parts, "ends": self.clocked,
        }  # fmt: skip
        if self.redo is not None:
            head["redo"] = list(self.redo)
        if self.back:
            head["back"] = [[name, self.back_dtypes[name]] for name in self.back]
        return PserverCall(FrameOp.PUSH, head, body)

    def landed(self, sub_request: SubRequest, head: Mapping[str, Any], body: memoryview) -> None:
        """Handle the answer to a sub-request."""
        pushed = [(self.parts[part].table, where) for part, where in sub_request.items]
        places = [(self.back[name], where, self.back_dtypes[name]) for name, where in pushed if name in self.back]
        _unpack(body, places)
        if places:
            _note_applied(self.applied, sub_request, head)
        self.heads.append(head)

    def total(self, name: str) -> int:
        """Sum of a counter over all answers."""
        return sum(int(head.get(name, 0)) for head in self.heads)


@dataclass
class Scan:
    """All rows of some buckets of a table. One key represents each bucket."""

    table: str
    buckets: Mapping[int, int]
    """The bucket that each key represents."""
    keys: Sequence[NDArray[np.int64]]
    found: list[Rows] = field(default_factory=list)
    clocked: bool = False

    def call(self, sub_request: SubRequest, route: RoutingTable) -> PserverCall:
        """Build the call for a sub-request. A sub-request has exactly one bucket."""
        (part, where) = sub_request.items[0]
        bucket = self.buckets[int(self.keys[part][where][0])]
        head = {"table": self.table, "bucket": bucket, "history": route.history, "version": route.version}
        return PserverCall(FrameOp.SCAN, head)

    def landed(self, sub_request: SubRequest, head: Mapping[str, Any], body: memoryview) -> None:
        """Handle the answer to a sub-request."""
        if body.nbytes:
            found = rows.decode(bytes(body))
            if len(found):
                self.found.append(found)


def _note_applied(applied: dict[int, int], sub_request: SubRequest, head: Mapping[str, Any]) -> None:
    number = int(head.get("applied", -1))
    applied[sub_request.server] = min(number, applied.get(sub_request.server, number))


def _unpack(body: memoryview, places: Sequence[tuple[NDArray[np.float32], Where, str]]) -> None:
    """Decode an answer's rows into the given places in order; each has a number format. Raises ``ProtocolError``."""
    at = 0
    for target, where, dtype in places:
        kind, count, dim = WIRE_DTYPES[dtype], _length(where), target.shape[1]
        size = count * dim * kind.itemsize
        if at + size > body.nbytes:
            raise ProtocolError(f"an answer with rows has {body.nbytes} bytes, expected at least {at + size}")
        found = np.frombuffer(body, kind, count * dim, at).reshape(count, dim)
        if isinstance(where, slice):
            decode_half(found, dtype, target[where])
        else:
            target[where] = decode_half(found, dtype, np.empty((count, dim), np.float32))
        at += padded(size)


def _length(where: Where) -> int:
    return where.stop - where.start if isinstance(where, slice) else len(where)
