"""One codec for all JSON: what it takes, what it refuses, and what it says then."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest

from edl.errors import ProtocolError
from edl.wire import json_messages
from edl.wire.json_messages import TaggedUnion, decode, encode


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0


@dataclass(frozen=True, slots=True)
class Whole:
    limit_s: float = 0.0
    parts: tuple[Part, ...] = ()
    best: Part | None = None
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Empty:
    pass


UNION: TaggedUnion[Part | Whole | Empty] = TaggedUnion(Part, Whole, Empty, tag="kind", what="a message")


@pytest.mark.parametrize("limit_s", [math.inf, -math.inf, 1.5])
def test_numbers_without_end_survive(limit_s: float) -> None:
    assert decode(Whole, encode(Whole(limit_s))) == Whole(limit_s)
    assert math.isnan(decode(Whole, encode(Whole(math.nan))).limit_s)


def test_file_names_that_are_no_text_survive() -> None:
    value = Whole(parts=(Part("lone \udcff"),), best=Part("ü"))
    assert decode(Whole, encode(value)) == value


def test_subclasses_of_basic_types_are_written_as_those() -> None:
    class Text(str):
        __slots__ = ()

    assert encode(Part(Text("a"))) == b'{"name":"a","port":0}'
    assert encode(Whole(np.float64(0.5))).startswith(b'{"limit_s":0.5')
    with pytest.raises(TypeError, match="a complex cannot be written as JSON"):
        encode(Part(3j))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"parts":[{"name":"a"},{"name":"b","port":"80"}]}', r"not a Whole: parts\[1\]\.port=80: Expected `int`"),
        ('{"best":{"name":"a","port":70000}}', r"best\.port=70000: Expected `int` <= 65535"),
        ('{"best":{"name":"a","port":true}}', r"best\.port=True: Expected `int`, got `bool`"),
        ('{"parts":[{}]}', r"parts\[0\]={}: Object missing required field `name`"),
        ("[]", r"value=\[\]: Expected `object`"),
        ("{", "not a Whole .Input data was truncated.: {"),
        ("[" * 100_000, "not a Whole .Expected `object`, got `array`"),
    ],
)
def test_an_error_names_the_place_and_the_value_and_what_to_do(text: str, said: str) -> None:
    with pytest.raises(ProtocolError, match=said) as refused:
        decode(Whole, text, advice="Do that")
    assert str(refused.value).endswith(". Do that")
    assert len(str(refused.value)) < 300


def test_a_union_tells_its_kinds_apart() -> None:
    for message in (Part("a", 1), Whole(data=b"\xff"), Empty()):
        assert UNION.decode(UNION.encode(message)) == message
    assert UNION.encode(Part("a", 1)) == b'{"kind":"Part","name":"a","port":1}'
    assert UNION.encode(Empty()) == b'{"kind":"Empty"}'


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b'{"kind":1}', b'{"kind":"Other"}', b'{"kind":"Part"}', b"\xff", b"[" * 100_000]
)
def test_what_is_in_no_union_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"kind|message|Part"):
        UNION.decode(text)
    other: Any = "x"
    with pytest.raises(KeyError):
        UNION.encode(other)


def test_a_place_that_cannot_be_followed_is_named_all_the_same() -> None:
    @dataclass(frozen=True)
    class Counts:
        by_name: dict[str, int]

    with pytest.raises(ProtocolError, match=r"by_name\[\.\.\.\]: Expected `int`"):
        json_messages.from_plain(Counts, {"by_name": {"a": "b"}})
