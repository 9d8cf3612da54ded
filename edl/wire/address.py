"""Text form of a host and a port."""

from __future__ import annotations

import re

from edl.errors import SettingError

_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]+@")


def address(host: str, port: int) -> str:
    """``host:port``, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_credentials(text: str) -> str:
    """A text to be shown, without the user and the password of the URLs in it."""
    return _CREDENTIALS.sub("…@", text)


def check_host(setting: str, value: str, host: str) -> None:
    """Raise ``SettingError`` about a setting's value if the host in it cannot be a name or an address; an empty host is
    accepted. The resolver would raise ``UnicodeError``."""
    try:
        host.encode("idna")
    except UnicodeError:
        what = f"{host!r} is not a host: a part between dots is empty or longer than 63 characters"
        raise SettingError(setting, value, what, "Correct it; is a variable in it empty?") from None
