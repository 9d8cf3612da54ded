"""URLs of channels: what each becomes, and that none is shown in an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.errors import SettingError
from edl.notify.addresses import channel, channels_of
from edl.notify.mail import Mail
from edl.notify.program import NotifyProgram
from edl.notify.webhook import Webhook

MAIL = "smtp://mail.example.com/?from=edl@example.com&to=a@example.com"


def test_a_webhook_with_a_key() -> None:
    made = channel("https://hooks.example.com:8443/T0/secret?x=1#key=k3y", {})
    assert made == Webhook("https://hooks.example.com:8443/T0/secret?x=1", "webhook hooks.example.com:8443", "k3y")
    assert "secret" not in repr(made)
    assert "k3y" not in repr(made)


@pytest.mark.parametrize(
    ("written", "key"), [("ab+c/d=", "ab+c/d="), ("ab&c", "ab&c"), ("ab%2Bc%20d", "ab+c d"), ("ab;c=d", "ab;c=d")]
)
def test_a_key_is_all_that_follows(written: str, key: str) -> None:
    made = channel(f"https://hooks.example.com/T0#key={written}", {})
    assert isinstance(made, Webhook)
    assert made.key == key


def test_a_mail_server() -> None:
    made = channel(
        "smtps://us%40er:pass%3Aword@mail.example.com/?from=edl@example.com&to=a@example.com,b@example.com", {}
    )
    assert isinstance(made, Mail)
    assert (made.host, made.port, made.tls) == ("mail.example.com", 465, True)
    assert (made.user, made.password) == ("us@er", "pass:word")
    assert made.recipients == ("a@example.com", "b@example.com")
    assert "pass:word" not in repr(made)
    assert made.label == "mail mail.example.com"


def test_a_mail_address_with_a_plus_sign() -> None:
    made = channel("smtp://mail.example.com/?from=edl+train@example.com&to=ops+edl@example.com,b%2Bc@example.com", {})
    assert isinstance(made, Mail)
    assert (made.sender, made.recipients) == ("edl+train@example.com", ("ops+edl@example.com", "b+c@example.com"))


def test_a_program(tmp_path: Path) -> None:
    program = tmp_path / "notify.sh"
    program.write_text("#!/bin/sh\n")
    with pytest.raises(SettingError, match="may be executed"):
        channel(f"exec:{program}", {})
    program.chmod(0o700)
    assert channel(f"exec:{program}", {"A": "b"}) == NotifyProgram(str(program), f"program {program}", {"A": "b"})


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("hooks.example.com/secret", "it has no scheme"),
        ("https:///secret", "without a host"),
        ("https://user:secret@hooks.example.com/", "which webhooks do not use"),
        ("https://hooks.example.com/secret#secret", "is not a key"),
        ("https://hooks.example.com/secret#key=", "is not a key"),
        ("https://hooks.example.com/secret#keys=secret", "is not a key"),
        ("https://hooks.example.com:secret/", "not a URL"),
        ("smtp://user:secret@mail.example.com/", "needs one sender"),
        ("smtp://user:secret@mail.example.com/?from=a@b", "needs one sender"),
        (f"{MAIL}&secure=yes", "unknown secure"),
        ("exec:relative/secret", "must begin with /"),
        ("exec://host/secret", "must begin with /"),
    ],
)
def test_errors_name_the_place_and_no_secret(url: str, text: str) -> None:
    with pytest.raises(SettingError, match=text) as raised:
        channel(url, {})
    assert "secret" not in str(raised.value).replace("the secret into the path", "")


def test_other_schemes_need_apprise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.notify.addresses.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"pip install 'edl\[notify\]'") as raised:
        channel("slack://secret/token", {})
    assert "slack:// needs the package apprise" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_repetitions_count_once_and_keys_do_not_reveal_the_address() -> None:
    one, other = channels_of([MAIL, MAIL.replace("to=a", "to=b"), MAIL], {})
    assert one.key("token") != other.key("token")
    assert one.key("token") == channels_of([MAIL], {})[0].key("token")
    assert one.key("token") != one.key("another token")
