"""--http-port and its companions on the launcher's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.errors import SettingError
from edl.launch.http_options import http_from
from edl.web.settings import HttpSettings

NONE = {
    name: ""
    for name in (
        "http_port",
        "http_host",
        "http_token_file",
        "http_read_token_file",
        "http_cert",
        "http_key",
        "http_client_ca",
    )
}


def given(**options: str) -> HttpSettings | None:
    return http_from({**NONE, **options})


def test_off_unless_a_port_is_given() -> None:
    assert given() is None
    assert given(http_port="0") == HttpSettings(0)
    assert given(http_port=" 8443 ", http_host="10.0.0.1") == HttpSettings(8443, "10.0.0.1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"http_port": "x"}, "--http-port=x: must be a port"),
        ({"http_port": "65536"}, "--http-port=65536"),
        ({"http_port": "-1"}, "--http-port=-1"),
        ({"http_port": "٣"}, "--http-port"),
        (
            {"http_port": "0", "http_host": ".svc"},
            "--http-host=.svc: '.svc' is not a host: a part between dots is empty",
        ),
        ({"http_host": "h"}, "--http-host=h: has no effect without --http-port"),
        ({"http_token_file": "full"}, "--http-token-file=full: has no effect without --http-port"),
        ({"http_port": "0", "http_token_file": "none"}, "--http-token-file=none: no such file"),
        ({"http_port": "0", "http_token_file": "empty"}, "holds no token"),
        ({"http_port": "0", "http_token_file": "short"}, "line 2 is not a token"),
        ({"http_port": "0", "http_token_file": "huge"}, "too long for a list of tokens"),
        ({"http_port": "0", "http_token_file": "full", "http_read_token_file": "full"}, "also in --http-token-file"),
        ({"http_port": "0", "http_cert": "full"}, "--http-cert=full: needs --http-key"),
        ({"http_port": "0", "http_key": "full"}, "--http-key=full: needs --http-cert"),
        ({"http_port": "0", "http_client_ca": "full"}, "needs TLS"),
        ({"http_port": "0", "http_cert": "full", "http_key": "full"}, "cannot be used with --http-key="),
    ],
)
def test_what_cannot_be(options: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").write_text("a-token-that-is-long")
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "short").write_text("a-token-that-is-long\nshort\n")
    (tmp_path / "huge").write_text("x" * 100_000)
    with pytest.raises(SettingError) as error:
        given(**options)
    assert words in str(error.value).replace(f"{tmp_path}/", "")
    assert "a-token-that" not in str(error.value)
