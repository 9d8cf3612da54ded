"""Keeps a node's synchronised directories alike with those of the other nodes, in threads of low priority.

One thread scans the directories. For each other node, one thread asks for changes, fetches the files, and enters all
of them at once. A slow node therefore delays only what comes from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edl.checkpoint.memory.background import lower_priority
from edl.errors import CheckpointError, EdlError
from edl.ports import Clock, FileCopies, LentFile
from edl.sync_dir import messages
from edl.sync_dir.barrier import PeerProgress, behind, lacking
from edl.sync_dir.cut import LastMoment
from edl.sync_dir.index import FileRecord
from edl.sync_dir.losses import LauncherId, Losses
from edl.sync_dir.messages import PeerReport
from edl.sync_dir.replica import NodeReplica
from edl.sync_dir.tree import SyncedTree
from edl.types import NodeId

PAUSE_S = 0.5
"""Seconds between two scans, and between two requests to a node. Scans take at most a tenth of the time."""
URGENT_PAUSE_S = 0.05
"""The same while workers wait."""
LONGEST_PAUSE_S = 30.0
"""Longest pause after copies from a node that have failed again and again; each is twice the previous one."""
FREE_TRIES = 3
"""Attempts to copy a file of which every byte counts as progress. Of later ones only bytes count that none has got to
before: a file that never fits would let workers wait for ever."""
WARN_S = 60.0
"""Seconds that a file may be in the middle of being written before the log says that its copy waits."""
SPARE_S = 3.0
"""Seconds without progress after which workers wait no longer for a node that is not in their world."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where another node serves its files."""

    node: NodeId
    host: str
    port: int


@dataclass(slots=True)
class _Peer:
    """Another node, as its thread sees it."""

    address: PeerAddress
    progress: PeerProgress = field(default_factory=PeerProgress)
    life: str = ""
    arrived_bytes: int = 0
    answered: int = 0
    """Number of its last answer among all answers of other nodes; 0: it has not answered yet."""
    has: int = 0
    """Number of this node's newest change that it has."""
    shared: frozenset[int] = frozenset()
    """Directories that are the same ones there."""
    ends: bool = False
    """It has said that nothing more comes from there."""
    knows_end: bool = False
    """It has the same from here."""
    gone: bool = False
    failure: str = ""
    """Why it cannot fetch files itself, as it last reported."""
    refused: bool = False
    """Its port refuses connections: its launcher is dead, although the store may not know it yet."""
    failing_since_s: float | None = None
    warned: bool = False
    failed_copies: int = 0
    """Copies of files from there that have failed in a row."""
    arrived: dict[FileRecord, str] = field(default_factory=dict)
    """Files that were fetched and wait for the others of their moment, with where they lie. Only the node's thread adds
    to it; another one takes over what it needs itself."""

    @property
    def launcher(self) -> LauncherId:
        return self.address.node, self.life


@dataclass(slots=True)
class _Tries:
    """Attempts to copy one file."""

    failed: int = 0
    furthest: int = 0
    """Most bytes that one of them has got."""

    def gained(self, size: int, position: int) -> int:
        """How many of ``size`` bytes, which end at ``position``, count as progress."""
        return size if self.failed < FREE_TRIES else max(0, min(size, position - self.furthest))


class DirectorySync:
    """Implements ``edl.ports.FileSource`` too. Thread-safe; methods block unless stated otherwise."""

    def __init__(
        self,
        node: NodeId,
        life: str,
        tree: SyncedTree,
        copies: FileCopies,
        clock: Clock,
        log: Callable[[str], None],
    ) -> None:
        """``life``: identifies this launcher among all that the node has had."""
        self._node = node
        self._life = life
        self._tree = tree
        self._copies = copies
        self._clock = clock
        self._log = log
        self._replica = NodeReplica(node, tree)
        self._changed = threading.Condition()
        """Guards all below, and is notified when any of it changes."""
        self._peers: dict[NodeId, _Peer] = {}
        self._fetched: set[FileRecord] = set()
        """Being fetched right now, each from one node."""
        self._tries: dict[FileRecord, _Tries] = {}
        """Of files whose last copy has failed."""
        self._settled = self._alike = self._arrived_bytes = self._answers = 0
        self._losses = Losses()
        self._writing = False
        """Workers of earlier rounds than ``_settled`` may still write here."""
        self._leaving = False
        """Nothing more is written here."""
        self._urgent = 0
        """Number of calls that wait."""
        self._trouble = ""
        """Why the directories cannot be scanned."""
        self._closed = False

    def open(self) -> None:
        """Enter the files that are there, and begin to scan. Raises ``CheckpointError``."""
        self._tree.open()
        try:
            self._replica.open()
        except OSError as error:
            raise CheckpointError(
                f"--sync-dir: cannot read {error.filename}: {error.strerror}. Let this user read it, or name another "
                "folder"
            ) from error
        self._begin("edl-sync-scan", self._keep_looking)

    def close(self) -> None:
        """Stop. Does not wait for threads that wait for the network."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tree.close()

    @property
    def total(self) -> tuple[int, int]:
        """Number and bytes of the files here."""
        return self._replica.total()

    def meet(self, addresses: Collection[PeerAddress]) -> None:
        """Set the other nodes of the job. Does not block. Raises ``RuntimeError`` if there can be no further thread at
        present: call it again later."""
        with self._changed:
            wanted = {one.node: one for one in addresses if one.node != self._node}
            for node, peer in list(self._peers.items()):
                if wanted.get(node) != peer.address:
                    peer.gone = True
                    del self._peers[node]
            for node, address in wanted.items():
                if node not in self._peers:
                    peer = _Peer(address)
                    self._begin(f"edl-sync-{node}", functools.partial(self._follow, peer))
                    self._peers[node] = peer
            self._changed.notify_all()

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            lower_priority()
            work()

        threading.Thread(target=run, name=name, daemon=True).start()

    # --- to other nodes ----------------------------------------------------------------------------------------------

    def report(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """What this node has, for one that asks; remembers what that one has. See ``edl.ports.FileSource``."""
        node, has = NodeId(messages.text(request, "node")), messages.number(request, "has")
        known = messages.text(request, "life") == self._life
        has, knows_end = (has, request.get("ends") is True) if known else (0, False)
        with self._changed:
            rounds, arrived_bytes = (self._settled, self._alike, self._losses.started), self._arrived_bytes
            leaving, writing = self._leaving, self._writing
            failing = [(name, one.progress.failure) for name, one in self._peers.items() if one.progress.failure]
            peer = self._peers.get(node)
            if peer is not None:
                peer.has, peer.knows_end = has, knows_end
                self._changed.notify_all()
        changes = self._replica.since(has)  # after the round: what was settled is in it
        failure = f"files of node {failing[0][0]}: {failing[0][1]}" if failing else ""
        until_ns = messages.FOR_EVER if leaving else changes.until_ns
        now_ns = self._tree.now_ns()
        report = PeerReport(self._life, changes.head, *rounds, writing, until_ns, now_ns, arrived_bytes, failure)
        return messages.report_to(report), messages.records_to(changes.records)

    def lend(self, request: Mapping[str, Any]) -> contextlib.AbstractContextManager[LentFile | None]:
        """Open a file for a node that fetches it. See ``edl.ports.FileSource``."""
        return self._replica.opened(messages.record_from(request))

    # --- from other nodes --------------------------------------------------------------------------------------------

    def _follow(self, peer: _Peer) -> None:
        while not (peer.gone or self._closed):
            error, refused = "", False
            try:
                failure = self._ask(peer)
            except (EdlError, OSError) as caught:
                failure = error = str(caught)
                refused = isinstance(caught.__cause__, ConnectionRefusedError)
            with self._changed:
                peer.refused = refused
                peer.progress = dataclasses.replace(peer.progress, failure=failure)
                self._changed.notify_all()
                self._tell(peer, failure, certain=bool(error))
                self._pause(peer)
        self._drop_arrived(peer)

    def _pause(self, peer: _Peer) -> None:
        """Wait until the node is to be asked again."""
        again = peer.failed_copies - FREE_TRIES
        if again >= 0:
            pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(again, 16))
            self._changed.wait_for(lambda: peer.gone or self._closed, pause_s)
            return
        pause_s = URGENT_PAUSE_S if (urgent := self._urgent > 0) else PAUSE_S
        self._changed.wait_for(lambda: peer.gone or self._closed or (not urgent and self._urgent > 0), pause_s)

    def _tell(self, peer: _Peer, failure: str, *, certain: bool) -> None:
        """Log that files cannot be copied, once, and the end of it. ``certain``: it is more than a wait for a file that
        is being written."""
        now_s = self._clock.now_s()
        if not failure:
            peer.failing_since_s = None
            if peer.warned:
                peer.warned = False
                self._log(f"--sync-dir: copying files from node {peer.address.node} works again")
            return
        if peer.failing_since_s is None:
            peer.failing_since_s = now_s
        late = certain or now_s - peer.failing_since_s >= WARN_S
        if late and not peer.warned and peer.answered and peer.progress.entered < peer.progress.head:
            peer.warned = True
            self._log(f"--sync-dir: cannot copy files from node {peer.address.node} yet: {failure}")

    def _ask(self, peer: _Peer) -> str:
        """Ask once, and enter what has changed there; returns why that was not possible."""
        address, entered = peer.address, peer.progress.entered
        request = {"node": self._node, "life": peer.life, "has": entered, "ends": peer.ends}
        asked_ns = self._tree.now_ns()
        frame, body = self._copies.changes(address.host, address.port, request)
        answered_ns = self._tree.now_ns()
        if peer.gone:
            return ""  # it may have set folders aside because this node is cut off, which is none of this node's rounds
        report, records = messages.report_from(frame), messages.records_from(body)
        if report.life != peer.life:
            entered = 0
            self._meet_life(peer, report.life)
        with self._changed:
            self._answers += 1
            peer.arrived_bytes, peer.answered = report.arrived_bytes, self._answers
            peer.failure = report.failure
            self._losses.heard(report.started)
            peer.progress = peer.progress.after(report, entered)
            self._changed.notify_all()
        failure = "" if entered == report.head else self._enter(peer, records)
        if not failure:
            until_ns = asked_ns - (report.now_ns - report.until_ns)
            moment = LastMoment(until_ns, report.now_ns - (asked_ns + answered_ns) // 2, peer.shared)
            with self._changed:
                peer.progress = dataclasses.replace(peer.progress, entered=report.head)
                peer.ends = report.until_ns == messages.FOR_EVER
                self._losses.reached(peer.launcher, moment)
        return failure

    def _meet_life(self, peer: _Peer, life: str) -> None:
        self._drop_arrived(peer)
        peer.progress = PeerProgress(failure=peer.progress.failure)
        peer.life, peer.ends, peer.shared = life, False, self._tree.shared_with(peer.address.node, life)
        if peer.shared:
            names = ", ".join(self._tree.names(peer.shared))
            self._log(f"--sync-dir: {names} is shared with node {peer.address.node} anyway: nothing is copied there")

    def _enter(self, peer: _Peer, records: list[FileRecord]) -> str:
        with self._fetching(self._replica.missing(records, peer.shared)) as wanted:
            if wanted is None:
                return "the same files are just being fetched from another node"
            self._take_over(peer, wanted)
            self._drop_arrived(peer, wanted)
            self._tree.check_space([one for one in wanted if one not in peer.arrived])
            for record in wanted:
                if record not in peer.arrived and not self._fetch(peer, record):
                    break
            failure = self._replica.enter(records, peer.arrived, peer.shared)
            if not failure:
                self._drop_arrived(peer)
            return failure

    def _take_over(self, peer: _Peer, wanted: Collection[FileRecord]) -> None:
        """Use what other threads have fetched already; they do not need it now, as these files are reserved."""
        with self._changed:
            for other in self._peers.values():
                found = [one for one in wanted if one in other.arrived] if other is not peer else []
                peer.arrived.update((one, other.arrived.pop(one)) for one in found)

    def _drop_arrived(self, peer: _Peer, kept: Collection[FileRecord] = ()) -> None:
        """Remove files that have arrived and are not needed any more, except ``kept`` ones."""
        with self._changed:
            dropped = peer.arrived.keys() - set(kept)
            paths = [peer.arrived.pop(one) for one in dropped]
        for path in paths:
            _discard(path)

    @contextlib.contextmanager
    def _fetching(self, wanted: list[FileRecord]) -> Iterator[list[FileRecord] | None]:
        """Reserve files for this thread; None if another one fetches some of them."""
        with self._changed:
            free = self._fetched.isdisjoint(wanted)
            if free:
                self._fetched.update(wanted)
        try:
            yield wanted if free else None
        finally:
            if free:
                with self._changed:
                    self._fetched.difference_update(wanted)

    def _fetch(self, peer: _Peer, record: FileRecord) -> bool:
        """Fetch a file to where it waits for the others of its moment. False: that node has it no longer."""
        path = self._tree.stage(record.path)
        found = False
        try:
            found = self._copy(peer, record, path)
        finally:
            if not found:
                _discard(path)
        if found:
            with self._changed:
                peer.arrived[record] = path
        return found

    def _copy(self, peer: _Peer, record: FileRecord, path: str) -> bool:
        tries, position = self._tries.get(record, _Tries()), 0

        def arrived(size: int) -> None:
            nonlocal position
            with self._changed:
                position += size
                self._arrived_bytes += tries.gained(size, position)
                if peer.gone or self._closed:
                    raise CheckpointError(f"node {peer.address.node} has left")

        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            found = self._copies.fetch(
                peer.address.host, peer.address.port, messages.record_to(record), descriptor, arrived
            )
        except BaseException as error:
            peer.failed_copies += 1
            self._tries[record] = _Tries(tries.failed + 1, max(tries.furthest, position))
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"{self._tree.locate(record.path)}: {error}") from error
            raise
        finally:
            os.close(descriptor)
        peer.failed_copies = 0
        self._tries.pop(record, None)
        return found

    # --- this node's own files ---------------------------------------------------------------------------------------

    def _keep_looking(self) -> None:
        while not self._closed:
            begun_s = self._clock.now_s()
            if self._look():
                self._look()  # at once: what is overwritten again and again stands still only briefly
            took_s = self._clock.now_s() - begun_s
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed, max(PAUSE_S, 10 * took_s))

    def _look(self) -> bool:
        """Scan once; returns whether files are about to count as written."""
        try:
            more, trouble = self._replica.look(), ""
        except (EdlError, OSError) as error:
            more, trouble = False, str(error)
        with self._changed:
            if trouble and trouble != self._trouble:
                self._log(f"--sync-dir: nothing is copied from here: {trouble}")
            self._trouble = trouble
        return more

    def _flush(self, cancelled: threading.Event) -> None:
        """Enter all that is finished. Two scans show that nothing else is. Raises ``CheckpointError``."""
        self._look()
        while self._look() and not self._ends(cancelled):
            cancelled.wait(URGENT_PAUSE_S)
        if self._trouble:
            raise CheckpointError(f"--sync-dir: {self._trouble}")

    # --- waiting -----------------------------------------------------------------------------------------------------

    def alike(
        self,
        number: int,
        members: Collection[NodeId],
        limit_s: float,
        cancelled: threading.Event,
        *,
        writing: bool = False,
    ) -> None:
        """Wait until all members of round ``number`` have the same files.

        ``limit_s``: seconds without any progress after which ``CheckpointError`` is raised. ``writing``: some workers
        of earlier rounds run on here, and may write.
        """
        others = frozenset(members) - {self._node}
        with self._waiting():
            self._flush(cancelled)
            self._gather(number, others, limit_s, cancelled, writing)
            if self._ends(cancelled):
                return
            self._replica.begin(number)
            self._set_aside(others)
            with self._changed:
                self._alike = max(self._alike, number)
            if self._wait(lambda: bool(behind(number, others, self._progress())), limit_s, cancelled):
                raise self._not_passed_on(behind(number, others, self._progress())[0], limit_s)
            with self._changed:
                if self._ends(cancelled):
                    return
                world, living = self._members(others), {peer.launcher for peer in self._peers.values()}
                self._losses.start(number, {peer.launcher for peer in world}, living, self._tree.now_ns())
            self._replica.adopt()

    def _gather(
        self, number: int, others: Collection[NodeId], limit_s: float, cancelled: threading.Event, writing: bool
    ) -> None:
        """Wait until what all members have written is here, and for other nodes a little."""
        with self._changed:
            if self._ends(cancelled):
                return
            self._settled, self._writing = max(self._settled, number), writing
            spares, answers = self._peers.keys() - others, self._answers
        if self._wait(lambda: bool(lacking(number, others, self._progress())), limit_s, cancelled):
            raise self._not_fetched(lacking(number, others, self._progress())[0], limit_s)
        with self._changed:
            if self._ends(cancelled):
                return
            now_ns = self._tree.now_ns()
            ended = [peer.launcher for peer in self._members(others) if not peer.progress.writing]
            self._losses.gathered(ended, now_ns)

        def awaited() -> bool:
            living = [peer.launcher for peer in self._members(spares) if not peer.refused]
            return bool(self._late(spares, answers)) or self._losses.unsure(living, now_ns)

        self._wait(awaited, SPARE_S, cancelled)

    def _members(self, nodes: Collection[NodeId]) -> list[_Peer]:
        return [peer for node, peer in self._peers.items() if node in nodes]

    def _set_aside(self, others: Collection[NodeId]) -> None:
        """Set aside what may lack files of nodes that were lost since the last world. If workers run on anywhere, the
        state is theirs, and files are not taken from them."""
        with self._changed:
            members = self._members(others)
            if self._writing or any(peer.progress.writing for peer in members):
                return
            lost = self._losses.lost({peer.launcher for peer in members})
            ahead_ns = {**self._losses.ahead_ns(), self._node: 0}
        try:
            for one in lost:
                self._replica.set_aside(one, ahead_ns)
        except OSError as error:
            raise CheckpointError(
                f"--sync-dir: cannot rename {error.filename}: {error.strerror}. It may lack files of a lost node: let "
                "this user rename it, or remove it"
            ) from error

    def caught_up(self, limit_s: float, cancelled: threading.Event) -> None:
        """Wait until this node has what the others had when it was called, or nothing has arrived for ``limit_s``."""
        with self._waiting():
            with self._changed:
                nodes, answers = set(self._peers), self._answers
            self._wait(lambda: bool(self._late(nodes, answers)), limit_s, cancelled)

    def passed_on(self, limit_s: float, cancelled: threading.Event) -> str:
        """Before leaving: wait until the other nodes have all that is here, and the reverse. Returns who does not;
        empty: nobody."""
        with self._waiting():
            with contextlib.suppress(CheckpointError):
                self._flush(cancelled)
                self._leaving = not cancelled.is_set()
            head = self._replica.head
            with self._changed:
                nodes, answers = set(self._peers), self._answers

            def without() -> list[NodeId]:
                late = [node for node, peer in self._peers.items() if not (peer.refused or self._has_all(peer, head))]
                return sorted({*late, *self._late(nodes, answers)})

            self._wait(lambda: bool(without()), limit_s, cancelled)
            with self._changed:
                return ", ".join(without())

    def _has_all(self, peer: _Peer, head: int) -> bool:
        return peer.has >= head and (peer.knows_end or not self._leaving)

    def _late(self, nodes: Collection[NodeId], answers: int) -> list[NodeId]:
        """Those of these nodes that live, and whose files are not here as of an answer after so many."""
        found = []
        for node in nodes:
            peer = self._peers.get(node)
            if peer is None or peer.refused:
                continue
            if peer.answered <= answers or peer.progress.entered < peer.progress.head:
                found.append(node)
        return found

    def _ends(self, cancelled: threading.Event) -> bool:
        """Whether a call that waits is to return without having got what it waits for."""
        return cancelled.is_set() or self._closed

    def _progress(self) -> dict[NodeId, PeerProgress]:
        return {node: peer.progress for node, peer in self._peers.items()}

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._changed:
            self._urgent += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._urgent -= 1

    def _wait(self, unfinished: Callable[[], bool], limit_s: float, cancelled: threading.Event) -> bool:
        """Wait while ``unfinished``; returns True if nothing has moved for ``limit_s`` seconds."""
        seen, until_s = None, 0.0
        with self._changed:
            while unfinished() and not self._ends(cancelled):
                now_s = self._clock.now_s()
                moved = (
                    self._arrived_bytes,
                    [
                        (node, peer.life, peer.has, peer.arrived_bytes, dataclasses.replace(peer.progress, failure=""))
                        for node, peer in sorted(self._peers.items())
                    ],
                )
                if moved != seen:
                    seen, until_s = moved, now_s + limit_s
                if now_s >= until_s:
                    return True
                self._changed.wait(min(until_s - now_s, URGENT_PAUSE_S))
        return False

    def _not_fetched(self, node: NodeId, limit_s: float) -> CheckpointError:
        """Files of this node are not here."""
        with self._changed:
            peer = self._peers.get(node)
            why = peer.progress.failure if peer else "it has not registered"
        return _not_alike(f"the files of node {node} could not be fetched", limit_s, why)

    def _not_passed_on(self, node: NodeId, limit_s: float) -> CheckpointError:
        """This node does not have all files."""
        with self._changed:
            peer = self._peers.get(node)
            why = (peer.failure or peer.progress.failure) if peer else "it has not registered"
        return _not_alike(f"node {node} does not have the files of all others", limit_s, why)


def _not_alike(what: str, limit_s: float, why: str) -> CheckpointError:
    return CheckpointError(
        f"--sync-dir: {what}, and nothing has moved for {limit_s:g} s ({why or 'it has not said why'}). Workers that "
        "start now could load different checkpoints. Make the nodes reach one another and have space on their disks, "
        "or raise --sync-timeout"
    )


def _discard(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
