"""``edl checkpoint``, ``edl stop`` and what ``edl status`` says of the state, up to a real Master and its server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine

import grpc
import pytest
from rich.console import Console

from edl.adapters.transport import MasterClient, MasterServer
from edl.cli import __main__ as cli
from edl.cli import find
from edl.cli.ask import RequestOutcome, SaveReader, SetReader, StopReader, ask, checked
from edl.cli.show import show_status
from edl.config import JobSpec, Timeouts
from edl.errors import CheckpointError, UsageError
from edl.exit_codes import ExitCode
from edl.master.shell import MasterShell
from edl.types import NodeId, Rank, Round
from edl.wire.messages import (
    Asked,
    Boundary,
    Finish,
    Hold,
    KeepWith,
    Kept,
    MasterMessage,
    Ready,
    StartRound,
    StopRound,
    Switch,
    Underway,
    WorkerFailed,
)
from edl.wire.purpose import Purpose
from edl.wire.records import Failure, Version
from edl.wire.status import Answer, EventsRequest, HistoryEntry, JobStatus, NodeView
from tests.support.master_fixture import JOB, SPEC, Agent, Bench, play

TOKEN = "secret"
SOON = dataclasses.replace(SPEC, timeouts=Timeouts(lease_ttl_s=3.0, join_grace_s=0, boundary_s=0.2))


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come")


class Setup:
    """A job of one node that trains, its Master behind a server, and a person's command."""

    def __init__(self, bench: Bench, shell: MasterShell, agent: Agent, port: int) -> None:
        self.bench, self.shell, self.agent, self.port = bench, shell, agent, port
        self.client = MasterClient("127.0.0.1", port, TOKEN)
        self.asking: list[asyncio.Future[RequestOutcome]] = []
        self.following = 0
        """How many commands have begun to follow the history."""
        events = shell.events

        def counted(request: EventsRequest) -> AsyncIterator[HistoryEntry]:
            self.following += 1
            return events(request)

        shell.events = counted  # type: ignore[method-assign]

    async def heard(self, kind: type[MasterMessage]) -> MasterMessage:
        await until(lambda: self.agent.last() is kind)
        return self.agent.heard[-1]

    def orders(self) -> list[type]:
        """The types of what the Master has sent about training, in order; not where copies of the state go."""
        return [type(message) for message in self.agent.heard if not isinstance(message, KeepWith)]

    async def underway(self) -> None:
        self.agent.say(Underway(Round(1), "in process"))
        await until(lambda: self.shell.status().nodes[0].underway)

    def ask(self, purpose: Purpose, *, wait: bool = True, argument: str = "") -> asyncio.Future[RequestOutcome]:
        self.asking.append(asyncio.ensure_future(ask(self.client, purpose, "edl test", wait=wait, argument=argument)))
        return self.asking[-1]

    async def agree(self, commit: int) -> Switch:
        """The node's answer to the agreement that follows."""
        order = await self.heard(Hold)
        assert isinstance(order, Hold)
        self.agent.say(Boundary(order.round, order.hold, commit))
        switch = await self.heard(Switch)
        assert isinstance(switch, Switch)
        return switch

    def keep(self, commit: int, error: str = "") -> None:
        where = "" if error else f"/ckpt/commit-{commit}"
        self.agent.say(Kept(Version(1, commit), where, error))


def act(
    scenario_of: Callable[[Setup], Coroutine[None, None, None]],
    *,
    checkpoint_dir: str | None = "/ckpt",
    spec: JobSpec = SPEC,
) -> None:
    async def whole(bench: Bench) -> None:
        deps = dataclasses.replace(bench.deps(spec=spec), checkpoint_dir=checkpoint_dir)
        shell = MasterShell(deps, bench.crown())
        bench.start(shell.run())
        server = MasterServer(lambda: TOKEN)
        port = await server.start("127.0.0.1")
        await until(lambda: shell.serving)
        server.serve(shell)
        agent = Agent(bench, shell, bench.register("a"))
        agent.attach()
        agent.ready()
        job = Setup(bench, shell, agent, port)
        try:
            await until(lambda: agent.last() is StartRound)
            await scenario_of(job)
        finally:
            for asked in job.asking:
                asked.cancel()
            await asyncio.gather(*job.asking, return_exceptions=True)
            await job.client.close()
            await server.stop()

    play(whole)


class TestCheckpoint:
    def test_says_where_it_lies_once_it_is_complete(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            asked = job.ask(Purpose.SAVE)
            switch = await job.agree(5)
            assert (switch.commit, switch.purpose) == (6, Purpose.SAVE)
            assert "edl test" in switch.reason
            job.keep(4)  # of a save before: was on its way
            job.keep(6)
            assert await asked == RequestOutcome(True, "commit 6 is complete in /ckpt/commit-6", 6, "/ckpt/commit-6")
            status = job.shell.status()
            assert (status.saved, status.saved_in) == (Version(1, 6), "/ckpt/commit-6")

        act(scenario)

    def test_a_later_commit_will_do_and_an_earlier_failure_does_no_harm(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            asked = job.ask(Purpose.SAVE)
            await job.agree(5)
            job.keep(4, "no space left")
            job.keep(8)
            assert (await asked).commit == 8

        act(scenario)

    @pytest.mark.parametrize("checkpoint_dir", ["/ckpt", None])
    def test_a_failure_is_said(self, checkpoint_dir: str | None) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            asked = job.ask(Purpose.SAVE)
            await job.agree(5)
            job.keep(6, "there is no checkpoint directory: name one with --checkpoint-dir")
            outcome = await asked
            assert not outcome.ok
            with pytest.raises(CheckpointError, match=r"commit 6 could not be written: .*--checkpoint-dir"):
                checked(outcome, Purpose.SAVE)

        act(scenario, checkpoint_dir=checkpoint_dir)

    def test_without_a_directory_nothing_is_begun(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            with pytest.raises(UsageError, match="no --checkpoint-dir"):
                await job.ask(Purpose.SAVE)
            assert job.orders() == [StartRound]

        act(scenario, checkpoint_dir="")

    def test_without_a_world_in_training_neither(self) -> None:
        async def scenario(job: Setup) -> None:
            with pytest.raises(UsageError, match=r"no world with edl\.State is in training"):
                await job.ask(Purpose.SAVE)
            assert job.orders() == [StartRound]

        act(scenario)

    def test_an_interrupted_round_ends_the_wait(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            asked = job.ask(Purpose.SAVE)
            await job.agree(5)
            job.agent.say(WorkerFailed(Failure(NodeId("a"), Round(1), Rank(0), 0, 1, "ended")))
            await job.heard(StopRound)
            job.agent.say(Ready(Round(1), (100, 101, 102), parked=True))
            outcome = await asked
            assert not outcome.ok
            assert "no checkpoint is known to be complete" in outcome.text

        act(scenario)

    def test_a_round_that_is_interrupted_before_it_is_agreed_on_does_not(self) -> None:
        """The next world owes it."""

        async def scenario(job: Setup) -> None:
            await job.underway()
            asked = job.ask(Purpose.SAVE)
            await job.heard(Hold)
            job.agent.say(WorkerFailed(Failure(NodeId("a"), Round(1), Rank(0), 0, 1, "ended")))
            await job.heard(StopRound)
            job.agent.say(Ready(Round(1), (100, 101, 102), parked=True))
            await job.heard(StartRound)
            job.agent.say(Underway(Round(2), "in process"))
            await job.agree(7)
            job.keep(8)
            outcome = await asked
            assert (outcome.ok, outcome.commit) == (True, 8)

        act(scenario)

    def test_workers_that_do_not_come_to_a_boundary_end_it_too(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            asked = job.ask(Purpose.SAVE)
            await job.heard(Hold)
            assert "save: checkpoint requested by edl test" in job.shell.status().boundary
            job.bench.clock.advance(1.0)
            outcome = await asked
            assert not outcome.ok
            assert "not saved, no answer from a within 0.2 s" in outcome.text

        act(scenario, spec=SOON)

    def test_a_master_that_goes_ends_it_too(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            asked = job.ask(Purpose.SAVE)
            await job.heard(Hold)
            job.bench.crown()
            job.keep(3)
            outcome = await asked
            assert not outcome.ok
            assert "before the checkpoint was complete. See edl status" in outcome.text

        act(scenario)

    def test_need_not_be_waited_for(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            assert await job.ask(Purpose.SAVE, wait=False) == RequestOutcome(
                True, "a checkpoint is written at the next step boundary"
            )
            await job.heard(Hold)

        act(scenario)

    def test_two_who_ask_get_the_same_one(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            first, second = job.ask(Purpose.SAVE), job.ask(Purpose.SAVE)
            await job.heard(Hold)
            await until(lambda: job.following == 2)
            await job.agree(5)
            job.keep(6)
            assert (await first).commit == (await second).commit == 6
            assert job.orders() == [StartRound, Hold, Switch]

        act(scenario)


class TestStop:
    def test_waits_for_the_end(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            asked = job.ask(Purpose.KILL)
            assert (await job.agree(5)).purpose is Purpose.KILL
            assert "edl test" in job.shell.status().kill
            with pytest.raises(UsageError, match="is being stopped"):
                await job.ask(Purpose.SAVE)
            again = job.ask(Purpose.KILL)
            await until(lambda: job.following == 2)
            job.keep(6)
            job.agent.say(Ready(Round(1), (100, 101, 102), parked=True))
            finish = await job.heard(Finish)
            assert isinstance(finish, Finish)
            assert finish.exit_code == ExitCode.KILLED
            job.agent.say(None)
            outcome = await asked
            assert (outcome.ok, outcome.commit, outcome.where) == (True, 6, "/ckpt/commit-6")
            assert "the job has ended: stopped by edl test" in outcome.text
            assert (await again).ok

        act(scenario)

    def test_ends_plain_scripts_as_well(self) -> None:
        async def scenario(job: Setup) -> None:
            answer = await job.ask(Purpose.KILL, wait=False)
            assert "without a new checkpoint" in answer.text
            await job.heard(StopRound)

        act(scenario, checkpoint_dir="")

    def test_does_not_throw_state_away(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            with pytest.raises(UsageError, match=r"would lose its state.*--checkpoint-dir"):
                await job.ask(Purpose.KILL)
            assert job.orders() == [StartRound]

        act(scenario, checkpoint_dir="")

    def test_says_when_the_state_could_not_be_kept(self) -> None:
        reader = StopReader()
        assert reader.take(HistoryEntry(1, 0.0, "state", "commit 6 could not be written: disk full")) is None
        assert reader.take(HistoryEntry(2, 0.0, "job-ended", "stopped by x")) is None
        outcome = reader.history_ended("the Master is gone")
        assert outcome == RequestOutcome(
            False, "the job has ended (stopped by x), but commit 6 could not be written: disk full"
        )

    def test_names_the_checkpoint_of_a_job_that_was_suspended(self) -> None:
        text = "the job has ended: stopped by x; the last checkpoint is commit 5"
        for where, place in (("/ckpt/5", " in /ckpt/5"), ("", "")):  # the Master may not know the place any more
            reader = StopReader((5, where))
            assert reader.take(HistoryEntry(1, 0.0, "job-ended", "stopped by x")) is None
            assert reader.history_ended("the Master is gone") == RequestOutcome(True, text + place, 5, where)

    def test_does_not_take_the_end_of_a_master_for_the_end_of_the_job(self) -> None:
        assert not StopReader().history_ended("the Master is gone").ok


def test_only_those_who_know_the_secret_may_ask() -> None:
    async def scenario(job: Setup) -> None:
        await job.underway()
        stranger = MasterClient("127.0.0.1", job.port, "guessed")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stranger.ask(Asked(Purpose.KILL, "me"))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await stranger.close()
        assert job.shell.status().kill == ""

    act(scenario)


def test_history_of_something_else_is_passed_over() -> None:
    reader = SaveReader()
    for kind, text in (("node-joined", "node b is ready"), ("state", "commit 9 is complete in /x"), ("waiting", "")):
        assert reader.take(HistoryEntry(1, 0.0, kind, text)) is None


# --- the command line ------------------------------------------------------------------------------------------------

VIEW = NodeView("a", "h", 2, "running", True, 0, 0, underway=True, how="in process")
STATUS = JobStatus(
    job=JOB,
    phase="running",
    round=3,
    world_size=2,
    reason="because",
    nnodes="1:4",
    fault_tolerance="elastic",
    restarts_used=0,
    restarts_allowed=3,
    master="a",
    nodes=(VIEW,),
    history=(HistoryEntry(7, 0.0, "world-formed", "round 3"),),
    failures=(),
)


class FakeClient:
    """A Master that answers at once."""

    def __init__(self, answer: Answer, *history: HistoryEntry) -> None:
        self.answer, self.history, self.asked = answer, history, list[Asked]()

    async def status(self) -> JobStatus:
        return STATUS

    async def ask(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        return self.answer

    async def events(self, after: int, follow: bool) -> AsyncIterator[HistoryEntry]:
        assert (after, follow) == (7, True)
        for entry in self.history:
            yield entry


def call(monkeypatch: pytest.MonkeyPatch, client: FakeClient, *words: str) -> int:
    @contextlib.asynccontextmanager
    async def master_of(where: find.Where) -> AsyncIterator[FakeClient]:
        assert where.job == "my-job"
        yield client

    monkeypatch.setattr(find, "master_of", master_of)
    monkeypatch.setattr(sys, "argv", ["edl", *words, "--rdzv-id=my-job"])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


SAVING = HistoryEntry(8, 0.0, "boundary", "checkpoint requested by x: saving commit 6")
SAVED = HistoryEntry(9, 0.0, "state", "commit 6 is complete in /ckpt/6")
LOST = HistoryEntry(9, 0.0, "state", "commit 6 could not be written: disk full")


class TestSet:
    def test_says_from_when_on_it_holds(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            asking = job.ask(Purpose.SET, argument="global-batch=64 lr-scale=0.5")
            switch = await job.agree(6)
            outcome = await asking
            assert (switch.commit, switch.settings.global_batch, outcome.commit) == (7, 64, 7)
            assert outcome.text.startswith(
                "settings 1 from commit 7: global batch 64, LR factor 0.5 (no rule) (edl test ("
            )
            assert job.shell.status().settings == switch.settings

        act(scenario)

    def test_what_changes_nothing_is_known_at_once(self) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            outcome = await job.ask(Purpose.SET, argument="lr-scale=1")
            assert outcome.ok and outcome.text.endswith(": lr-scale=1: nothing changes in the running world")

        act(scenario)

    def test_plain_scripts_have_it_later(self) -> None:
        async def scenario(job: Setup) -> None:
            outcome = await job.ask(Purpose.SET, argument="global-batch=64")
            assert outcome.ok and outcome.text.endswith(": global-batch=64: takes effect with the next world")

        act(scenario)

    @pytest.mark.parametrize("argument", ["local-batch=0", "speed=9", "lr-rule=cubic"])
    def test_nonsense_is_refused_before_anybody_is_asked(self, argument: str) -> None:
        async def scenario(job: Setup) -> None:
            await job.underway()
            with pytest.raises(UsageError, match=argument):
                await job.ask(Purpose.SET, argument=argument)

        act(scenario)

    def test_the_end_of_the_job_ends_the_wait(self) -> None:
        outcome = SetReader("edl set (me)").take(HistoryEntry(8, 0.0, "job-ended", "all done"))
        assert outcome is not None and "the job ended before the settings were changed: all done" in outcome.text
        with pytest.raises(UsageError, match="all done"):
            checked(outcome, Purpose.SET)
        lost = SetReader("edl set (me)").history_ended("the Master is gone")
        assert (lost.ok, lost.text) == (
            False,
            "the Master is gone before the settings were changed. See edl status",
        )

    def test_history_of_others_is_passed_over(self) -> None:
        reader = SetReader("edl set (me)")
        assert reader.take(HistoryEntry(8, 0.0, "settings", "edl set (you): lr-scale=1: nothing changes")) is None
        assert reader.take(HistoryEntry(9, 0.0, "boundary", "settings 2 from commit 9: none")) is None


class TestCommandLine:
    def test_set(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        changed = HistoryEntry(8, 0.0, "settings", "settings 2 from commit 9: global batch 64, LR factor 1 (no rule)")
        client = FakeClient(Answer("", ok=True), changed)
        assert call(monkeypatch, client, "set", "global-batch=64", "lr-scale=1") == 0
        assert capsys.readouterr().out == changed.text + "\n"
        assert (client.asked[0].purpose, client.asked[0].argument) == (Purpose.SET, "global-batch=64 lr-scale=1")
        assert call(monkeypatch, client, "set") == ExitCode.USAGE

    def test_checkpoint(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        client = FakeClient(Answer("", ok=True), SAVING, SAVED)
        assert call(monkeypatch, client, "checkpoint") == 0
        assert capsys.readouterr().out == "commit 6 is complete in /ckpt/6\n"
        (asked,) = client.asked
        assert asked.purpose is Purpose.SAVE
        assert asked.by.startswith("edl checkpoint (")

    def test_as_json(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        client = FakeClient(Answer("", ok=True), SAVING, SAVED)
        assert call(monkeypatch, client, "checkpoint", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told == {"ok": True, "text": SAVED.text, "commit": 6, "where": "/ckpt/6"}

    def test_failed(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        client = FakeClient(Answer("", ok=True), SAVING, LOST)
        assert call(monkeypatch, client, "checkpoint") == ExitCode.CHECKPOINT_UNUSABLE
        assert "disk full" in capsys.readouterr().err

    def test_refused(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        client = FakeClient(Answer("there is nothing to save", ok=False))
        assert call(monkeypatch, client, "checkpoint") == ExitCode.USAGE
        assert "edl: error: there is nothing to save" in capsys.readouterr().err

    def test_stop(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        ended = HistoryEntry(10, 0.0, "job-ended", "stopped by x")
        client = FakeClient(Answer("", ok=True), SAVED, ended)
        assert call(monkeypatch, client, "stop") == 0
        assert "the job has ended: stopped by x; commit 6 is complete in /ckpt/6" in capsys.readouterr().out
        assert client.asked[0].purpose is Purpose.KILL

    def test_stop_without_waiting(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert call(monkeypatch, FakeClient(Answer("it will end", ok=True)), "stop", "--no-wait") == 0
        assert capsys.readouterr().out == "it will end\n"


def shown(status: JobStatus) -> str:
    text = io.StringIO()
    show_status(Console(file=text, width=200), status)
    return text.getvalue()


class TestStatus:
    def test_of_a_job_with_state(self) -> None:
        leaving = NodeView(
            "b", "h", 2, "running", True, 1, 2, underway=True, how="restarted (was killed)", draining=True
        )
        text = shown(
            dataclasses.replace(
                STATUS,
                nodes=(VIEW, leaving),
                era=4,
                restored=Version(3, 120),
                saved=Version(3, 100),
                saved_in="/ckpt/commit-100.era-3",
                boundary="switch: node b leaves (1 of 2 nodes have answered)",
                kill="x",
                holders=2,
            )
        )
        for part in (
            "Commits in memory: each on 2 nodes or more",
            "State: era 4, began from commit 120 of era 3",
            "Last checkpoint: commit 100 of era 3 in /ckpt/commit-100.era-3",
            "Agreeing on a step boundary to switch: node b leaves (1 of 2 nodes have answered)",
            "Ending: stop requested by x",
            "UNDERWAY",
            "in process",
            "restarted (was killed)",
            "running, draining",
        ):
            assert part in text, text

    def test_of_a_new_state(self) -> None:
        assert "State: era 1, began without a checkpoint" in shown(dataclasses.replace(STATUS, era=1))

    def test_of_a_plain_script(self) -> None:
        plain = dataclasses.replace(VIEW, underway=False, how="")
        text = shown(dataclasses.replace(STATUS, nodes=(plain,), era=4))
        words = ("State:", "UNDERWAY", "Last checkpoint", "Commits in memory", "Ending", "Agreeing")
        assert not [word for word in words if word in text]

    def test_of_a_node_with_one_worker(self) -> None:
        alone = dataclasses.replace(VIEW, slots=1, first_rank=3)
        lines = shown(dataclasses.replace(STATUS, nodes=(alone,), world_size=1)).splitlines()
        assert "round 3, 1 worker  nodes" in lines[0]
        assert next(line for line in lines if line.startswith("a ")).split()[:4] == ["a", "running", "3", "1"]
