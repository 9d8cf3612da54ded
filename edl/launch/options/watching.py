"""Options about watchdogs and notifications."""

from __future__ import annotations

import math

from edl.errors import SettingError
from edl.launch.options.option import Option, Section, Setting
from edl.launch.options.parsing import bytes_from
from edl.launch.settings import LaunchSettings
from edl.notify.settings import NotifySettings
from edl.watch.table import BY_NAME, OFF, WATCHDOGS, WatchLimits

NOTHING = "off"


def limits_from(option: str, text: str) -> WatchLimits:
    """Parse ``NAME=LIMIT,…``, or ``off`` for no watchdogs at all. Raises ``SettingError``."""
    if text.strip() == NOTHING:
        return WatchLimits(tuple((one.name, OFF) for one in WATCHDOGS))
    changed: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, limit = (piece.strip() for piece in part.partition("="))
        if name not in BY_NAME:
            raise SettingError(option, part, "there is no such watchdog", f"Possible: {', '.join(BY_NAME)}")
        changed[name] = _limit(option, part, limit, BY_NAME[name].unit)
    return WatchLimits(tuple(sorted(changed.items())))


def _limit(option: str, part: str, text: str, unit: str) -> float:
    if text == NOTHING:
        return OFF
    if unit == "bytes" and text:
        return float(bytes_from(option, text))
    try:
        number = float(text)
    except ValueError:
        number = OFF
    if not 0 <= number < math.inf:
        raise SettingError(option, part, f"must be a number of {unit}, 0 or more", "Write NAME=LIMIT, or NAME=off")
    return number


WATCHING = (
    Option(
        "--watch",
        setting=Setting(LaunchSettings, "limits"),
        written_default="",
        parse=limits_from,
        metavar="NAME=LIMIT[,…]|off",
        help=(
            "Limits of [watchdogs](notifications.md#watchdogs) that differ from the defaults, such as "
            "`disk-space=50G,waiting=off`. `off`: no watchdogs."
        ),
    ),
    Option(
        "--notify",
        written_default="",
        repeated=True,
        metavar="URL",
        help=(
            "Notify this channel: `https://…` (webhook), `smtp://…` or `smtps://…` (mail), `exec:/PROGRAM`, or any "
            "address of apprise, see [notifications.md](notifications.md). May be given several times; in `EDL_NOTIFY` "
            "separated by blanks. Other users of the host can read a command line: prefer `--notify-file`."
        ),
    ),
    Option(
        "--notify-file",
        metavar="FILE",
        help="File with one such URL a line, which only its owner may read.",
    ),
    Option(
        "--notify-on",
        setting=Setting(NotifySettings, "least"),
        help="Lowest severity of events that are notified: `info`, `warning` or `critical`.",
    ),
    Option(
        "--otlp-endpoint",
        written_default="",
        metavar="URL",
        help=(
            "Send [traces](traces.md) of each change of the world to this OpenTelemetry collector: `http://HOST:4318`. "
            "Default: no traces."
        ),
    ),
)
SECTIONS = (
    Section(
        "Watchdogs, notifications and traces",
        WATCHING,
        "Give these options to every launcher, because any of them may become the Master.",
    ),
)
