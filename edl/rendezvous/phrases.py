"""Small turns of phrase for messages: numbers with their nouns, lists that are not too long, words of somebody else."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, noun: str = "node") -> str:
    """A number with its noun: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Some names, and how many more."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def one_line(text: str) -> str:
    """Somebody's words as they can be shown or given to a program: no control characters, no halves of characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
