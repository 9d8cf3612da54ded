"""Each channel against a real receiver on loopback."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from edl.errors import NotificationError
from edl.notify import mail
from edl.notify.addresses import channel
from edl.notify.notification import Notification
from edl.wire.severity import Severity
from tests.process.harness import alive, until
from tests.support.notification_sinks import ProgramSink, mail_sink, webhook_sink

LIMIT_S = 20.0
NOTE = Notification(
    "job-1f-7", "job", "node-lost", Severity.WARNING, "node b lost: gone\nwith a second line", 1.5, "b", 3, 7, "a"
)


def refusing_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TestWebhook:
    def test_the_document_and_its_signature(self) -> None:
        with webhook_sink() as sink:
            channel(f"{sink.url}/path?x=1#key=k", {}).send(NOTE, 1700000000.4, LIMIT_S)
        ((headers, body),) = sink.posts
        assert json.loads(body) == {
            "id": "job-1f-7",
            "job": "job",
            "event": "node-lost",
            "severity": "warning",
            "text": "node b lost: gone\nwith a second line",
            "subject": "edl job job: warning: node-lost: node b lost: gone with a second line",
            "node": "b",
            "round": 3,
            "number": 7,
            "time": "1970-01-01T00:00:01.500+00:00",
            "master": "a",
        }
        assert headers["edl-notification-id"] == "job-1f-7"
        assert headers["edl-timestamp"] == "1700000000"
        assert headers["content-type"] == "application/json"
        expected = hmac.new(b"k", b"1700000000." + body, hashlib.sha256).hexdigest()
        assert headers["edl-signature"] == f"sha256={expected}"

    def test_without_a_key_it_is_not_signed(self) -> None:
        with webhook_sink() as sink:
            channel(sink.url, {}).send(NOTE, 0.0, LIMIT_S)
        assert "edl-signature" not in sink.posts[0][0]

    @pytest.mark.parametrize(
        ("status", "retry"),
        [(500, True), (503, True), (408, True), (425, True), (429, True), (404, False), (302, False)],
    )
    def test_statuses(self, status: int, retry: bool) -> None:
        with webhook_sink() as sink:
            sink.statuses = [status]
            with pytest.raises(NotificationError, match=f"status {status}") as raised:
                channel(f"{sink.url}/secret", {}).send(NOTE, 0.0, LIMIT_S)
        assert raised.value.retry is retry
        assert "secret" not in str(raised.value)
        assert not sink.posts

    @pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
    def test_nobody_there(self, host: str) -> None:
        with pytest.raises(NotificationError, match="cannot be reached") as raised:
            channel(f"http://{host}:{refusing_port()}/secret", {}).send(NOTE, 0.0, LIMIT_S)
        assert raised.value.retry
        assert "secret" not in str(raised.value)

    def test_no_answer(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            place = f"127.0.0.1:{mute.getsockname()[1]}"
            with pytest.raises(NotificationError) as raised:
                channel(f"http://{place}", {}).send(NOTE, 0.0, 0.2)
        assert raised.value.retry


class TestMail:
    def test_a_message(self) -> None:
        with mail_sink() as sink:
            url = f"smtp://{sink.place}/?from=edl@example.com&to=a@example.com,b@example.com"
            channel(url, {}).send(NOTE, 0.0, LIMIT_S)
        (message,) = sink.messages
        assert message["From"] == "edl@example.com"
        assert message["To"] == "a@example.com, b@example.com"
        assert message["Subject"] == "edl job job: warning: node-lost: node b lost: gone with a second line"
        assert message["Message-ID"] == "<job-1f-7@edl.invalid>"
        assert message["Auto-Submitted"] == "auto-generated"
        assert message.get_content().startswith("node b lost: gone")
        assert sink.recipients == [["a@example.com", "b@example.com"]]

    @pytest.mark.parametrize(("answer", "retry"), [("550 unknown", False), ("450 later", True)])
    def test_refused(self, answer: str, retry: bool) -> None:
        with mail_sink() as sink:
            sink.refuses = answer
            with pytest.raises(NotificationError, match=f"status {answer[:3]}") as raised:
                channel(f"smtp://{sink.place}/?from=edl@example.com&to=a@example.com", {}).send(NOTE, 0.0, LIMIT_S)
        assert raised.value.retry is retry
        assert not sink.messages

    def test_a_mail_that_was_taken_is_not_sent_again_for_an_odd_farewell(self) -> None:
        with mail_sink() as sink:
            sink.bye = "421 closing"
            channel(f"smtp://{sink.place}/?from=edl@example.com&to=a@example.com", {}).send(NOTE, 0.0, LIMIT_S)
            assert len(sink.messages) == 1

    def test_names_are_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The mail server needs this host's name for little, and the name server may be away."""
        answers = threading.Event()

        def getfqdn(name: str = "") -> str:
            answers.wait()
            return "alpha.example.com"

        monkeypatch.setattr(socket, "getfqdn", getfqdn)
        monkeypatch.setattr(mail, "NAME_S", 0.01, raising=False)
        with mail_sink() as sink:
            sending = threading.Thread(
                target=channel(f"smtp://{sink.place}/?from=edl@example.com&to=a@example.com", {}).send,
                args=(NOTE, 0.0, LIMIT_S),
                daemon=True,
            )
            sending.start()
            sending.join(LIMIT_S)
            answers.set()
            assert not sending.is_alive()
            assert len(sink.messages) == 1

    def test_a_password_is_not_sent_in_the_clear(self) -> None:
        with mail_sink() as sink:
            url = f"smtp://user:secret@{sink.place}/?from=edl@example.com&to=a@example.com"
            with pytest.raises(NotificationError, match="offers no STARTTLS") as raised:
                channel(url, {}).send(NOTE, 0.0, LIMIT_S)
        assert not raised.value.retry
        assert not sink.messages

    def test_a_silent_server(self) -> None:
        with mail_sink() as sink:
            sink.silent.set()
            with pytest.raises(NotificationError, match=r"does not answer: .*timed out") as raised:
                channel(f"smtp://{sink.place}/?from=edl@example.com&to=a@example.com", {}).send(NOTE, 0.0, 0.2)
        assert raised.value.retry

    def test_nobody_there(self) -> None:
        url = f"smtp://127.0.0.1:{refusing_port()}/?from=edl@example.com&to=a@example.com"
        with pytest.raises(NotificationError, match="cannot be reached: Connection refused"):
            channel(url, {}).send(NOTE, 0.0, LIMIT_S)


class TestProgram:
    def test_it_gets_the_document(self, tmp_path: Path) -> None:
        sink = ProgramSink(tmp_path)
        channel(f"exec:{sink.path}", dict(os.environ)).send(NOTE, 0.0, LIMIT_S)
        assert sink.documents == [json.loads(NOTE.document())]

    def test_it_fails(self, tmp_path: Path) -> None:
        program = script(tmp_path, "echo no route >&2\nexit 3")
        with pytest.raises(NotificationError, match="exited with status 3 and said: no route") as raised:
            channel(f"exec:{program}", {}).send(NOTE, 0.0, LIMIT_S)
        assert raised.value.retry

    def test_it_hangs_and_is_killed_with_its_children(self, tmp_path: Path) -> None:
        program = script(tmp_path, f"sleep 1000 &\necho $! > {tmp_path}/pid\nwait")
        with pytest.raises(NotificationError, match=r"longer than 2 s and was killed"):
            channel(f"exec:{program}", dict(os.environ)).send(NOTE, 0.0, 2.0)
        child = int((tmp_path / "pid").read_text())
        until(lambda: not alive(child), "the end of the child")

    def test_no_disk_is_needed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """That the disk is full may be what the notification says."""
        monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
        channel(f"exec:{script(tmp_path, 'cat')}", dict(os.environ)).send(NOTE, 0.0, LIMIT_S)

    @pytest.mark.parametrize(("number", "retry"), [(errno.EAGAIN, True), (errno.ENOMEM, True), (errno.ENOENT, False)])
    def test_what_the_host_lacks_now_it_may_have_later(
        self, number: int, retry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = channel(f"exec:{script(tmp_path, 'cat')}", {})

        def refused(*_: Any, **__: Any) -> NoReturn:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("subprocess.Popen", refused)
        with pytest.raises(NotificationError, match=os.strerror(number)) as raised:
            program.send(NOTE, 0.0, LIMIT_S)
        assert raised.value.retry is retry

    def test_output_without_an_end_is_cut_off(self, tmp_path: Path) -> None:
        with pytest.raises(NotificationError, match="it printed more than 4 MiB and was killed"):
            channel(f"exec:{script(tmp_path, 'exec yes')}", dict(os.environ)).send(NOTE, 0.0, LIMIT_S)

    def test_it_sees_the_given_environment_only(self, tmp_path: Path) -> None:
        program = script(tmp_path, f"/usr/bin/env > {tmp_path}/env")
        channel(f"exec:{program}", {"MINE": "yes"}).send(NOTE, 0.0, LIMIT_S)
        seen = (tmp_path / "env").read_text()
        assert "MINE=yes" in seen
        assert "HOME=" not in seen


def script(folder: Path, text: str) -> Path:
    program = folder / "program.sh"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return program


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what apprise imports
def test_apprise_posts_its_own_document() -> None:
    pytest.importorskip("apprise")
    with webhook_sink() as sink:
        place = sink.url.removeprefix("http://")
        channel(f"json://{place}/path", {}).send(NOTE, 0.0, LIMIT_S)
        sink.statuses = [500]
        with pytest.raises(NotificationError, match="apprise could not deliver"):
            channel(f"json://{place}/path", {}).send(NOTE, 0.0, LIMIT_S)
    (document,) = sink.documents
    assert document["title"] == NOTE.subject
    assert document["type"] == "warning"
