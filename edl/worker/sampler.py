"""The position in an epoch and the order of its samples: the common part of both frameworks' samplers."""

from __future__ import annotations

import os
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

from edl.arithmetic.permutation import Permutation, key
from edl.arithmetic.plan import TAILS, stream, tail_end
from edl.errors import DataError, StateError
from edl.wire.local import AGENT_VARIABLE
from edl.worker import session as sessions
from edl.worker.context import context, number
from edl.worker.session import note

_ORDERS = ("framework", "computed")
_CHUNK = 4096
"""Number of a worker's samples looked up at once."""
_CHECKED = 65536
"""Number of entries of an order that are compared with the order in which a position was reached."""
_DEPTH = 12
"""Maximum stack depth for finding the iterating loader."""
_PAST = 1 << 62
"""The position at the end of an epoch of any length."""


# --- the place in the world ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorldPlace:
    """The receiver of samples."""

    rank: int
    world: int
    round: int
    """0 when it is independent of rounds."""


def current_place() -> WorldPlace:
    """The current place of this process. For a script that does not take part in rounds, and for processes that load
    data, it is read from the environment."""
    session = sessions.opened()
    if session is None or session.seat is None:
        ahead = AGENT_VARIABLE in os.environ and "EDL_ROUND" not in os.environ
        if not ahead or sessions.is_helper(os.environ):
            return WorldPlace(number("RANK", 0), number("WORLD_SIZE", 1), number("EDL_ROUND", 0))
        context()  # a process that was started before its world waits for it
        session = sessions.current()
    seat = session.seat
    assert seat is not None, "context() waits for it"  # noqa: S101
    return WorldPlace(seat.rank, seat.world_size, seat.round if session.link is not None else 0)


# --- the position ----------------------------------------------------------------------------------------------------


class Walk:
    """One iteration over the rest of an epoch."""

    __slots__ = ("begin", "ended", "place")

    def __init__(self, place: WorldPlace, begin: int) -> None:
        self.place = place
        self.begin = begin
        """The position at which it began."""
        self.ended = False


class Position:
    """Epoch and position: the number of places of the epoch that all workers together have consumed.

    Loaders report what they have delivered, and the state saved by a commit covers exactly that.
    """

    def __init__(
        self, num_replicas: int | None, rank: int | None, *, counts: bool = True, model_parallel: int = 1
    ) -> None:
        if not isinstance(model_parallel, int) or model_parallel < 1:
            raise StateError(f"model_parallel={model_parallel!r}: it must be an integer of at least 1")
        if model_parallel > 1 and num_replicas is not None:
            raise StateError(
                f"model_parallel={model_parallel} with num_replicas={num_replicas}: leave one of them out. A rank that "
                "is given is that of the data-parallel replica"
            )
        if (num_replicas is None) != (rank is None):
            raise StateError(f"num_replicas={num_replicas}, rank={rank}: give both, or neither to follow the job")
        if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
            raise StateError(f"rank={rank}: it must be at least 0 and less than num_replicas={num_replicas}")
        self._fixed = WorldPlace(rank, num_replicas, 0) if rank is not None and num_replicas is not None else None
        self._epoch = 0
        self._position = 0
        self._restored: tuple[int, int] | None = None
        """Loaded epoch and position, as long as nothing has been delivered since."""
        self._walk: Walk | None = None
        self._counts = counts
        self._model_parallel = model_parallel

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration continues."""
        return self._epoch

    @property
    def position(self) -> int:
        """Number of places of the epoch that have been delivered, over all workers."""
        return self._position if self._position < _PAST else self._length() or 0

    @property
    def counts(self) -> bool:
        """Whether handing out moves the position; otherwise only ``advance`` does."""
        return self._counts

    @property
    def standing(self) -> int:
        """The position for loaders: far behind the end if nothing is to be delivered again."""
        return self._position

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the next iteration. No effect in the middle of that epoch, or right after restoring it;
        other epochs begin at their beginning. An epoch before the restored one has been consumed, so nothing of it is
        delivered again."""
        if epoch < 0:
            raise StateError(f"epoch={epoch}: it must be at least 0")
        self._forget_other_round()
        if epoch != self._epoch:
            self._go(int(epoch))
            self._walk = None

    def advance(self, samples: int) -> None:
        """Count manually: all workers together have consumed this many more samples. From then on only this counts. For
        prefetching loaders unknown to edl."""
        if samples < 0:
            raise StateError(f"advance({samples}): it must be at least 0")
        self._forget_other_round()
        end = self._length()
        if self._counts and self._walk is not None:
            if self._walk.ended:
                raise StateError(
                    "advance() after the loader has already taken the whole epoch: construct the sampler with "
                    "counts=False, so that only advance() counts from the start"
                )
            self._position = self._walk.begin
        self._counts = False
        self._move(self._position + samples if end is None else min(self._position + samples, end))
        if end is not None and self._position >= end and self._walk is not None and self._walk.ended:
            self._go(self._epoch + 1)

    def place(self) -> WorldPlace:
        """The receiver of samples: the given one, or this worker's place in the current world. Raises ``StateError`` if
        ``model_parallel`` does not divide that."""
        return self._fixed or self.replica(current_place())

    def replica(self, here: WorldPlace) -> WorldPlace:
        """The place of this worker's replica: its workers get the same samples."""
        together = self._model_parallel
        if here.world % together:
            raise StateError(
                f"model_parallel={together} in a world of {here.world} workers: start the job with "
                f"--replica-size={together}, which keeps each world at a multiple of it"
            )
        return WorldPlace(here.rank // together, here.world // together, here.round)

    # --- for iterations ----------------------------------------------------------------------------------------------

    def begin(self) -> Walk:
        """Begin an iteration at the position; it replaces an earlier one."""
        place = self.place()
        self._forget_other_round()
        self._walk = Walk(place, self._position)
        return self._walk

    def _forget_other_round(self) -> None:
        """Begin anew if the last iteration was one of another round, and no state has been restored since. A new worker
        knows nothing of that round, and all workers have to iterate over the same order from the same position."""
        walk = self._walk
        if walk is None or walk.place.round == (number := self.place().round):
            return
        if self._position:
            note(
                f"a {type(self).__name__} begins anew in round {number}: it is not part of the State, so its position "
                f"{self.position} in epoch {self._epoch} was not kept"
            )
        self._epoch = self._position = 0
        self._walk = self._restored = None

    def check(self, walk: Walk) -> None:
        """Raise ``StateError`` when this iteration is no longer valid."""
        if walk is not self._walk:
            raise StateError(
                "this iteration is over: the position was restored or set, or another iteration has begun, since it "
                "began. Call iter() on the loader again; it continues from the position"
            )
        if walk.place.round and walk.place.round != self.place().round:
            raise StateError(
                f"this iteration began in round {walk.place.round}, and this is round {self.place().round}: call "
                "iter() on the loader in the function that run calls"
            )

    def delivered(self, position: int) -> None:
        """Note that everything up to this position has been delivered."""
        if self._counts:
            self._move(position)

    def ended(self, walk: Walk) -> None:
        """Note that an iteration has delivered the last of its epoch."""
        walk.ended = True
        end = self._length()
        if self._counts or (end is not None and self._position >= end):
            self._go(self._epoch + 1)

    def uncounted(self, why: str) -> None:
        """From here on only ``advance`` counts; ``why`` is printed once."""
        if self._counts:
            note(
                f"{why} takes indices ahead of the script, so {type(self).__name__} cannot know what has been "
                "consumed: use edl.DataLoader, or call advance(samples of all workers) after each step"
            )
        self._counts = False

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch; the same on all ranks."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        raise NotImplementedError

    def _standing(self) -> tuple[int, int]:
        """Epoch and position to save. While a script skips the epochs before the restored one, that one is saved."""
        if self._restored is not None and self._epoch < self._restored[0]:
            return self._restored
        return self._epoch, self._position

    def _restore(self, epoch: int, position: int) -> None:
        self._restored = self._epoch, self._position = epoch, position
        self._walk = None

    def _move(self, position: int) -> None:
        self._position = position
        self._restored = None

    def _go(self, epoch: int) -> None:
        before, self._epoch, self._position = self._restored, epoch, 0
        if before is not None and epoch == before[0]:
            self._position = before[1]
        elif before is not None and epoch < before[0]:
            self._position = _PAST
        else:
            self._restored = None

    def _length(self) -> int | None:
        """Number of places in this epoch, if known."""
        raise NotImplementedError


# --- orders ----------------------------------------------------------------------------------------------------------


class EpochOrder(Protocol):
    """The content of each place of an epoch. Places beyond its end wrap around to 0."""

    def __len__(self) -> int:
        """Number of places in the epoch."""

    def take(self, places: range) -> list[Any]:
        """The content of these places."""

    def samples(self, places: range) -> int:
        """Number of samples at these places."""


class InOrder:
    """Each index at its own place."""

    check: int | None = None
    """Checksum that distinguishes this order from others, once computed."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def take(self, places: range) -> list[Any]:
        """The indices at these places."""
        return list(places) if not places or places[-1] < self._length else [place % self._length for place in places]

    def samples(self, places: range) -> int:
        """One sample per place."""
        return len(places)


class Stored(InOrder):
    """A stored array of indices (NumPy, torch or Python): it can be sliced, and a slice has ``tolist``."""

    def __init__(self, values: Any) -> None:
        super().__init__(len(values))
        self._values = values

    def take(self, places: range) -> list[int]:
        """The indices at these places."""
        if places and places[-1] >= self._length:
            return [int(self._values[place % self._length]) for place in places]
        found: list[int] = self._values[places.start : places.stop : places.step].tolist()
        return found


class Computed(InOrder):
    """A permutation that is computed instead of stored."""

    def __init__(self, permutation: Permutation) -> None:
        super().__init__(len(permutation))
        self._permutation = permutation

    def take(self, places: range) -> list[int]:
        """The indices at these places."""
        found: list[int] = self._permutation.pick([place % self._length for place in places]).tolist()
        return found


class Groups(InOrder):
    """Groups of indices that stay together, one group per place."""

    def __init__(self, groups: Iterator[Any]) -> None:
        self._indices, self._ends = array("q"), array("q", [0])
        for group in groups:
            self._indices.extend(group)
            self._ends.append(len(self._indices))
        super().__init__(len(self._ends) - 1)

    def take(self, places: range) -> list[Any]:
        """The groups at these places."""
        bounds = [(self._ends[place % self._length], self._ends[place % self._length + 1]) for place in places]
        return [self._indices[begin:end].tolist() for begin, end in bounds]

    def samples(self, places: range) -> int:
        """Number of samples in the groups at these places."""
        return sum(self._ends[place % self._length + 1] - self._ends[place % self._length] for place in places)

    @property
    def indices(self) -> array[int]:
        """The indices of all groups."""
        return self._indices


def check_tail(tail: str) -> None:
    """Raise ``StateError`` for an unknown value of ``tail``."""
    if tail not in TAILS:
        raise StateError(f"tail={tail!r}: it must be one of {', '.join(TAILS)}")


def check_repeatable(what: str, source: Any) -> None:
    """Raise ``StateError`` for something that can be iterated over only once, such as a generator or an open file. Each
    epoch, and each world, begins to iterate anew. A class may have an ``__iter__`` that does so and returns itself."""
    own = isinstance(getattr(type(source), "__iter__", None), FunctionType)
    if isinstance(source, Iterator) and not own:
        raise StateError(
            f"{what}: a {type(source).__name__} can be iterated over only once, so that what was read before would be "
            "missing in the next epoch and in the next world; give an object whose __iter__() begins anew, such as one "
            "that opens its file there"
        )


# --- the sampler -----------------------------------------------------------------------------------------------------


class CoreSampler(Position):
    """The order of each epoch, and one worker's part of it. Subclasses define how their framework shuffles."""

    framework = ""

    def __init__(
        self, dataset: Any, num_replicas: int | None, rank: int | None, *, shuffle: bool, seed: int,
        tail: str, order: str, base: Any, counts: bool, model_parallel: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(num_replicas, rank, counts=counts, model_parallel=model_parallel)
        check_tail(tail)
        if order not in _ORDERS:
            raise StateError(f"order={order!r}: it must be one of {', '.join(_ORDERS)}")
        if base is not None and order != "framework":
            raise StateError(f"order={order!r} with base=…: the base sampler defines the order")
        check_repeatable("base=…", base)
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = int(seed)
        self.tail = tail
        self.base = base
        self._computed = order == "computed"
        self._known: tuple[int, EpochOrder] | None = None
        self._expected: tuple[int, int, int] | None = None
        """Epoch, places and checksum of the order that the restored position belongs to."""

    def __len__(self) -> int:
        """Number of samples that this worker gets in a whole epoch (of groups, if the base sampler yields those)."""
        place = self.place()
        return len(stream(self.places(), 0, place.rank, place.world, self.tail))

    def __iter__(self) -> Iterator[Any]:
        """The indices of this worker in the rest of the epoch, for loaders that do not prefetch."""
        walk = self.begin()
        order = self.order()
        if ahead := fetches_ahead():
            self.uncounted(ahead)
        return self._indices(walk, order)

    def _indices(self, walk: Walk, order: EpochOrder) -> Iterator[Any]:
        world = walk.place.world
        places = stream(len(order), walk.begin, walk.place.rank, world, self.tail)
        end = min(len(order), tail_end(len(order), walk.begin, world, self.tail))
        position = walk.begin
        for first in range(0, len(places), _CHUNK):
            chunk = places[first : first + _CHUNK]
            for place, one in zip(chunk, order.take(chunk), strict=True):
                if walk is not self._walk:
                    self.check(walk)
                position = min(position + world, end)
                self.delivered(len(order) if place + world >= places.stop else position)
                yield one
        self.check(walk)
        self.ended(walk)

    def order(self) -> EpochOrder:
        """The order of the current epoch. Raises ``DataError`` if a restored position belongs to a different order."""
        if self._known is None or self._known[0] != self._epoch:
            self._known = None  # two orders may not fit into memory
            self._known = (self._epoch, self._make())
        order = self._known[1]
        if self._expected is not None and self._expected[0] == self._epoch:
            self._compare(order, *self._expected)
            self._expected = None
        return order

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch; the same on all ranks."""
        epoch, position = self._standing()
        places, check = 0, 0
        if self._known is not None and self._known[0] == epoch and position:
            places, check = len(self._known[1]), self._fingerprint(self._known[1])
        elif self._expected is not None and self._expected[0] == epoch:
            places, check = self._expected[1:]
        return {
            "epoch": epoch, "position": position, "length": len(self.dataset), "order": self._order_name(),
            "seed": self.seed, "tail": self.tail, "places": places, "check": check,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises ``DataError`` if the data set has another length, ``StateError`` if
        the sampler has other options; the position would then mean other samples."""
        where = f"the sampler's state (epoch {state['epoch']}, position {state['position']})"
        if state["length"] != len(self.dataset):
            raise DataError(
                f"{where} is for a data set of {state['length']} samples, and this one has {len(self.dataset)}: the "
                "position is meaningless for it. Use the same data set as before, or start with another "
                "--checkpoint-dir and job"
            )
        mine = {"order": self._order_name(), "seed": self.seed, "tail": self.tail}
        if other := [f"{name}={state[name]!r}, not {value!r}" for name, value in mine.items() if state[name] != value]:
            raise StateError(
                f"{where} was reached with {'; '.join(other)} as this sampler has: the rest of the epoch would repeat "
                "and skip samples. Construct it with the values of the state, or start with another "
                "--checkpoint-dir and job"
            )
        self._restore(int(state["epoch"]), int(state["position"]))
        places, check = int(state["places"]), int(state["check"])
        self._expected = (self._epoch, places, check) if places and self._position else None

    # --- orders ------------------------------------------------------------------------------------------------------

    def _order_name(self) -> str:
        if self.base is not None:
            return f"base {type(self.base).__name__}"
        if not self.shuffle:
            return "as given"
        return "computed" if self._computed else self.framework

    def _make(self) -> EpochOrder:
        if self.base is not None:
            return self._from_base()
        length = len(self.dataset)
        if not self.shuffle:
            return InOrder(length)
        if self._computed:
            return Computed(Permutation(length, key("sampler", self.seed, self._epoch)))
        return Stored(self._shuffled(length, self._epoch))

    def _from_base(self) -> EpochOrder:
        """The order of the base sampler, made to depend on seed and epoch only."""
        if hasattr(self.base, "set_epoch"):
            self.base.set_epoch(self._epoch)
        with self._seeded(self._epoch):
            found = iter(self.base)
            first = next(found, None)
            if first is None:
                return InOrder(0)
            if isinstance(first, (list, tuple, array)) or getattr(first, "ndim", False):
                return Groups(_chained(first, found))
            return Stored(array("q", map(int, _chained(first, found))))

    def _fingerprint(self, order: EpochOrder) -> int:
        """Checksum that distinguishes orders; 0 for computed ones."""
        if not isinstance(order, (Stored, Groups)):
            return 0
        if order.check is None:
            first = range(min(_CHECKED, len(order)))
            some = order.indices if isinstance(order, Groups) else array("q", order.take(first))
            order.check = zlib.crc32(some.tobytes())
        return order.check

    def _compare(self, order: EpochOrder, epoch: int, places: int, check: int) -> None:
        if (len(order), self._fingerprint(order)) != (places, check):
            what = f"base sampler {type(self.base).__name__}" if self.base is not None else f"{self.framework} shuffle"
            raise DataError(
                f"the {what} yields another order for epoch {epoch} (seed {self.seed}) than when position "
                f"{self._position} was reached: {len(order)} entries with check {self._fingerprint(order):08x}, not "
                f"{places} with {check:08x}. It must depend on the seeds of torch, numpy and Python, and on set_epoch "
                "only; or restart the epoch with set_epoch"
            )

    @property
    def grouped(self) -> bool:
        """Whether the base sampler yields groups, each of which takes one place."""
        return isinstance(self.order(), Groups)

    def places(self) -> int:
        """Number of places in the current epoch."""
        return len(self.order()) if self.base is not None else len(self.dataset)

    def _length(self) -> int:
        return self.places()

    def _shuffled(self, length: int, epoch: int) -> Any:
        """The framework's own order of an epoch, as one array."""
        raise NotImplementedError

    def _seeded(self, epoch: int) -> AbstractContextManager[None]:
        """Context in which all generators depend on seed and epoch."""
        raise NotImplementedError


def _chained(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from others


def fetches_ahead() -> str:
    """Description of the calling loader if it is known to prefetch indices; else empty."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame.f_back is None:
            break
        frame = frame.f_back
        name = type(frame.f_locals.get("self")).__name__
        if name in ("_MultiProcessingDataLoaderIter", "_DataLoaderIterSingleProcess", "_DataLoaderIterMultiProcess"):
            return "a DataLoader with worker processes" if "Single" not in name else "paddle.io.DataLoader"
    return ""
