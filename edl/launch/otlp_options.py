"""``--otlp-endpoint``: the collector of traces."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from edl.errors import SettingError
from edl.wire.address import without_credentials

FLAG = "--otlp-endpoint"
_PATH = "/v1/traces"
"""Where a collector takes traces, by the specification of OTLP."""


def otlp_from(options: Mapping[str, Any]) -> str:
    """The URL to which traces are sent; empty: none are. Raises ``SettingError``."""
    given = str(options["otlp_endpoint"]).strip()
    if not given:
        return ""
    shown = without_credentials(given)
    wrong = SettingError(FLAG, shown, "is no URL of a collector", "Give one such as http://collector:4318")
    try:
        parts = urlsplit(given)
        _ = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise SettingError(FLAG, shown, "needs the OpenTelemetry SDK", "Install it: pip install 'edl[otel]'")
    return given if parts.path.strip("/") else given.rstrip("/") + _PATH
