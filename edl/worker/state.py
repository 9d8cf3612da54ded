"""``State``: what a training script keeps through every change of the world."""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from edl.errors import CheckpointError, StateError
from edl.wire import local, snapshot
from edl.wire.local import OWN, STATE, Seat
from edl.wire.records import NO_STATE, Version
from edl.wire.snapshot import Layout, Meta, SnapshotHeader, folder_name
from edl.worker import alike, part_numbers, vote, write_through
from edl.worker.accumulate import check_finished
from edl.worker.boundary import BoundaryAction, RoundOver
from edl.worker.building import Builder
from edl.worker.contents import Contents, NoRoom, is_own, may_be_own
from edl.worker.first_state import FirstState, first_state_memory
from edl.worker.framework import Framework
from edl.worker.link import Link
from edl.worker.local_steps import OuterSteps
from edl.worker.mapped_memory import MappedMemory
from edl.worker.numbers import SEED
from edl.worker.part_numbers import RankPart
from edl.worker.session import PeersLost, Session
from edl.worker.state_comparison import StateComparison

_ENTRY_BYTES = 256
"""Of a snapshot's header for each array."""
_Word = local.Committed | local.WroteThrough
"""Messages to the agent about a commit."""
_SAVING = (BoundaryAction.SAVE, BoundaryAction.KILL)
_TOGETHER = (BoundaryAction.SWITCH, BoundaryAction.KILL)
_LEAVING = (*_TOGETHER, BoundaryAction.STOP)


def headers_stream(seat: Seat) -> str:
    """Names the answer to a request for headers; an answer to an earlier round's is not taken for it."""
    return f"headers-{seat.round}"


class BaseState(Contents):
    """Named objects and values that are committed at step boundaries and restored in every new world.

    Objects have ``state_dict()`` and ``load_state_dict()`` and are changed in place. Values may be anything that a
    snapshot can hold (numbers, strings, lists, dicts, arrays …) and can be assigned: ``state.epoch += 1``. A value that
    is missing in an older snapshot keeps its initial value.

    An object with a true attribute ``edl_per_rank`` belongs to each worker individually. In a new world a worker gets
    back what was committed in its slot; if there is nothing, ``derive(rank)`` is called if the object has it.

    In a sharded state an object with a true attribute ``edl_union`` has entries of each worker, by key. In a world of
    another size each worker is given those of all.
    """

    def __init__(
        self,
        framework: Framework,
        values: Mapping[str, Any],
        *,
        sharded: bool = False,
        build: Callable[[], Mapping[str, Any]] | None = None,
        copy_every: int = 1,
    ) -> None:
        """``build`` is called in each world, with the group connected, and returns further objects by name.
        ``copy_every``: copy the state only at every n-th boundary; a planned change copies at its own boundary in any
        case.

        Raises ``StateError`` for an impossible name or value.
        """
        if copy_every < 1:
            raise StateError(f"copy_every={copy_every}: it must be at least 1, which copies at every commit")
        super().__init__(framework, values, sharded=sharded)
        self._builder = Builder(build) if build is not None else None
        self._copy_every = copy_every
        self._commits = 0
        self._session: Session | None = None
        self._trained = False
        self._first: FirstState | None = None
        self._others_copied = False
        """A boundary of this world is passed at which another worker of this node was to copy the state. That it has is
        only known one boundary later: it may have died meanwhile."""
        self._agreement: StateComparison | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._ran = self._again = self._passing = self._votes = False
        self._part: RankPart | None = None
        """This worker's part in the commits of this world, once the workers have agreed on it."""
        self._part_layout: Layout | None = None
        """Layout of the last commit for which that was right."""
        self._last: Version = NO_STATE
        """The newest commit that this worker has made or begun from."""
        self._unkept = False
        """There was no memory for the last commit."""
        self._asked_own = False
        """This worker's own objects have been requested for this restore."""

    # --- for scripts -------------------------------------------------------------------------------------------------

    @property
    def commits(self) -> int:
        """Number of step boundaries passed since the state was first created."""
        return self._commits

    @property
    def era(self) -> int:
        """Era of this world's commits; 0 before there is a world."""
        seat = self._session.seat if self._session is not None else None
        return seat.era if seat is not None else 0

    @property
    def keeps_numbers(self) -> bool:
        """Whether it has a ``RandomState``."""
        return bool(self._numbers.generators)

    def commit(self, ok: bool | None = None) -> bool:
        """A step boundary: all workers call it, at the same steps. Everything up to here is safe from then on.

        ``ok`` is a vote. All workers give one, which takes a small collective. If any is False, nothing is committed,
        every worker gets the state of the last commit back, and all calls return False. Raises ``CheckpointError`` when
        there is no such commit in memory.
        """
        return self._pass(save=False, ok=ok)

    def save(self, ok: bool | None = None) -> bool:
        """A step boundary whose commit is also written to the checkpoint directory, in the background. ``ok``: as for
        ``commit``."""
        return self._pass(save=True, ok=ok)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Register functions to call, in this order, each time this process has entered another world, with the group
        formed and the state restored, before ``train`` is called again. They are not called before the first ``train``
        in a process."""
        self._callbacks += callbacks

    def __repr__(self) -> str:
        return f"State({self._names()}; {self._commits} commits)"

    # --- for framework subclasses ------------------------------------------------------------------------------------

    def _restore_sharded(self, folder: str) -> None:
        """Called on all ranks with the group connected: read the parts of a sharded state from this folder of the
        checkpoint directory, at any world size."""
        raise NotImplementedError

    def _recut(self, link: Link, seat: Seat, job: str) -> None:
        """Called on all ranks with the group connected: read the parts of a sharded state from the memory of launchers,
        where a world of another size left it."""
        raise NotImplementedError

    def _ranks_alike(self) -> frozenset[int]:
        """Ranks that hold the same pieces of all sharded tensors as this one; may be empty if there is none."""
        return frozenset()

    def _growth_bytes(self) -> int:
        """Bytes that the first step adds to the state, as far as they are known."""
        return 0

    @property
    def _why_restarted(self) -> str:
        """Why a worker with this state cannot rejoin in process; empty when it can."""
        return (
            "its state is sharded, and no build function was given" if self._sharded and self._builder is None else ""
        )

    def _expected_bytes(self) -> int:
        """About how large this worker's snapshots will be; 0 if that cannot be said before it is in a world."""
        if self._sharded:
            return 0
        try:
            _, names, leaves = self._flattened(STATE)
            return sum(_ENTRY_BYTES + info.size for info in self._infos(names, leaves)) + self._growth_bytes()
        except Exception:  # noqa: BLE001  it fails again, with its own message, where the state is needed
            return 0

    # --- boundaries --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """One more boundary after ``train`` has returned. Other workers may make none."""
        self._pass(save=False, last=True)

    def _pass(self, *, save: bool, ok: bool | None = None, last: bool = False) -> bool:
        session, seat = self._trainer()
        check_finished()  # a commit of incomplete gradients would be permanent
        self._check_equal("commit() or save()")
        session.settle()
        session.check()
        self._passing = True
        try:
            if ok is not None and not vote.passed(self, session, seat, ok):
                for outer in self._outer():
                    outer.restored()
                return False
            self._cross(session, seat, save, last)
            self._votes = self._votes or ok is not None
            if self._votes and session.link is None:
                self._first = self._keep_first(session, seat)
            return True
        finally:
            self._passing = False

    def _check_equal(self, event: str) -> None:
        """Raise ``StateError`` between two outer steps."""
        for outer in self._outer():
            outer.check_equal(event)

    def _outer(self) -> list[OuterSteps]:
        """The objects that make outer steps."""
        return [obj for obj in self._objects.values() if isinstance(obj, OuterSteps)]

    def _trainer(self) -> tuple[Session, Seat]:
        """Session and place. Raises ``StateError`` where no boundary is possible."""
        session = self._session
        if session is None or not session.training or session.seat is None:
            raise StateError("commit() and save() must be called in the function that run calls: it may end there")
        if session.trainer != threading.get_ident():
            raise StateError(
                f"commit() and save() were called on the thread {threading.current_thread().name!r}: they are for the "
                "thread that runs train, which they unwind when the world changes, and whose step must be complete"
            )
        if self._passing:
            raise StateError("commit() or save() was called inside another one, as by a signal handler")
        return session, session.seat

    def _cross(self, session: Session, seat: Seat, save: bool, last: bool) -> None:
        """Pass the next boundary, and announce what is kept there."""
        commit = self._commits + 1
        turn = session.arrive(commit)
        self._commits = commit
        self._keep_modes(commit)
        save = save or turn in _SAVING
        compared = turn is not BoundaryAction.STOP and not last and self._compare(session, commit, save, turn)
        if turn in _LEAVING and self._unkept and seat.checkpoint_dir:
            save = True  # nothing is in memory
        if session.link is None:
            if save:
                self._note("nothing is saved: this script runs without a launcher (python -m edl.launch)")
        elif save or turn in _LEAVING or self._is_kept(commit, compared):
            # If the round is interrupted from here on, the copies may contain garbage: only the announcement counts,
            # and it is made when all copies are complete.
            if self._sharded and self._part is None and turn is not BoundaryAction.STOP and not last:
                self._part = self._agreed_part(session, seat)
            began_s = time.monotonic()
            kept = self._keep(session, seat, save)
            session.announce(kept)
            session.committing_s += time.monotonic() - began_s
            copied = any(isinstance(one, local.Committed) and one.stream == STATE for one in kept)
            if copied:
                self._last = Version(seat.era, commit)
            if copied or (not self._copies(seat) and self._others_copied):
                self._first = None
            self._others_copied = True
        if turn in _LEAVING:
            raise RoundOver
        session.measure()
        session.passed()
        self._numbers.derive(seat.rank, commit)

    def _compare(self, session: Session, commit: int, save: bool, turn: BoundaryAction) -> bool:
        """Compare with the other ranks if that is due. All of them are at this boundary."""
        agreement = self._agreement
        if session.link is None or agreement is None:
            return False
        kept = save or (turn in _TOGETHER and agreement.rolls_back)
        if not agreement.due(commit, kept):
            return False
        agreement.committing(commit)
        return True

    def _is_kept(self, commit: int, compared: bool) -> bool:
        """Whether a commit without a special request is copied."""
        if self._agreement is not None and self._agreement.rolls_back:
            return compared
        return commit % self._copy_every == 0

    def _keep(self, session: Session, seat: Seat, save: bool) -> list[_Word]:
        """Copy this worker's part of this commit. Returns the messages for the agent."""
        kept: list[_Word | None] = []
        part = self._my_part(seat)
        if part.copies:
            kept.append(self._copy(session, seat, STATE, part, save))
        if any(is_own(obj) for obj in self._objects.values()):
            kept.append(self._copy(session, seat, OWN, RankPart.of_rank(seat.rank, seat.world_size), False))
        return [one for one in kept if one is not None]

    def _is_read(self, seat: Seat) -> bool:
        """Whether this node writes what this worker saves."""
        return bool(seat.checkpoint_dir) and (self._sharded or seat.position == 0)

    def _copies(self, seat: Seat) -> bool:
        """Whether this worker copies the shared state: on each node one worker copies each part that is there."""
        return self._my_part(seat).copies

    def _my_part(self, seat: Seat) -> RankPart:
        if not self._sharded:
            return RankPart.whole(seat.world_size, copies=seat.local_rank == 0)
        return self._part or RankPart.of_rank(seat.rank, seat.world_size)

    def _agreed_part(self, session: Session, seat: Seat) -> RankPart:
        """Agree with the other ranks, which are at the same boundary, who holds which part."""
        ranks = self._ranks_alike() | {seat.rank}
        digests = self._digests() if len(ranks) > 1 else {}
        mine = part_numbers.Claim(tuple(sorted(ranks)), digests, seat.node)
        self._part_layout = None
        return part_numbers.agree(mine, seat.rank, lambda data: self._exchange(session, data), self._note)

    def _still_alike(self, part: RankPart) -> bool:
        """Whether the ranks that share this part still hold the same pieces, after the state has been copied."""
        layout = self._layouts[STATE][1]
        if self._part_layout not in (None, layout) and len(part.ranks) > 1 and not part.ranks <= self._ranks_alike():
            return False
        self._part_layout = layout
        return True

    def _copy(
        self, session: Session, seat: Seat, stream: str, part: RankPart, save: bool
    ) -> local.Committed | local.WroteThrough | None:
        assert session.link is not None, "only called with an agent"  # noqa: S101
        number = -1

        def room(size: int) -> memoryview:
            nonlocal number
            assert session.link is not None, "still there"  # noqa: S101
            number, view = session.link.buffer(stream, size)
            return view

        try:
            size = self._write(stream, self._meta(session, part), room)
        except NoRoom as error:
            self._unkept = True
            if stream == STATE and part.parts == 1 and save and seat.checkpoint_dir:
                return self._write_through(session, seat, str(error))
            lost = "nothing is saved" if save else "commits are not kept in memory"
            self._note(f"{lost}, because there is no memory for them: {error}", again=save)
            return None
        if stream == STATE and not self._still_alike(part):
            self._note(
                "commits are not kept until the next world: the workers of this one share parts, and the state has got "
                "a tensor that is sharded in another way since. Create such tensors before the first commit",
                again=save,
            )
            return None
        self._unkept = self._unkept and stream != STATE
        save = save and (part.saves or part.parts == 1)
        version, waits = (seat.era, self._commits), (session.committing_s, session.waiting_s)
        return local.Committed(stream, number, size, *version, part.number, part.parts, save, part.others, *waits)

    def _write_through(self, session: Session, seat: Seat, why: str) -> local.WroteThrough | None:
        """Save without memory: the first node's worker writes, and training waits for it."""
        if seat.position != 0:
            return None
        self._note(
            f"there is no memory for commits ({why}); saved ones are written straight to the checkpoint directory"
        )
        meta = self._meta(session, RankPart.whole(seat.world_size, copies=True))
        fill = functools.partial(self._write, STATE, meta)
        written = write_through.write(seat.checkpoint_dir, meta.era, meta.commit, fill)
        if written.error:
            self._note(f"commit {meta.commit} is not saved: {written.error}", again=True)
        return written

    def _restore_directly(self, session: Session, seat: Seat, own: frozenset[str]) -> None:
        """Restore a state that is too large for the launchers' memory."""
        try:
            memory = write_through.mapped(seat.checkpoint_dir, seat.restore_era, seat.restore_commit)
        except OSError as error:
            which = f"commit {seat.restore_commit} (era {seat.restore_era})"
            raise CheckpointError(f"cannot read {which} in {seat.checkpoint_dir}: {error.strerror}") from error
        try:
            found = snapshot.parse(memory.view)
            self._load(found, memory.view, frozenset(self._objects) - own)
            self._reset_lacking(found.tree["values"])
        finally:
            memory.close()

    def _meta(self, session: Session, part: RankPart) -> Meta:
        seat = session.seat
        job = session.environment.get("EDL_JOB_ID", "")
        era, number = (seat.era, seat.round) if seat is not None else (0, 0)
        return Meta(job, era, self._commits, number, part.number, part.parts, self._framework.name, part.workers)

    # --- among the workers -------------------------------------------------------------------------------------------

    def _exchange(self, session: Session, data: bytes) -> list[bytes]:
        """A small collective. Raises ``RoundOver`` when its result may be garbage."""
        answers = self._framework.exchange(data)
        session.check()
        return answers

    def _tell_reset(self) -> None:
        """Call the reset callbacks before ``train`` is called again in another world."""
        again, self._again, self._ran = self._again, False, True
        for callback in self._callbacks if again else ():
            callback()

    # --- reading -----------------------------------------------------------------------------------------------------

    def _ask(self, session: Session, seat: Seat) -> None:
        """Let the agent prepare what ``_begin`` will need."""
        self._asked_own = False
        if session.link is None or seat.restore_commit == 0 or seat.stored:
            return
        part = self._whole_part(seat)
        if part is None:
            self._ask_headers(session.link, seat)
        else:
            session.link.send(local.Fetch(STATE, seat.restore_era, seat.restore_commit, part, seat.round))
        self._ask_own(session, seat)

    def _ask_headers(self, link: Link, seat: Seat) -> None:
        link.send(local.FetchHeaders(headers_stream(seat), seat.restore_era, seat.restore_commit, seat.shards))

    def _ask_own(self, session: Session, seat: Seat) -> None:
        if session.link is not None and any(is_own(obj) for obj in self._objects.values()):
            self._asked_own = True
            session.link.send(local.Fetch(OWN, seat.restore_era, seat.restore_commit, seat.rank, seat.round))

    def _whole_part(self, seat: Seat) -> int | None:
        """The part that this worker restores from memory as it is. None: it reads pieces of all parts, which a world of
        another size made, or one whose workers shared parts."""
        if not self._sharded:
            return 0
        if self._part is not None and seat.restore_era == seat.era:
            return self._part.number  # made in this world
        return seat.rank if seat.shards == seat.world_size else None

    def _begin(self, session: Session, seat: Seat) -> None:
        """Restore the state from which this world begins. Raises ``RoundOver``, ``CheckpointError``, ``StateError``."""
        self._session = session
        self._part = None
        self._model_modes.set_back(self._modes())
        from_nothing = seat.restore_commit == 0
        for outer in self._outer():
            if self._sharded:
                raise StateError("local steps need the whole model on each worker, and this state is sharded")
            outer.before_restore(self._objects, from_nothing)
        if self._builder is not None:
            self._builder.rebuild(self)
        self._begin_modes()
        if self._numbers.generators:
            self._values[SEED] = ""  # as in the snapshot, the same on all ranks
        if from_nothing:
            self._begin_from_scratch(session, seat)
        self._again = self._ran
        self._trained = True
        self._agreement = StateComparison(session, self)
        if seat.restore_commit > 0:
            self._restore(session, seat)
            self._restore_modes()
            self._agreement.restored(seat.restore_commit)
        elif not self._sharded and seat.world_size > 1:
            models = {name: self._structure(obj) for name, obj in self._objects.items() if not is_own(obj)}
            alike.check(self._framework, {name: alike.digest(text) for name, text in models.items() if text})
        for outer in self._outer():
            outer.restored(from_nothing)
            session.check()
        self._commits = seat.restore_commit
        self._last = Version(seat.restore_era, seat.restore_commit)
        if self._numbers.generators:
            self._values[SEED] = self._numbers.begin(self._values[SEED], lambda data: self._exchange(session, data))
            self._numbers.derive(seat.rank, self._commits)

    def _restore(self, session: Session, seat: Seat) -> None:
        mine = frozenset(name for name, obj in self._objects.items() if is_own(obj))
        if seat.stored:
            era, commit = seat.restore_era, seat.restore_commit
            if self._sharded:
                self._restore_sharded(os.path.join(seat.checkpoint_dir, folder_name(era, commit)))
            else:
                self._restore_directly(session, seat, mine)
            self._derive(mine, seat.rank)
            return
        assert session.link is not None, "there is nothing to restore without an agent"  # noqa: S101
        part = self._whole_part(seat)
        fetched = part is not None and self._fetch(session, seat, STATE, part)
        if part is not None and not fetched:
            self._ask_headers(session.link, seat)
        if not fetched:
            self._recut(session.link, seat, session.environment.get("EDL_JOB_ID", ""))
        if mine:
            if not self._asked_own:  # build has made the first such object only now
                self._ask_own(session, seat)
            self._fetch(session, seat, OWN, seat.rank)

    def _begin_from_scratch(self, session: Session, seat: Seat) -> None:
        self._others_copied = False
        if self._builder is not None:
            self._builder.begin_from_nothing(self)
        elif self._trained:
            if self._first is None:
                raise StateError(
                    "the world begins from nothing, but this process has trained already and no longer has its first "
                    "state; a new process must replace it"
                )
            self._load(self._first.parsed, self._first.view, frozenset(self._objects))
        elif session.link is not None and session.rejoins:
            self._commits = 0
            link = session.link

            def prepare(size: int) -> None:
                if self._copies(seat):
                    link.prepare(STATE, size + self._growth_bytes(), self._is_read(seat))

            self._first = self._keep_first(session, seat, prepare)

    def _keep_first(
        self, session: Session, seat: Seat, planned: Callable[[int], object] = lambda size: None
    ) -> FirstState | None:
        """A copy for the case that the round is interrupted before the first commit; None when it would take much
        memory. ``planned`` is called with its size before it is made."""
        memory: mmap.mmap | None = None

        def room(size: int) -> memoryview:
            nonlocal memory
            planned(size)
            memory = first_state_memory(size, seat.local_world_size)
            return memoryview(memory)

        try:
            self._write("", self._meta(session, RankPart.whole(seat.world_size, copies=True)), room)
        except NoRoom:
            return None
        return FirstState(memory)

    def _fetch(self, session: Session, seat: Seat, stream: str, shard: int) -> bool:
        """Restore from a part that has been requested. Returns whether it is this worker's: it is not if it was made by
        another number of workers, on another mesh, or by a worker with other objects."""
        link, job = session.link, session.environment.get("EDL_JOB_ID", "")
        assert link is not None, "there is nothing to restore without an agent"  # noqa: S101
        wanted = (seat.restore_era, seat.restore_commit)

        def fits(view: memoryview) -> SnapshotHeader | None:
            found = snapshot.parse(view, job=job)
            return found if (found.meta.era, found.meta.commit) == wanted else None

        piece = link.piece(stream, fits)
        mine = frozenset(name for name, obj in self._objects.items() if is_own(obj) == (stream == OWN))
        if isinstance(piece, str):
            if stream == OWN:
                self._derive(mine, seat.rank)
                return True
            raise PeersLost(f"commit {wanted[1]} of era {wanted[0]} could not be fetched for rank {seat.rank}: {piece}")
        memory, found = piece
        if stream == STATE and self._sharded and not may_be_own(found, mine, seat.world_size):
            memory.close()
            return False
        if stream == OWN or self._copies(seat):
            saves = stream == STATE and self._is_read(seat)
            link.prepare(stream, memory.size, saves)  # while this one is being loaded
        try:
            if stream == OWN:
                self._derive(mine - found.tree.get("objects", {}).keys(), seat.rank)
                mine &= found.tree.get("objects", {}).keys()
            elif found.meta.shard != shard:
                raise CheckpointError(f"received shard {found.meta.shard} instead of shard {shard}")
            with link.undisturbed(), self._fast_reading(link, memory):
                memory.read_soon()
                taken = self._load_part(found, memory.view, mine)
            if stream == STATE and taken:
                self._reset_lacking(found.tree["values"])
        finally:
            closed = memory.close()
        if not closed and not _closed_after_collecting(memory):
            raise StateError(
                f"an array of commit {wanted[1]} (era {wanted[0]}) is still in use after the state was restored, and "
                "its memory is about to be overwritten: what keeps it needs a copy (State._owned)"
            )
        return taken

    @contextlib.contextmanager
    def _fast_reading(self, link: Link, memory: MappedMemory) -> Iterator[None]:
        """Let the device read a piece of the state from this worker's page-locked mapping of it, if there is one."""
        accelerator = self._framework.accelerator
        if accelerator is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            locked = stack.enter_context(link.locked_twin(memory))
            if locked is not None:
                stack.enter_context(accelerator.alias(memory.view, locked))
            yield


def _closed_after_collecting(memory: MappedMemory) -> bool:
    """Close the memory after a garbage collection: views may be kept alive by reference cycles, such as those of caught
    exceptions."""
    gc.collect()
    return memory.close()
