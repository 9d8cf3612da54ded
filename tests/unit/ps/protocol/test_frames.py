"""The layout of frames, and the proofs at the beginning of a connection: no socket here."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.errors import ProtocolError
from ps.protocol.frames import (
    HEADER_BYTES,
    MOST_BODY,
    MOST_HEAD,
    Frame,
    FrameOp,
    check_of,
    hash_of,
    pack,
    pack_head,
    unpack,
    unpack_head,
    views,
)
from ps.protocol.handshake import ANSWER_BYTES, MASTER, OPENING_BYTES, TRAINER, Called, CallerHello, Calling


@given(
    st.sampled_from(list(FrameOp)),
    st.integers(0, (1 << 64) - 1),
    st.binary(max_size=50),
    st.lists(st.binary(max_size=50), max_size=3),
    st.booleans(),
    st.floats(0, 1e12),
)
def test_what_goes_in_comes_out(
    op: FrameOp, request: int, head: bytes, parts: list[bytes], check: bool, wait_s: float
) -> None:
    body = views(parts)
    data = pack(op, request, head, body, wait_s=wait_s, check=check)
    header = unpack(data[:HEADER_BYTES])
    assert (header.op, header.request, header.head_bytes) == (op, request, len(head))
    assert header.body_bytes == sum(map(len, parts))
    assert header.wait_s == pytest.approx(min(wait_s, (1 << 32) / 1000), abs=0.002)
    header.accept_head(data[HEADER_BYTES:])
    whole = b"".join(parts)
    header.accept_body(hash_of(whole))
    assert (header.body_check is None) == (not whole or not check)


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("borrows", [False, True])
@pytest.mark.parametrize("check", [False, True])
def test_where_the_body_is_comes_through(lent: bool, borrows: bool, check: bool) -> None:
    data = pack(FrameOp.PULL, 7, b"head", [memoryview(b"body")], check=check, lent=lent, borrows=borrows)
    header = unpack(data[:HEADER_BYTES])
    assert (header.lent, header.borrows) == (lent, borrows)
    assert (header.body_check is not None) == (check and not lent), (
        "what is lent is not sent, and may change until read"
    )
    plain = unpack(pack(FrameOp.PULL, 7, check=check)[:HEADER_BYTES])
    assert (plain.lent, plain.borrows) == (False, False)


def test_the_largest_sizes_are_allowed() -> None:
    head = b"x" * MOST_HEAD
    lazy = np.broadcast_to(np.zeros(1, np.uint8), (MOST_BODY,)).data
    header = unpack(pack(FrameOp.PUSH, 1, head, [lazy], check=False)[:HEADER_BYTES])
    assert (header.head_bytes, header.body_bytes) == (MOST_HEAD, MOST_BODY)
    assert Frame(FrameOp.OK, 1, pack_head({"a": 1}), memoryview(b"")).json() == {"a": 1}


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_header_with_any_bit_turned_is_refused(bit: int) -> None:
    data = bytearray(pack(FrameOp.PULL, 7, b"head", [memoryview(b"body")], check=True)[:HEADER_BYTES])
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        unpack(data)


def test_heads_and_bodies_are_checked() -> None:
    header = unpack(pack(FrameOp.PULL, 7, b"head", [memoryview(b"body")], check=True)[:HEADER_BYTES])
    with pytest.raises(ProtocolError, match="head of a frame"):
        header.accept_head(b"hexd")
    with pytest.raises(ProtocolError, match="body of a frame"):
        header.accept_body(hash_of(b"bodx"))
    unchecked = unpack(pack(FrameOp.PULL, 7, b"head", [memoryview(b"body")], check=False)[:HEADER_BYTES])
    unchecked.accept_body(hash_of(b"anything"))


def test_the_checksum_of_parts_is_that_of_the_whole() -> None:
    parts = views([b"some", b"parts", np.arange(3)])
    assert check_of(parts) == hash_of(b"".join(parts))


def test_other_versions_and_sizes_that_cannot_be_are_refused() -> None:
    good = pack(FrameOp.OK, 1, check=True)
    unknown = good[:4] + b"\x63" + good[5:-8]
    with pytest.raises(ProtocolError, match="another version"):
        unpack(unknown + hash_of(unknown).to_bytes(8, "little"))
    for place, value in ((5, 0x80), (6, 1)):  # a flag and a field that this version does not know
        unknown = good[:place] + bytes([value]) + good[place + 1 : -8]
        with pytest.raises(ProtocolError, match="another version"):
            unpack(unknown + hash_of(unknown).to_bytes(8, "little"))
    large = good[:8] + (MOST_HEAD + 1).to_bytes(4, "little") + good[12:-8]
    with pytest.raises(ProtocolError, match=f"head of {MOST_HEAD + 1} bytes"):
        unpack(large + hash_of(large).to_bytes(8, "little"))
    with pytest.raises(ProtocolError, match="begins with b'GET '"):
        unpack(b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES))


def test_too_much_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ProtocolError, match="Ask for less"):
        pack(FrameOp.PUSH, 1, b"x" * (MOST_HEAD + 1), check=False)
    lazy = np.broadcast_to(np.zeros(1, np.uint8), (MOST_BODY + 1,)).data
    with pytest.raises(ProtocolError, match="Ask for less"):
        pack(FrameOp.PUSH, 1, b"", [lazy], check=False)


def test_any_array_is_a_part_of_a_body_without_being_copied() -> None:
    array = np.arange(12, dtype=np.float16).reshape(3, 4)
    (view,) = views([array, np.zeros((0, 5)), b""])
    array[0, 0] = 5
    assert bytes(view) == array.tobytes()
    with pytest.raises(ProtocolError, match="not contiguous in memory"):
        views([array[:, ::2]])


def test_heads_are_json_objects() -> None:
    assert unpack_head(pack_head({"step": 3, "parts": [["t", 5, "f4"]]})) == {"step": 3, "parts": [["t", 5, "f4"]]}
    assert unpack_head(b"") == {}
    for bad in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        with pytest.raises(ProtocolError, match="not the head"):
            unpack_head(bad)


# --- the beginning of a connection -----------------------------------------------------------------------------------


def test_both_sides_prove_that_they_know_the_secret() -> None:
    calling = Calling("secret")
    assert len(calling.opening) == OPENING_BYTES
    called = Called("secret", calling.opening)
    assert len(called.answer) == ANSWER_BYTES
    assert called.accepts(calling.answer(called.answer))


def test_a_wrong_secret_is_seen_by_either_side() -> None:
    calling = Calling("secret")
    with pytest.raises(ProtocolError, match="does not know the secret"):
        calling.answer(Called("other", calling.opening).answer)
    called = Called("secret", calling.opening)
    assert not called.accepts(bytes(32))


def test_a_proof_is_good_for_one_connection_and_one_side() -> None:
    first, second = Calling("secret"), Calling("secret")
    called = Called("secret", first.opening)
    proof = first.answer(called.answer)
    assert not Called("secret", first.opening).accepts(proof)
    with pytest.raises(ProtocolError):
        second.answer(called.answer)
    assert not called.accepts(called.answer[-32:])


def test_strangers_are_told_from_callers() -> None:
    with pytest.raises(ProtocolError, match="another protocol"):
        Called("secret", b"GET / HTTP/1.1\r\n".ljust(OPENING_BYTES))


def test_a_hello_says_who_calls() -> None:
    hello = CallerHello(TRAINER, 3, "n1/0", check=False)
    assert CallerHello.unpack(hello.pack()) == hello
    assert str(hello) == "trainer 3 (n1/0)"
    assert str(CallerHello(MASTER)) == "master"
    for field, bad in (("role", "boss"), ("number", -1), ("number", True), ("name", 3), ("token", "x"), ("check", 1)):
        plain = {"role": TRAINER, "number": 1, "name": "n", "token": 0, "check": True, field: bad}
        with pytest.raises(ProtocolError, match="not a HELLO"):
            CallerHello.unpack(pack_head(plain))
