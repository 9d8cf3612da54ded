"""``--notify`` and ``--notify-file``: the channels of notifications."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.adapters.secret_file import private_bytes
from edl.config import CREDENTIALS
from edl.launch.options import record
from edl.notify.settings import FILE_ADVICE, MOST_BYTES, NotifySettings


def notify_from(options: Mapping[str, Any], env: Mapping[str, str]) -> NotifySettings:
    """The addresses, each checked as far as possible without a connection. Raises ``SettingError``."""
    urls = list(dict.fromkeys((*options["notify"], *_urls_in(options["notify_file"].strip()))))
    if urls:
        from edl.notify.addresses import channel  # imported late: only for jobs that notify

        plain = {name: value for name, value in env.items() if name not in CREDENTIALS}
        for url in urls:
            channel(url, plain)
    return record(NotifySettings, options, urls=tuple(urls))


def _urls_in(file: str) -> list[str]:
    if not file:
        return []
    from edl.notify.addresses import urls_in

    return urls_in(private_bytes(Path(file), "--notify-file", FILE_ADVICE, MOST_BYTES), file)
