"""Text helpers for messages: numbers with nouns, shortened lists, and untrusted text on one line."""

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


def lines_of(text: str) -> list[str]:
    """The lines of untrusted text, made safe to print like ``one_line``, but with their indentation."""
    lines = (line.expandtabs() for line in text.splitlines())
    return ["".join(letter if letter.isprintable() else " " for letter in line).rstrip() for line in lines]


def one_line(text: str) -> str:
    """Untrusted text made safe to print: one line, without control characters or lone surrogates."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
