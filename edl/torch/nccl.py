"""NCCL's communicators: created while a group is formed, aborted together, and watched for hanging calls."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from edl.worker.session import note

ERROR_TIMEOUT_S = 10.0
"""Seconds after which an NCCL error, without a reported lost peer, is treated as a hanging call."""
_LOOK_S = 1.0
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_LAUNCHERS = "1"
"""The value that launchers (torchrun as well) set by default. This value and 3 end the process whenever a communicator
is aborted."""
_NCCL2 = "TORCH_DIST_USE_NCCL2"
"""Makes torch 2.14 and later use ``ProcessGroupNCCL2`` for NCCL."""
_DUMP = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_DUMP_MS = "200"
"""Time in ms that torch's watchdog sleeps at its end. The threads and descriptors of an ended group stay for that
long."""
_NAMED = 8
"""Most workers that an error names."""

_log = logging.getLogger(__name__)


def set_up(environment: MutableMapping[str, str]) -> None:
    """Configure torch's handling of NCCL errors, unless the user has. Called before each group is made.

    A worker that cannot abort NCCL leaves it to torch's watchdog to end the process when a collective hangs.
    """
    if environment.get(_HANDLING, _LAUNCHERS) == _LAUNCHERS and not why_not(environment):
        environment[_HANDLING] = "0"
    environment.setdefault(_DUMP, _DUMP_MS)


def why_not(environment: MutableMapping[str, str]) -> str:
    """Why a worker cannot abort NCCL and continue; empty when it can."""
    if not hasattr(getattr(dist, "ProcessGroupNCCL", None), "abort"):
        return f"NCCL cannot be aborted in torch {torch.__version__}"
    if environment.get(_NCCL2) == "1":
        return f"{_NCCL2}=1 chooses another NCCL backend, which may end the process when it is aborted"
    if environment.get(_HANDLING) == "3":
        return f"{_HANDLING}=3 ends the process when a communicator is aborted; 0 or 2 would not"
    return ""


def has_nccl(group: Any) -> bool:
    """Whether a torch group has an NCCL backend."""
    return bool(backends([group]))


def backends(groups: Iterable[Any]) -> list[Any]:
    """The NCCL backends of torch groups. If torch was built with CUDA, gloo's backends also serve CUDA devices and are
    left out."""
    found = []
    for group in groups:
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # no backend, or not formed yet
            continue
        if backend.name() == "nccl":
            found.append(backend)
    return found


def form(group: Any, device: Any) -> None:
    """Create the communicator now instead of at the first collective. A peer that dies meanwhile is then detected while
    the group is formed. ``abort`` does not reach a communicator that is being created (seen with torch 2.11 and NCCL
    2.28); ``edl.torch.sockets.shut`` does."""
    for backend in backends([group]):
        if hasattr(backend, "eager_connect_single_device"):
            backend.eager_connect_single_device(device)


def place(device: torch.device) -> bytes:
    """What NCCL compares to find two ranks on one GPU: the host, which ``NCCL_HOSTID`` may name, and the GPU's place on
    the bus. Eight bytes."""
    host = os.environ.get("NCCL_HOSTID") or _boot_id()  # noqa: TID251  NCCL's own setting
    found = torch.cuda.get_device_properties(device)
    bus = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]  # not in older torch
    return hashlib.blake2b(repr((host, bus, str(getattr(found, "uuid", device)))).encode(), digest_size=8).digest()


def _boot_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read()
    return socket.gethostname()


class Cards(NamedTuple):
    """The GPUs that the workers of a world have for NCCL."""

    shared: bool
    """Two workers use the same one, which NCCL refuses."""
    lacking: tuple[str, ...]
    """Some workers that have none, while others do; at most ``_NAMED``."""


def compare(store: Any, mine: bytes, name: str, world_size: int) -> Cards:
    """Compare the ``place`` of each worker of a world; one without a GPU gives none. All of them ask, with a store of
    their own; each waits for the others, as they will to form the group. ``name``: of this worker, for errors."""
    if not mine:
        store.set(f"lacks {store.add('lacking', 1)}", name)
    elif store.add(f"at {mine.hex()}", 1) > 1:
        store.set("shared", "")
    if store.add("counted", 1) == world_size:
        store.set("all counted", "")
    store.wait(["all counted"])
    lacking = store.add("lacking", 0) % world_size  # if all lack one, nobody has one
    names = [bytes(store.get(f"lacks {number}")).decode() for number in range(1, min(lacking, _NAMED) + 1)]
    if lacking and not mine and store.add("read", 1) == lacking:
        store.set("all read", "")
    if lacking and mine:
        store.wait(["all read"])  # who leaves now closes the store
    return Cards(bool(store.check(["shared"])), tuple(sorted(names)))


def only_some(lacking: Iterable[str]) -> str:
    """An error for a world in which these workers have no GPU, and the others have one."""
    return (
        f"{', '.join(lacking)}: no GPU that torch can use with NCCL, and other workers of this world have one. Look at "
        "the driver there (nvidia-smi) and at CUDA_VISIBLE_DEVICES, or hide the GPUs from all workers "
        "(CUDA_VISIBLE_DEVICES=) to train on CPUs"
    )


def note_shared(device: torch.device) -> None:
    """Say once that a world has no NCCL."""
    _note_once(
        f"several workers use one GPU (this one uses {device}), which NCCL refuses, so this world uses gloo, which is "
        "slower. Give each worker a GPU of its own (--nproc-per-node=gpu, or CUDA_VISIBLE_DEVICES for each launcher), "
        "or hide it from all workers to train on CPUs (CUDA_VISIBLE_DEVICES=)"
    )


def abort(groups: list[Any]) -> None:
    """Abort the communicators of all groups at the same moment; returns when all have ended.

    Aborting one frees its memory, which may wait for the device: one after the other, that wait would never end if a
    kernel of the next one waits for a lost peer. It would also let the next one finish, with the garbage that the first
    has left, for peers that have lost nobody. So each has a thread. NCCL's own grouping of calls is no help: it holds
    for the calls of one thread, and torch makes each of these on a thread of its own.
    """
    found = [backend for backend in backends(groups) if hasattr(backend, "abort")]
    threads = [threading.Thread(target=_abort, args=(one,), daemon=True, name="edl-abort") for one in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        _log.warning("NCCL did not abort cleanly: %s", error)


class Complaint:
    """Measures how long NCCL has reported an error."""

    def __init__(self, timeout_s: float = ERROR_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._since: float | None = None

    def overdue(self, errors: list[str], now_s: float) -> str:
        """The error that has lasted too long; empty if there is none."""
        if not errors:
            self._since = None
            return ""
        if self._since is None:
            self._since = now_s
        return errors[0] if now_s - self._since >= self._timeout_s else ""


def errors(groups: Iterable[Any]) -> list[str]:
    """Errors found by torch's watchdog: ``TIMEOUT``, ``COMM_ERROR`` or ``REMOTE_ERROR``."""
    said = [backend.get_error() for backend in backends(groups) if hasattr(backend, "get_error")]
    return [one.name for one in said if one.name != "SUCCESS"]


class WatchedGroups(NamedTuple):
    """The NCCL communicators of one round."""

    groups: Callable[[], list[Any]]
    failed: Callable[[], str]
    """The first failure of a collective that this worker has seen itself; empty while there is none."""
    ended: threading.Event
    """They have been aborted."""
    round: int


def watch(watched: WatchedGroups, end: Callable[[], None]) -> None:
    """Watch until the communicators are aborted: end this process when a collective has failed or timed out and no lost
    peer is reported. Aborting and continuing instead would leave partial sums in arrays of the next commit."""
    found = backends(watched.groups())  # none if the round is over already
    if found and not any(hasattr(backend, "get_error") for backend in found):
        _note_once(f"torch {torch.__version__} does not report NCCL calls that hang; --hang-timeout finds them")
    complaint, failure = Complaint(), Complaint(2 * ERROR_TIMEOUT_S)  # usually ``run`` ends a failed worker before
    while not watched.ended.wait(_LOOK_S):
        now_s = time.monotonic()  # noqa: TID251  on a thread of the worker's
        failed = watched.failed()
        late = failure.overdue([failed] if failed else [], now_s)
        what = complaint.overdue([] if failed else errors(watched.groups()), now_s)
        if late or what:
            note(
                f"round {watched.round}: {late or f'NCCL reports {what}'}, and no worker is lost: a collective hangs "
                "or has failed. This worker ends, so that the others can continue. Its threads:"
            )
            end()
            return


@functools.cache
def _note_once(text: str) -> None:
    note(text)


def end_process() -> None:
    """End the process as torch does when its watchdog finds such a call."""
    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
    os.kill(os.getpid(), signal.SIGABRT)
