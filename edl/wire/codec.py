"""Dataclasses to protobuf messages of the same name and back.

One generic walk over the fields instead of a pair of functions for each message: the two definitions agree by name,
and a unit test compares every field of both.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from edl.errors import ProtocolError
from edl.wire import edl_pb2, health, messages, node_requests, status
from edl.wire.messages import AgentMessage, MasterMessage
from edl.wire.scale_requests import Granted, ScaleRequest

T = TypeVar("T")

_AGENT_BODIES: dict[type, str] = {
    messages.Attach: "attach",
    messages.Ready: "ready",
    messages.Preparing: "preparing",
    messages.Underway: "underway",
    messages.Boundary: "boundary",
    messages.Kept: "kept",
    messages.Asked: "asked",
    messages.Hanging: "hanging",
    messages.WorkerFailed: "worker_failed",
    messages.WorkersDone: "workers_done",
    messages.Leaving: "leaving",
    messages.ServiceFromWorker: "service_from_worker",
    messages.Pace: "pace",
    messages.NotKept: "not_kept",
    messages.NotLogged: "not_logged",
    messages.Alarms: "alarms",
    messages.HangLimit: "hang_limit",
    health.HealthChecked: "health_checked",
}
_MASTER_BODIES: dict[type, str] = {
    messages.StopRound: "stop_round",
    messages.StartRound: "start_round",
    messages.Hold: "hold",
    messages.Switch: "switch",
    messages.Prestart: "prestart",
    messages.LoadState: "load_state",
    messages.KeepWith: "keep_with",
    messages.Dismissed: "dismissed",
    messages.Finish: "finish",
    messages.Expelled: "expelled",
    messages.ServiceToWorker: "service_to_worker",
    messages.Depart: "depart",
    messages.Idle: "idle",
    messages.UseSlots: "use_slots",
    health.CheckHealth: "check_health",
}
_AGENT_KINDS = {name: kind for kind, name in _AGENT_BODIES.items()}
_MASTER_KINDS = {name: kind for kind, name in _MASTER_BODIES.items()}


def encode_agent(message: AgentMessage) -> bytes:
    """Encode an agent's message in its envelope."""
    envelope = edl_pb2.FromAgent()
    body = getattr(envelope, _AGENT_BODIES[type(message)])
    body.SetInParent()
    _fill(body, message)
    return envelope.SerializeToString()


def decode_agent(data: bytes) -> AgentMessage:
    """The inverse. Raises ``ProtocolError`` for anything that is not an agent's message."""
    return typing.cast(AgentMessage, _open(edl_pb2.FromAgent(), data, _AGENT_KINDS))


def encode_master(message: MasterMessage) -> bytes:
    """Encode a Master's message in its envelope. The same message often goes to all nodes, and one of them names all
    nodes, so its bytes are kept: encoding it once per node would be quadratic in the number of nodes."""
    kept, data = _encoded.get(type(message), (None, b""))
    if kept != message:
        data = _encode_master(message)
        _encoded[type(message)] = (message, data)
    return data


_encoded: dict[type, tuple[MasterMessage, bytes]] = {}
"""The last message of each kind, and its bytes."""


def _encode_master(message: MasterMessage) -> bytes:
    envelope = edl_pb2.FromMaster()
    body = getattr(envelope, _MASTER_BODIES[type(message)])
    body.SetInParent()
    _fill(body, message)
    return envelope.SerializeToString()


def decode_master(data: bytes) -> MasterMessage:
    """The inverse. Raises ``ProtocolError`` for anything that is not a Master's message."""
    return typing.cast(MasterMessage, _open(edl_pb2.FromMaster(), data, _MASTER_KINDS))


Loose = (
    status.JobStatus
    | status.HistoryEntry
    | status.Question
    | status.EventsRequest
    | status.Answer
    | node_requests.OutputRequest
    | node_requests.StacksRequest
    | node_requests.OutputLines
    | node_requests.OptionsRequest
    | node_requests.OptionValues
    | messages.Asked
    | ScaleRequest
    | Granted
)
"""Messages that are sent without an envelope."""


def encode(value: Loose) -> bytes:
    """Encode a message that needs no envelope."""
    message = getattr(edl_pb2, type(value).__name__)()
    _fill(message, value)
    return typing.cast(bytes, message.SerializeToString())


def decode(kind: type[T], data: bytes) -> T:
    """The inverse of ``encode``."""
    message = getattr(edl_pb2, kind.__name__)()
    _parse(message, data)
    return typing.cast(T, _build(kind, message))


def _open(envelope: Any, data: bytes, kinds: dict[str, type]) -> Any:
    _parse(envelope, data)
    name = envelope.WhichOneof("body")
    if name is None:
        raise ProtocolError(f"a {type(envelope).__name__} message of a kind this version of edl does not know")
    return _build(kinds[name], getattr(envelope, name))


def _parse(message: Message, data: bytes) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ProtocolError(f"not a {type(message).__name__} message: {error}") from error


def _fill(target: Any, value: Any) -> None:
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            sub = getattr(target, field.name)
            sub.SetInParent()
            _fill(sub, item)
        elif isinstance(item, tuple):
            repeated = getattr(target, field.name)
            for element in item:
                if dataclasses.is_dataclass(element):
                    _fill(repeated.add(), element)
                else:
                    repeated.append(element)
        else:
            setattr(target, field.name, item.value if isinstance(item, enum.Enum) else item)


def _member(kind: type[enum.Enum], value: str) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        raise ProtocolError(f"{value!r} is no {kind.__name__} that this version of edl knows") from None


def _build(kind: Any, message: Any) -> Any:
    fetch, reads = _plan(kind)
    values = fetch(message)
    if reads:
        values = list(values)
        for index, read in reads:
            values[index] = read(values[index])
    return kind(*values)


_Reader = Callable[[Any], Any]


@functools.cache
def _plan(kind: Any) -> tuple[Callable[[Any], Any], tuple[tuple[int, _Reader], ...]]:
    """Decoder of a dataclass: the getter of all its fields, in order, and the conversions of some. Built once per
    kind, because a world of a thousand nodes has as many members."""
    names = [field.name for field in dataclasses.fields(kind)]
    known = typing.get_type_hints(kind)
    found = [(index, read) for index, name in enumerate(names) if (read := _reader(known[name])) is not None]
    several = (
        operator.attrgetter(*names) if len(names) > 1 else lambda message: [getattr(message, one) for one in names]
    )
    return several, tuple(found)


def _reader(hint: Any) -> _Reader | None:
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0]
        return functools.partial(_build_all, element) if dataclasses.is_dataclass(element) else tuple
    if dataclasses.is_dataclass(hint):
        return functools.partial(_build, hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return functools.partial(_member, hint)
    return None


def _build_all(kind: Any, entries: Any) -> tuple[Any, ...]:
    return tuple(_build(kind, entry) for entry in entries)
