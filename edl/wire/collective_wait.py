"""Datagrams between a worker that uses torch.distributed and its agent, about collectives that it waits for.

The worker sends a ``CollectiveWait`` about once a second to the address of its agent's worker server plus
``ADDRESS_SUFFIX``; the agent may answer with a ``DumpRequest``. Lost datagrams do no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

ADDRESS_SUFFIX = "-collectives"
LARGEST_BYTES = 8192
"""Largest datagram."""
MOST_SHOWN = 4
"""Most collectives in one message."""


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A collective that a worker has called and that is not complete."""

    name: str
    """Backend and operation, such as ``nccl:all_reduce``."""
    number: int
    """Counts the collectives of its group."""
    group: str
    sizes: str = ""
    """Shapes of its inputs, for people."""

    @property
    def text(self) -> str:
        """For people."""
        sizes = f" of {self.sizes}" if self.sizes else ""
        return f"{self.name}{sizes}, number {self.number} of group {self.group}"


@dataclass(frozen=True, slots=True)
class CollectiveWait:
    """What a worker waits for; not worth mentioning while collectives complete."""

    state: str = ""
    """Differs after each collective that is called or completes; empty: none is pending."""
    pending: tuple[PendingCollective, ...] = ()
    """The oldest ones, at most ``MOST_SHOWN``."""


@dataclass(frozen=True, slots=True)
class DumpRequest:
    """Write the flight recorder's content to this path."""

    path: str
