"""From the URLs in ``--notify`` to channels, whose modules are imported only if there is one: they import much of the
standard library."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from edl.errors import SettingError
from edl.notify.channel import NotifyChannel
from edl.notify.settings import FILE_ADVICE

PORTS = {"smtp": 25, "smtps": 465}
KINDS = "https://HOST/PATH, smtp(s)://USER:PASSWORD@HOST/?from=ADDRESS&to=ADDRESS, exec:/PATH/PROGRAM"
INSTALL = "Run: pip install 'edl[notify]'"


@dataclass(frozen=True, slots=True)
class NamedChannel:
    """A channel, and a name for it that does not change from one launcher to the next."""

    channel: NotifyChannel = field(repr=False)
    digest: str
    """Digest of its address."""

    @property
    def label(self) -> str:
        """See ``NotifyChannel.label``."""
        return self.channel.label

    def key(self, run: str) -> str:
        """Names the channel in the store. ``run``: of the job; keeps the address from being guessed."""
        return hashlib.sha256(f"channel {run} {self.digest}".encode()).hexdigest()[:16]


def channels_of(
    urls: Sequence[str], environment: Mapping[str, str], setting: str = "--notify"
) -> tuple[NamedChannel, ...]:
    """The channels, without repetitions. ``environment``: for programs. Raises ``SettingError``, which never shows a
    URL."""
    made = {url: channel(url, environment, setting) for url in urls}
    return tuple(NamedChannel(one, hashlib.sha256(url.encode()).hexdigest()) for url, one in made.items())


def urls_in(raw: bytes, file: str, setting: str = "--notify-file") -> list[str]:
    """The URLs in the content of a file: one a line; empty lines and lines that begin with # do not count. Raises
    ``SettingError``."""
    try:
        lines = [line.strip() for line in raw.decode().splitlines()]
    except UnicodeDecodeError:
        raise SettingError(setting, file, "is not UTF-8 text", FILE_ADVICE) from None
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise SettingError(setting, file, "holds no URL", FILE_ADVICE)
    return found


def heartbeat_of(url: str) -> NamedChannel:
    """The heartbeat of ``edl watch``. Raises ``SettingError``."""
    what = "not a URL with http:// or https:// and a host"
    wrong = SettingError("--heartbeat", None, what, "Write https://HOST/PATH")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong
    from edl.notify.webhook import Heartbeat

    return NamedChannel(Heartbeat(url, f"heartbeat {_place(parts)}"), hashlib.sha256(url.encode()).hexdigest())


def channel(url: str, environment: Mapping[str, str], setting: str = "--notify") -> NotifyChannel:
    """The channel for one URL. Raises ``SettingError``."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # its text contains a part of the URL
        raise SettingError(setting, None, "not a URL: its host or port is malformed", f"Write {KINDS}") from None
    if not parts.scheme:
        raise SettingError(setting, None, "not a URL: it has no scheme", f"Write {KINDS}")
    make = _KINDS.get(parts.scheme)
    return _other(url, parts, setting) if make is None else make(url, parts, environment, setting)


def _webhook(url: str, parts: SplitResult, environment: Mapping[str, str], setting: str) -> NotifyChannel:
    if not parts.hostname:
        raise SettingError(setting, None, f"{parts.scheme}:// without a host", "Write https://HOST/PATH")
    if parts.username or parts.password:
        what = f"the webhook on {parts.hostname} has a user or a password, which webhooks do not use"
        raise SettingError(setting, None, what, "Put the secret into the path, or sign: https://HOST/PATH#key=KEY")
    name, _, key = parts.fragment.partition("=")
    if parts.fragment and (name != "key" or not key):
        what = f"what follows # in the webhook on {parts.hostname} is not a key"
        raise SettingError(setting, None, what, "Write https://HOST/PATH#key=KEY")
    from edl.notify.webhook import Webhook

    return Webhook(parts._replace(fragment="").geturl(), f"webhook {_place(parts)}", unquote(key))


def _mail(url: str, parts: SplitResult, environment: Mapping[str, str], setting: str) -> NotifyChannel:
    query = parse_qs(parts.query.replace("+", "%2B"))  # a blank in forms, but a common character in mail addresses
    where = f"the mail server {parts.hostname}"
    if not parts.hostname:
        raise SettingError(setting, None, f"{parts.scheme}:// without a host", f"Write {KINDS}")
    senders, unknown = query.pop("from", []), sorted(set(query) - {"to", "plain"})
    recipients = tuple(one.strip() for text in query.get("to", []) for one in text.split(",") if one.strip())
    if len(senders) != 1 or not recipients:
        what = f"{where} needs one sender and at least one recipient"
        raise SettingError(setting, None, what, "Write smtp://HOST/?from=ADDRESS&to=ADDRESS")
    if unknown:
        raise SettingError(setting, None, f"{where}: unknown {', '.join(unknown)}", "Possible: from, to, plain=yes")
    from edl.notify.mail import Mail

    return Mail(
        f"mail {_place(parts)}",
        parts.hostname,
        parts.port or PORTS[parts.scheme],
        senders[0],
        recipients,
        unquote(parts.username or ""),
        unquote(parts.password or ""),
        tls=parts.scheme == "smtps",
        plain=query.get("plain") == ["yes"],
    )


def _program(url: str, parts: SplitResult, environment: Mapping[str, str], setting: str) -> NotifyChannel:
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/"):
        raise SettingError(setting, None, "the path of a program must begin with /", "Write exec:/PATH/PROGRAM")
    if not Path(path).is_file() or not os.access(path, os.X_OK):
        raise SettingError(setting, f"exec:{path}", "is not a program that may be executed", f"Run: chmod +x {path}")
    from edl.notify.program import NotifyProgram

    return NotifyProgram(path, f"program {path}", environment)


def _other(url: str, parts: SplitResult, setting: str) -> NotifyChannel:
    from edl.notify.others import AppriseChannel, opened

    if find_spec("apprise") is None:
        what = f"{parts.scheme}:// needs the package apprise, which is not installed"
        raise SettingError(setting, None, what, f"{INSTALL}. Without it: {KINDS}")
    if opened(url) is None:
        what = f"apprise does not understand the address with {parts.scheme}://"
        raise SettingError(setting, None, what, "See its documentation for the address of this service")
    return AppriseChannel(url, f"apprise {parts.scheme}")


def _place(parts: SplitResult) -> str:
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)


_KINDS: dict[str, Callable[[str, SplitResult, Mapping[str, str], str], NotifyChannel]] = {
    "http": _webhook,
    "https": _webhook,
    "smtp": _mail,
    "smtps": _mail,
    "exec": _program,
}
"""For each scheme a function of URL, its parts, the environment for programs, and the option, that makes a channel."""
