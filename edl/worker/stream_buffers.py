"""The buffers of one stream of snapshots, as a worker has mapped them."""

from __future__ import annotations

from dataclasses import dataclass

from edl.worker.mapped_memory import MappedMemory

MOST_BUFFERS = 4
"""Maximum number of buffers of a stream, which the agent never exceeds. The oldest is unmapped when there would be
more."""
REFUSED_S = 60.0
"""Seconds for which a refusal holds, so that a launcher without memory is not asked at each commit."""
_SMALL_BYTES = 256 * 1024
"""Tolerance in bytes beyond twice the needed size of a buffer."""


@dataclass
class StreamBuffers:
    """The buffers of one stream."""

    maps: dict[int, MappedMemory]
    """By buffer number."""
    ready: tuple[int, int] | None = None
    """Number and size of the buffer to write next."""
    due: int = 0
    """Outstanding answers: exactly one for each ``Want`` and each ``Committed``, in order. Only the last one counts,
    since an earlier offer may have been withdrawn or replaced."""
    needed: int = 0
    """Bytes of the newest snapshot."""
    refused: str = ""
    """Why there is no buffer."""
    ask_again_s: float = 0.0
    """Time on the monotonic clock from which a refusal does not hold any more: the host may have been short of memory
    for a moment only."""
    ahead: bool = False
    """The outstanding request was made ahead of a commit, so a refusal now does not apply to that commit."""
    unknown: int = 0
    """Number of consecutive buffers that came without a descriptor."""

    def map(self, number: int, memory: MappedMemory) -> None:
        """Add a buffer, and unmap those that the agent will not offer again: they do not fit the current snapshot, or
        exceed the maximum number."""
        self.drop(number)
        for other, old in list(self.maps.items()):
            if not self.needed <= old.size <= 2 * self.needed + _SMALL_BYTES:
                self.drop(other)
        while len(self.maps) >= MOST_BUFFERS:
            self.drop(next(iter(self.maps)))
        self.maps[number] = memory

    def refuse(self, why: str, now_s: float) -> None:
        """Note that there is no buffer, for ``REFUSED_S`` seconds."""
        self.refused, self.ask_again_s = why, now_s + REFUSED_S

    def drop(self, number: int) -> None:
        """Unmap a buffer, if it is mapped."""
        old = self.maps.pop(number, None)
        if old is not None:
            old.close_in_background()
