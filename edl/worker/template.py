"""A template: a process forked from the fork server that has imported a script's learnt modules as well, and forks
workers in its place.

The workers are children of the fork server, which watches them as usual. A template can be thrown away at any time, so
the fork server itself never imports a learnt module.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from edl.wire.datagrams import receive
from edl.wire.fork_server import WorkerOrder, read_order
from edl.wire.json_messages import TaggedUnion
from edl.worker import linux
from edl.worker.import_record import ImportRecord
from edl.worker.learnt import same_values
from edl.worker.replay import ALL_NAMES, Replayed, Rules, as_in, replay
from edl.worker.spawn import Streams, take_streams


@dataclass(frozen=True, slots=True)
class ImportBegins:
    """The template is about to import this module."""

    module: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """This module must not be imported ahead."""

    module: str
    why: str


@dataclass(frozen=True, slots=True)
class VariablesRead:
    """Environment variables that the modules have read; a part of them."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """All imports are done. The template forks workers now, unless modules were left out or it was a rehearsal."""

    memory_bytes: int
    """Memory that it shares with no other process."""
    count: int
    """Number of modules that it has imported."""
    full: bool
    """Whether it has stopped at its memory limit."""


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """Fork a worker. Comes with five descriptors: its order, stdin, stdout, stderr, and a pipe from which it reads one
    byte before it goes on; it exits if the pipe is closed instead."""

    record: int
    """Number of its import record; -1 for none."""


@dataclass(frozen=True, slots=True)
class ForkAnswer:
    """What a template has made of a ``ForkOrder``."""

    pid: int
    error: str = ""
    """Why there is no worker; empty if there is one."""


FromTemplate = ImportBegins | LeftOut | VariablesRead | Prepared | ForkAnswer
_UNION: TaggedUnion[FromTemplate | ForkOrder] = TaggedUnion(
    *(ImportBegins, LeftOut, VariablesRead, Prepared, ForkOrder, ForkAnswer),
    tag="kind",
    what="a message between a fork server and its template",
)
_NAMES_AT_ONCE = 200
"""Names in one datagram, whose size is limited."""
encode, decode = _UNION.encode, _UNION.decode


@dataclass(frozen=True, slots=True)
class ForkedWorker:
    """Returned in a forked worker: its order, its streams, and where to record imports."""

    order: WorkerOrder
    streams: Streams
    record: ImportRecord | None


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """What a template takes over from the worker after which it is made."""

    environment: Mapping[str, str]
    arguments: tuple[str, ...]
    """``sys.argv``."""
    script: str
    """Path of the script."""
    folder: str
    """Its entry on the search path."""


def fits(reads: Collection[str], ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Whether modules that read these variables under one environment are as if imported under the other."""
    names = [name for name in reads if name != ALL_NAMES]
    return same_values(names, ours, theirs) and (len(names) == len(reads) or ours.keys() == theirs.keys())


def run_template(
    channel: socket.socket, place: WorkerPlace, rules: Rules, records: tuple[ImportRecord, ...], keep: Collection[int]
) -> ForkedWorker:
    """In the template's process: import the modules, then fork workers. Returns only in a worker.

    ``keep``: descriptors that the framework keeps open.
    """
    parent = os.getppid()
    nothing = os.open(os.devnull, os.O_RDWR)
    # What a module prints at its import belongs to the worker, which has shown it.
    take_streams(nothing, nothing, nothing)
    linux.close_all_but({channel.fileno(), *keep})

    def send(message: FromTemplate) -> None:
        channel.send(encode(message))

    with as_in(place.environment, place.arguments, place.script, place.folder):
        replayed = replay(rules, lambda module: send(ImportBegins(module)))
    for module, why in replayed.left_out.items():
        send(LeftOut(module, why))
    for start in range(0, len(replayed.reads), _NAMES_AT_ONCE):
        send(VariablesRead(replayed.reads[start : start + _NAMES_AT_ONCE]))
    send(Prepared(replayed.memory_bytes, replayed.count, replayed.full))
    if replayed.left_out or rules.rehearsal:
        os._exit(0)
    while True:
        data, descriptors = receive(channel, 5)
        message = decode(data) if data else None
        if not isinstance(message, ForkOrder) or len(descriptors) != 5:
            os._exit(0)
        take_streams(0, 1, descriptors[3])  # what goes wrong on the way to a worker is shown in its output
        try:
            answer = ForkAnswer(linux.fork_for(parent))
        except OSError as error:
            answer = ForkAnswer(0, f"{error}")
        if not answer.pid and not answer.error:
            record = records[message.record] if message.record >= 0 else None
            return _forked(descriptors, place.environment, replayed, record)
        take_streams(0, 1, 1)
        send(answer)
        for descriptor in descriptors:
            os.close(descriptor)


def _forked(
    descriptors: list[int],
    imported_under: Mapping[str, str],
    replayed: Replayed,
    record: ImportRecord | None,
) -> ForkedWorker:
    """In a new worker, once the fork server knows it."""
    memory, stdin, stdout, stderr, go = descriptors
    if not os.read(go, 1):
        os._exit(0)
    order = read_order(memory)
    for generator in replayed.generators:
        generator.seed()
    environment = with_writes(order.environment, imported_under, replayed.writes)
    return ForkedWorker(replace(order, environment=environment), (stdin, stdout, stderr), record)


def with_writes(
    environment: Mapping[str, str], imported_under: Mapping[str, str], writes: Mapping[str, str | None]
) -> dict[str, str]:
    """A worker's environment with the variables that modules set when they are imported. A variable that has another
    value for this worker than at the import stays as it is."""
    result = dict(environment)
    for name, value in writes.items():
        if environment.get(name) == imported_under.get(name):
            if value is None:
                result.pop(name, None)
            else:
                result[name] = value
    return result


def fork_from(
    channel: socket.socket, record: int, descriptors: Collection[int], adopt: Callable[[int], None], limit_s: float
) -> int:
    """In the fork server: have a template fork a worker; ``adopt`` gets its pid before it runs. Raises ``OSError`` or
    ``ValueError`` if there is none within ``limit_s``; the template must then be killed."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        channel.settimeout(limit_s)
        socket.send_fds(channel, [encode(ForkOrder(record))], [*descriptors, reading])
        data, _ = receive(channel)
        answer = decode(data) if data else None
        if not isinstance(answer, ForkAnswer) or answer.error:
            raise ValueError(answer.error if isinstance(answer, ForkAnswer) else "it has ended")
        adopt(answer.pid)
        os.write(writing, b"1")
        return answer.pid
    finally:
        os.close(reading)
        os.close(writing)
