"""Text helpers for messages: numbers with nouns, sizes, durations, shortened lists, and untrusted text on one line."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, noun: str = "node") -> str:
    """A number with its noun: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


LISTED = 5
"""Most names in a message."""


def listed(names: Sequence[str]) -> str:
    """The first ``LISTED`` names and the number of the others: ``a, b and 3 more``."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def one_line(text: str) -> str:
    """Untrusted text made safe to print: one line, without control characters or lone surrogates."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def amount(size: int) -> str:
    """A number of bytes: ``12.0 MiB``."""
    value, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return count(size, "byte") if unit == "bytes" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """An approximate duration: ``40 s``, ``3 min``, ``2 h 5 min``, ``4 days``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{round(minutes / 1440)} days"
