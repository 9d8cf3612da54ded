"""An accelerator and its collectives, as far as they matter for commits.

Calls return at once; the work is done later, in order, at the latest when a caller waits for the device. A collective
whose group is aborted ends without an exception, and what it leaves is garbage. So NCCL behaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from edl.wire.local import Seat
from edl.worker.framework import ArrayInfo, Arrays, Framework

Work = Callable[[], bool]
"""Returns False when it cannot be done yet, because a peer has not come."""


class Device:
    """One stream of work."""

    def __init__(self, wait: Callable[[], None], most: int = 1 << 30) -> None:
        """``wait``: called while the host waits and nothing can be done; something has happened when it returns.
        ``most``: the greatest number of pending operations. Starting another blocks, as on a real device."""
        self._wait = wait
        self._most = most
        self._queue: deque[Work] = deque()
        self._working = False

    def put(self, work: Work) -> None:
        """Begin something. It is done after all that was begun before."""
        self._queue.append(work)
        self._wait_for(self._most)

    def do(self, work: Callable[[], object]) -> None:
        """The same for what can always be done."""

        def done() -> bool:
            work()
            return True

        self.put(done)

    def advance(self) -> bool:
        """Do the next piece of work; False when there is none, or it cannot be done yet."""
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
        """Return when everything is done."""
        self._wait_for(0)

    def _wait_for(self, left: int) -> None:
        while len(self._queue) > left:
            if not self.advance():
                self._wait()


class AsynchronousArrays:
    """``edl.worker.framework.Arrays`` on such a device: copies wait for what was begun before."""

    def __init__(self, arrays: Arrays, device: Callable[[], Device]) -> None:
        self._arrays = arrays
        self._device = device

    def is_array(self, value: object) -> bool:
        """As the framework's."""
        return self._arrays.is_array(value)

    def info(self, value: Any) -> ArrayInfo:
        """As the framework's."""
        return self._arrays.info(value)

    def copy_out(self, values: Sequence[Any], buffers: Iterable[memoryview]) -> None:
        """As the framework's, when the device is done."""
        self._device().synchronize()
        self._arrays.copy_out(values, buffers)

    def view(self, info: ArrayInfo, data: memoryview) -> Any:
        """As the framework's. What is copied from there to the device comes after all that was begun before, as in a
        stream: what is left of an aborted round may not come after the restore that follows it."""
        self._device().synchronize()
        return self._arrays.view(info, data)

    def copy(self, value: Any) -> Any:
        """As the framework's, when the device is done."""
        self._device().synchronize()
        return self._arrays.copy(value)

    def digest(self, values: Sequence[Any]) -> int:
        """As the framework's, when the device is done."""
        self._device().synchronize()
        return self._arrays.digest(values)

    def finite(self, values: Sequence[Any]) -> list[bool]:
        """As the framework's, when the device is done."""
        self._device().synchronize()
        return self._arrays.finite(values)


class PeerGone(RuntimeError):
    """Raised by a collective of a synchronous backend."""


class AsynchronousGroup:
    """``edl.worker.framework.Communicator``. ``come``: whether all peers have come to the collectives of this step."""

    def __init__(self, seat: Seat, device: Device, come: Callable[[int], bool]) -> None:
        self.seat = seat
        self._device = device
        self._come = come
        self.step = 0
        """Which the next collective belongs to."""
        self.aborted = self.disconnected = False
        self.failed = ""

    def failure(self) -> str:
        """See ``Communicator``."""
        return self.failed or ("the group was aborted" if self.aborted else "")

    def settle(self) -> None:
        """The device does, when it is synchronised."""

    def abort(self) -> None:
        """End pending operations, with garbage as results."""
        self.aborted = True

    def end(self, why: str = "") -> None:
        """It comes to the same end by itself, and says so only where there is a ``why``."""
        self.disconnected, self.failed = True, self.failed or why

    def retire(self) -> None:
        """Nothing is left of it."""

    def collective(self, combined: Callable[[], object], garbage: Callable[[], object]) -> None:
        """Begin one: ``combined`` puts the result in place, ``garbage`` what an abort leaves of it."""
        step = self.step

        def done() -> bool:
            if self.aborted or self.disconnected:
                garbage()
            elif self._come(step):
                combined()
            else:
                return False
            return True

        self._device.put(done)

    def blocking(self, combined: Callable[[], object], garbage: Callable[[], object]) -> None:
        """The same by a synchronous backend: it raises ``PeerGone`` where the result is garbage."""
        spoilt: list[bool] = []

        def spoil() -> None:
            spoilt.append(True)
            garbage()

        self.collective(combined, spoil)
        self._device.synchronize()
        if spoilt:
            self.failed = self.failed or "a collective failed: connection closed by peer"
            raise PeerGone(self.failed)


class AsynchronousFramework:
    """``edl.worker.framework.Framework`` around a real one, whose groups are such."""

    def __init__(self, real: Framework, device: Callable[[], Device], come: Callable[[int], bool]) -> None:
        self.name = real.name
        self.arrays: Arrays = AsynchronousArrays(real.arrays, device)
        self._device, self._come = device, come
        self.group: AsynchronousGroup | None = None

    def why_not_in_process(self) -> str:
        """It can."""
        return ""

    def prepare(self, seat: Seat) -> AsynchronousGroup:
        """See ``Framework``."""
        self.group = AsynchronousGroup(seat, self._device(), self._come)
        return self.group

    def connect(self, group: Any, seat: Seat) -> None:
        """All peers are there from the start."""

    def out_of_memory(self, error: BaseException) -> bool:
        """See ``Framework``."""
        return isinstance(error, MemoryError)

    def broadcast(self, data: bytes, root: int) -> bytes:
        """The same of all."""
        return self.exchange(data)[root]

    def lost_peers(self, error: BaseException) -> bool:
        """See ``Framework``."""
        return isinstance(error, PeerGone)

    def exchange(self, data: bytes) -> list[bytes]:
        """All agree, absent ranks included: garbage may look like an answer."""
        assert self.group is not None, "prepared"  # noqa: S101
        answers = [data] * self.group.seat.world_size
        self.group.collective(lambda: None, lambda: None)
        self._device().synchronize()
        return answers
