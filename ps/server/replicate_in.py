"""The receiving end of replication streams: content is accepted in order, or refused bucket by bucket.

Everything is first passed to ``BucketMachine.refuses``, under the lock of the shard that it changes, so that a former
owner cannot overwrite what this pserver has served since. Accepted buckets are not checked again until orders may have
changed that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import ProtocolError
from edl.threads import Threads
from ps.hashing import buckets_of
from ps.net.caller import EndpointPeer, FrameReply
from ps.protocol.frames import Frame, FrameOp, pack_head
from ps.protocol.replication import ReleaseItem, part_of, unpack
from ps.rows import BucketImage, ShardChange
from ps.server.bucket_machine import Released
from ps.server.bucket_shell import BucketShell
from ps.spec import BUCKETS
from ps.store.store import RowStore

TABLES_S = 5.0
"""Seconds that a stream waits for the orders that define one of its tables."""


@dataclass(slots=True)
class _Accepted:
    """The buckets accepted from one sender so far."""

    meant: tuple[int, int]
    """Number and history of this pserver for which the stream was opened."""
    turn: int = -1
    version: int = -1
    buckets: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(BUCKETS, np.bool_))


class ReplicationIn:
    """Receives the replication streams of other pservers."""

    def __init__(self, bucket_shell: BucketShell, store: RowStore, threads: Threads = SYSTEM_THREADS) -> None:
        self._bucket_shell, self._store, self._threads = bucket_shell, store, threads
        self._lock = threads.lock()
        self._newest: dict[int, EndpointPeer] = {}
        """Newest connection by sender; nothing is accepted from older ones."""

    def left(self, peer: EndpointPeer) -> None:
        """A sender's connection has ended."""
        with self._lock:
            if self._newest.get(peer.number) is peer:
                del self._newest[peer.number]

    def reset(self) -> None:
        """This pserver has a new number or history: close the streams that were opened for the previous one."""
        with self._lock:
            newest = list(self._newest.values())
        for peer in newest:
            if isinstance(peer.data, _Accepted) and peer.data.meant != self._name():
                peer.hang_up()

    def take(self, peer: EndpointPeer, frame: Frame) -> FrameReply:
        """Process one frame of a stream. Raises ``ProtocolError``, and the store's ``PsError``."""
        head = frame.json()
        meant = (head.get("to"), head.get("history"))
        if not meant[0] or meant != self._name():
            mine = self._bucket_shell
            text = f"this is pserver {mine.number or '(no number yet)'} in history {mine.history}"
            return FrameReply.no(FrameOp.REFUSED, kind="number", text=text)
        if not isinstance(peer.data, _Accepted):
            peer.data = _Accepted(meant)
            with self._lock:
                old, self._newest[peer.number] = self._newest.get(peer.number), peer
            if old is not None:
                old.hang_up()
        fenced: set[int] = set()
        for version, content in unpack(head.get("items", []), frame.body):
            if self._name() != meant:
                return FrameReply.no(
                    FrameOp.REFUSED, kind="number", text=f"this is pserver {self._bucket_shell.number} now"
                )
            if isinstance(content, ReleaseItem):
                self._check(peer)
                refused = set(self._bucket_shell.refuses(peer.number, version, content.buckets))
                fenced |= refused
                taken = tuple(bucket for bucket in content.buckets if bucket not in refused)
                self._bucket_shell.post(Released(peer.number, version, taken))
            elif isinstance(content, BucketImage):
                fenced.update(self._image(peer, version, content))
            else:
                fenced.update(self._piece(peer, version, content))
        if not fenced:
            return FrameReply()
        return FrameReply(FrameOp.OK, pack_head({"fenced": sorted(fenced), "version": self._bucket_shell.version}))

    def _name(self) -> tuple[int, int]:
        return self._bucket_shell.number, self._bucket_shell.history

    def _check(self, peer: EndpointPeer) -> None:
        """Raise ``ProtocolError`` if the sender has opened a newer stream: content of this one may be outdated.
        Requires a shard's lock."""
        if self._newest.get(peer.number) is not peer:
            raise ProtocolError("superseded by a newer stream from this pserver")

    def _image(self, peer: EndpointPeer, version: int, image: BucketImage) -> Sequence[int]:
        self._await_tables(image.rows)
        if not 0 <= image.bucket < BUCKETS:
            raise ProtocolError(f"an image of an invalid bucket, {image.bucket}")
        with self._store.lock(image.bucket):
            self._check(peer)
            refused = self._bucket_shell.refuses(peer.number, version, [image.bucket])
            if not refused:
                self._store.take_image(image)
        return refused

    def _piece(self, peer: EndpointPeer, version: int, piece: ShardChange) -> Sequence[int]:
        self._await_tables([*piece.rows, *piece.removed])
        with self._store.lock(shard=piece.shard):
            self._check(peer)
            refused = self._refused(peer, version, piece)
            if refused:
                keep = np.ones(BUCKETS, np.bool_)
                keep[refused] = False
                piece = part_of(piece, keep)
            self._store.apply_piece(piece)
        return refused

    def _refused(self, peer: EndpointPeer, version: int, piece: ShardChange) -> list[int]:
        known: _Accepted = peer.data
        turn = self._bucket_shell.turn
        if (known.turn, known.version) != (turn, version):
            known.turn, known.version = turn, version
            known.buckets[:] = False
        touched = piece.buckets
        if piece.removed:
            touched = np.unique(np.concatenate([touched, *(buckets_of(keys) for keys in piece.removed.values())]))
        asked = [int(bucket) for bucket in touched[~known.buckets[touched]]]
        if not asked:
            return []
        refused = self._bucket_shell.refuses(peer.number, version, asked)
        known.buckets[asked] = True
        known.buckets[refused] = False
        return refused

    def _await_tables(self, names: Iterable[str]) -> None:
        """Wait for the orders that define these tables; the sender may have received them first. Raises
        ``ProtocolError``."""
        missing = [name for name in names if name not in self._store.tables]
        if not missing:
            return
        now_s = self._threads.now_s
        until_s = now_s() + TABLES_S
        with self._bucket_shell.changed:
            while any(name not in self._store.tables for name in missing):
                if now_s() >= until_s:
                    raise ProtocolError(f"rows of a table that is not defined here: {', '.join(missing)}")
                self._bucket_shell.changed.wait(until_s - now_s())
