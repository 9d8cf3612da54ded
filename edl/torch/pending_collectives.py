"""Tells the agent which collectives a worker waits for, from a thread beside the user's code.

torch's flight recorder knows them for every backend, whatever the script looks like: NCCL returns at once, and a
synchronisation then spins, so neither stacks nor CPU time show that a rank waits. The thread starts when the script
forms its first process group.

gloo's counters of complete collectives lag behind now and then, so they are only a hint: what is pending is read from
the recorded calls, once for each state of the counters that lasts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from edl.errors import ProtocolError
from edl.wire.collective_wait import (
    ADDRESS_SUFFIX,
    LARGEST_BYTES,
    MOST_SHOWN,
    CollectiveWait,
    DumpRequest,
    PendingCollective,
)
from edl.wire.json_messages import decode, encode
from edl.wire.local import AGENT_VARIABLE

EVERY_S = 1.0
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""torch's functions that return what is recorded, as JSON: of NCCL, and of other backends."""
_SIZE = "TORCH_FR_BUFFER_SIZE"
_OLD_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_TIMING = "TORCH_NCCL_ENABLE_TIMING"
_CALLS = "2000"
"""Recorded calls; the default of torch 2.13."""
_TIMED_CALLS = "256"
"""Recorded calls if torch records their durations, which are read all the time (``edl.torch.flight_recorder``): each
takes torch 13 µs to write out."""

Recorded = Mapping[str, Any]
Dump = Callable[[bool, bool], Recorded]
"""The flight recorder's content. Arguments: with the calls, and of these only such as are not complete, as far as torch
knows (gloo's: all)."""
LASTS = 4
"""Looks without a change after which the calls are read: they are many, and a step may well take seconds."""


def set_up(environment: MutableMapping[str, str]) -> None:
    """Let the flight recorder record, unless the user has chosen how much."""
    if _SIZE not in environment and _OLD_SIZE not in environment:
        calls = _TIMED_CALLS if environment.get(_TIMING) == "1" else _CALLS
        environment[_SIZE if hasattr(_c10d(), _DUMPS[1]) else _OLD_SIZE] = calls


def begin() -> None:
    """Start to report to this worker's agent, once in each process. Without agent or recorder it does nothing."""
    address, dumps = os.environ.get(AGENT_VARIABLE), recorders()  # noqa: TID251
    if not address or not dumps or _started.get(os.getpid()):
        return
    line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        line.bind(f"\0{address}-{os.getpid()}")
        line.connect(f"\0{address}{ADDRESS_SUFFIX}")  # from now on, only the agent's datagrams are received
    except OSError:
        line.close()
        return  # the agent does not look for hangs; and a diagnosis is not worth the worker
    _started[os.getpid()] = True
    threading.Thread(target=_run, args=(WaitReporter(dumps), line), name="edl-collectives", daemon=True).start()


_started: dict[int, bool] = {}
"""By process, because a child of this worker inherits it but not the thread."""


def recorders() -> tuple[Dump, ...]:
    """What this torch offers; older ones have none that returns JSON."""
    found = [getattr(_c10d(), name) for name in _DUMPS if hasattr(_c10d(), name)]
    return tuple(_dump_with(one) for one in found)


def _c10d() -> Any:
    try:
        import torch._C._distributed_c10d as c10d
    except ImportError:
        return None  # a torch without torch.distributed
    return c10d


def _dump_with(function: Callable[..., bytes | str]) -> Dump:
    def dump(calls: bool, active: bool) -> Recorded:
        found = json.loads(function(includeCollectives=calls, onlyActive=active))
        return found if isinstance(found, dict) else {}

    return dump


def counters(recorded: Recorded) -> str:
    """The state of all groups' counters as text, if a group has more collectives called than complete; else empty."""
    groups = recorded.get("pg_status") or {}
    rows = {name: [_number(one.get(f"last_{what}_collective")) for what in _STAGES] for name, one in groups.items()}
    behind = any(called > complete for called, _, complete in rows.values())
    return json.dumps(rows, sort_keys=True) if behind else ""


_STAGES = ("enqueued", "started", "completed")


def pending(recorded: Recorded) -> tuple[PendingCollective, ...]:
    """The recorded collectives that are not complete, the oldest first, at most ``MOST_SHOWN``. Sends and receives do
    not count: a receive may be posted long before its sender is due."""
    calls = [one for one in recorded.get("entries") or () if not one.get("retired") and not one.get("is_p2p")]
    calls.sort(key=lambda one: _number(one.get("record_id")))
    return tuple(_described(one) for one in calls[:MOST_SHOWN])


def _described(call: Mapping[str, Any]) -> PendingCollective:
    group = call.get("process_group") or ["", ""]
    shapes = call.get("input_sizes") or []
    sizes = ", ".join("x".join(str(size) for size in shape) or "a scalar" for shape in shapes[:MOST_SHOWN])
    name = str(call.get("profiling_name", "a collective"))[:80]
    return PendingCollective(name, _number(call.get("collective_seq_id")), str(group[-1])[:80], sizes[:200])


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1


class WaitReporter:
    """Decides what to report: one dump of the counters each time, and one of the calls for each state that lasts."""

    def __init__(self, dumps: tuple[Dump, ...]) -> None:
        self._dumps = dumps
        self._before, self._lasted = "", 0
        self._known: tuple[str, tuple[PendingCollective, ...]] = ("", ())

    def look(self) -> CollectiveWait:
        """What this process waits for at the moment."""
        state = "|".join(filter(None, (counters(dump(False, False)) for dump in self._dumps)))
        self._lasted = self._lasted + 1 if state == self._before else 0
        self._before = state
        if not state or self._lasted < LASTS:
            return CollectiveWait()
        if self._known[0] != state:
            self._known = (state, next(filter(None, (pending(dump(True, True)) for dump in self._dumps)), ()))
        waits = self._known[1]
        return CollectiveWait(hashlib.sha256(state.encode()).hexdigest()[:16], waits) if waits else CollectiveWait()

    def write(self, path: str) -> None:
        """Write everything that is recorded. Raises ``OSError``."""
        with open(path, "w") as file:
            json.dump([dump(True, False) for dump in self._dumps], file)


def _run(reporter: WaitReporter, line: socket.socket) -> None:
    """Report until this process ends, or its agent."""
    with line:
        while True:
            try:
                line.send(encode(reporter.look()), socket.MSG_DONTWAIT)
            except ConnectionRefusedError:
                return
            except (OSError, ValueError, TypeError, RuntimeError):
                pass  # its queue is full, or torch's function is another one: no diagnosis is worth the worker
            if select.select([line], [], [], EVERY_S)[0]:
                with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError, ProtocolError):
                    reporter.write(decode(DumpRequest, line.recv(LARGEST_BYTES)).path)
