"""Simulated in-memory checkpoints, one store per launcher, and the checkpoint directory that outlives them.

Records only which commits are where, without their content. Mirrors ``memory_checkpoints`` and ``snapshot_pool`` in
``edl.checkpoint.memory``.
"""

from __future__ import annotations

import math
import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from edl.checkpoint.memory.copy_policy import Copying, needed
from edl.checkpoint.memory.pending_saves import PendingSave
from edl.checkpoint.memory.replication import COPY_TIMEOUT_S
from edl.checkpoint.memory.shard_saves import parts_to_write
from edl.tasks import AGAIN_S
from edl.testing.sim.network import Network
from edl.testing.sim.timeline import Timeline
from edl.types import NodeId
from edl.wire.messages import KeepWith, Kept
from edl.wire.records import NO_STATE, Holding, NodeInfo, Source, Version, World

Stream = tuple[str, str, int]
"""Kind (worker, loaded, replica), owner, and slot or shard."""


@dataclass(slots=True)
class Saved:
    """One checkpoint in the directory."""

    shards: int
    parts: set[int] = field(default_factory=set)
    corrupt: bool = False
    whole_s: float = 0.0
    """When its last shard was written."""

    @property
    def complete(self) -> bool:
        """Whether its manifest exists."""
        return len(self.parts) == self.shards


class Directory:
    """The checkpoint directory, shared by all nodes and by successive jobs."""

    def __init__(self) -> None:
        self.entries: dict[Version, Saved] = {}
        self.save_asked = ""
        """Requester of the pending save; empty if none."""
        self.kill_asked = ""

    def write(self, version: Version, shard: int = 0, shards: int = 1, now_s: float = 0.0) -> bool:
        """Write a shard; returns whether the commit is complete now. ``now_s`` 0: it was there from the start."""
        saved = self.entries.setdefault(version, Saved(shards))
        if not saved.complete:
            saved.whole_s = now_s
        saved.parts.add(shard)
        return saved.complete

    def complete(self) -> list[tuple[Version, Saved]]:
        """Complete commits, newest first."""
        return sorted(((v, s) for v, s in self.entries.items() if s.complete), key=lambda pair: pair[0], reverse=True)

    def usable(self, until_s: float = math.inf) -> Version:
        """The newest intact commit that was complete by this time."""
        found = (version for version, saved in self.complete() if not saved.corrupt and saved.whole_s <= until_s)
        return next(found, NO_STATE)


@dataclass(slots=True)
class StateNet:
    """What the in-memory checkpoints of all launchers share."""

    timeline: Timeline
    rng: random.Random
    network: Network
    directory: Directory
    memories: dict[tuple[str, int], SimMemory] = field(default_factory=dict)
    """In-memory checkpoints of live launchers, by address."""
    copying: Copying = Copying.AUTO
    """``--copies``."""
    acknowledged: set[Version] = field(default_factory=set)
    """Commits whose save was acknowledged to workers."""
    impatient: int = 0
    """How often a worker gave up waiting for the copy of its last commit."""
    kill_source: bool = False
    """Whether the next node that is asked for a piece of state is killed."""


class Owner(Protocol):
    """The launcher that an in-memory checkpoint belongs to."""

    host: str
    alive: bool
    info: NodeInfo

    @property
    def paused(self) -> bool:
        """Whether it is stopped by SIGSTOP."""
        ...

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> object:
        """Call after ``delay_s`` seconds; while the process is stopped, once it continues; never if it is dead."""
        ...

    def kept(self, message: Kept) -> None:
        """A commit was written to the checkpoint directory, or could not be."""
        ...

    def copied(self) -> None:
        """A shard of another node's commit has arrived, be it a copy or for a worker that restores."""
        ...

    def progressed(self, slot: int, commit: int) -> None:
        """A worker has committed."""
        ...

    def crash(self) -> None:
        """Kill the process, as SIGKILL would."""
        ...


class SimMemory:
    """The commits in a node's memory. They are lost with its launcher."""

    def __init__(self, owner: Owner, net: StateNet) -> None:
        self.owner = owner
        self.net = net
        self.stored: tuple[Version, bool] = (NO_STATE, False)
        self.refused = ""
        self.since_s: dict[Holding, float] = {}
        """When each shard arrived."""
        self._streams: dict[Stream, list[Holding]] = {}
        self._bad: set[Version] = set()
        self._peer: KeepWith | None = None
        self._copied: dict[Stream, Holding] = {}
        self._sending = False
        self._peer_named = False
        self._patient = True
        self._writer = False
        self._nodes = 1
        self._members: frozenset[NodeId] = frozenset()
        self._sharing: dict[Stream, frozenset[NodeId]] = {}
        self._owed = PendingSave()
        self._writing: Version | None = None
        """The save that is being written. Only a newer one starts another attempt."""
        self._tried = NO_STATE
        self._fetches: dict[tuple[Version, int], list[Callable[[bool], None]]] = {}
        self._parts_to_write = 0
        self._unseen = False
        self.loading = False
        net.memories[self.address] = self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which other nodes reach it."""
        return self.owner.host, self.owner.info.state_port

    def end(self) -> None:
        """Remove it: its launcher has ended."""
        if self.net.memories.get(self.address) is self:
            del self.net.memories[self.address]

    # --- contents -----------------------------------------------------------------------------------------------------

    def holdings(self) -> tuple[Holding, ...]:
        """Every shard in this node's memory."""
        found = {holding for held in self._streams.values() for holding in held}
        return tuple(sorted(found, key=lambda holding: (holding.version, holding.shard)))

    def has(self, version: Version, shard: int) -> bool:
        """Whether this shard is in memory."""
        return any((h.version, h.shard) == (version, shard) for held in self._streams.values() for h in held)

    def _put(self, stream: Stream, holding: Holding) -> None:
        held = [one for one in self._streams.get(stream, ()) if one != holding]
        self._streams[stream] = [holding, *held][: 3 if holding.shards > 1 else 1]
        self.since_s[holding] = self.net.timeline.now_s

    def _of(self, *uses: str) -> Iterator[Stream]:
        return (stream for stream in list(self._streams) if stream[0] in uses)

    def _drop_older(self, version: Version, uses: Iterable[str]) -> None:
        for stream in self._of(*uses):
            if all(one.version < version for one in self._streams[stream]):
                del self._streams[stream]

    # --- this node's workers ------------------------------------------------------------------------------------------

    def committed(self, slot: int, holding: Holding, save: bool, others: frozenset[NodeId] = frozenset()) -> None:
        """A worker has copied a commit to memory. ``save``: it is to be written to the directory too. ``others``: other
        nodes whose workers keep the same part."""
        stream = ("worker", "", slot)
        self._sharing[stream] = others
        self._put(stream, holding)
        self.owner.progressed(slot, holding.version.commit)
        held = self._streams[stream]
        needed, uses = (1, ("loaded",)) if holding.shards == 1 else (3, ("loaded", "replica"))
        if len(held) >= needed:
            self._drop_older(held[needed - 1].version, uses)
        self._replicate()
        if save and holding.shards == 1:
            self.net.acknowledged.add(holding.version)
            self._owed.take(holding.version)
            self._save()
        elif save and holding.shards > 1:
            self._parts_to_write += 1
            self._unseen = True
            self.owner.after(self.net.rng.uniform(0.05, 0.5), self._write_part, holding)

    def enter(self, world: World) -> None:
        """A world that includes this node begins."""
        self._writer, self._nodes = world.members[0].node == self.owner.info.node, len(world.members)
        self._members = frozenset(member.node for member in world.members) - {self.owner.info.node}
        restore = world.restore
        self._owed.begin(restore)
        self._trim(restore)
        self._tried = NO_STATE
        if self._writer and self._owed.due:
            self._owed.written(self.net.directory.usable())
        self._save()
        self._replicate()

    def _trim(self, restore: Version) -> None:
        """Drop commits older than the one that the world starts from, and those of an abandoned era."""
        if restore == NO_STATE:
            return
        for held in self._streams.values():
            versions = [one.version for one in held]
            if restore in versions:
                del held[: versions.index(restore)]
        if any(one.version >= restore for held in self._streams.values() for one in held):
            self._drop_older(restore, ("loaded", "replica"))

    def piece(self, version: Version, shard: int, sources: tuple[Source, ...], done: Callable[[bool], None]) -> None:
        """Fetch a shard from one of ``sources`` unless it is here; ``done`` is called with whether it is here now."""
        if self.has(version, shard):
            self.owner.after(0.001, done, True)
            return
        waiting = self._fetches.setdefault((version, shard), [])
        waiting.append(done)
        if len(waiting) == 1:
            others = [one for one in sources if one.shard == shard and one.node != self.owner.info.node]
            self.net.rng.shuffle(others)
            self._ask(version, shard, others)

    def _ask(self, version: Version, shard: int, others: list[Source]) -> None:
        if not others:
            for done in self._fetches.pop((version, shard)):
                done(False)
            return
        source = self.net.memories.get((others[0].host, others[0].port))
        self._may_kill(source)
        self.owner.after(self.net.rng.uniform(0.02, 0.5), self._given, version, shard, others, source)

    def _given(self, version: Version, shard: int, others: list[Source], source: SimMemory | None) -> None:
        reached = source is not None and self._reaches(source)
        part = (
            next((h for h in source.holdings() if (h.version, h.shard) == (version, shard)), None) if source else None
        )
        if not reached or part is None:
            self._ask(version, shard, others[1:])
            return
        self._put(("loaded", f"{version}", shard), part)
        self.owner.copied()
        if source is not None and (owed := source._owed.to_write) is not None:
            self._owed.take(owed)
            self._save()
        for done in self._fetches.pop((version, shard)):
            done(True)

    def pieces(self, version: Version, shards: int, sources: tuple[Source, ...], done: Callable[[bool], None]) -> None:
        """Read pieces of all shards, here or from ``sources``; nothing is kept. ``done`` is called with whether every
        shard could be read."""
        others = [one for one in sources if not self.has(version, one.shard)]
        if others:
            self._may_kill(self.net.memories.get((others[0].host, others[0].port)))

        def read() -> None:
            done(all(self.has(version, shard) or self._there(version, shard, others) for shard in range(shards)))

        self.owner.after(self.net.rng.uniform(0.02, 0.5), read)

    def _may_kill(self, source: SimMemory | None) -> None:
        """Crash a node that is read from, if the schedule wants one to die so."""
        if source is not None and self.net.kill_source:
            self.net.kill_source = False
            self.net.timeline.after(0.01, source.owner.crash)

    def _there(self, version: Version, shard: int, sources: Iterable[Source]) -> bool:
        """Whether one of these nodes can be reached and holds the shard."""
        nodes = [self.net.memories.get((one.host, one.port)) for one in sources if one.shard == shard]
        return any(node is not None and self._reaches(node) and node.has(version, shard) for node in nodes)

    def lives(self, sources: Iterable[Source]) -> bool:
        """Whether one of these nodes is alive, even if unreachable."""
        return any((source.host, source.port) in self.net.memories for source in sources)

    def _reaches(self, other: SimMemory) -> bool:
        return other.owner.alive and not other.owner.paused and self.net.network.both(self.owner.host, other.owner.host)

    # --- copies of commits --------------------------------------------------------------------------------------------

    def keep_with(self, peer: KeepWith) -> None:
        """Send copies of commits to this node from now on."""
        self._peer_named = self._patient = True
        self._peer = peer if peer.node else None
        self._copied.clear()  # if the same peer is named again, it reports what it already has
        self._replicate()

    def when_copied(self, slot: int, then: Callable[[], None], since_s: float | None = None) -> None:
        """Call ``then`` once the newest commit of this slot's worker is on another node, or that node is too slow."""
        now_s = self.net.timeline.now_s
        since_s = now_s if since_s is None else since_s
        awaited = self._nodes > 1 and self.net.copying is not Copying.NEVER and not self._peer_named
        if not self._patient or not (self._peer or awaited) or ("worker", "", slot) not in self._behind():
            then()
        elif now_s - since_s >= COPY_TIMEOUT_S:
            self._patient = False
            self.net.impatient += 1
            then()
        else:
            self._replicate()
            self.owner.after(AGAIN_S, self.when_copied, slot, then, since_s)

    def _behind(self) -> list[Stream]:
        newest = {stream: held[0] for stream in self._of("worker") if (held := self._streams[stream])}
        wanted = {s: one for s, one in newest.items() if needed(self.net.copying, self._holders(s, one))}
        return [stream for stream, one in wanted.items() if self._copied.get(stream) != one]

    def _holders(self, stream: Stream, holding: Holding) -> int:
        """Members whose workers keep this part, this node included."""
        return self._nodes if holding.shards == 1 else 1 + len(self._sharing.get(stream, frozenset()) & self._members)

    def _replicate(self) -> None:
        behind, peer = self._behind(), self._peer
        if self._sending or peer is None or not behind:
            return
        self._sending = True
        holding = self._streams[behind[0]][0]
        self.owner.after(self.net.rng.uniform(0.01, 0.3), self._sent, behind[0], holding, peer)

    def _sent(self, stream: Stream, holding: Holding, peer: KeepWith) -> None:
        self._sending = False
        other = self.net.memories.get((peer.host, peer.port))
        taken = (
            other is not None
            and self._reaches(other)
            and other.take_copy(self.owner.info.node, holding, self._owed.to_write)
        )
        if taken and peer == self._peer:
            self._copied[stream] = holding
        if taken:
            self._replicate()

    def take_copy(self, owner: NodeId, holding: Holding, owed: Version | None) -> bool:
        """Take another node's commit and the version that it has yet to write; false if a newer one is here."""
        stream = ("replica", owner, holding.shard)
        held = self._streams.get(stream)
        if held and held[0].version >= holding.version:
            return held[0] == holding
        self._put(stream, holding)
        if owed is not None:
            self._owed.take(owed)
        self.owner.copied()
        return True

    # --- the checkpoint directory -------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read which checkpoint in the directory is the newest."""
        known = [(version, saved) for version, saved in self.net.directory.complete() if version not in self._bad]
        self.stored = (known[0][0], known[0][1].shards > 1) if known else (NO_STATE, False)

    def load(self) -> None:
        """Load the newest intact commit from the directory."""
        self.look()
        version, sharded = self.stored
        if version == NO_STATE or (not sharded and self.has(version, 0)):
            return
        for version, saved in self.net.directory.complete():
            if saved.corrupt:
                self._bad.add(version)
            elif saved.shards > 1:
                break  # every byte of it has been looked at
            else:
                self._put(("loaded", f"{version}", 0), Holding(version))
                break
        self.look()
        self.refused = "" if self.stored[0].commit or not self._bad else "every checkpoint is corrupt"

    def _save(self) -> None:
        wanted = self._owed.to_write
        if self._writer and self._writing is None and wanted is not None and wanted > self._tried:
            self._writing = wanted
            self.owner.after(self.net.rng.uniform(0.05, 1.0), self._write)

    def _write(self) -> None:
        wanted, self._writing = self._writing, None
        assert wanted is not None  # noqa: S101 - it was begun
        self._tried = wanted
        newer = [h.version for h in self.holdings() if h.version >= wanted and h.shards == 1]
        if newer:
            version = wanted if wanted in newer else min(newer)
            self.net.directory.write(version, now_s=self.net.timeline.now_s)
            self._owed.written(version)
            self.finish(version)
        else:
            self._owed.failed(wanted, "it is no longer in memory")
            self.owner.kept(Kept(wanted, "", "it is no longer in memory"))
        self._save()

    @property
    def saving(self) -> bool:
        """Whether this node has yet to write a commit that workers saved."""
        return bool(self._parts_to_write) or (self._writer and self._owed.to_write is not None)

    @property
    def writing(self) -> bool:
        """Whether a write is under way."""
        return bool(self._parts_to_write) or (self._writer and self._writing is not None)

    @property
    def unsaved(self) -> str:
        """Why saves of workers are not written, if this node is the writer; empty if none is missing."""
        return self._owed.text if self._writer else ""

    def try_again(self) -> None:
        """Write missing saves, including those whose write has failed before."""
        self._tried = NO_STATE
        self._save()

    def _write_part(self, holding: Holding) -> None:
        self._parts_to_write -= 1
        if self.net.directory.write(holding.version, holding.shard, holding.shards, self.net.timeline.now_s):
            self.finish(holding.version)

    @property
    def busy(self) -> bool:
        """Whether ``stored`` may be outdated. Reads the directory when the writes are over."""
        if self.loading or self._parts_to_write:
            return True
        if self._unseen:
            self._unseen = False
            self.look()
        return False

    def finish(self, version: Version) -> None:
        """A commit is complete in the directory."""
        sharded = self.net.directory.entries[version].shards > 1
        self.stored = max(self.stored, (version, sharded))
        self.net.directory.save_asked = ""
        self.owner.kept(Kept(version, f"checkpoint {version.commit}", sharded=sharded))

    def flush(self, version: Version) -> None:
        """Write this node's shards of a commit if the directory has none as new."""
        self.look()
        if version > self.stored[0]:
            self._write_parts(version)
            saved = self.net.directory.entries.get(version)
            if saved is not None and saved.complete:
                self.look()
                self.owner.kept(Kept(version, f"checkpoint {version.commit}", sharded=saved.shards > 1))

    def save_what_is_left(self) -> None:
        """Write the newest commit before the launcher ends."""
        self._write_parts(None)

    def _write_parts(self, version: Version | None) -> None:
        for one in parts_to_write(self.holdings(), (), version):
            self.net.directory.write(one.version, one.shard, one.shards, self.net.timeline.now_s)
