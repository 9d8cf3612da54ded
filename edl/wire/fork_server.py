"""Messages between an agent and its fork server.

The fork server is the helper process that creates workers (``edl.worker.fork_server``); the agent's end is
``edl.adapters.processes``. They share an ``AF_UNIX`` ``SOCK_SEQPACKET`` pair: one JSON object per datagram,
with descriptors attached. A worker's order can be large (an environment naming thousands of endpoints), so it travels
in a memory file whose descriptor accompanies the ``Spawn``.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import edl
from edl.wire import json_messages
from edl.wire.json_messages import TaggedUnion
from edl.wire.memory_file import LARGEST_BYTES, read_memory, write_memory
from edl.wire.process_events import WorkerExited, WorkerResumed, WorkersStopped, WorkerSuspended

__all__ = ["LARGEST_BYTES", "PROBE", "WorkerOrder", "decode", "encode", "helper_command", "read_order", "write_order"]


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker. Comes with four descriptors: its order (a memory file), stdin, stdout, stderr."""

    id: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Signal the process group of a worker."""

    pid: int
    number: int


@dataclass(frozen=True, slots=True)
class Dump:
    """Make a worker dump the stacks of its threads to its stderr. Its child processes get no signal, because it would
    kill them. On failure, a ``LogLine`` says why."""

    pid: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Send a signal to a worker only, if it handles that signal; else a ``LogLine`` says why it was not sent."""

    pid: int
    number: int


@dataclass(frozen=True, slots=True)
class Entitled:
    """The launcher is alive. Unless extended, workers may run until this time on the host's monotonic clock."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Heard:
    """Answer to ``Entitled``: the fork server is alive."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """The fork server is ready; ``text`` describes how workers are started."""

    text: str


@dataclass(frozen=True, slots=True)
class WarmFailed:
    """A module that the script needs cannot be imported."""

    module: str
    error: str
    """Last line of the traceback."""
    traceback: str


@dataclass(frozen=True, slots=True)
class Spawned:
    """Answer to ``Spawn``: the worker was started."""

    id: int
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """Answer to ``Spawn``: no process was created."""

    id: int
    error: str


@dataclass(frozen=True, slots=True)
class LogLine:
    """A sentence for the agent's log."""

    text: str


FromWorkers = WorkerExited | WorkerSuspended | WorkerResumed | WorkersStopped
"""Passed on to the agent as they are."""
ToForkServer = Spawn | Signal | Dump | Forward | Entitled
ToAgent = Warmed | WarmFailed | Spawned | SpawnFailed | Heard | LogLine | FromWorkers
Message = ToForkServer | ToAgent

_UNION: TaggedUnion[Message] = TaggedUnion(
    *(Spawn, Signal, Dump, Forward, Entitled),
    *(Warmed, WarmFailed, Spawned, SpawnFailed, Heard, LogLine),
    *(WorkerExited, WorkerSuspended, WorkerResumed, WorkersStopped),
    tag="kind",
    what="a message between a launcher and its fork server",
)


encode = _UNION.encode
"""Encode a message as one datagram."""
decode = _UNION.decode
"""The inverse of ``encode``. Raises ``ProtocolError`` for anything else."""


PROBE = "probe"
"""Kind of an order for the probe of a health check, whose target is no user's program."""


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """Everything that a new worker needs to start."""

    kind: str
    """A ``CommandKind`` value (script, module, program or call), or ``PROBE``."""
    target: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Complete environment: the worker has no other variables."""
    directory: str = ""
    """Working directory; empty: the fork server's own."""
    cores: tuple[int, ...] = ()
    """CPU cores that the worker is bound to; empty: those of the fork server."""
    after: tuple[int, ...] = ()
    """Exiting processes whose memory and devices the worker may need: it waits until they are gone, but not forever."""


def write_order(order: WorkerOrder) -> int:
    """Write the order to a memory file; return its descriptor, which the caller closes."""
    return write_memory("edl-order", json_messages.encode(order))


def read_order(descriptor: int) -> WorkerOrder:
    """The inverse of ``write_order``; leaves the descriptor open. Raises ``ProtocolError``."""
    return json_messages.decode(WorkerOrder, read_memory(descriptor))


# The search path is left as the interpreter would have it for a script, without the current directory that "-c"
# puts first: a stray queue.py there must not break the imports. The edl that runs the agent is found first, for
# that one import only, so that an older copy elsewhere on the path cannot slip in.
_ENTRY = (
    "import sys;sys.path[:]=[p for p in sys.path if p];sys.path.insert(0,sys.argv.pop(1));import edl;"
    "r=sys.path.pop(0);r in sys.path or sys.path.append(r);import importlib;"
    "importlib.import_module(sys.argv.pop(1)).main()"
)


def helper_command(python: str, module: str, *arguments: str) -> list[str]:
    """Command line of an unbuffered interpreter that runs ``main()`` of an edl module with these arguments."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(edl.__file__)))
    return [python, "-u", "-c", _ENTRY, root, module, *arguments]
