"""Notifications of a real job arrive once in every channel, whatever happens to its Masters."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from edl.types import JobId
from edl.wire.keys import JobKeys
from tests.process.etcd_fixture import patient_store
from tests.process.harness import Job, OutsideEtcd, until
from tests.support.notification_sinks import MailSink, ProgramSink, WebhookSink, mail_sink, webhook_sink


@pytest.mark.slow
def test_each_notification_arrives_once_in_each_channel_across_masters(tmp_path: Path, etcd: OutsideEtcd) -> None:
    program = ProgramSink(tmp_path)
    with webhook_sink() as web, mail_sink() as mail:
        addresses = tmp_path / "channels"
        addresses.write_text(
            f"# of this test\n{web.url}/hook/not-to-be-shown#key=a-secret-key\n"
            f"smtp://{mail.place}/?from=edl@example.com&to=ops@example.com\nexec:{program.path}\n"
        )
        addresses.chmod(0o600)
        # Each node has a log directory of its own, and none has room for so much.
        options = (f"--notify-file={addresses}", "--notify-on=info", "--watch=disk-space=1000000T")
        with Job(tmp_path / "job", [etcd.endpoint], nnodes="2:3", options=options) as job:
            job.start("a", "b", "c")
            job.wait_world(3)
            status = job.wait_status(lambda status: len(status["alarms"]) == 3, "an alarm of each node")
            assert all(alarm["name"] == "disk-space" for alarm in status["alarms"])
            until(lambda: _count(web.documents, "alarm") == 3, "three alarms")
            tried = job.cli("notify", "test")
            assert tried.returncode == 0, tried.stderr
            assert tried.stdout.count(": delivered (") == 3, tried.stdout
            master = status["master"]
            job.kill(min({"a", "b", "c"} - {master}))
            until(lambda: _count(web.documents, "node-lost") == 1, "the lost node")
            job.start("d")
            until(lambda: _count(web.documents, "alarm") == 4, "the new node's alarm")
            seen = job.wait_world(3, after=job.status()["round"] - 1)
            _wait_for_all(web.documents, mail.messages, program)
            newest = max(document["number"] for document in web.documents)
            # A Master that dies between sending and noting that it has sent leaves one to be sent again.
            until(lambda: _noted(job) == [newest] * 3, "the numbers in the store", pause_s=0.2)
            job.kill(master)
            until(lambda: _count(web.documents, "master-changed") == 1, "another Master")
            until(lambda: _count(web.documents, "node-lost") == 2, "the lost Master")
            job.wait_world(2, after=seen.round)
            job.end_soon(5)
            job.exit_codes()
            until(lambda: _count(web.documents, "job-ended") == 1, "the end")
            for node in job.nodes.values():
                assert "not-to-be-shown" not in node.text
                assert "a-secret-key" not in node.text
        _check(job.name, web, mail, program)


def _check(name: str, web: WebhookSink, mail: MailSink, program: ProgramSink) -> None:
    """Each notification arrived once in each channel, and signed in the webhook."""
    numbers = Counter(document["id"] for document in web.documents)
    assert set(numbers.values()) == {1}, numbers
    assert Counter(document["id"] for document in program.documents) == numbers
    mailed = Counter(str(message["Message-ID"]) for message in mail.messages)
    assert mailed == Counter(f"<{one}@edl.invalid>" for one in numbers)
    for headers, body in web.posts:
        signed = f"{headers['edl-timestamp']}.".encode() + body
        expected = hmac.new(b"a-secret-key", signed, hashlib.sha256).hexdigest()
        assert headers["edl-signature"] == f"sha256={expected}"
    assert {document["job"] for document in web.documents} == {name}
    (last,) = [document for document in web.documents if document["event"] == "job-ended"]
    assert last["severity"] == "info"


def _count(documents: list[dict[str, Any]], event: str) -> int:
    return sum(document["event"] == event for document in documents)


def _noted(job: Job) -> list[int]:
    """What the store holds for each channel: the number of the last entry that was sent."""

    async def read() -> list[int]:
        store = patient_store(*job.endpoints)
        try:
            entries = (await store.read(JobKeys(JobId(job.name)).companion("notify/"))).entries
        finally:
            await store.close()
        return [int(entry.value) for entry in entries if not entry.key.endswith("/master")]

    return asyncio.run(read())


def _wait_for_all(documents: list[dict[str, Any]], messages: list[Any], program: ProgramSink) -> None:
    """Wait until every channel has as much as the others."""
    until(lambda: len(messages) == len(program.documents) == len(documents), "the other channels")


@pytest.mark.slow
def test_a_job_is_watched_from_outside(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with webhook_sink() as web, Job(tmp_path / "job", [etcd.endpoint], nnodes="1") as job:
        watch = ["watch", "--limit=3600", "--grace=2", f"--notify={web.url}/alarms"]
        beat = f"--heartbeat={web.url}/beat"
        gone = job.cli(*watch, beat, "--once")
        assert gone.returncode == 1
        assert _count(web.documents, "alarm") == 1
        assert web.documents[0]["text"].startswith("job-reachable: no Master has answered for")
        assert web.gets == [], "no heartbeat without an answer"
        job.start("a")
        job.wait_world(1)
        healthy = job.cli(*watch, beat, "--once")
        assert healthy.returncode == 0, healthy.stderr
        assert healthy.stdout.startswith("running: ")
        assert (len(web.documents), web.gets) == (1, ["/beat"])
        job.end_soon(100)
        ended = job.cli(*watch, "--every=0.5")
        assert ended.returncode == 0, ended.stderr
        assert job.exit_codes() == {"a": 0}
        assert "job-ended" in ended.stdout


@pytest.mark.slow
def test_a_master_that_does_not_reach_the_store_says_so(tmp_path: Path, own_etcd: OutsideEtcd) -> None:
    with webhook_sink() as web:
        options = (f"--notify={web.url}", "--watch=store=3")
        with Job(tmp_path / "job", [own_etcd.endpoint], nnodes="1", options=options) as job:
            job.start("a")
            job.wait_world(1)
            own_etcd.kill()
            until(lambda: _count(web.documents, "alarm") == 1, "the alarm")
            (alarm,) = web.documents
            assert alarm["text"].startswith("store: the Master has not reached the store for ")
            assert (alarm["severity"], alarm["number"]) == ("critical", 0)
            own_etcd.restart()
            until(lambda: _count(web.documents, "alarm-cleared") == 1, "that it is over")
            job.end_soon(5)
            assert job.exit_codes() == {"a": 0}
        assert [document["event"] for document in web.documents] == ["alarm", "alarm-cleared"]
