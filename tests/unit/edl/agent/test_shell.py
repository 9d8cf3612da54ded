"""Waits of an agent, and how they are cancelled."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest

from edl.adapters.clock import SystemClock
from edl.agent import shell as shell_module
from edl.agent.deps import AgentDeps, NodeCheckpoints, Workers
from edl.agent.machine import events as ev
from edl.agent.machine.machine import step
from edl.agent.machine.state import AgentState, Outcome
from edl.agent.shell import AgentShell
from edl.agent.worker_server import WorkerCheckpoints, WorkerServer
from edl.agent.workers.ports import PortReservation
from edl.config import Timeouts
from edl.errors import JobConflict, StoreError, StoreFull, StoreRefused, StoreUnavailable, WorkerStartError
from edl.launch.registration import JobEnded
from edl.ports import Processes
from edl.tasks import end
from edl.testing.clock import FakeClock
from edl.types import FencingToken, Incarnation, NodeId, Round
from edl.wire.messages import Depart, Dismissed, Finish, Ready
from edl.wire.process_events import ProcessEvent, WorkersStopped
from edl.wire.records import NO_STATE, NodeInfo

INFO = NodeInfo(NodeId("a"), Incarnation(5), "host-a", 1, 1)
LEFT = Outcome(143, "left the job")
SOON_S = 30.0


class Stuck:
    """Workers, a fork server and a checkpoint directory that block their callers."""

    unsaved = ""
    busy = loading = False
    stored = (NO_STATE, False)
    refused = ""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.waiting = asyncio.Event()
        self.until_s: list[float] = []
        self.happened: asyncio.Queue[ProcessEvent] = asyncio.Queue()

    async def look(self) -> None:
        pass

    async def settled(self) -> None:
        await asyncio.Event().wait()

    def holdings(self) -> tuple[()]:
        return ()

    async def save_what_is_left(self, reason: str) -> None:
        await self.forever()

    async def start(self, world: object, slots: object) -> list[ev.WorkerEnded]:
        await self.forever()
        return []

    async def dump_stacks(self) -> None:
        await self.forever()

    async def forever(self) -> None:
        """Not even cancelling helps: a thread that waits for a disk which hangs."""
        self.waiting.set()
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if self.released:
                    raise

    released = False

    async def events(self) -> AsyncIterator[ProcessEvent]:
        while True:
            yield await self.happened.get()

    def entitle(self, until_s: float) -> None:
        self.until_s.append(until_s)

    def place(self, pid: int) -> None:
        return None

    def warn_by(self, warn: object) -> None:
        pass

    def meet_at(self, worker_server: str) -> None:
        pass


def shell_of(stuck: Stuck, **timeouts: float) -> AgentShell:
    def nobody(*_: object) -> Any:
        raise AssertionError("not in these tests")

    warming: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    deps = AgentDeps(
        clock=SystemClock(),
        processes=cast(Processes, stuck),
        warming=warming,
        workers=cast(Workers, stuck),
        worker_server=lambda heard, relay: WorkerServer(
            stuck.place, cast(WorkerCheckpoints, stuck), heard, relay, stuck.said.append
        ),
        ports=PortReservation(),
        checkpoints=cast(NodeCheckpoints, stuck),
        secret=nobody,
        connect=nobody,
        refuses=nobody,
        register=nobody,
        master_refused=nobody,
        log=stuck.said.append,
    )
    return AgentShell(deps, AgentState(INFO, Timeouts(**timeouts), contact_s=SystemClock().now_s()))  # type: ignore[arg-type]


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario, SOON_S)

    asyncio.run(limited())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_module, "LET_GO_S", 0.0)


@pytest.mark.parametrize(
    ("effect", "said"),
    [
        (ev.Start(cast(Any, None), (0,)), "interrupted again: no longer waiting for the workers to start"),
        (ev.DumpStacks(), "interrupted again: no longer waiting for the remaining stacks"),
        (ev.Exit(LEFT), "interrupted again: the newest commit may not be in the checkpoint directory"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_the_agent_waits_for_is_given_up_on_the_second_signal(
    monkeypatch: pytest.MonkeyPatch, effect: ev.Effect, said: str
) -> None:
    async def scenario() -> None:
        stuck = Stuck()
        shell = shell_of(stuck)
        monkeypatch.setattr(shell, "_enter", lambda world, started: None)
        doing = asyncio.ensure_future(shell._carry_out(None, ev.Decision(shell.state, (effect,), "")))
        await stuck.waiting.wait()
        shell.post(ev.Interrupted(signal.SIGTERM, again=False))
        await asyncio.sleep(0)
        assert not doing.done()
        shell.post(ev.Interrupted(signal.SIGTERM, again=True))
        await doing
        assert stuck.said == [said]
        stuck.released = True
        shell._worker_server.close()

    play(scenario())


def test_the_agent_does_not_wait_for_stacks_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        stuck = Stuck()
        shell = shell_of(stuck)
        monkeypatch.setattr(shell_module, "STACKS_S", 0.0)
        await shell._carry_out(None, ev.Decision(shell.state, (ev.DumpStacks(),), ""))
        assert stuck.said == ["the time limit was reached: no longer waiting for the remaining stacks"]
        stuck.released = True
        shell._worker_server.close()

    play(scenario())


def test_the_fork_server_is_told_of_each_renewal_also_while_the_agent_waits() -> None:
    async def scenario() -> None:
        stuck = Stuck()
        shell = shell_of(stuck, lease_ttl_s=100.0)
        now_s = SystemClock().now_s()
        shell.leased(now_s)
        assert stuck.until_s == [now_s + 90.0]
        # The lease has ended, and the agent has not come to it yet: that it lives is no longer enough.
        shell.post(ev.LeaseGone())
        assert shell._entitlement.look(now_s + 89.0) is None
        shell._worker_server.close()

    play(scenario())


@pytest.mark.parametrize(("lasted_s", "pauses"), [(0.0, [0.05, 0.1, 0.2, 0.4, 0.8]), (10.0, [0.05] * 5)])
def test_a_master_that_hangs_up_is_called_at_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, lasted_s: float, pauses: list[float]
) -> None:
    """Unless the call has lasted."""

    async def scenario() -> None:
        shell, clock = shell_of(Stuck()), FakeClock()
        paused: list[float] = []
        called_often = asyncio.Event()

        class Cut:
            async def run(self, opened: Callable[[], None], heard: object) -> str:
                opened()
                clock.advance(lasted_s)
                return "cut"

            def send(self, message: object) -> None:
                pass

        async def refuses(host: str, port: int) -> bool:
            return False

        async def pause(seconds: float) -> None:
            paused.append(seconds)
            if len(paused) == len(pauses):
                called_often.set()
                await asyncio.Event().wait()

        deps = dataclasses.replace(shell._deps, clock=clock, connect=lambda host, port: Cut(), refuses=refuses)
        monkeypatch.setattr(shell, "_deps", deps)
        monkeypatch.setattr(asyncio, "sleep", pause)
        staying = asyncio.ensure_future(shell._stay_attached())
        shell.follow("host-m", 7, FencingToken(3))
        await called_often.wait()
        assert paused == pauses
        await end(staying)
        shell._worker_server.close()

    play(scenario())


def test_a_message_that_cannot_be_handled_costs_the_connection_and_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one for a worker, when the launcher has no descriptor left. Without a pause it would do nothing else."""

    async def scenario() -> None:
        stuck = Stuck()
        shell = shell_of(stuck)
        paused: list[float] = []
        called_often = asyncio.Event()

        class Lacking:
            async def run(self, opened: Callable[[], None], heard: object) -> str:
                opened()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            def send(self, message: object) -> None:
                pass

        async def refuses(host: str, port: int) -> bool:
            return False

        async def pause(seconds: float) -> None:
            paused.append(seconds)
            if len(paused) == 3:
                called_often.set()
                await asyncio.Event().wait()

        monkeypatch.setattr(
            shell, "_deps", dataclasses.replace(shell._deps, connect=lambda host, port: Lacking(), refuses=refuses)
        )
        monkeypatch.setattr(asyncio, "sleep", pause)
        staying = asyncio.ensure_future(shell._stay_attached())
        shell.follow("host-m", 7, FencingToken(3))
        await called_often.wait()
        assert paused == [0.05, 0.1, 0.2]
        assert len(stuck.said) == 3
        assert "Too many open files" in stuck.said[0]
        await end(staying)
        shell._worker_server.close()

    play(scenario())


def test_a_node_that_cannot_attach_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait in silence otherwise, as behind a firewall."""

    async def scenario() -> None:
        stuck, clock, said = Stuck(), FakeClock(), asyncio.Event()
        shell = shell_of(stuck)

        class Unreachable:
            async def run(self, opened: Callable[[], None], heard: object) -> str:
                clock.advance(20.0)
                return "unavailable: connection timed out"

            def send(self, message: object) -> None:
                pass

        async def refuses(host: str, port: int) -> bool:
            if stuck.said:
                said.set()
                await asyncio.Event().wait()
            return False

        monkeypatch.setattr(shell_module, "RECONNECT_PAUSE_S", 0.0)
        monkeypatch.setattr(
            shell, "_deps", dataclasses.replace(shell._deps, connect=lambda *_: Unreachable(), refuses=refuses)
        )
        monkeypatch.setattr(shell._trouble, "_now_s", clock.now_s)
        staying = asyncio.ensure_future(shell._stay_attached())
        shell.follow("host-m", 7, FencingToken(3))
        await said.wait()
        assert stuck.said[0].startswith("cannot attach to the Master at host-m:7 for 20 s: unavailable: ")
        await end(staying)
        shell._worker_server.close()

    play(scenario())


@pytest.mark.parametrize(("number", "later"), [(errno.EMFILE, True), (errno.EADDRINUSE, True), (errno.EACCES, False)])
def test_ports_that_the_host_lacks_for_the_moment_are_tried_again(
    monkeypatch: pytest.MonkeyPatch, number: int, later: bool
) -> None:
    class Ports:
        def ports(self, count: int) -> tuple[int, ...]:
            raise OSError(number, os.strerror(number))

        def use(self) -> None:
            pass

        def release(self) -> None:
            pass

    async def scenario() -> None:
        stuck = Stuck()
        monkeypatch.setattr(shell_module, "LACKING_AGAIN_S", 0.0)
        shell = shell_of(stuck)
        shell._ports = Ports()
        for _ in range(2):
            shell._announce()
            event = await shell._events.get()
            assert isinstance(event, ev.StateChanged if later else ev.Fatal)
        assert len(stuck.said) == later, "it is said once"
        shell._worker_server.close()

    play(scenario())


def test_the_next_world_does_not_wait_for_ever_for_a_directory_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        stuck, sent = Stuck(), list[object]()
        stuck.busy = True
        shell = shell_of(stuck)
        monkeypatch.setattr(shell, "_deps", dataclasses.replace(shell._deps, save_timeout_s=0.05))
        monkeypatch.setattr(shell, "_stream", Recording(sent))
        shell._announce()
        assert isinstance(await shell._events.get(), ev.StateChanged)
        shell._announce()
        assert [type(message) for message in sent] == [Ready]
        assert len(stuck.said) == 1
        stuck.busy = False
        shell._announce()
        stuck.busy = True
        shell._announce()
        assert len(sent) == 2, "it is waited for again"
        assert isinstance(await shell._events.get(), ev.StateChanged)
        shell._ports.release()
        shell._worker_server.close()

    play(scenario())


def test_a_save_that_is_not_written_in_time_is_reported_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        stuck = Stuck()
        stuck.unsaved = "commit 7 is not written yet"
        monkeypatch.setattr(stuck, "saving", True, raising=False)
        monkeypatch.setattr(stuck, "flush_saves", asyncio.Event().wait, raising=False)
        shell = shell_of(stuck)
        monkeypatch.setattr(shell, "_deps", dataclasses.replace(shell._deps, save_timeout_s=0.05))
        await shell._flush_saves(Round(3))
        assert await shell._events.get() == ev.SavesFlushed(Round(3), pending=True)
        unsaved = "commit 7 is not written yet (given up after 0.05 s: --save-timeout=0.05)"
        assert await shell._events.get() == ev.SavesFlushed(Round(3), unsaved=unsaved)
        shell._worker_server.close()

    play(scenario())


class Recording:
    """A stream to the Master that keeps what is sent."""

    def __init__(self, sent: list[object]) -> None:
        self._sent = sent

    def send(self, message: object) -> None:
        self._sent.append(message)


@pytest.mark.parametrize(("number", "later"), [(errno.EAGAIN, True), (errno.EMFILE, True), (errno.ENOENT, False)])
def test_a_fork_server_that_the_host_has_no_process_for_is_started_later(
    monkeypatch: pytest.MonkeyPatch, number: int, later: bool
) -> None:
    """As at a container's limit on processes."""
    tries = 0

    async def warm() -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise WorkerStartError("cannot start python") from OSError(number, os.strerror(number))
        return "ready"

    async def scenario() -> None:
        stuck = Stuck()
        monkeypatch.setattr(shell_module, "LACKING_AGAIN_S", 0.0)
        monkeypatch.setattr(stuck, "warm", warm, raising=False)
        shell = shell_of(stuck)
        monkeypatch.setattr(shell, "_warming", None)
        await shell._warm()
        event = await shell._events.get()
        assert isinstance(event, ev.ForkServerReady if later else ev.Fatal)
        assert len(stuck.said) == (2 if later else 0), "the reason once, and that it is there"
        shell._worker_server.close()

    play(scenario())


def test_a_node_that_reads_the_state_is_not_ready_however_long_that_takes() -> None:
    """The Master would take the checkpoint for one that cannot be used, and begin from an older commit."""

    async def scenario() -> None:
        stuck, sent = Stuck(), list[object]()
        shell = shell_of(stuck)
        shell._stream = cast(Any, Recording(sent))
        stuck.busy = stuck.loading = shell._gave_up_saves = True
        shell._announce()
        assert sent == []
        stuck.loading = False
        shell._announce()
        assert [type(message) for message in sent] == [Ready], "it does not wait for saves that take too long"
        shell._ports.release()
        shell._worker_server.close()

    play(scenario())


def test_killed_workers_come_to_the_machine_as_the_fork_server_reports_them() -> None:
    async def scenario() -> None:
        shell = shell_of(Stuck())
        assert await shell._event_of(WorkersStopped("silent")) == WorkersStopped("silent")
        shell._worker_server.close()

    play(scenario())


def test_a_thread_that_hangs_does_not_keep_the_launcher() -> None:
    code = """if True:
        import asyncio, sys, threading, time
        from edl.launch import __main__ as main
        main.THREADS_S = 0.1
        async def work():
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
            return 7
        main._run_and_exit(work())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7
    assert done.stderr == (
        "edl: a thread is still blocked, possibly on a hanging file system: exiting with status 7 without waiting for "
        "it\n"
    )


@pytest.mark.parametrize("error", [StoreUnavailable("silent"), StoreRefused("wrong password"), StoreFull("no room")])
def test_a_store_that_refuses_a_node_whose_lease_has_ended_counts_as_one_that_is_away(
    monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    """Its credentials were accepted before: a changed password must not end a running job. Said once."""
    monkeypatch.setattr(shell_module, "REGISTER_PAUSE_S", 0.0)

    async def scenario() -> None:
        stuck = Stuck()
        shell = shell_of(stuck)
        answers: list[StoreError | NodeInfo] = [error, error, error, INFO]

        async def register() -> NodeInfo:
            answer = answers.pop(0)
            if isinstance(answer, StoreError):
                raise answer
            return answer

        monkeypatch.setattr(shell, "_deps", dataclasses.replace(shell._deps, register=register))
        await shell._register()
        assert await shell._events.get() == ev.Registered(INFO)
        assert stuck.said == ([f"cannot register again: {error}"] if error.definite else [])
        shell._worker_server.close()

    play(scenario())


@pytest.mark.parametrize(
    ("event", "times"),
    [
        (ev.MasterSaid(Depart("edl drain", 20.0)), 1),
        (ev.MasterSaid(Dismissed("the job is suspended")), 1),
        (ev.Noticed("spot instance", 60.0), 1),
        (ev.Interrupted(signal.SIGTERM, again=False), 1),
        (ev.Fatal(Outcome(7, "no such program", save=False)), 1),
        (ev.Fatal(Outcome(0, "the job has already ended", job_over=True)), 0),
        (ev.MasterSaid(Finish(0, "all done")), 0),
        (ev.LeaseRenewed(), 0),
    ],
    ids=str,
)
def test_that_a_node_leaves_a_job_that_goes_on_is_reported_once(event: ev.Event, times: int) -> None:
    async def scenario() -> None:
        stuck, calls = Stuck(), list[str]()
        shell = shell_of(stuck)
        shell._deps = dataclasses.replace(shell._deps, leaves=lambda: calls.append("leaves"))
        shell._state = dataclasses.replace(shell.state, connected=True)
        for each in (event, ev.Noticed("spot instance", 60.0) if times else event):
            decision = step(shell.state, each, SystemClock().now_s())
            carried_out = tuple(one for one in decision.effects if not isinstance(one, ev.Exit))
            await shell._carry_out(each, dataclasses.replace(decision, effects=carried_out))
        assert len(calls) == times
        shell._let_go()

    play(scenario())


@pytest.mark.parametrize(
    "error", [JobEnded(Finish(0, "all done")), JobConflict("its store has lost its data")], ids=str
)
def test_a_node_that_cannot_register_again_knows_whether_the_job_is_over(error: JobConflict) -> None:
    """The data of the job's store are deleted only then."""

    async def scenario() -> None:
        async def register() -> NodeInfo:
            raise error

        shell = shell_of(Stuck())
        shell._deps = dataclasses.replace(shell._deps, register=register)
        await shell._register()
        event = await shell._events.get()
        assert isinstance(event, ev.Fatal)
        assert event.outcome.job_over is isinstance(error, JobEnded)
        shell._worker_server.close()

    play(scenario())
