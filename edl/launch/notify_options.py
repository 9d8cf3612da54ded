"""``--notify`` and ``--notify-file``: the channels of notifications."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.adapters.secret_file import private_bytes
from edl.config import CREDENTIALS
from edl.errors import SettingError
from edl.launch.options import record
from edl.notify.settings import NotifySettings

MOST_BYTES = 65536
"""Limit on the size of the file."""
_ADVICE = "Write one URL a line into a file of your own with mode 600"


def notify_from(options: Mapping[str, Any], env: Mapping[str, str]) -> NotifySettings:
    """The addresses, each checked as far as possible without a connection. Raises ``SettingError``."""
    urls = list(dict.fromkeys((*options["notify"], *urls_in(options["notify_file"].strip()))))
    if urls:
        from edl.notify.addresses import channel  # imported late: only for jobs that notify

        plain = {name: value for name, value in env.items() if name not in CREDENTIALS}
        for url in urls:
            channel(url, plain)
    return record(NotifySettings, options, urls=tuple(urls))


def urls_in(file: str) -> list[str]:
    """The URLs in a file: one a line; empty lines and lines that begin with # do not count. Raises ``SettingError``."""
    if not file:
        return []
    raw = private_bytes(Path(file), "--notify-file", _ADVICE, MOST_BYTES)
    try:
        lines = [line.strip() for line in raw.decode().splitlines()]
    except UnicodeDecodeError:
        raise SettingError("--notify-file", file, "is not UTF-8 text", _ADVICE) from None
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise SettingError("--notify-file", file, "holds no URL", _ADVICE)
    return found
