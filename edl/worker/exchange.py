"""Exchanges short messages between all ranks, normally with a single collective."""

from __future__ import annotations

from collections.abc import Callable

FIRST_BYTES = 1024
"""Bytes sent in the first collective, including the length; longer messages need a second one."""
_LENGTH_BYTES = 4


def exchange(data: bytes, gather: Callable[[bytes], list[bytes]]) -> list[bytes]:
    """The messages of all ranks, in the order of the ranks.

    ``gather`` does the same for messages of equal length. It must raise rather than return the result of an aborted
    collective, because lengths are read from that result.
    """
    head = len(data).to_bytes(_LENGTH_BYTES, "big") + data[: FIRST_BYTES - _LENGTH_BYTES]
    heads = gather(head.ljust(FIRST_BYTES, b"\0"))
    lengths = [int.from_bytes(one[:_LENGTH_BYTES], "big") for one in heads]
    most = max(lengths) + _LENGTH_BYTES - FIRST_BYTES
    rests = gather(data[FIRST_BYTES - _LENGTH_BYTES :].ljust(most, b"\0")) if most > 0 else [b""] * len(heads)
    return [(first[_LENGTH_BYTES:] + rest)[:length] for first, rest, length in zip(heads, rests, lengths, strict=True)]
