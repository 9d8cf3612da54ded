"""Messages arrive unchanged, and invalid ones are refused."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import types
import typing
from typing import Any

import pytest

from edl.config import FaultTolerance, JobSpec, NodeRange, Timeouts
from edl.errors import ProtocolError, SettingError
from edl.master.election import MasterInfo
from edl.master.state import Phase, Record
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire import (
    alarm,
    codec,
    edl_pb2,
    health,
    json_messages,
    messages,
    node_requests,
    plain,
    rank_pace,
    records,
    scale_requests,
    status,
)
from edl.wire.messages import Attach, Expelled, Finish, Leaving, Ready, StartRound, StopRound
from edl.wire.records import Failure, Member, NodeInfo, World

GARBAGE = (b"\xff", b"\x0a\xff", b"not protobuf", b"\x0a\x05ab")
ENVELOPES = {"FromAgent", "FromMaster"}


def dataclasses_of(module: types.ModuleType) -> list[type]:
    found = inspect.getmembers(module, inspect.isclass)
    return [kind for _, kind in found if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__]


MODULES = (messages, records, alarm, health, rank_pace, status, scale_requests, node_requests)
KINDS = [kind for module in MODULES for kind in dataclasses_of(module)]
AGENT_KINDS = typing.get_args(messages.AgentMessage)
MASTER_KINDS = typing.get_args(messages.MasterMessage)


def example(hint: Any, number: int = 1) -> Any:
    """A value of a type in which no two fields are the same and none has its default."""
    hint = getattr(hint, "__supertype__", hint)
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0]
        return (example(element, number + 1), example(element, number + 20))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return example(typing.get_args(hint)[0], number)
    if dataclasses.is_dataclass(hint):
        known = typing.get_type_hints(hint)
        return typing.cast(Any, hint)(
            **{name: example(kind, number + i) for i, (name, kind) in enumerate(known.items())}
        )
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return list(hint)[-1]
    by_type: dict[Any, Any] = {str: f"text {number} äß", int: number, bool: True, float: number + 0.25}
    return by_type[hint]


def names(kinds: list[type] | tuple[Any, ...]) -> list[str]:
    return [kind.__name__ for kind in kinds]


class TestCodec:
    @pytest.mark.parametrize("kind", KINDS, ids=names(KINDS))
    def test_fields_are_those_of_the_proto_message(self, kind: type) -> None:
        proto = edl_pb2.DESCRIPTOR.message_types_by_name[kind.__name__]
        assert [field.name for field in proto.fields] == [field.name for field in dataclasses.fields(kind)]

    def test_every_proto_message_has_its_dataclass(self) -> None:
        assert set(edl_pb2.DESCRIPTOR.message_types_by_name) - ENVELOPES == set(names(KINDS))

    @pytest.mark.parametrize(("envelope", "kinds"), [("FromAgent", AGENT_KINDS), ("FromMaster", MASTER_KINDS)])
    def test_an_envelope_holds_each_of_its_kinds(self, envelope: str, kinds: tuple[Any, ...]) -> None:
        fields = edl_pb2.DESCRIPTOR.message_types_by_name[envelope].oneofs_by_name["body"].fields
        assert sorted(field.message_type.name for field in fields if field.message_type) == sorted(names(kinds))

    @pytest.mark.parametrize("kind", KINDS, ids=names(KINDS))
    def test_a_full_message_arrives_as_it_was(self, kind: type) -> None:
        value = example(kind)
        assert codec.decode(kind, codec.encode(value)) == value

    @pytest.mark.parametrize("kind", AGENT_KINDS, ids=names(AGENT_KINDS))
    def test_an_agents_message_arrives_as_it_was(self, kind: type) -> None:
        value = example(kind)
        arrived = codec.decode_agent(codec.encode_agent(value))
        assert type(arrived) is kind
        assert arrived == value

    @pytest.mark.parametrize("kind", MASTER_KINDS, ids=names(MASTER_KINDS))
    def test_a_masters_message_arrives_as_it_was(self, kind: type) -> None:
        value = example(kind)
        arrived = codec.decode_master(codec.encode_master(value))
        assert type(arrived) is kind
        assert arrived == value

    def test_a_message_of_nothing_but_defaults_keeps_its_kind(self) -> None:
        assert codec.decode_agent(codec.encode_agent(Leaving(""))) == Leaving("")
        assert codec.decode_agent(codec.encode_agent(Ready(Round(0), ()))) == Ready(Round(0), ())
        assert codec.decode_master(codec.encode_master(Expelled(""))) == Expelled("")

    def test_what_goes_to_all_nodes_is_encoded_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        encoded: list[object] = []
        really = codec._encode_master

        def encode(message: messages.MasterMessage) -> bytes:
            encoded.append(message)
            return really(message)

        monkeypatch.setattr(codec, "_encode_master", encode)
        for round_ in (Round(1), Round(2), Round(1)):
            for dump in (False, True, False):
                for _ in range(3):
                    order = StopRound(round_, f"node {round_}", dump)
                    assert codec.decode_master(codec.encode_master(order)) == order
                    codec.encode_master(Expelled(""))
        assert len([one for one in encoded if isinstance(one, StopRound)]) == 9

    def test_numbers_below_zero_survive(self) -> None:
        info = NodeInfo(NodeId("a"), Incarnation(2**62), "h", 1, 1, node_rank=-1)
        attach = Attach(info, Round(0), Round(0), False)
        assert codec.decode_agent(codec.encode_agent(attach)) == attach
        finish = Finish(-9, "", (Failure(NodeId("a"), Round(1), Rank(0), 0, -11, "was killed by SIGSEGV"),))
        assert codec.decode_master(codec.encode_master(finish)) == finish

    @pytest.mark.parametrize("data", GARBAGE)
    def test_garbage_is_refused(self, data: bytes) -> None:
        with pytest.raises(ProtocolError, match="FromAgent"):
            codec.decode_agent(data)
        with pytest.raises(ProtocolError, match="FromMaster"):
            codec.decode_master(data)
        with pytest.raises(ProtocolError, match="JobStatus"):
            codec.decode(status.JobStatus, data)

    @pytest.mark.parametrize("data", [b"", b"\xf2\x07\x03abc"], ids=["empty", "field 126"])
    def test_a_kind_from_the_future_is_refused(self, data: bytes) -> None:
        with pytest.raises(ProtocolError, match="does not know"):
            codec.decode_agent(data)
        with pytest.raises(ProtocolError, match="does not know"):
            codec.decode_master(data)

    def test_a_field_from_the_future_is_ignored(self) -> None:
        assert codec.decode(status.EventsRequest, b"\x08\x05\xf2\x07\x03abc") == status.EventsRequest(5, False)


MEMBER = Member(NodeId("a"), Incarnation(7), "host", 2, Rank(0), (1, 2, 3))
WORLD = World(Round(4), (MEMBER,), 1)
SPEC = JobSpec(
    JobId("job"),
    NodeRange(2, 8, 2),
    max_restarts=5,
    fault_tolerance=FaultTolerance.SHRINK,
    timeouts=Timeouts(1.5, 0.0, 2.0, 30.0),
)
RECORD = Record(
    phase=Phase.ENDED,
    round=Round(4),
    world=WORLD,
    reason="because",
    restarts=2,
    charged=True,
    done=(NodeId("a"), NodeId("b")),
    failures=(example(Failure),),
    outcome=Finish(1, "over", (example(Failure, 30),)),
)


class TestPlain:
    @pytest.mark.parametrize(
        "value",
        [
            SPEC,
            RECORD,
            Record(),
            WORLD,
            MasterInfo(NodeId("a"), "::1", 80),
            example(NodeInfo),
            example(status.HistoryEntry),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_lies_in_the_store_is_read_as_it_was_written(self, value: Any) -> None:
        assert plain.loads(type(value), plain.dumps(value)) == value

    def test_every_wire_message_can_lie_in_the_store(self) -> None:
        for kind in KINDS:
            assert plain.loads(kind, plain.dumps(example(kind))) == example(kind)

    def test_a_string_that_is_no_text_survives(self) -> None:
        master = MasterInfo(NodeId("a"), "lone \udcff surrogate", 80)
        assert plain.loads(MasterInfo, plain.dumps(master)) == master

    def test_a_key_from_the_future_is_ignored(self) -> None:
        values = json_messages.to_plain(RECORD)
        values["later"] = 1
        values["world"]["members"][0]["colour"] = "blue"
        assert json_messages.from_plain(Record, values) == RECORD

    def test_a_missing_key_takes_the_default(self) -> None:
        assert plain.loads(Record, b'{"round": 3}') == Record(round=Round(3))

    def test_a_missing_key_without_default_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match=r"not a MasterInfo.*port"):
            plain.loads(MasterInfo, b'{"node": "a", "host": "h"}')

    @pytest.mark.parametrize(
        ("kind", "key", "value"),
        [
            (MasterInfo, "port", "80"),
            (MasterInfo, "port", 80.5),
            (MasterInfo, "port", True),
            (MasterInfo, "port", None),
            (MasterInfo, "host", 7),
            (World, "members", "abc"),
            (World, "members", {"a": 1}),
            (World, "members", 7),
            (World, "members", None),
            (World, "members", ["abc"]),
            (World, "members", [[1, 2]]),
            (Record, "phase", "asleep"),
            (Record, "phase", ["running"]),
            (Record, "done", "abc"),
            (Record, "done", {"a": 1}),
            (Record, "charged", 1),
            (Record, "world", 7),
            (Timeouts, "recover_s", "600"),
            (Timeouts, "recover_s", True),
        ],
    )
    def test_a_value_of_another_type_is_refused(self, kind: type, key: str, value: object) -> None:
        good = {MasterInfo: MasterInfo(NodeId("a"), "h", 80), World: WORLD, Record: RECORD, Timeouts: Timeouts()}[kind]
        values = json_messages.to_plain(good) | {key: value}
        with pytest.raises(ProtocolError):
            json_messages.from_plain(kind, values)

    @pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b'"text"', b"null", b"\xff\xfe"])
    def test_another_document_is_refused(self, text: bytes) -> None:
        with pytest.raises(ProtocolError, match="not a Record"):
            plain.loads(Record, text)

    def test_whole_numbers_are_times_too(self) -> None:
        read = plain.loads(Timeouts, b'{"recover_s": 5}')
        assert read.recover_s == 5.0
        assert type(read.recover_s) is float

    def test_settings_are_checked_again_when_they_are_read(self) -> None:
        with pytest.raises(SettingError, match="--max-restarts=-1"):
            json_messages.from_plain(JobSpec, json_messages.to_plain(SPEC) | {"max_restarts": -1})

    def test_it_is_json(self) -> None:
        assert json.loads(plain.dumps(SPEC))["fault_tolerance"] == "shrink"


class TestWorld:
    def test_finds_members_by_name(self) -> None:
        second = dataclasses.replace(MEMBER, node=NodeId("b"), slots=1, first_rank=Rank(2), host="other", ports=(9, 8))
        world = World(Round(1), (second, MEMBER), 0)
        assert world.size == 3
        assert (world.master_host, world.master_port) == ("other", 9)
        assert world.member(NodeId("a")) is MEMBER
        assert world.member(NodeId("c")) is None
        assert world.position(NodeId("a")) == 1
        with pytest.raises(KeyError, match="c"):
            world.position(NodeId("c"))

    def test_travels_inside_the_order_to_start(self) -> None:
        order = StartRound(WORLD, "why")
        assert codec.decode_master(codec.encode_master(order)) == order
