"""The launcher's options about leaving: signals, preemption notices, and the exit status of a drained node."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from edl.errors import SettingError
from edl.launch.options import record
from edl.launch.preemption_notices import PROVIDERS
from edl.launch.settings import LeaveSettings, NoticeSettings

ALLOWED = ("TERM", "USR1", "USR2", "HUP", "QUIT", "XCPU")
"""Possible drain signals: those with which batch systems announce the end of a job."""
ALWAYS = ("TERM", "INT", "HUP", "QUIT")
"""Signals on which a launcher always leaves."""
FORWARDABLE = ("USR1", "USR2", "ALRM", "XCPU", "URG", "WINCH")
"""Signals that can be forwarded, because a launcher does not need them itself."""


def leave_from(options: Mapping[str, Any]) -> LeaveSettings:
    """The settings about leaving. Raises ``SettingError``."""
    drained, passed = _signals(options["drain_signals"]), _passed(options["signals_to_handle"])
    return record(
        LeaveSettings,
        options,
        signals=drained,
        notice=_notice(options["preemption_notice"].strip()),
        passed=passed,
        forwarded=_forwarded(options["forward_signals"].strip(), drained, passed),
    )


def _passed(text: str) -> tuple[int, ...]:
    """Parse ``--signals-to-handle``; signals in ``ALWAYS`` are left out. Raises ``SettingError``."""
    names = _names(text)
    allowed = tuple(dict.fromkeys((*ALWAYS, *ALLOWED)))
    for name in names:
        if name not in allowed:
            why = f"{name!r} is not a signal on which a launcher can leave"
            raise SettingError("--signals-to-handle", text, why, f"Possible: {', '.join(allowed)}")
    return tuple(int(signal.Signals[f"SIG{name}"]) for name in dict.fromkeys(names) if name not in ALWAYS)


def _forwarded(text: str, drained: tuple[int, ...], passed: tuple[int, ...]) -> tuple[int, ...]:
    """Parse ``--forward-signals``; default: SIGUSR1, unless this node leaves on it. Raises ``SettingError``, also for a
    signal on which this node leaves."""
    if text.lower() == "none":
        return ()
    if not text:
        return tuple({int(signal.SIGUSR1)} - {*drained, *passed})
    found = []
    for name in _names(text):
        number = int(signal.Signals[f"SIG{name}"]) if f"SIG{name}" in signal.Signals.__members__ else 0
        if number in drained or number in passed or name in ALWAYS:
            option = "--signals-to-handle" if number in passed else "--drain-signals"
            why = f"this node leaves on SIG{name}" + ("" if name in ALWAYS else f" ({option})")
            raise SettingError(
                "--forward-signals", text, why, "Drop it" if name in ALWAYS else "Drop it from one of the two options"
            )
        if name not in FORWARDABLE:
            why = f"{name!r} cannot be forwarded"
            raise SettingError("--forward-signals", text, why, f"Possible: {', '.join(FORWARDABLE)}, or none")
        found.append(number)
    return tuple(dict.fromkeys(found))


def _names(text: str) -> list[str]:
    """Parse signal names: ``USR1,SIGUSR2`` gives USR1 and USR2."""
    return [part.strip().upper().removeprefix("SIG") for part in text.split(",") if part.strip()]


def _signals(text: str) -> tuple[int, ...]:
    """Parse ``--drain-signals``, such as ``TERM,USR2`` or ``SIGTERM,SIGUSR2``. SIGTERM is always included. Raises
    ``SettingError``."""
    names = _names(text)
    for name in names:
        if name == "INT":
            raise SettingError(
                "--drain-signals", text, "SIGINT is Ctrl-C, which ends the launcher with status 130", "Drop INT"
            )
        if name not in ALLOWED:
            raise SettingError(
                "--drain-signals", text, f"a node cannot drain on {name!r}", f"Possible: {', '.join(ALLOWED)}"
            )
    return tuple(int(signal.Signals[f"SIG{name}"]) for name in dict.fromkeys(["TERM", *names]))


def _notice(text: str) -> NoticeSettings | None:
    if not text:
        return None
    name, colon, base = text.partition(":")
    if name not in PROVIDERS:
        raise SettingError("--preemption-notice", text, f"unknown cloud {name!r}", f"Known: {', '.join(PROVIDERS)}")
    if colon and not _is_base(base):
        raise SettingError("--preemption-notice", text, "is not a base URL", f"Write {name}:http://HOST[:PORT]")
    return NoticeSettings(name, base.rstrip("/") if colon else PROVIDERS[name].base)


def _is_base(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
    except ValueError:
        return False
