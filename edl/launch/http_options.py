"""The launcher's options for its HTTP interface."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.errors import SettingError
from edl.web.settings import HttpSettings
from edl.wire.address import check_host

_FILES = ("http_token_file", "http_read_token_file", "http_cert", "http_key", "http_client_ca")


def http_from(options: Mapping[str, Any]) -> HttpSettings | None:
    """The settings of the HTTP interface; None without ``--http-port``. Reads the token files and the certificate to
    check them. Raises ``SettingError``."""
    text = options["http_port"].strip()
    given = {name: options[name].strip() for name in ("http_host", *_FILES)}
    if not text:
        for name, value in given.items():
            if value:
                raise SettingError(_flag(name), value, "has no effect without --http-port", "Add --http-port=PORT")
        return None
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise SettingError("--http-port", text, "must be a port from 0 to 65535", "Write 0 for any free port")
    check_host("--http-host", given["http_host"], given["http_host"])
    for name in _FILES:
        if given[name] and not Path(given[name]).is_file():
            raise SettingError(_flag(name), given[name], "no such file")
    settings = HttpSettings(
        port=int(text),
        host=given["http_host"],
        token_file=_absolute(given["http_token_file"]),
        read_token_file=_absolute(given["http_read_token_file"]),
        cert=_absolute(given["http_cert"]),
        key=_absolute(given["http_key"]),
        client_ca=_absolute(given["http_client_ca"]),
    )
    _check_tokens(settings)
    _check_tls(settings)
    return settings


def _check_tokens(settings: HttpSettings) -> None:
    """Check that each file holds at least one token, and that no token is in both. Raises ``SettingError``."""
    from edl.web.access import tokens_in  # imported late: only for jobs that serve HTTP

    found = {}
    for flag, path in (
        ("--http-token-file", settings.token_file),
        ("--http-read-token-file", settings.read_token_file),
    ):
        if not path:
            continue
        try:
            found[flag] = tokens_in(path)
        except OSError as error:
            raise SettingError(flag, path, f"cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise SettingError(flag, path, str(error), "Write one token per line") from None
        if not found[flag]:
            raise SettingError(
                flag, path, "holds no token", "Write one per line, such as the output of: openssl rand -hex 32"
            )
    both = set(found.get("--http-token-file", ())) & set(found.get("--http-read-token-file", ()))
    if both:
        raise SettingError(
            "--http-read-token-file",
            settings.read_token_file,
            f"{len(both)} of its tokens are also in --http-token-file",
            "Give read-only clients tokens of their own",
        )


def _check_tls(settings: HttpSettings) -> None:
    if bool(settings.cert) != bool(settings.key):
        missing, there = ("--http-key", "--http-cert") if settings.cert else ("--http-cert", "--http-key")
        raise SettingError(there, settings.cert or settings.key, f"needs {missing} as well", f"Add {missing}=FILE")
    if settings.client_ca and not settings.cert:
        raise SettingError(
            "--http-client-ca", settings.client_ca, "needs TLS", "Add --http-cert=FILE and --http-key=FILE"
        )
    if settings.cert:
        from edl.web.front import load

        load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), settings)


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
