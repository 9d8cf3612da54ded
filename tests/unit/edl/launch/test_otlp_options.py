"""``--otlp-endpoint``."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from edl.errors import SettingError
from edl.launch import otlp_options
from edl.launch.otlp_options import otlp_from

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("", ""),
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("https://collector/tenant/v1/traces", "https://collector/tenant/v1/traces"),
    ],
)
def test_the_path_is_that_of_the_specification_unless_there_is_one(given: str, url: str) -> None:
    assert otlp_from({"otlp_endpoint": given}) == url


@pytest.mark.parametrize(
    "given", ["collector:4318", "grpc://collector:4317", "http://", "http://[collector", "http://collector:many"]
)
def test_what_is_no_url_is_refused(given: str) -> None:
    with pytest.raises(
        SettingError, match=rf"--otlp-endpoint={re.escape(given)}: is no URL of a collector\. Give one such as"
    ):
        otlp_from({"otlp_endpoint": given})


def test_without_the_sdk_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        return None if name.startswith("opentelemetry") else importlib.util.find_spec(name)

    monkeypatch.setattr(otlp_options, "find_spec", find)
    with pytest.raises(SettingError, match=r": needs the OpenTelemetry SDK\. Install it: pip install 'edl\[otel\]'"):
        otlp_from({"otlp_endpoint": "http://collector:4318"})


def test_a_refused_password_is_not_shown() -> None:
    with pytest.raises(SettingError) as refused:
        otlp_from({"otlp_endpoint": "grpc://me:geheim@collector:4317"})
    assert "--otlp-endpoint=grpc://…@collector:4317: is no URL" in str(refused.value)
