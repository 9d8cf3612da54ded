"""Text helpers for messages: numbers with nouns, sizes, durations, shortened lists, and untrusted text on one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone


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


LEAST_S = 0.0005
"""Shorter durations are not mentioned."""


def measured(amount_s: float) -> str:
    """A measured duration with about three significant digits: ``0.143 s``, ``5,310 s``."""
    digits = 3 if amount_s < 1 else 2 if amount_s < 10 else 1 if amount_s < 100 else 0
    return f"{amount_s:,.{digits}f} s"


def largest(parts: Mapping[str, float]) -> str:
    """The four largest durations, in parentheses and after a space; empty: none is worth mentioning."""
    long = sorted((one for one in parts.items() if one[1] >= LEAST_S), key=lambda one: -one[1])[:4]
    return f" ({', '.join(f'{name} {measured(part_s)}' for name, part_s in long)})" if long else ""


def goodput(slot_seconds: Mapping[str, float]) -> str:
    """A job's goodput, given its slot-seconds by use; empty: there are none."""
    whole_s = sum(slot_seconds.values())
    if not whole_s:
        return ""
    rest = {name.replace("_", " "): part_s for name, part_s in slot_seconds.items() if name != "useful"}
    share = slot_seconds.get("useful", 0.0) / whole_s
    return f"{share:.1%} of {measured(whole_s)} of slot time{largest(rest)}"


LAST_S = datetime(9999, 12, 31, 23, 59, tzinfo=timezone.utc).timestamp()


def day(wall_s: float) -> str:
    """A time in seconds since 1970, in UTC: ``2026-05-04 13:20 UTC``. Any number is accepted, because it may come from
    outside: a time before 1970 or after 9999 is shown as the nearest one between."""
    return datetime.fromtimestamp(min(max(0.0, wall_s), LAST_S), timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def cut(text: str, most: int) -> str:
    """The text, shortened to ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


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
