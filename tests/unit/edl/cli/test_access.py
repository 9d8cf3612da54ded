"""Warnings of commands about access to a job, and settings of launchers that they ignore."""

from __future__ import annotations

import pytest

from edl.cli.find import door_of
from edl.cli.options import LAUNCHERS, TORCHRUN, where_of
from edl.errors import SettingError
from edl.launch.settings import CONF_KEYS
from edl.launch.torchrun_table import KEYS
from edl.wire.secret import Secret

SECRET = Secret(b"s" * 32)


@pytest.mark.parametrize(("endpoints", "secret", "own", "said"), [
    (["unix:/tmp/x"], None, False, "closed: its store is on a private socket, which only its user can access"),
    (["h:1"], SECRET, False, f"closed: only holders of its secret (fingerprint {SECRET.fingerprint}) can access it"),
    (["h:1"], SECRET, True, "can access it, but the etcd at h:1 has its own access rules"),
    (["h:1", "i:1"], None, True, "open: anyone who can read its store at h:1, i:1 controls it; --secret-file"),
])  # fmt: skip
def test_one_line_on_who_reaches_a_job(endpoints: list[str], secret: Secret | None, own: bool, said: str) -> None:
    line = door_of(endpoints, secret, own=own)
    assert said in line and "\n" not in line


def where(conf: str) -> dict[str, str]:
    return {"rdzv_conf": conf, "rdzv_endpoint": "h:1", "rdzv_id": "j", "secret_file": ""}


def test_commands_take_the_conf_that_launchers_take(capsys: pytest.CaptureFixture[str]) -> None:
    found = where_of(where("request_timeout=0.5,data_dir=/x,connect_timeout=9,user=me,password=p"))
    assert (found.user, found.password) == ("me", "p")
    assert {*LAUNCHERS, "ca", "cert", "key", "user", "password"} == set(CONF_KEYS) | KEYS.keys() - TORCHRUN.keys()
    assert {name: KEYS[name].becomes for name in TORCHRUN} == TORCHRUN
    theirs = where_of(where("ssl_cert=/c,ssl_cert_key=/k,cacert=/a,read_timeout=5")).tls
    assert theirs is not None and (theirs.ca, theirs.cert, theirs.key) == ("/a", "/c", "/k")
    assert capsys.readouterr().err == ""
    assert where_of(where("usr=me")).user is None
    assert "--rdzv-conf: unknown key 'usr' is ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("endpoint", "conf"),
    [
        ("etcds://h:2379", "user=u,password=p"),
        ("h:1,etcds://h:2", ""),
        ("h:2379", "protocol=https,user=u,password=p"),
        ("h:2379", "cert=/c,key=/k"),
        ("", "ssl_cert_key=/k"),
    ],
)
def test_tls_without_a_ca_is_refused_before_anything_is_sent(endpoint: str, conf: str) -> None:
    with pytest.raises(SettingError, match=r"--rdzv-conf ca='': TLS needs the CA certificate\. Add ca=FILE"):
        where_of({**where(conf), "rdzv_endpoint": endpoint})


def test_tls_with_a_ca_and_keys_with_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    found = where_of({**where("user=u, ca=/a, protocol=https,"), "rdzv_endpoint": "h:1"})
    assert found.tls is not None and (found.tls.ca, found.tls.cert, found.tls.key) == ("/a", None, None)
    assert (found.endpoints, found.user, capsys.readouterr().err) == (("h:1",), "u", "")
