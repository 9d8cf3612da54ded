"""The way of ``edl logs`` and ``edl stacks``: over gRPC to the launchers themselves, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from edl.adapters.transport import MasterServer, NodeClient
from edl.agent.workers.recent_output import RecentOutput
from edl.cli import output
from edl.cli.find import NoAnswer, NoMaster, Where
from edl.cli.launchers import MOST_FAILURES, Launchers
from edl.errors import UsageError
from edl.types import Incarnation, NodeId
from edl.wire.messages import Finish
from edl.wire.node_requests import OptionValue, OptionValues, OutputLine, OutputLines, OutputRequest, StacksRequest
from edl.wire.records import NodeInfo
from edl.wire.status import HistoryEntry, JobStatus, Kind, NodeView

TOKEN = "right"


class Node:
    """One launcher, with a worker whose output the test writes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.recent = RecentOutput()
        self.server = MasterServer(lambda: TOKEN)

    def output(self, request: OutputRequest) -> OutputLines:
        return self.recent.read(request)

    async def stacks(self, request: StacksRequest) -> OutputLines:
        return OutputLines((OutputLine(self.rank, 1, True, f"stacks for {request.ranks}"),), 1)

    def options(self) -> OptionValues:
        return OptionValues((OptionValue("--node-id", "ab"[self.rank], "command-line"),))

    def write(self, text: str) -> None:
        self.recent.add(0, self.rank, 1, False, [text.encode()])


class Job:
    """Launchers a, b, … and a Master that knows them."""

    def __init__(self) -> None:
        self.nodes = [Node(0), Node(1)]
        self.incarnations = [1, 1]
        self.ports: list[int] = []
        self.problem: Exception | None = None
        self.shown: list[str] = []

    @property
    def launchers(self) -> tuple[NodeInfo, ...]:
        return tuple(
            NodeInfo(NodeId(name), Incarnation(incarnation), "127.0.0.1", port, 1)
            for name, incarnation, port in zip("ab", self.incarnations, self.ports, strict=True)
        )

    def launcher(self, info: NodeInfo) -> NodeClient:
        return NodeClient(info.host, info.port, TOKEN)

    async def status(self) -> JobStatus:
        nodes = tuple(NodeView(name, "h", 1, "running", True, at, at) for at, name in enumerate("ab"))
        return JobStatus("job", "running", 1, 2, "", "1:2", "elastic", 0, 3, "a", nodes, (), ())

    async def events(self, after: int, follow: bool) -> AsyncIterator[HistoryEntry]:
        """The job ends at once, and its private store with it."""
        self.nodes[1].write("the last line")
        self.problem = NoMaster("no such store")
        yield HistoryEntry(after + 1, 1.0, Kind.JOB_ENDED.value, "done")

    @contextlib.asynccontextmanager
    async def master_of(self, where: Where) -> AsyncIterator[Job]:
        if self.problem is not None:
            raise self.problem
        yield self

    def show(self, node: str, found: OutputLines) -> None:
        self.shown += [f"{line.rank}@{node} {line.text}" for line in found.lines]
        self.shown += [f"gap {node}"] if found.gap else []

    def take(self) -> list[str]:
        shown, self.shown = self.shown, []
        return shown


def play(
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[[Job, Launchers], Awaitable[None]],
    nodes: tuple[str, ...] = (),
    ranks: tuple[int, ...] = (),
) -> None:
    job = Job()
    monkeypatch.setattr("edl.cli.polling.master_of", job.master_of)

    async def whole() -> None:
        for node in job.nodes:
            job.ports.append(await node.server.start("127.0.0.1"))
            node.server.serve_node(node)
        try:
            async with contextlib.aclosing(Launchers(Where("job", ("here",)), nodes, ranks)) as launchers:
                await scenario(job, launchers)
        finally:
            for node in job.nodes:
                await node.server.stop()

    asyncio.run(whole())


def test_lines_of_all_nodes_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(job: Job, launchers: Launchers) -> None:
        for number in range(3):
            job.nodes[0].write(f"a{number}")
        job.nodes[1].write("b")
        await launchers.find()
        await launchers.show_output(2, job.show, required=True)
        assert job.take() == ["0@a a1", "0@a a2", "1@b b"]
        job.nodes[1].write("more")
        assert await launchers.show_output(2, job.show)
        assert not await launchers.show_output(2, job.show)
        assert job.take() == ["1@b more"]

    play(monkeypatch, scenario)


def test_only_what_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(job: Job, launchers: Launchers) -> None:
        for node in job.nodes:
            node.write("line")
        await launchers.find()
        await launchers.show_output(9, job.show, required=True)
        assert await launchers.show_stacks(job.show)
        assert job.take() == ["1@b line", "1@b stacks for (1,)"]

    play(monkeypatch, scenario, ranks=(1,))


def test_a_launcher_that_has_returned_is_asked_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(job: Job, launchers: Launchers) -> None:
        job.nodes[1].write("old")
        await launchers.find()
        await launchers.show_output(9, job.show)
        job.nodes[1].recent, job.incarnations = RecentOutput(), [1, 2]
        job.nodes[1].write("new")
        assert not await launchers.find_again()
        await launchers.show_output(9, job.show)
        assert job.take() == ["1@b old", "1@b new"]

    play(monkeypatch, scenario)


def test_launchers_that_do_not_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(job: Job, launchers: Launchers) -> None:
        job.nodes[1].write("line")
        await launchers.find()
        await job.nodes[0].server.stop()
        await launchers.show_output(9, job.show, required=True)
        assert job.take() == ["1@b line"]
        assert capsys.readouterr().err == "edl: the launcher of node a does not answer (unavailable)\n"
        await job.nodes[1].server.stop()
        with pytest.raises(NoAnswer, match="the launcher of node a does not answer"):
            await launchers.show_stacks(job.show)
        await launchers.show_output(9, job.show)

    play(monkeypatch, scenario)


def test_output_is_followed_without_a_master(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(job: Job, launchers: Launchers) -> None:
        await launchers.find()
        job.problem = NoMaster("no Master at this moment")
        assert not await launchers.find_again()
        job.nodes[0].write("still here")
        await launchers.show_output(9, job.show)
        assert job.take() == ["0@a still here"]
        for _ in range(MOST_FAILURES - 2):
            assert not await launchers.find_again()
        with pytest.raises(UsageError, match="no Master at this moment"):
            await launchers.find_again()
        job.problem = NoMaster("the job has ended", Finish(0, "done"))
        assert await launchers.find_again()

    play(monkeypatch, scenario)


def test_following_ends_with_the_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "POLL_S", 3600.0)

    async def scenario(job: Job, launchers: Launchers) -> None:
        job.nodes[0].write("line")
        selection = output.Selection((), (), as_json=False, raw=False)
        await asyncio.wait_for(output._logs(Where("job", ("here",)), selection, 9, follow=True), 60.0)
        assert capsys.readouterr().out == "[0@a]: line\n[1@b]: the last line\n"

    play(monkeypatch, scenario)


@pytest.mark.parametrize(
    ("nodes", "ranks", "text"),
    [
        (("a",), (1,), "no line of rank 1 is kept on a. Without --node, the node that has the rank now is asked"),
        ((), (0, 1), "no line of ranks 0, 1 is kept"),
        ((), (), "no line is kept"),
    ],
)
def test_it_says_that_there_is_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nodes: tuple[str, ...],
    ranks: tuple[int, ...],
    text: str,
) -> None:
    async def scenario(job: Job, launchers: Launchers) -> None:
        selection = output.Selection(ranks, nodes, as_json=False, raw=False)
        for lines in (9, 0):
            await output._logs(Where("job", ("here",)), selection, lines, follow=False)
        assert capsys.readouterr().err == f"edl: {text}\n"

    play(monkeypatch, scenario)


def test_a_launcher_that_still_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(job: Job, launchers: Launchers) -> None:
        monkeypatch.setattr(job.nodes[0].server, "_node", None)
        await launchers.find()
        with pytest.raises(NoAnswer, match="unavailable"):
            await launchers.show_output(9, job.show, required=True)

    play(monkeypatch, scenario, nodes=("a",))


def test_a_launcher_answers_with_its_options() -> None:
    async def asked() -> None:
        node = Node(1)
        port = await node.server.start("127.0.0.1")
        node.server.serve_node(node)
        client = NodeClient("127.0.0.1", port, TOKEN)
        try:
            assert await client.options() == node.options()
        finally:
            await client.close()
            await node.server.stop()

    asyncio.run(asked())
