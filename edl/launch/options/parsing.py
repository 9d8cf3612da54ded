"""Parsers and checks that several options share. Pure."""

from __future__ import annotations

import math
import re

from edl.config import HangTimeout
from edl.errors import SettingError
from edl.launch.options.option import Check, Parser


def bytes_from(option: str, text: str) -> int:
    """Parse an amount of memory: ``512M``, ``8G``, ``1.5T`` (powers of 1024) or bytes. Raises ``SettingError``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)i?[bB]?", text.strip())
    if match is None:
        raise SettingError(option, text, "not an amount of memory", "Write bytes, or 512M, 8G, 1.5T")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def bytes_or_default(option: str, text: str) -> int:
    """Like ``bytes_from``, but -1 for an empty text. Raises ``SettingError``."""
    return bytes_from(option, text) if text else -1


def whole(option: str, text: str) -> int:
    """Parse a whole number, 0 or more. Raises ``SettingError``."""
    if not text.isdecimal():
        raise SettingError(option, text, "must be a whole number, 0 or more")
    return int(text)


def count_or_none(least: int) -> Parser:
    """A parser for a whole number of at least ``least``; an empty text gives 0."""

    def parse(option: str, text: str) -> int:
        text = text.strip()
        if not text:
            return 0
        if not text.isdecimal() or int(text) < least:
            advice = "Omit it for none" if least else ""
            raise SettingError(option, text, f"must be a whole number of at least {least}", advice)
        return int(text)

    return parse


def seconds(option: str, text: str) -> float:
    """Parse a number of seconds, of which the settings check the range. Raises ``SettingError``."""
    try:
        return float(text)
    except ValueError:
        raise SettingError(option, text, "must be a number of seconds") from None


def hang_timeout(option: str, text: str) -> HangTimeout:
    """Parse ``auto``, ``auto:SECONDS`` or a number of seconds. Raises ``SettingError``."""
    word, colon, rest = text.strip().partition(":")
    auto = word == "auto"
    if auto and not colon:
        return HangTimeout()
    try:
        number = float(rest if auto else text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SettingError(option, text, "must be auto, auto:SECONDS or a number of seconds", "Write auto, 600 or 0")
    return HangTimeout(auto, number)


def names(option: str, text: str) -> tuple[str, ...]:
    """Split ``a,b`` at commas, without surrounding blanks and empty parts."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def between(least: int, most: int) -> Check:
    """A check that a number is from ``least`` to ``most``."""
    return lambda value: "" if least <= value <= most else f"must be from {least} to {most}"


def above_zero(value: float) -> str:
    """Check that a number is above 0; returns what is wrong, or an empty string."""
    return "" if value > 0 else "must be more than 0"


def at_least(least: int, why: str = "") -> Check:
    """A check that a number is at least ``least``. ``why``: the reason, for the error."""
    allowed = f"must be at least {least}" if least else "must be 0 or more"
    return lambda value: "" if value >= least else allowed + (f": {why}" if why else "")


def finite_days(value: float) -> str:
    """Check that a number of days is finite and 0 or more; returns what is wrong, or an empty string."""
    return "" if 0 <= value < math.inf else "must be a number of days, 0 or more"


def finite_seconds(value: float) -> str:
    """Check that a number of seconds is finite and 0 or more; returns what is wrong, or an empty string."""
    return "" if 0 <= value < math.inf else "must be a number of seconds, 0 or more"
