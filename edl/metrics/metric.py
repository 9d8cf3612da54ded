"""One row of a table of metrics."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

F = TypeVar("F")
Values = Iterable[tuple[tuple[str, ...], float]]
"""Values of a metric, each with the values of its labels."""


class MetricKind(enum.Enum):
    """Types of metrics, as Prometheus names them."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class Metric(Generic[F]):
    """One metric that is read from facts of type ``F``."""

    name: str
    """In base units; that of a counter ends with ``_total``."""
    help: str
    read: Callable[[F], Values]
    """The current values. A value that is unknown is left out."""
    labels: tuple[str, ...] = ()
    kind: MetricKind = MetricKind.GAUGE


def plain(value: Callable[[F], float | None]) -> Callable[[F], Values]:
    """Reads one value without labels; None: unknown."""

    def read(facts: F) -> Values:
        found = value(facts)
        return () if found is None else (((), float(found)),)

    return read


def one_hot(value: Callable[[F], str], known: Iterable[str]) -> Callable[[F], Values]:
    """Reads a state as one value per known state: 1 for the current one, 0 for the others."""
    states = tuple(known)

    def read(facts: F) -> Values:
        current = value(facts)
        return [((state,), float(state == current)) for state in dict.fromkeys((*states, current))]

    return read
