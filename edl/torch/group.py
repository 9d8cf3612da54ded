"""The process group of one round: formed on torch's store, disconnected from any thread, and freed later."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore, _unregister_all_process_groups
from torch.distributed import distributed_c10d as c10d

from edl.errors import UsageError
from edl.torch import devices, nccl, pending_collectives
from edl.torch.addresses import Addresses, endpoint
from edl.torch.collectives import Collectives, nccl_error
from edl.torch.flight_recorder import WaitReader
from edl.torch.sockets import (
    Socket,
    connections,
    deafen,
    hang_up,
    listeners,
    listeners_of_nccl,
    poke,
    shut,
    sockets,
)
from edl.wire.local import Seat
from edl.worker.framework import CollectiveWaits
from edl.worker.wait_until_open import wait_until_open
from edl.worker.waits import now

STORE_TIMEOUT = timedelta(seconds=300)
"""How long a worker waits for rank 0's store unless it is aborted; torch's own default."""
_AGAIN_S = 0.005
"""Pause in seconds between disconnects while a group that is being formed keeps opening connections."""
_LONGEST_AGAIN_S = 0.2
_NOTICED_S = 0.1
"""Seconds within which gloo has read the end of a connection that was shut down."""
_ASK_AGAIN_S = 1.0

_MAPS = (
    "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state",
)  # fmt: skip
_HELPER = "_new_process_group_helper"

_Gloo: Any = getattr(c10d, "ProcessGroupGloo", object)

_log = logging.getLogger(__name__)


class GroupLost(ConnectionError):
    """The group was aborted, or rank 0 could not be reached, while it was formed."""


class TorchGroup:
    """The group of one round. Created on the main thread before any connection is made; ``disconnect`` and ``abort``
    may be called from any thread."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.addresses = Addresses(_port(seat.master), serves=seat.rank == 0)
        self._forming = 0
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        self._ended = threading.Event()
        """Its NCCL communicators, if there are any, have been aborted as well."""
        self._moved = threading.Event()
        self._groups: list[Any] = []
        self._held: list[Any] = []
        """torch's own store, the wrappers that gloo uses instead, and gloo's devices."""
        self._before_nccl: frozenset[Socket] | None = None
        """While NCCL's communicator is being set up: the sockets that were open before."""
        self._recorder: WaitReader | None = None
        """Of a group with NCCL."""
        self.has_nccl = False
        """Whether NCCL is there for tensors on GPUs, once the group is formed."""
        self.watch = Collectives(self)
        watch_new_groups(None)  # else an earlier round's group would take this one, or the script's, for its own

    # --- any thread ----------------------------------------------------------------------------------------------

    @property
    def aborted(self) -> bool:
        """Whether ``disconnect`` or ``abort`` has been called."""
        return self._aborted.is_set()

    def failure(self) -> str:
        """Why the results of this round's collectives cannot be used; empty when they can."""
        if self.watch.failed or self.aborted:
            return self.watch.failed or "the group was aborted"
        return nccl_error(self._groups)

    def settle(self) -> None:
        """Wait for all collectives that have been started; see ``edl.worker.framework.Communicator``."""
        self.watch.settle()

    def waits(self) -> CollectiveWaits | None:
        """The waits in collectives; see ``edl.worker.framework.Communicator``. With NCCL they are taken from torch's
        flight recorder, since the host does not wait for its collectives."""
        return self._recorder.waits(now()[0]) if self._recorder is not None else self.watch.waits

    def disconnect(self) -> None:
        """Make every call fail, now and later, that waits for a peer on the host. What NCCL has begun is left alone:
        see ``edl.worker.framework.Communicator``."""
        with self._lock:
            if self._aborted.is_set():
                return
            self._aborted.set()
        self._moved.set()
        deaf = self._shut()
        _in_background(lambda: self._shut_again(deaf))

    def abort(self) -> None:
        """Make every call that waits for a peer fail, now and later."""
        self.disconnect()
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            groups = list(self._groups)
        if any(nccl.has_nccl(group) for group in groups):
            _in_background(lambda: nccl.abort(groups))

    def _shut(self) -> list[socket.socket]:
        deaf = deafen(connections(self.addresses))
        if self._forming:
            poke(listeners(self.addresses), self.seat.world_size)
        return deaf

    def _shut_again(self, deaf: list[socket.socket]) -> None:
        """Disconnect again: a group that is being formed opens new connections, and torch's store retries."""
        pause_s = _AGAIN_S
        while self._forming:
            threading.Event().wait(pause_s)
            hang_up(deaf)
            deaf = self._shut()
            # First it may find the closed connections of a dead peer by itself.
            if (before := self._before_nccl) is not None and pause_s == _LONGEST_AGAIN_S:
                shut(listeners_of_nccl(before))
            pause_s = min(pause_s * 1.5, _LONGEST_AGAIN_S)
        threading.Event().wait(_NOTICED_S)
        hang_up(deaf)

    # --- main thread ---------------------------------------------------------------------------------------------

    def connect(self, backend: str) -> None:
        """Form the group and make it torch's default group. Raises ``GroupLost``, torch's own errors, and
        ``UsageError`` if this worker has no GPU and others have one."""
        seat = self.seat
        pending_collectives.begin()
        with _Forming(self):
            store = self._open_store()
            self._held.append(store)
            if seat.world_size > 1:
                backend = self._agreed(store, backend)
            hook = sys.excepthook
            try:
                dist.init_process_group(
                    backend,
                    store=PrefixStore(f"edl/{seat.round}", store),
                    rank=seat.rank,
                    world_size=seat.world_size,
                )
            finally:
                sys.excepthook = hook  # torch wraps it for each group, which would become a long chain
            formed = c10d._get_default_group()
            self.adopt(formed)
            if nccl.has_nccl(formed):
                self._begin_nccl(formed)
        if seat.world_size > 1 and not self.addresses.own:
            _log.warning(
                "gloo of torch %s publishes its address in an unknown format, so its calls cannot be interrupted: "
                "after a fault workers will be restarted", torch.__version__,
            )  # fmt: skip
        watch_new_groups(self)

    def _agreed(self, store: Any, backend: str) -> str:
        """The backend of this world, of which this worker can use ``backend``: gloo if workers share a GPU, which NCCL
        refuses; noted then. Raises ``UsageError`` if only other workers have a GPU, and ``GroupLost`` in those."""
        seat = self.seat
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else None
        place = nccl.place(device) if device is not None else b""
        gpus = PrefixStore(f"edl/{seat.round}/gpus", store)
        cards = nccl.compare(gpus, place, f"rank {seat.rank} on {seat.node}", seat.world_size)
        if cards.lacking:
            text = f"round {seat.round}: {nccl.only_some(cards.lacking)}"
            raise UsageError(text) if device is None else GroupLost(text)
        if device is None or not cards.shared:
            return backend
        nccl.note_shared(device)
        return "gloo"

    def has(self, group: Any) -> bool:
        """Whether this torch group belongs to the round."""
        return any(one is group for one in self._groups)

    def _begin_nccl(self, formed: Any) -> None:
        if self.seat.world_size > 1:
            self._before_nccl = sockets()
            try:
                nccl.form(formed, torch.device("cuda", torch.cuda.current_device()))
            finally:
                self._before_nccl = None
        self.has_nccl = True
        self._recorder = WaitReader()
        watched = nccl.WatchedGroups(
            lambda: list(self._groups), lambda: self.watch.failed, self._ended, self.seat.round
        )
        _in_background(lambda: nccl.watch(watched, nccl.end_process))

    def adopt(self, group: Any) -> None:
        """Add another torch group that ends with this one."""
        with self._lock:
            self._groups.append(group)

    def _open_store(self) -> Any:
        seat = self.seat
        if seat.world_size == 1:
            return HashStore()
        host, port = seat.master.rpartition(":")[0].strip("[]"), _port(seat.master)
        if seat.rank == 0:
            return TCPStore(host, port, None, True, STORE_TIMEOUT, wait_for_workers=False)
        # The constructor cannot be interrupted while it retries or resolves names. So it runs on a thread, which an
        # aborted worker leaves behind to end by itself.
        result: list[Any] = []
        _in_background(lambda: self._reach_store(host, port, result))
        if not self._moved.wait(STORE_TIMEOUT.total_seconds()):
            raise GroupLost(f"round {seat.round}: rank 0 does not answer at {seat.master}")
        self.check()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def _reach_store(self, host: str, port: int, result: list[Any]) -> None:
        while not self.aborted and not wait_until_open((host, port), _ASK_AGAIN_S):
            pass
        self.addresses.store_hosts = _hosts(host, port)
        try:
            result.append(TCPStore(host, port, None, False, STORE_TIMEOUT, wait_for_workers=False))
        except Exception as error:  # noqa: BLE001  passed to the main thread
            result.append(error)
        self._moved.set()

    def refuse(self) -> None:
        """Raise ``GroupLost`` if this round has failed or is over, before NCCL begins a collective. gloo fails by
        itself."""
        if self.has_nccl and self.aborted:
            raise GroupLost(f"round {self.seat.round}: no collective can begin: {self.failure()}")

    def check(self) -> None:
        """Raise ``GroupLost`` if ``disconnect`` or ``abort`` has been called."""
        if self.aborted:
            raise GroupLost(f"round {self.seat.round} was aborted while its group was formed")

    def retire(self) -> None:
        """Free its threads and descriptors."""
        with self._lock:
            groups, self._groups = self._groups, []
            held, self._held = self._held, []
        self.watch.forget()
        # The destructors wait for threads that poll every ten milliseconds; they release the GIL.
        garbage: list[Any] = [groups, held]
        del groups, held
        _in_background(garbage.clear, waited_for=True)


class _Forming:
    """Active while torch opens connections for a group: records the addresses of gloo's members."""

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        self._gloo: Any = None

    def __enter__(self) -> None:
        self._group._forming += 1  # first: disconnect sets its flag before it reads this counter
        try:
            self._group.check()
        except GroupLost:
            self._group._forming -= 1
            raise
        self._gloo = c10d.ProcessGroupGloo
        _NotingGloo.group = self._group
        c10d.ProcessGroupGloo = _NotingGloo  # type: ignore[misc]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        group = self._group
        c10d.ProcessGroupGloo, _NotingGloo.group = self._gloo, None  # type: ignore[misc]
        group._forming -= 1
        if not group.aborted:
            return
        hang_up(deafen(connections(group.addresses)))
        if error is None or isinstance(error, Exception):
            raise GroupLost(f"round {group.seat.round} was aborted while its group was formed") from error


class _NotingGloo(_Gloo):  # type: ignore[misc]
    """torch's gloo backend over a store that records addresses."""

    group: ClassVar[TorchGroup | None] = None
    """The group that is being formed."""

    def __init__(self, store: Any, *arguments: Any, **named: Any) -> None:
        if self.group is not None:
            store = NotingStore(store, self.group)
            self.group._held.append(store)  # C++ holds only its own half of the object
            if devices.needed(torch.__version__) and len(arguments) == 2 and set(named) == {"timeout"}:
                options = devices.options(_Gloo, named.pop("timeout"), os.environ)  # noqa: TID251  torch's own settings
                self.group._held.append(options)
                arguments = (*arguments, options)
        super().__init__(store, *arguments, **named)


class NotingStore(Store):
    """Wraps the store for gloo: records the addresses that are published and read, and fails every call after
    ``abort``."""

    def __init__(self, store: Any, group: TorchGroup) -> None:
        super().__init__()
        self._store = store
        self._group = group

    def set(self, key: str, value: Any) -> None:
        """Store a value. A rank publishes its listening address this way."""
        self._group.check()
        self._group.addresses.note_own(bytes(value))
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        """Read a value. A rank reads another rank's listening address this way."""
        self._group.check()
        value = self._store.get(key)
        self._group.addresses.note_other(bytes(value))
        return value

    def wait(self, *arguments: Any) -> None:
        """Wait for keys, like the wrapped store."""
        self._group.check()
        self._store.wait(*arguments)


def _passing_on(name: str) -> Callable[..., Any]:
    def passing_on(self: Any, *arguments: Any) -> Any:
        self._group.check()
        return getattr(self._store, name)(*arguments)

    return passing_on


for _name in ("add", "check", "compare_set", "delete_key", "num_keys", "append", "clone"):
    setattr(NotingStore, _name, _passing_on(_name))


def why_not() -> str:
    """Why this torch's default group cannot be replaced in process; empty when it can."""
    missing = [name for name in ("_world", "_update_default_pg", _HELPER, "ProcessGroupGloo")
               if not hasattr(c10d, name)]  # fmt: skip
    if not missing:
        missing = [f"_world.{name}" for name in (*_MAPS, "group_count") if not hasattr(c10d._world, name)]
    return f"torch {torch.__version__} has no {', '.join(missing)}" if missing else ""


def forget_default_group() -> None:
    """Make torch forget all its groups, so that a new default group can be made. Main thread only; does not block.

    ``destroy_process_group`` does the same, but first shuts down every group, which waits for peers.
    """
    world = c10d._world
    world.group_count = 0  # part of the keys in the store; a group that could not be formed was counted
    if not dist.is_initialized():
        return
    c10d._update_default_pg(None)
    for name in _MAPS:
        getattr(world, name).clear()
    _unregister_all_process_groups()


_watching: TorchGroup | None = None


def watch_new_groups(group: TorchGroup | None) -> None:
    """Count groups made by ``dist.new_group`` and the like as parts of this group from now on, so that ``abort``
    reaches them."""
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


def _hosts(host: str, port: int) -> frozenset[str]:
    """The addresses that a name resolves to; torch's store will resolve it in the same way."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset(endpoint(str(name[0]), port)[0] for *_, name in found)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _in_background(work: Callable[[], object], waited_for: bool = False) -> None:
    """Run work on a thread. ``waited_for``: the interpreter does not exit before the work has ended."""
    threading.Thread(target=work, daemon=not waited_for, name="edl-group").start()
