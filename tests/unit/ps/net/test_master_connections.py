"""The Master's connections to pservers: over real sockets, with the pservers' own endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest

from edl.exit_codes import ExitCode
from edl.master import service as sv
from edl.master.shell import MasterShell
from edl.ports import Delete, HelperConnections, HelperListener, Put
from edl.types import FencingToken, Round
from edl.wire.messages import Finish, ServiceFromWorker, StartRound
from ps.net import master_connections as connections_module
from ps.net.caller import EndpointPeer, FrameEndpoint, FrameReply
from ps.net.master_connections import MasterConnectionsDeps, PserverConnections
from ps.protocol.frames import Frame, FrameOp
from ps.protocol.handshake import MASTER
from tests.support.master_fixture import KEYS, Agent, Bench, play
from tests.support.relay import start_relay

SECRET = "a secret"
HOST = "127.0.0.1"
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(connections_module, "LONGEST_PAUSE_S", 0.01)


class Pserver:
    """A pserver as far as the Master can tell: says back what it hears."""

    def __init__(self, port: int = 0, secret: str = SECRET) -> None:
        self.heard: list[str] = []
        self.masters: list[EndpointPeer] = []
        self.newest = 0
        self.endpoint = FrameEndpoint(self._handle, secret=secret, met=self._met)
        self.endpoint.start(HOST, port)

    @property
    def key(self) -> bytes:
        place = {"host": HOST, "port": self.endpoint.port, "secret": SECRET, "path": "", "machine": "", "most_bytes": 0}
        return json.dumps(place).encode()

    def _met(self, peer: EndpointPeer) -> tuple[str, str] | None:
        if peer.hello.token < self.newest:
            return "fenced", "another Master rules"
        self.newest = peer.hello.token
        self.masters.append(peer)
        return None

    def _handle(self, peer: EndpointPeer, frame: Frame) -> FrameReply:
        assert peer.role == MASTER and frame.op is FrameOp.CONTROL
        self.heard.append(str(frame.body, "utf-8"))
        peer.push(FrameOp.CONTROL, b"", [f"heard {self.heard[-1]}".encode()])
        return FrameReply()


@contextlib.contextmanager
def pserver(port: int = 0, secret: str = SECRET) -> Iterator[Pserver]:
    made = Pserver(port, secret)
    try:
        yield made
    finally:
        made.endpoint.stop()


class Ear:
    """``HelperListener`` that keeps what it hears."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, object]] = []
        self._changed = asyncio.Event()

    def up(self, name: str) -> None:
        self._add("up", name, None)

    def down(self, name: str, refused: bool) -> None:
        self._add("down", name, refused)

    def heard(self, name: str, body: str) -> None:
        self._add("heard", name, body)

    async def until(self, *last: tuple[str, str, object]) -> None:
        """The newest of what it has heard are these."""

        async def look() -> None:
            while self.told[-len(last) :] != list(last):
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(look(), WAIT_S)

    def _add(self, what: str, name: str, detail: object) -> None:
        self.told.append((what, name, detail))
        self._changed.set()


NAME = "ps/servers/n1-1"


def connections_for(
    ear: Ear, *, ttl_s: float = 30.0, token: int = 7, log: list[str] | None = None
) -> PserverConnections:
    return PserverConnections(
        MasterConnectionsDeps(ttl_s, (log if log is not None else []).append, "n1"), FencingToken(token), ear
    )


async def real(holds: Callable[[], bool]) -> None:
    """Until something holds that a thread or a socket brings about."""

    async def look() -> None:
        while not holds():  # noqa: ASYNC110 - threads bring it about
            await asyncio.sleep(0.001)

    await asyncio.wait_for(look(), WAIT_S)


def test_messages_pass_both_ways_with_the_token() -> None:
    async def scenario() -> None:
        with pserver() as server:
            ear = Ear()
            connections = connections_for(ear)
            connections.put(NAME, server.key)
            await ear.until(("up", NAME, None))
            for word in ("one", "zwölf", "x" * 3_000_000):
                connections.send(NAME, word)
                await ear.until(("heard", NAME, f"heard {word}"))
            assert server.masters[0].hello.token == 7
            connections.close()
            await real(lambda: server.masters[0].gone)

    asyncio.run(scenario())


def test_other_helpers_and_bad_keys_get_no_line() -> None:
    async def scenario() -> None:
        log: list[str] = []
        ear = Ear()
        connections = connections_for(ear, log=log)
        connections.put("data/readers/r1", b"{}")
        connections.put(NAME, b"{}")
        connections.put("ps/servers/n1-2", b'{"host": "h", "port": 0, "secret": "s"}')
        connections.send(NAME, "lost")
        assert ear.told == []
        assert [line.split(":")[0] for line in log] == [
            f"cannot connect to {NAME}",
            "cannot connect to ps/servers/n1-2",
        ]
        connections.close()

    asyncio.run(scenario())


def test_a_refused_port_is_a_death_and_a_new_process_another_line() -> None:
    async def scenario() -> None:
        ear = Ear()
        connections = connections_for(ear)
        with pserver() as server:
            port = server.endpoint.port
            connections.put(NAME, server.key)
            await ear.until(("up", NAME, None))
        await ear.until(("down", NAME, True))
        with pserver(port) as again:
            await ear.until(("up", NAME, None))
            connections.send(NAME, "there again")
            await ear.until(("heard", NAME, "heard there again"))
            assert again.heard == ["there again"]
            connections.gone(NAME)
            told = len(ear.told)
            connections.send(NAME, "nobody hears")
            await real(lambda: again.masters[0].gone)
        assert len(ear.told) == told
        connections.close()

    asyncio.run(scenario())


def test_a_refusal_is_told_once() -> None:
    async def scenario() -> None:
        asked: list[int] = []
        log: list[str] = []

        async def refuses(host: str, port: int, timeout_s: float = 1.0) -> bool:
            asked.append(port)
            return True

        with socket.create_server((HOST, 0)) as taken:
            port = taken.getsockname()[1]
        ear = Ear()
        kit = MasterConnectionsDeps(30.0, log.append, refuses=refuses)
        connections = PserverConnections(kit, FencingToken(1), ear)
        connections.put(NAME, json.dumps({"host": HOST, "port": port, "secret": SECRET}).encode())
        await real(lambda: len(asked) > 3)
        assert ear.told == [("down", NAME, True)]
        connections.close()

    asyncio.run(scenario())


def test_a_silent_pserver_counts_as_down_but_not_as_dead() -> None:
    """Frozen: the kernel still takes connections and bytes for it."""

    async def scenario() -> None:
        frozen = asyncio.Event()

        with pserver() as server:

            def passes(data: bytes) -> bool:
                return not frozen.is_set()

            listener = await start_relay(server.endpoint.port, passes=passes)
            port = listener.sockets[0].getsockname()[1]
            ear = Ear()
            connections = connections_for(ear, ttl_s=0.2)
            connections.put(NAME, json.dumps({"host": HOST, "port": port, "secret": SECRET}).encode())
            await ear.until(("up", NAME, None))
            frozen.set()
            await ear.until(("up", NAME, None), ("down", NAME, False))
            frozen.clear()
            await ear.until(("down", NAME, False), ("up", NAME, None))
            connections.close()
            listener.close()

    asyncio.run(scenario())


def test_a_deposed_master_and_a_wrong_secret_are_refused_with_one_line_of_log() -> None:
    async def scenario() -> None:
        with pserver() as server, pserver(secret="another") as stranger:
            server.newest = 8
            log: list[str] = []
            ear = Ear()
            connections = connections_for(ear, log=log)
            connections.put(NAME, server.key)
            await ear.until(("down", NAME, False))
            connections.put(NAME, stranger.key)
            await real(lambda: len(log) == 2)
            assert "refused: another Master rules" in log[0]
            assert "does not know the secret" in log[1]
            assert server.masters == stranger.masters == []
            connections.close()

    asyncio.run(scenario())


class SilentWriter:
    """``ConnectionWriter`` of a connection on which nothing happens."""

    def __init__(self) -> None:
        self.transport = self
        self.aborted = False

    def write(self, data: bytes) -> None: ...

    def writelines(self, data: Iterable[bytes]) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None:
        self.aborted = True


def test_a_line_that_is_closed_while_it_opens_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever moment: before Python 3.12, ``wait_for`` loses a cancellation that comes with its result."""

    async def scenario(turns: int) -> None:
        opened = asyncio.get_running_loop().create_future()
        writer = SilentWriter()

        async def opens(line: object) -> tuple[asyncio.StreamReader, SilentWriter]:
            try:
                await opened
            except asyncio.CancelledError:
                writer.abort()
                raise
            return asyncio.StreamReader(), writer

        monkeypatch.setattr("ps.net.master_connections._PserverConnection._open", opens)
        ear = Ear()
        connections = connections_for(ear)
        connections.put(NAME, json.dumps({"host": HOST, "port": 1, "secret": SECRET}).encode())
        await asyncio.sleep(0)
        opened.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        connections.close()
        for _ in range(20):
            await asyncio.sleep(0)
        assert writer.aborted, f"open {turns} turns after its connection was made"

    for turns in range(10):
        asyncio.run(scenario(turns))


# --- in a Master -----------------------------------------------------------------------------------------------------


class Placement:
    """A service with connections: sends on request, and records what it receives."""

    name = "ps"

    def __init__(self) -> None:
        self.events: list[sv.Event] = []

    def load(self, kept: Mapping[str, bytes], now_s: float) -> tuple[sv.Effect, ...]:
        return ()

    def step(self, event: sv.Event, now_s: float) -> tuple[sv.Effect, ...]:
        self.events.append(event)
        if isinstance(event, sv.LineUp):
            return (sv.Send(event.name, "orders"), sv.Keep("sent", event.name.encode()))
        if isinstance(event, sv.Said):
            return (sv.Fail(event.body),)
        return ()

    def report(self) -> tuple[sv.Progress, ...]:
        return ()


async def master(bench: Bench, service: Placement) -> tuple[MasterShell, asyncio.Future[Finish]]:
    def connections(token: FencingToken, listener: HelperListener) -> HelperConnections:
        return PserverConnections(MasterConnectionsDeps(30.0, bench.said.append), token, listener)

    deps = dataclasses.replace(bench.deps(), services=lambda: (service,), helper_connections=connections)
    shell = MasterShell(deps, bench.crown())
    run = bench.start(shell.run())
    await real(lambda: shell.serving or run.done())
    return shell, run


def test_a_service_hears_of_its_lines_and_sends_over_them() -> None:
    async def scenario(bench: Bench) -> None:
        with pserver() as server:
            early, late = KEYS.helper("ps", "servers/n1-1"), KEYS.helper("ps", "servers/n1-2")
            bench.store.write_now([Put(early, server.key)])
            service = Placement()
            await master(bench, service)
            await real(lambda: sv.HelperSaid("servers/n1-1", "heard orders") in service.events)
            bench.store.write_now([Put(late, server.key)])
            await real(lambda: sv.HelperSaid("servers/n1-2", "heard orders") in service.events)
            kinds = [type(event) for event in service.events]
            assert kinds == [sv.KeyPut, sv.LineUp, sv.HelperSaid, sv.KeyPut, sv.LineUp, sv.HelperSaid]
            bench.store.write_now([Delete(late)])
            await real(lambda: service.events[-1] == sv.KeyGone("servers/n1-2"))
            await real(lambda: server.masters[1].gone)
            assert not server.masters[0].gone
        await real(lambda: service.events[-1] == sv.LineDown("servers/n1-1", True))

    play(scenario)


def test_nothing_is_sent_that_is_not_kept() -> None:
    async def scenario(bench: Bench) -> None:
        with pserver() as server:
            service = Placement()
            await master(bench, service)
            heard: list[list[str]] = []
            bench.store.on_failure = lambda: heard.append(list(server.heard))
            bench.store.fail_writes = 2
            bench.store.write_now([Put(KEYS.helper("ps", "servers/n1-1"), server.key)])
            await real(lambda: server.heard == ["orders"])
            assert heard == [[], []]
            assert KEYS.service("ps", "sent") in bench.stored()

    play(scenario)


def test_a_master_that_is_replaced_lets_go_of_its_lines() -> None:
    async def scenario(bench: Bench) -> None:
        with pserver() as server:
            bench.store.write_now([Put(KEYS.helper("ps", "servers/n1-1"), server.key)])
            service = Placement()
            _, run = await master(bench, service)
            await real(lambda: server.heard == ["orders"])
            run.cancel()
            await real(lambda: server.masters[0].gone)

    play(scenario)


def test_a_service_that_fails_ends_the_job() -> None:
    async def scenario(bench: Bench) -> None:
        service = Placement()
        shell, run = await master(bench, service)
        agent = Agent(bench, shell, bench.register("a"))
        agent.attach()
        agent.ready()
        await agent.hears(StartRound)
        why = "pserver 3 on n2 is lost with 17 buckets, and there is no checkpoint"
        agent.say(ServiceFromWorker("ps", 0, Round(1), why))
        finish = await agent.hears(Finish)
        assert isinstance(finish, Finish)
        assert (finish.exit_code, finish.reason) == (ExitCode.WORKER_FAILED, why)
        agent.say(None)
        await real(run.done)
        assert (await run).reason == why
        assert why in bench.said

    play(scenario)
