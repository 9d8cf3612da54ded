"""Parameter servers over TLS: only with a certificate of the job's authority, and frames as ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edl.errors import SettingError
from edl.types import FencingToken
from ps.errors import HungUp, TimedOut, Unreachable
from ps.net.caller import FrameCaller, FrameEndpoint, FrameReply
from ps.net.connection import PlainSocket, now_s
from ps.net.master_connections import MasterConnectionsDeps, PserverConnections
from ps.net.tls import TlsSocket, contexts, watched
from ps.protocol.frames import FrameOp
from ps.protocol.handshake import TRAINER, CallerHello
from ps.protocol.messages import PserverAddress
from ps.server.server import ParameterServer, Setup

HOST = "127.0.0.1"
LONG_S = 20.0

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl program")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("job", "other"):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-subj", f"/CN={name}", "-days", "1", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return folder


def of(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return contexts(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / f"{name}.pem"))


@contextlib.contextmanager
def serving(tls: ssl.SSLContext | None) -> Iterator[FrameEndpoint]:
    endpoint = FrameEndpoint(
        lambda peer, frame: FrameReply(FrameOp.OK, frame.head, [bytes(frame.body)]), secret="s", tls=lambda: tls
    )
    endpoint.start(HOST)
    try:
        yield endpoint
    finally:
        endpoint.stop(wait_s=LONG_S)


def call(endpoint: FrameEndpoint, tls: ssl.SSLContext | None, deadline_s: float = LONG_S) -> FrameCaller:
    place = PserverAddress(1, "n1-1", HOST, endpoint.port)
    return FrameCaller.connect(place, CallerHello(TRAINER, 1), secret="s", deadline_s=deadline_s, tls=tls)


def test_frames_of_all_sizes(made: Path) -> None:
    calling, called = of(made, "job")
    with serving(called) as endpoint, contextlib.closing(call(endpoint, calling)) as caller:
        for size in (0, 10, 100_000, 3_000_001):
            body = np.random.default_rng(size).integers(0, 256, size, np.uint8)
            answer = caller.request(FrameOp.PUSH, b"head", [body], deadline_s=LONG_S)
            assert (answer.head, bytes(answer.body)) == (b"head", body.tobytes())


def test_one_thread_sends_while_another_receives(made: Path) -> None:
    calling, called = of(made, "job")
    with serving(called) as endpoint, contextlib.closing(call(endpoint, calling)) as caller:
        bodies = [bytes([number]) * 100_000 for number in range(50)]

        def send() -> None:
            for body in bodies:
                caller.send(FrameOp.PUSH, b"", [body], deadline_s=LONG_S)

        thread = threading.Thread(target=send)
        thread.start()
        got = [bytes(caller.receive(deadline_s=LONG_S).body) for _ in bodies]
        thread.join()
        assert got == bodies


def test_both_ends_send_at_once_more_than_the_sockets_hold(made: Path) -> None:
    calling, called = of(made, "job")
    ours, theirs = map(PlainSocket, socket.socketpair())
    until_s, data = now_s() + LONG_S, bytes(range(256)) * (1 << 17)

    def read(end: TlsSocket) -> bool:
        view = memoryview(bytearray(len(data)))
        end.read_into(view, len(view), until_s)
        return bytes(view) == data

    with contextlib.closing(ours), contextlib.closing(theirs), ThreadPoolExecutor(4) as threads:
        answering = threads.submit(TlsSocket, theirs, called, True, until_s)
        ends = TlsSocket(ours, calling, False, until_s), answering.result()
        writing = [threads.submit(end.write, [memoryview(data)], until_s) for end in ends]
        assert list(threads.map(read, ends)) == [True, True]
        assert [one.result() for one in writing] == [None, None]


def test_a_deadline_and_a_death(made: Path) -> None:
    calling, called = of(made, "job")
    with serving(called) as endpoint:
        caller = call(endpoint, calling)
        with pytest.raises(TimedOut):
            caller.receive(deadline_s=0.01)
        assert caller.request(FrameOp.PULL, b"on", deadline_s=LONG_S).head == b"on"
        endpoint.stop()
        with pytest.raises(HungUp):
            caller.receive(deadline_s=LONG_S)
        caller.close()


def test_strangers_are_refused(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    calling, called = of(made, "job")
    other, _ = of(made, "other")
    with serving(called) as endpoint:
        for tls in (other, None):
            with pytest.raises(Unreachable):
                call(endpoint, tls)
        assert endpoint.peers == ()
    assert "TLS handshake failed" in caplog.text
    with serving(None) as endpoint, pytest.raises(Unreachable):
        call(endpoint, calling)


def test_unix_sockets_need_none(made: Path) -> None:
    calling, called = of(made, "job")
    with serving(called) as endpoint:
        place = PserverAddress(1, "n1-1", HOST, endpoint.port, endpoint.path, endpoint.machine)
        caller = FrameCaller.connect(place, CallerHello(TRAINER, 1), secret="s", deadline_s=LONG_S, tls=calling)
        with contextlib.closing(caller):
            assert "unix" in caller.where
            assert caller.request(FrameOp.PULL, b"on", deadline_s=LONG_S).head == b"on"


def test_the_masters_line(made: Path) -> None:
    calling, called = of(made, "job")

    class Ear:
        def __init__(self) -> None:
            self.told = asyncio.Event()

        def up(self, name: str) -> None:
            self.told.set()

        def down(self, name: str, refused: bool) -> None:
            raise AssertionError("down")

        def heard(self, name: str, body: str) -> None:
            raise AssertionError("heard")

    async def scenario(port: int) -> None:
        ear = Ear()
        connections = PserverConnections(
            MasterConnectionsDeps(30.0, lambda text: None, tls=calling), FencingToken(1), ear
        )
        connections.put("ps/servers/a", json.dumps({"host": HOST, "port": port, "secret": "s"}).encode())
        await asyncio.wait_for(ear.told.wait(), LONG_S)
        connections.close()

    with serving(called) as endpoint:
        asyncio.run(scenario(endpoint.port))


def test_files_that_change_are_used_by_new_connections(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Certificates are renewed while the job runs."""

    def put(name: str) -> None:
        for end in ("key", "pem"):
            (tmp_path / f"new.{end}").write_bytes((made / f"{name}.{end}").read_bytes())
            (tmp_path / f"new.{end}").replace(tmp_path / f"used.{end}")

    put("job")
    paths = [str(tmp_path / f"used.{end}") for end in ("pem", "key", "pem")]
    one = ParameterServer(Setup("a", "job", "s", kernels="numpy", tls=watched(*paths)))
    one.start(HOST)
    try:
        first = call(one.endpoint, of(made, "job")[0])
        (tmp_path / "used.key").write_text("half of it")
        for _ in range(2):
            call(one.endpoint, of(made, "job")[0]).close()
        assert sum("The previous ones stay in use" in line for line in caplog.messages) == 1
        put("other")
        call(one.endpoint, of(made, "other")[0]).close()
        with pytest.raises(Unreachable):
            call(one.endpoint, of(made, "job")[0])
        assert first.request(FrameOp.PING, deadline_s=LONG_S).op is FrameOp.OK, "open connections stay"
        first.close()
    finally:
        one.stop()


def test_an_authority_that_is_removed_is_not_trusted_any_more(made: Path, tmp_path: Path) -> None:
    trusted, new = tmp_path / "trusted.pem", tmp_path / "new.pem"
    pems = {name: (made / f"{name}.pem").read_bytes() for name in ("job", "other")}
    trusted.write_bytes(pems["job"] + pems["other"])
    files = watched(str(made / "other.pem"), str(made / "other.key"), str(trusted))
    one = ParameterServer(Setup("a", "job", "s", kernels="numpy", tls=files))
    one.start(HOST)
    caller = contexts(str(made / "job.pem"), str(made / "job.key"), str(made / "other.pem"))[0]
    try:
        call(one.endpoint, caller).close()
        new.write_bytes(pems["other"])
        new.replace(trusted)
        with pytest.raises(Unreachable):
            call(one.endpoint, caller)
        call(one.endpoint, of(made, "other")[0]).close()
    finally:
        one.stop()


def test_files_that_are_no_good_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("nothing")
    with pytest.raises(SettingError, match=r"a\.pem.*cannot be used"):
        contexts(str(tmp_path / "a.pem"), str(tmp_path / "a.pem"), str(tmp_path / "a.pem"))
