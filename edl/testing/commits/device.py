"""An accelerator and its collectives, as far as they matter for commits.

Calls return at once; the work is done later, in order, at the latest when a caller synchronises the device. As with
NCCL, a collective whose group is aborted, here or in a peer, ends without an exception and leaves garbage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from edl.wire.local import Seat
from edl.worker.framework import ArrayInfo, Arrays, Framework

Work = Callable[[], bool]
"""Performs one operation; returns False if it cannot complete yet, because a peer has not arrived."""


class Device:
    """A device with one stream of operations."""

    def __init__(self, wait: Callable[[], None], most: int = 1 << 30) -> None:
        """``wait`` is called while the host waits and no operation can complete; it returns after something has
        happened. ``most``: limit of pending operations; starting another one blocks, as on a real device."""
        self._wait = wait
        self._most = most
        self._queue: deque[Work] = deque()
        self._working = False

    def put(self, work: Work) -> None:
        """Enqueue an operation. It is executed after all earlier ones."""
        self._queue.append(work)
        self._wait_for(self._most)

    def do(self, work: Callable[[], object]) -> None:
        """Enqueue an operation that can always complete."""

        def done() -> bool:
            work()
            return True

        self.put(done)

    def advance(self) -> bool:
        """Execute the next operation; returns False if there is none, or if it cannot complete yet."""
        if self._working or not self._queue:
            return False
        self._working = True
        try:
            done = self._queue[0]()
        finally:
            self._working = False
        if done:
            self._queue.popleft()
        return done

    def synchronize(self) -> None:
        """Block until all operations are complete."""
        self._wait_for(0)

    def _wait_for(self, left: int) -> None:
        while len(self._queue) > left:
            if not self.advance():
                self._wait()


class AsynchronousArrays:
    """``edl.worker.framework.Arrays`` on such a device: copies wait for all earlier operations."""

    def __init__(self, arrays: Arrays, device: Callable[[], Device]) -> None:
        self._arrays = arrays
        self._device = device

    def is_array(self, value: object) -> bool:
        """Whether the real framework regards this as an array."""
        return self._arrays.is_array(value)

    def info(self, value: Any) -> ArrayInfo:
        """Describe an array, with the real framework."""
        return self._arrays.info(value)

    def copy_out(self, values: Sequence[Any], buffers: Iterable[memoryview]) -> None:
        """Synchronise the device, then copy with the real framework."""
        self._device().synchronize()
        self._arrays.copy_out(values, buffers)

    def view(self, info: ArrayInfo, data: memoryview) -> Any:
        """Synchronise the device, then make a view with the real framework. As in a stream, a restore takes effect
        after everything that an aborted round has left in the queue."""
        self._device().synchronize()
        return self._arrays.view(info, data)

    def copy(self, value: Any) -> Any:
        """Synchronise the device, then copy with the real framework."""
        self._device().synchronize()
        return self._arrays.copy(value)

    def digest(self, values: Sequence[Any]) -> int:
        """Synchronise the device, then hash with the real framework."""
        self._device().synchronize()
        return self._arrays.digest(values)

    def finite(self, values: Sequence[Any]) -> list[bool]:
        """Synchronise the device, then check with the real framework."""
        self._device().synchronize()
        return self._arrays.finite(values)


class PeerGone(RuntimeError):
    """Raised by a collective of a synchronous backend that has lost a peer."""


class AsynchronousGroup:
    """``edl.worker.framework.Communicator``. ``come``: whether all peers have joined the collectives of a step.
    ``peer_aborted``: whether one of them has aborted its group."""

    def __init__(
        self, seat: Seat, device: Device, come: Callable[[int], bool], peer_aborted: Callable[[], bool]
    ) -> None:
        self.seat = seat
        self._peer_aborted = peer_aborted
        self._device = device
        self._come = come
        self.step = 0
        """The step that the next collective belongs to."""
        self.aborted = self.disconnected = False
        self.broken_off = False
        """It has failed by itself."""
        self.failed = ""

    def failure(self) -> str:
        """Why no result of the group's collectives may be kept; empty while it is intact."""
        return self.failed or ("the group was disconnected" if self.disconnected else "")

    def settle(self) -> None:
        """Does nothing: ``Device.synchronize`` waits for all collectives."""

    def waits(self) -> None:
        """Not measured."""

    def disconnect(self) -> None:
        """Make blocking collectives fail; leave the others pending."""
        self.disconnected = True

    def abort(self) -> None:
        """Complete pending collectives with garbage as results."""
        self.disconnected = self.aborted = True

    def end(self, why: str = "") -> None:
        """Let the group fail by itself, without ``abort``. ``why``: what ``failure`` reports; empty: nothing."""
        self.broken_off, self.failed = True, self.failed or why

    def retire(self) -> None:
        """Does nothing: an aborted group holds no resources."""

    def collective(self, combined: Callable[[], object], garbage: Callable[[], object]) -> None:
        """Enqueue a collective. ``combined`` stores the result, ``garbage`` what an abort leaves instead."""
        self._put(combined, garbage, lambda: self.aborted or self.broken_off)

    def _put(self, combined: Callable[[], object], garbage: Callable[[], object], ended: Callable[[], bool]) -> None:
        step = self.step

        def done() -> bool:
            if ended():
                garbage()
            elif self._come(step):
                combined()
            elif self._peer_aborted():
                garbage()
            else:
                return False
            return True

        self._device.put(done)

    def blocking(self, combined: Callable[[], object], garbage: Callable[[], object]) -> None:
        """A collective of a synchronous backend: raises ``PeerGone`` if the result is garbage."""
        spoilt: list[bool] = []

        def spoil() -> None:
            spoilt.append(True)
            garbage()

        self._put(combined, spoil, lambda: self.disconnected or self.broken_off)
        self._device.synchronize()
        if spoilt:
            self.failed = self.failed or "a collective failed: connection closed by peer"
            raise PeerGone(self.failed)


class AsynchronousFramework:
    """``edl.worker.framework.Framework`` around a real one, with asynchronous groups and arrays."""

    def __init__(
        self,
        real: Framework,
        device: Callable[[], Device],
        come: Callable[[int], bool],
        peer_aborted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._peer_aborted = peer_aborted
        self.name = real.name
        self.arrays: Arrays = AsynchronousArrays(real.arrays, device)
        self.accelerator = real.accelerator
        self._device, self._come = device, come
        self.group: AsynchronousGroup | None = None

    def why_not_in_process(self) -> str:
        """Empty: workers can rejoin in process."""
        return ""

    def warm_up(self, local_rank: int, enough: Callable[[], bool]) -> str:
        """Nothing to do: the device is simulated."""
        return ""

    def synchronize(self) -> None:
        """Synchronise the device."""
        self._device().synchronize()

    def prepare(self, seat: Seat) -> AsynchronousGroup:
        """Create the group of this place; ``connect`` has nothing to add."""
        self.group = AsynchronousGroup(seat, self._device(), self._come, self._peer_aborted)
        return self.group

    def connect(self, group: Any, seat: Seat) -> None:
        """Does nothing: all peers are connected from the start."""

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether this is Python's ``MemoryError``."""
        return isinstance(error, MemoryError)

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Return the own data, since all ranks hold the same."""
        return self.exchange(data)[root]

    def lost_peers(self, error: BaseException) -> bool:
        """Whether this is ``PeerGone``."""
        return isinstance(error, PeerGone)

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the own data for every rank, including lost ones: garbage may look like an answer."""
        assert self.group is not None, "prepared"  # noqa: S101
        answers = [data] * self.group.seat.world_size
        self.group.collective(lambda: None, lambda: None)
        self._device().synchronize()
        return answers
