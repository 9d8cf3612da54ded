"""Tokens, token files that change, and certificates."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from edl.errors import PortInUse
from edl.web.access import Rights, Tokens
from edl.web.front import Web, WebDeps
from edl.web.routes import ROUTES
from edl.web.settings import HttpLimits, HttpSettings
from tests.support.fake_master import JOB
from tests.support.web_fixture import HOST, TOKEN, Setup, play
from tests.unit.edl.web.test_relay import another

FULL, READ = "full-" + "f" * 20, "read-" + "r" * 20


@pytest.fixture
def files(tmp_path: Path) -> HttpSettings:
    (tmp_path / "full").write_text(f"# of the operators\n{FULL}\nanother-full-token\n\n")
    (tmp_path / "read").write_text(READ)
    return HttpSettings(0, token_file=str(tmp_path / "full"), read_token_file=str(tmp_path / "read"))


def test_files_name_the_tokens(files: HttpSettings) -> None:
    async def scenario(on: Setup) -> None:
        assert (await on.ask("GET", "JOB/scale", token=TOKEN)).code == 401, "the job's own does not count any more"
        for token in (FULL, "another-full-token"):
            assert (await on.ask("PATCH", "JOB/scale", {}, token=token)).code == 200
        assert (await on.ask("GET", "JOB/scale", token="# of the operators")).code == 401

    play(scenario, files)


def test_a_token_that_may_only_look(files: HttpSettings) -> None:
    async def scenario(on: Setup) -> None:
        for route in ROUTES:
            path = route.path.format(job=JOB, node="node-a", dataset="train")
            reply = await on.ask(route.method, path, token=READ)
            may = route.method == "GET" and not route.private
            assert reply.code == (200 if may else 403), f"{route.method} {route.path}"
        assert on.master.requests == [] and on.master.asked == []

    play(scenario, files)


def test_a_file_that_changes_is_read_again(files: HttpSettings) -> None:
    path = Path(files.token_file)

    def write(text: str) -> None:
        path.write_text(text)

    def remove() -> None:
        path.unlink()

    async def scenario(on: Setup) -> None:
        async def codes(*tokens: str) -> list[int]:
            on.now_s += 1.5
            return [(await on.ask("GET", "JOB/scale", token=token)).code for token in tokens]

        assert await codes(FULL, "a-new-token") == [200, 401]
        write("a-new-token")
        assert await codes("a-new-token", FULL) == [200, 401]
        write("too many words in one line")
        assert await codes("a-new-token") == [200]
        remove()
        assert await codes("a-new-token") == [200], "a file that cannot be read takes nothing away"
        assert await codes("a-new-token") == [200]
        write("")
        assert await codes("a-new-token") == [401], "an empty one does"

    log = "\n".join(play(scenario, files).log)
    assert log.count("has changed") == 2 and log.count("cannot read") == 2
    assert "a-new-token" not in log and FULL not in log and "too many" not in log


def test_what_a_header_gives(files: HttpSettings) -> None:
    log: list[str] = []
    tokens = Tokens(lambda: TOKEN, "", files.read_token_file, log.append)
    assert tokens.rights(f"Bearer {READ}") is None, "not read yet"
    tokens.refresh()
    assert tokens.rights(f"Bearer {READ}") is Rights.READ
    assert tokens.rights(f"bearer  {TOKEN} ") is Rights.FULL
    for wrong in ("", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer", "Bearer ", "Bearer \udcff"):
        assert tokens.rights(wrong) is None
    assert Tokens(lambda: "", "", "", log.append).rights("Bearer ") is None, "the job's own is not known yet"
    assert log == []


# --- certificates ----------------------------------------------------------------------------------------------------

openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl program")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client", "stranger"):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
        command += ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return folder


def of(folder: Path, client: str = "", other: str = "server") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / f"{other}.pem"))
    if client:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    return context


def settings(folder: Path, *, mutual: bool = False) -> HttpSettings:
    ca = str(folder / "client.pem") if mutual else ""
    return HttpSettings(0, cert=str(folder / "server.pem"), key=str(folder / "server.key"), client_ca=ca)


@openssl
def test_tls(made: Path) -> None:
    async def scenario(on: Setup) -> None:
        assert on.web.url.startswith("https://")
        assert (await on.ask("GET", "JOB/scale")).code == 200
        assert (await on.ask("GET", "JOB/scale", token=None)).code == 401
        _, writer = await on.raw(b"GET / HTTP/1.1\r\n\r\n")
        writer.close()

    play(scenario, settings(made), tls=of(made))


@openssl
def test_a_certificate_stands_for_a_token(made: Path) -> None:
    async def scenario(on: Setup) -> None:
        assert (await on.ask("PATCH", "JOB/scale", {"spec": {"replicas": 2}}, token=None)).code == 202
        assert on.master.requests[0].by == "HTTP, client at 127.0.0.1"
        assert (await on.ask("GET", "JOB/scale", token="wrong-token")).code == 401, "a token that is sent counts"
        page = {"Origin": "http://elsewhere"}
        assert (await on.ask("POST", "JOB/stop", token=None, headers=page)).code == 401, "browsers send theirs unasked"

    play(scenario, settings(made, mutual=True), tls=of(made, "client"))


@openssl
@pytest.mark.parametrize("client", ["", "stranger"])
def test_without_the_right_certificate_there_is_no_connection(made: Path, client: str) -> None:
    async def scenario(on: Setup) -> None:
        with pytest.raises(aiohttp.ClientError):
            await on.ask("GET", "/healthz")

    play(scenario, settings(made, mutual=True), tls=of(made, client))


@openssl
def test_a_certificate_that_changes_is_read_again(made: Path, tmp_path: Path) -> None:
    for suffix in ("pem", "key"):
        shutil.copy(made / f"stranger.{suffix}", tmp_path / f"server.{suffix}")

    async def scenario(on: Setup) -> None:
        async def until(condition: Callable[[], bool]) -> None:
            while not condition():
                on.now_s += 10.0
                await asyncio.sleep(0.001)

        with pytest.raises(aiohttp.ClientError):
            await on.ask("GET", "JOB/scale")
        shutil.copy(made / "server.pem", tmp_path / "server.pem")
        os.utime(tmp_path / "server.pem", (1, 1))
        await until(lambda: "cannot read the certificates again" in on.log[-1])
        # The key does not belong to it, so the previous certificate stays in use.
        before = aiohttp.TCPConnector(ssl=of(made, other="stranger"))
        async with aiohttp.ClientSession(connector=before) as client:
            assert (await client.get(f"{on.web.url}/healthz")).status == 200
        shutil.copy(made / "server.key", tmp_path / "server.key")
        await until(lambda: "have changed" in on.log[-1])
        assert (await on.ask("GET", "JOB/scale")).code == 200

    # Nobody can ask meanwhile: clients refuse the certificate.
    play(scenario, settings(tmp_path), HttpLimits(rate=1e6, burst=1e6, certificates_s=0.001), tls=of(made))


@openssl
def test_an_authority_that_is_removed_does_not_count_any_more(made: Path, tmp_path: Path) -> None:
    authorities = tmp_path / "ca.pem"
    shutil.copy(made / "client.pem", authorities)
    pem, key = str(made / "server.pem"), str(made / "server.key")

    async def scenario(on: Setup) -> None:
        async def is_heard(name: str) -> bool:
            try:
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=of(made, name))) as client:
                    return (await client.get(f"{on.web.url}/healthz")).status == 200
            except aiohttp.ClientError:
                return False

        assert (await is_heard("client"), await is_heard("stranger")) == (True, False)
        shutil.copy(made / "stranger.pem", authorities)
        while "have changed" not in on.log[-1]:
            on.now_s += 10.0
            await asyncio.sleep(0.001)
        assert (await is_heard("client"), await is_heard("stranger")) == (False, True)

    limits = HttpLimits(rate=1e6, burst=1e6, certificates_s=0.001)
    play(scenario, HttpSettings(0, cert=pem, key=key, client_ca=str(authorities)), limits, tls=of(made, "client"))


@openssl
def test_launchers_with_the_same_certificate_relay_to_each_other(made: Path) -> None:
    async def scenario(on: Setup) -> None:
        relay = {"Edl-Relay": "1"}
        async with another(on.master, settings=settings(made)) as master:
            on.url = master.url
            assert (await on.ask("GET", "JOB/scale", headers=relay)).code == 200
            on.url = master.url.replace("127.0.0.1", "localhost")
            reply = await on.ask("GET", "JOB/scale", headers=relay)
            assert reply.code == 503 and "localhost" in reply.json["message"], "the certificate is for another name"
        other = HttpSettings(0, cert=str(made / "stranger.pem"), key=str(made / "stranger.key"))
        async with another(on.master, settings=other) as stranger:
            on.url = stranger.url
            reply = await on.ask("GET", "JOB/scale", headers=relay)
            assert reply.code == 503 and "certificate" in reply.json["message"].lower()
            assert TOKEN not in reply.text
        assert on.master.requests == []

    play(scenario, settings(made), tls=of(made), rules=False)


@openssl
def test_launchers_whose_certificates_the_client_authority_signs_relay_to_each_other(made: Path) -> None:
    pem, key = str(made / "server.pem"), str(made / "server.key")
    mutual = HttpSettings(0, cert=pem, key=key, client_ca=pem)

    async def scenario(on: Setup) -> None:
        async with another(on.master, settings=mutual) as master:
            on.url = master.url
            assert (await on.ask("GET", "JOB/scale", headers={"Edl-Relay": "1"})).code == 200

    play(scenario, mutual, tls=of(made, "server"), rules=False)


@openssl
def test_a_certificate_is_not_passed_on(made: Path) -> None:
    async def scenario(on: Setup) -> None:
        async with another(on.master, settings=settings(made)) as master:
            on.url = master.url
            reply = await on.ask("GET", "JOB/scale", token=None, headers={"Edl-Relay": "1"})
            assert reply.code == 401 and "needs a token" in reply.json["message"]

    play(scenario, settings(made, mutual=True), tls=of(made, "client"), rules=False)


# --- where it listens ------------------------------------------------------------------------------------------------


def web(log: list[str], **fields: str | int) -> Web:
    return Web(WebDeps(JOB, HttpSettings(**{"port": 0, **fields}), lambda: TOKEN, log.append, lambda: 0.0))  # type: ignore[arg-type]


def test_a_port_that_is_taken() -> None:
    first = web([])
    port = int(first.listen(HOST).rpartition(":")[2])
    with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{port}: .*in use.*--http-port"):
        web([], port=port).listen(HOST)
    with pytest.raises(PortInUse, match=r"no-such-host\.invalid"):
        web([], host="no-such-host.invalid").listen(HOST)
    first._socket.close()  # type: ignore[union-attr]


def test_others_are_told_an_address_that_they_can_reach() -> None:
    everywhere = web([], host="0.0.0.0")
    assert everywhere.listen("10.1.2.3").startswith("http://10.1.2.3:")
    six = web([], host="::1")
    assert six.listen("10.1.2.3").startswith("http://[::1]:")
    for one in (everywhere, six):
        one._socket.close()  # type: ignore[union-attr]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_all_addresses_are_those_of_both_families() -> None:
    one = web([], host="::")
    url = one.listen("127.0.0.1")
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 60.0):
        one._socket.close()  # type: ignore[union-attr]


def test_without_tls_a_warning_where_others_can_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    one = web([])
    for url, warned in (("http://10.0.0.1:80", True), ("http://127.0.0.1:80", False), ("http://[::1]:80", False)):
        one.url = url
        assert ("without TLS" in one._warning()) == warned


def test_a_file_system_that_hangs_holds_one_thread() -> None:
    async def scenario(on: Setup) -> None:
        assert (await on.ask("GET", "JOB/scale")).code == 200
        hangs, begun = threading.Event(), list[float]()

        def refresh() -> None:
            begun.append(on.now_s)
            assert hangs.wait(60)

        on.web.refresh = refresh  # type: ignore[method-assign]
        try:
            for _ in range(5):
                on.now_s += 10.0
                assert (await on.ask("GET", "JOB/scale")).code == 200
            assert len(begun) == 1
        finally:
            hangs.set()

    play(scenario, limits=HttpLimits(rate=1e6, burst=1e6, refresh_s=0.05))
