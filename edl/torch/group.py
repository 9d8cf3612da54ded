"""The process group of one round: formed on torch's store, cut from any thread, freed later."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore, _unregister_all_process_groups
from torch.distributed import distributed_c10d as c10d

from edl.torch.sockets import Socket, deafen, hang_up, poke, sockets
from edl.wire.local import Seat
from edl.worker.patience import wait_until_open

STORE_TIMEOUT = timedelta(seconds=300)
"""How long a worker waits for rank 0's store when nobody aborts. torch's own default."""
_AGAIN_S = 0.005
"""Pause between cuts while a group that is being formed keeps opening connections."""
_LONGEST_AGAIN_S = 0.2
_NOTICED_S = 0.1
"""By then gloo has read the end of what was cut."""
_ASK_AGAIN_S = 1.0

_MAPS = (
    "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state",
)  # fmt: skip
_HELPER = "_new_process_group_helper"

_log = logging.getLogger(__name__)


class GroupLost(ConnectionError):
    """The group was aborted, or rank 0 could not be reached, while it was formed."""


class TorchGroup:
    """Made on the main thread before anything is connected; ``abort`` may come from any thread."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._before = sockets()
        self._own: frozenset[Socket] = frozenset()
        self._forming = 0
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        self._moved = threading.Event()
        self._groups: list[Any] = []
        self._store: Any = None

    # --- any thread ----------------------------------------------------------------------------------------------

    @property
    def aborted(self) -> bool:
        """Whether ``abort`` has been called."""
        return self._aborted.is_set()

    def abort(self) -> None:
        """Let every call that waits for a peer fail, now and later."""
        with self._lock:
            if self._aborted.is_set():
                return
            self._aborted.set()
            groups = list(self._groups)
        self._moved.set()
        deaf = self._cut()
        _in_background(lambda: self._cut_again(deaf))
        if any(has_nccl(group) for group in groups):
            _in_background(lambda: abort_nccl(groups))

    def _cut(self) -> list[socket.socket]:
        new = sockets() - self._before
        if not self._forming:  # asked only now: else sockets of the next round could be among the new ones
            return deafen(self._own)
        deaf = deafen(new)
        poke(new, self.seat.world_size, _port(self.seat.master))
        return deaf

    def _cut_again(self, deaf: list[socket.socket]) -> None:
        """A group that is being formed opens new connections, and torch's store tries again."""
        pause_s = _AGAIN_S
        while self._forming:
            threading.Event().wait(pause_s)
            hang_up(deaf)
            deaf = self._cut()
            pause_s = min(pause_s * 1.5, _LONGEST_AGAIN_S)
        threading.Event().wait(_NOTICED_S)
        hang_up(deaf)

    # --- main thread ---------------------------------------------------------------------------------------------

    def connect(self, backend: str) -> None:
        """Form the group and make it torch's default one. Raises ``GroupLost`` or what torch raises."""
        seat = self.seat
        with _Forming(self):
            self._store = store = self._open_store()
            hook = sys.excepthook
            try:
                dist.init_process_group(
                    backend,
                    store=PrefixStore(f"edl/{seat.round}", store),
                    rank=seat.rank,
                    world_size=seat.world_size,
                )
            finally:
                sys.excepthook = hook  # torch wraps it anew for each group, which would become a long chain
            self.adopt(c10d._get_default_group())
        watch_new_groups(self)

    def adopt(self, group: Any) -> None:
        """Another torch group that ends with this one."""
        with self._lock:
            self._groups.append(group)

    def _open_store(self) -> Any:
        seat = self.seat
        if seat.world_size == 1:
            return HashStore()
        host, port = seat.master.rpartition(":")[0].strip("[]"), _port(seat.master)
        if seat.rank == 0:
            return TCPStore(host, port, None, True, STORE_TIMEOUT, wait_for_workers=False)
        # Its constructor cannot be interrupted: it tries again and again, or waits for names to be looked up. So an
        # aborted worker leaves it behind on a thread, where it ends by itself.
        result: list[Any] = []
        _in_background(lambda: self._reach_store(host, port, result))
        if not self._moved.wait(STORE_TIMEOUT.total_seconds()):
            raise GroupLost(f"round {seat.round}: rank 0 does not answer at {seat.master}")
        self._check()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def _reach_store(self, host: str, port: int, result: list[Any]) -> None:
        while not self.aborted and not wait_until_open((host, port), _ASK_AGAIN_S):
            pass
        try:
            result.append(TCPStore(host, port, None, False, STORE_TIMEOUT, wait_for_workers=False))
        except Exception as error:  # noqa: BLE001  handed to the main thread
            result.append(error)
        self._moved.set()

    def _check(self) -> None:
        if self.aborted:
            raise GroupLost(f"round {self.seat.round} was aborted while its group was formed")

    def retire(self) -> None:
        """Free its threads and descriptors."""
        with self._lock:
            groups, self._groups = self._groups, []
            store, self._store = self._store, None
        # The destructors wait for threads that look around every ten milliseconds; they release the GIL.
        garbage: list[Any] = [groups, store]
        del groups, store
        _in_background(garbage.clear, waited_for=True)


class _Forming:
    """While torch opens connections for a group: what is new afterwards belongs to it."""

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        self._before: frozenset[Socket] = frozenset()

    def __enter__(self) -> None:
        self._before = sockets()
        self._group._forming += 1  # before looking: abort sets its mark before it asks whether anything is being formed
        try:
            self._group._check()
        except GroupLost:
            self._group._forming -= 1
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        group = self._group
        group._own |= sockets() - self._before
        group._forming -= 1
        if not group.aborted:
            return
        hang_up(deafen(group._own))
        if error is None or isinstance(error, Exception):
            raise GroupLost(f"round {group.seat.round} was aborted while its group was formed") from error


def why_not() -> str:
    """Why a default group of this torch cannot be replaced by another one in process; empty when it can."""
    missing = [name for name in ("_world", "_update_default_pg", _HELPER)
               if not hasattr(c10d, name)]  # fmt: skip
    if not missing:
        missing = [f"_world.{name}" for name in (*_MAPS, "group_count") if not hasattr(c10d._world, name)]
    return f"torch {torch.__version__} has no {', '.join(missing)}" if missing else ""


def forget_default_group() -> None:
    """Make torch forget all its groups, so that a new default one can be made. Main thread; does not block.

    ``destroy_process_group`` does the same, but shuts every group down first, which waits for peers.
    """
    world = c10d._world
    world.group_count = 0  # part of the names in the store; a group that could not be formed has been counted
    if not dist.is_initialized():
        return
    c10d._update_default_pg(None)
    for name in _MAPS:
        getattr(world, name).clear()
    _unregister_all_process_groups()


def has_nccl(group: Any) -> bool:
    """Whether a torch group has an NCCL backend."""
    return dist.is_nccl_available() and any(device.type == "cuda" for device in group._device_types)


def has_nccl_abort() -> bool:
    """Whether this torch offers to abort NCCL's communicators."""
    return hasattr(getattr(dist, "ProcessGroupNCCL", None), "abort")


def abort_nccl(groups: list[Any]) -> None:
    """Abort the communicators of all groups at once: one after the other may deadlock between them."""
    backends = []
    for group in groups:
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue
        if hasattr(backend, "abort"):
            backends.append(backend)
    if not backends:
        return
    first = backends[0]
    together = len(backends) > 1 and hasattr(first, "_group_start")
    try:
        if together:
            first._group_start()
        for backend in backends:
            backend.abort()
        if together:
            first._group_end()
    except RuntimeError as error:
        _log.warning("NCCL did not abort cleanly: %s", error)


_watching: TorchGroup | None = None


def watch_new_groups(group: TorchGroup | None) -> None:
    """From now on ``dist.new_group`` and its like count as parts of this group, so that ``abort`` reaches them."""
    global _watching
    _watching = group
    original = getattr(c10d, _HELPER)
    if getattr(original, "_edl_watched", False):
        return

    def watched(*arguments: Any, **named: Any) -> Any:
        watching = _watching
        if watching is None:
            return original(*arguments, **named)
        with _Forming(watching):
            result = original(*arguments, **named)
        made = result[0] if isinstance(result, tuple) else result
        if isinstance(made, dist.ProcessGroup):
            watching.adopt(made)
        return result

    watched._edl_watched = True  # type: ignore[attr-defined]
    setattr(c10d, _HELPER, watched)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _in_background(work: Callable[[], object], waited_for: bool = False) -> None:
    """``waited_for``: the interpreter does not end before it is through."""
    threading.Thread(target=work, daemon=not waited_for, name="edl-group").start()
