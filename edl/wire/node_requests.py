"""Requests that every launcher answers for its own node, whether or not it is the Master, and the answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """Request for the recent output of a node's workers."""

    ranks: tuple[int, ...] = ()
    """Only lines written while their worker had one of these ranks; empty: all lines."""
    lines: int = 20
    """Most lines of each worker in a first answer, the newest ones."""
    after: int = 0
    """``OutputLines.next`` of the previous answer: only later lines; 0: this is the first request."""


@dataclass(frozen=True, slots=True)
class StacksRequest:
    """Request for the stacks of a node's workers, which continue to run."""

    ranks: tuple[int, ...] = ()
    """Only those of workers with one of these ranks; empty: all of them."""


@dataclass(frozen=True, slots=True)
class OptionsRequest:
    """Request for the options of a launcher."""


@dataclass(frozen=True, slots=True)
class OptionValue:
    """One option of a launcher, with its value and where that comes from."""

    flag: str
    """With dashes, such as ``--max-restarts``."""
    value: str
    """As on the command line; ``…`` in place of a secret."""
    source: str
    """``default``, ``cluster``, ``pet``, ``edl``, ``command-line`` or ``paddle``, in order of precedence."""
    origin: str = ""
    """The variable that has set it, such as ``PADDLE_NNODES``; empty: none has."""
    default: str = ""


@dataclass(frozen=True, slots=True)
class OptionValues:
    """The options of a launcher, in the order of docs/launcher.md."""

    options: tuple[OptionValue, ...]


@dataclass(frozen=True, slots=True)
class OutputLine:
    """One line that a worker wrote."""

    rank: int
    """The worker's rank when the line was read; -1: it had no world yet."""
    round: int
    stderr: bool
    text: str
    """As written, with its control characters; without the newline."""


@dataclass(frozen=True, slots=True)
class OutputLines:
    """Lines of all workers of a node, in the order in which its launcher read them."""

    lines: tuple[OutputLine, ...]
    next: int
    """To continue with, as ``OutputRequest.after``; positive."""
    gap: bool = False
    """Whether lines of a worker after ``OutputRequest.after`` are missing, because they are no longer kept."""
