"""Short messages from every rank to every rank, with one collective as a rule."""

from __future__ import annotations

from collections.abc import Callable

FIRST_BYTES = 1024
"""What goes in the first collective, with the length in front; who has more, needs a second one."""
_LENGTH_BYTES = 4


def exchange(data: bytes, gather: Callable[[bytes], list[bytes]]) -> list[bytes]:
    """What each rank has handed over, in the order of the ranks.

    ``gather`` does that for messages that are equally long on all ranks. It raises rather than return what an aborted
    collective has left: lengths are read from it.
    """
    head = len(data).to_bytes(_LENGTH_BYTES, "big") + data[: FIRST_BYTES - _LENGTH_BYTES]
    heads = gather(head.ljust(FIRST_BYTES, b"\0"))
    lengths = [int.from_bytes(one[:_LENGTH_BYTES], "big") for one in heads]
    most = max(lengths) + _LENGTH_BYTES - FIRST_BYTES
    rests = gather(data[FIRST_BYTES - _LENGTH_BYTES :].ljust(most, b"\0")) if most > 0 else [b""] * len(heads)
    return [(first[_LENGTH_BYTES:] + rest)[:length] for first, rest, length in zip(heads, rests, lengths, strict=True)]
