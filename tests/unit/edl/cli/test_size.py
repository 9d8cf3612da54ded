"""``edl scale`` and its companions: the request, and the wait until the status says that it is so."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from edl.adapters.transport import MasterClient
from edl.cli import find, polling
from edl.cli import requests as wi
from edl.cli.__main__ import edl
from edl.cli.find import NoMaster
from edl.cli.job_end import JobEnd
from edl.cli.show import scale_lines, show_status
from edl.errors import StoreUnavailable, UsageError
from edl.wire.messages import Finish
from edl.wire.scale_requests import Cordon, Drain, DrainMode, Granted, Resize, ScaleView, SetBounds, Suspend, Verdict
from edl.wire.status import DroppedSlot, HistoryEntry, JobStatus, NodeView
from tests.support.fake_master import FakeMaster
from tests.unit.edl.cli.test_polling import Events

STATUS = FakeMaster().status()
GRANTED = Granted(Verdict.ACCEPTED, "2 nodes requested", 43, 2)


def status(phase: str = "running", there: tuple[NodeView, ...] = STATUS.nodes, **scale: object) -> JobStatus:
    view = dataclasses.replace(STATUS.scale, **scale)  # type: ignore[arg-type]
    return dataclasses.replace(STATUS, phase=phase, scale=view, nodes=there, reason="round 2")


class Told:
    """A Master that says one thing after another; an exception is raised, at connecting."""

    def __init__(self, *said: JobStatus | Exception) -> None:
        self.said = list(said)
        self.pauses = 0

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Told]:
        first = self.said[0]
        if isinstance(first, Exception):
            del self.said[: len(self.said) > 1]
            raise first
        yield self

    async def status(self) -> JobStatus:
        said = self.said[0]
        if len(self.said) > 1:
            self.said.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    async def submit(self, request: object) -> Granted:
        return GRANTED

    async def pause(self) -> None:
        self.pauses += 1


def reach(
    goal: wi.Goal, *said: JobStatus | Exception, end: HistoryEntry | None = None
) -> tuple[wi.ScaleResult, list[str]]:
    """``end``: what the history says while nobody looks."""
    lines: list[str] = []
    told = Told(*said)

    async def body() -> wi.ScaleResult:
        async with contextlib.aclosing(JobEnd(Events(end).connect)) as job_end:
            return await wi.reach(told.connect, GRANTED, goal, lines.append, told.pause, job_end)

    result = asyncio.run(body())
    assert lines.pop(0) == GRANTED.text
    return result, lines


def test_waiting_for_a_size() -> None:
    result, lines = reach(
        wi.size_is(4, 2),
        status(generation=1),
        status(generation=2, desired=4, observed=1, waiting="1 node has not come"),
        status(generation=2, desired=4, observed=1, waiting="1 node has not come"),
        status(generation=2, desired=4, observed=1),
        status(generation=2, desired=4, observed=2, nodes=4),
    )
    assert (result.ok, result.done, result.text, result.generation) == (
        True,
        True,
        "4 nodes in training (wanted: 4)",
        2,
    )
    assert lines == [
        "waiting: the Master has not confirmed the request yet",
        "waiting: 1 node has not come",
        "waiting: 3 nodes in training, 4 wanted",
    ]


def test_somebody_else_asks_meanwhile() -> None:
    result, _ = reach(wi.size_is(4, 2), status(generation=3, desired=2, by="kim"))
    assert (result.ok, result.text) == (False, "superseded: kim has requested 2 nodes since")
    result, _ = reach(wi.size_is(0, 2), status(generation=3, observed=3, desired=2, nodes=2))
    assert result.ok, "with other bounds any size will do"


def test_a_size_of_a_job_that_sleeps() -> None:
    result, _ = reach(wi.size_is(4, 2), status("forming", generation=2, desired=4, suspended=True))
    assert result.ok and "edl resume" in result.text


def test_waiting_for_nodes_to_go() -> None:
    doomed = dataclasses.replace(STATUS.nodes[0], draining=True)
    result, lines = reach(
        wi.gone(("node-a", "node-b"), 2), status(there=(doomed, STATUS.nodes[1])), status(there=STATUS.nodes[2:])
    )
    assert result.text == "node-a, node-b have left"
    assert lines == ["waiting: node-a is draining, node-b is running; round 2"]


def test_waiting_for_a_cordon() -> None:
    spare = dataclasses.replace(STATUS.nodes[0], position=-1, state="cordoned")
    result, lines = reach(
        wi.cordoned("node-a", 2, wanted=True),
        status(generation=1),
        status(cordoned=("node-a",)),
        status(cordoned=("node-a",), there=(spare,)),
    )
    assert result.text == "node-a takes no part"
    assert lines[1] == "waiting: node-a still trains; round 2"
    assert reach(wi.cordoned("node-a", 2, wanted=False), status(cordoned=("node-a",), generation=1), status())[0].ok


def test_waiting_for_a_slot() -> None:
    slot = DroppedSlot("node-a", "h", 1, "GPU-1,GPU-2", "by hand", 3)
    trains = dataclasses.replace(STATUS.nodes[0], places=(0, 1))
    without = dataclasses.replace(trains, places=(0,))

    def seen(there: NodeView, *dropped: DroppedSlot, **scale: Any) -> JobStatus:
        return dataclasses.replace(status(there=(there,), **scale), dropped=dropped)

    for device in ("1", "gpu-2"):
        steps = (seen(trains, generation=1), seen(trains, slot), seen(without, slot))
        result, lines = reach(wi.dropped("node-a", device, 2, wanted=True), *steps)
        assert (result.ok, result.text) == (True, "slot 1 of node-a takes no part")
        assert lines[1] == "waiting: a worker still trains in slot 1 of node-a; round 2"
    back = wi.dropped("node-a", "1", 2, wanted=False)
    result, lines = reach(
        back, seen(without, observed=1, waiting="slot 1 of node-a takes part"), seen(trains, observed=2)
    )
    assert (result.ok, result.text) == (True, "slot 1 of node-a may take part again")
    assert lines == ["waiting: slot 1 of node-a takes part"]
    result, _ = reach(back, seen(trains, slot, generation=3, by="you"))
    assert (result.ok, result.text) == (False, "slot 1 of node-a is dropped: you has requested that since")


def test_a_slot_is_named_by_its_number_or_its_device(run: Callable[..., tuple[Client, Result]]) -> None:
    for command, wanted in (("cordon", True), ("uncordon", False)):
        client, done = run(command, "node-a", "--device=GPU-1", "--reason=noise", "--no-wait")
        (request,) = client.requests
        assert isinstance(request, Cordon), done.output
        assert (request.node, request.cordoned, request.device, request.reason) == ("node-a", wanted, "GPU-1", "noise")


def test_the_status_names_dropped_slots_and_counts_the_others() -> None:
    slot = DroppedSlot("node-a", "h", 1, "GPU-1", "failed by itself 2 times, last: was killed by SIGBUS", 3)
    first = dataclasses.replace(STATUS.nodes[0], slots=3, places=(0, 2, 3), spare_slots=1)
    console = Console(file=io.StringIO(), width=200)
    show_status(console, dataclasses.replace(STATUS, nodes=(first, *STATUS.nodes[1:]), dropped=(slot,)))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert (
        "Dropped: slot 1 of node-a (GPU-1) after round 3: failed by itself 2 times, last: was killed by SIGBUS" in shown
    )
    assert "edl uncordon node-a --device=1" in shown
    assert "0-2" in shown and "slots 0,2,3 of 4" in shown


def test_a_single_slot_in_use_is_not_taken_for_a_number_of_slots() -> None:
    node = dataclasses.replace(STATUS.nodes[0], slots=2, places=(0,))
    console = Console(file=io.StringIO(), width=200)
    show_status(console, dataclasses.replace(STATUS, nodes=(node, *STATUS.nodes[1:])))
    assert isinstance(console.file, io.StringIO)
    assert " slot 0 of 2 " in console.file.getvalue()


def test_off_a_terminal_no_line_of_the_status_is_wrapped(
    run: Callable[..., tuple[Client, Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = "3 in process, 1 restarted (was killed by SIGKILL), on a host whose name is as long as some names are"
    first = dataclasses.replace(STATUS.nodes[0], underway=True, how=how, host="a-host-with-a-long-name.example.com")
    monkeypatch.setattr(FakeMaster, "status", lambda self: dataclasses.replace(STATUS, nodes=(first,)))
    monkeypatch.setenv("COLUMNS", "60")
    (line,) = (line for line in run("status")[1].stdout.splitlines() if line.startswith("node-a"))
    assert how in line and first.host in line


def test_waiting_for_sleep_and_for_the_way_back() -> None:
    ready = tuple(dataclasses.replace(node, state="ready", position=-1) for node in STATUS.nodes)
    result, lines = reach(
        wi.suspended(2, wanted=True),
        status(generation=1),
        status(suspended=True),
        status("forming", suspended=True, there=ready),
    )
    assert result.text == "training has stopped; see edl resume"
    assert lines[1].startswith("waiting: workers are ending on node-a, node-b, node-c")
    result, lines = reach(
        wi.suspended(2, wanted=False),
        status("forming", suspended=True, generation=1),
        status("forming", waiting="1 node"),
        status(),
    )
    assert result.ok and lines[1:] == ["waiting: 1 node"]


def test_somebody_asks_for_the_contrary_meanwhile() -> None:
    for goal, scale in (
        (wi.suspended(2, wanted=True), {}),
        (wi.suspended(2, wanted=False), {"suspended": True}),
        (wi.cordoned("node-a", 2, wanted=True), {}),
        (wi.cordoned("node-a", 2, wanted=False), {"cordoned": ("node-a",)}),
    ):
        result, lines = reach(goal, status(generation=3, by="kim", **scale))
        assert (result.ok, result.done, lines) == (False, False, [])
        assert "kim has requested that since" in result.text


def test_a_node_joins_again_under_its_name() -> None:
    result, lines = reach(wi.gone(("node-a",), 2), status(generation=2, observed=1), status(generation=2, observed=2))
    assert (result.ok, result.text) == (True, "node-a left, and node-a joined again")
    assert lines == ["waiting: node-a is running; round 2"]


def test_a_node_stays_since_nothing_could_be_saved() -> None:
    away = HistoryEntry(7, 0.0, "drain", "drain of node-a requested by me")
    stays = HistoryEntry(
        8, 0.0, "drain-failed", "node-a stays: the checkpoint could not be written (disk full)", "node-a"
    )
    done = status(generation=2, observed=2)
    result, _ = reach(wi.gone(("node-a",), 2), dataclasses.replace(done, history=(away, stays)))
    assert (result.ok, result.text) == (False, stays.text)
    again = HistoryEntry(9, 0.0, "drain", "drain of node-a requested by me")
    assert reach(wi.gone(("node-a",), 2), dataclasses.replace(done, history=(stays, again)))[0].ok
    both = HistoryEntry(8, 0.0, "drain-failed", "node-a, node-b stay: the checkpoint could not be written (disk full)")
    assert reach(wi.gone(("node-a",), 2), dataclasses.replace(done, history=(away, both)))[0].text == both.text


def test_another_node_that_stays_is_none_of_ones_own() -> None:
    other = HistoryEntry(
        8, 0.0, "drain-failed", "node-b stays: the checkpoint could not be written (disk full)", "node-b"
    )
    told = HistoryEntry(9, 0.0, "scale", "4 nodes wanted by drain of node-a requested")
    for history in ((other,), (told,)):
        assert reach(wi.gone(("node-a",), 2), dataclasses.replace(status(generation=2, observed=2), history=history))[
            0
        ].ok


def test_the_job_ends_meanwhile() -> None:
    for goal in (wi.size_is(4, 2), wi.gone(("a",), 2), wi.cordoned("a", 2, wanted=True), wi.suspended(2, wanted=True)):
        result, _ = reach(goal, status("ended"))
        assert (result.ok, result.text) == (False, "the job has ended: round 2")
    ended = NoMaster("job train has ended with exit code 0: done", Finish(0, "done"))
    assert reach(wi.gone(("node-a",), 2), status(), ended)[0].text == str(ended)


def test_the_job_ends_between_two_looks_and_its_store_with_it() -> None:
    end = HistoryEntry(2, 0.0, "job-ended", "all is done")
    result, _ = reach(wi.gone(("node-a",), 2), *3 * [status()], StoreUnavailable("no answer"), end=end)
    assert (result.ok, result.text) == (False, "job train has ended: all is done")


def test_the_master_changes_meanwhile() -> None:
    away: list[Exception] = [
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()),
        NoMaster("no Master at this moment"),
        OSError("no descriptor is left"),
        StoreUnavailable("no answer"),
    ]
    result, lines = reach(wi.gone(("node-a",), 2), status(), *away, status(there=()))
    assert result.text == "node-a has left"
    assert lines[-1] == "waiting: no Master answers at the moment"
    result, _ = reach(wi.gone(("node-a",), 2), NoMaster("no job"))
    assert not result.ok and "The request is still valid; see edl status. The last attempt: no job" in result.text


def test_what_is_refused_is_an_error() -> None:
    class No(Told):
        async def submit(self, request: object) -> Granted:
            return Granted(Verdict.REFUSED, "9 nodes: outside 1:8")

    with pytest.raises(UsageError, match="outside 1:8"):
        asyncio.run(wi.ask(No(status()), Resize(9, "me")))


# --- the commands ----------------------------------------------------------------------------------------------------


class Client(FakeMaster):
    """Stands where the command line expects a connection to a Master."""

    token, http, door = "the-token", "http://h:1", ""

    async def status(self) -> JobStatus:  # type: ignore[override]
        return FakeMaster.status(self)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Client, Result]]:
    def command(*words: str) -> tuple[Client, Result]:
        client = Client()

        @contextlib.asynccontextmanager
        async def found(where: object) -> AsyncIterator[Client]:
            yield client

        here = [object()]

        def located(_: object) -> object:
            """The launcher of this host is there once: it may be the one that is drained."""
            if not here:
                raise UsageError("no launcher runs on this host")
            return here.pop()

        monkeypatch.setattr(polling, "located", located)
        monkeypatch.setattr(polling, "master_of", found)
        monkeypatch.setattr(find, "master_of", found)
        return client, CliRunner().invoke(edl, [*words, "--rdzv-id=train"])

    return command


def test_scale(run: Callable[..., tuple[Client, Result]]) -> None:
    client, done = run("scale", "4", "--reason=more data", "--json")
    (request,) = client.requests
    assert isinstance(request, Resize) and (request.nodes, request.reason, request.revision) == (4, "more data", 0)
    assert request.by.startswith("edl scale (")
    said = json.loads(done.stdout)
    assert (said["ok"], said["verdict"], said["generation"], said["done"]) == (True, "accepted", 2, True)
    assert "size 4" in done.stderr


def test_the_size_is_given_back_to_the_policy(run: Callable[..., tuple[Client, Result]]) -> None:
    client, result = run("scale", "auto", "--no-wait")
    assert result.exit_code == 0
    (request,) = client.requests
    assert isinstance(request, Resize)
    assert (request.nodes, request.auto) == (0, True)
    _, result = run("scale", "many")
    assert result.exit_code == 2
    assert "give a number of nodes, or auto" in result.output


def test_bounds_come_before_the_size(run: Callable[..., tuple[Client, Result]]) -> None:
    client, _ = run("scale", "12", "--min=2", "--max=16", "--no-wait")
    assert [type(request) for request in client.requests] == [SetBounds, Resize]
    client, done = run("scale", "--max=16", "--no-wait")
    (request,) = client.requests
    assert isinstance(request, SetBounds) and (request.minimum, request.maximum, request.revision) == (1, 16, 40)
    assert done.stdout == "bounds\n" and done.stderr == ""


def test_a_size_outside_of_the_bounds_given_with_it_changes_neither(run: Callable[..., tuple[Client, Result]]) -> None:
    client, done = run("scale", "12", "--max=8")
    assert client.requests == []
    assert "12 nodes are outside the requested bounds 1:8" in str(done.exception or done.output)


def test_showing_the_size(run: Callable[..., tuple[Client, Result]]) -> None:
    client, done = run("scale")
    assert client.requests == [] and done.stdout.startswith("Size: 3 nodes train (1 to 8 allowed)")
    assert json.loads(run("scale", "--json")[1].stdout)["revision"] == 40


def test_the_other_commands(run: Callable[..., tuple[Client, Result]]) -> None:
    words = ("drain", "node-b", "node-c", "--deadline=9", "--checkpoint=must", "--no-wait")
    (request,) = run(*words)[0].requests
    assert isinstance(request, Drain)
    assert (request.nodes, request.deadline_s, request.mode) == (("node-b", "node-c"), 9.0, DrainMode.MUST)
    for command, cordoned in (("cordon", True), ("uncordon", False)):
        (request,) = run(command, "node-d", "--reason=hot")[0].requests
        assert isinstance(request, Cordon) and (request.node, request.cordoned, request.reason) == (
            "node-d",
            cordoned,
            "hot",
        )
    for command, asleep in (("suspend", True), ("resume", False)):
        (request,) = run(command, "--no-wait")[0].requests
        assert isinstance(request, Suspend) and request.suspended is asleep
    assert run("token")[1].stdout == "the-token\n"


def test_what_is_refused_has_no_output(run: Callable[..., tuple[Client, Result]]) -> None:
    refused: list[tuple[str, ...]] = [("scale", "9"), ("scale", "0"), ("drain", "nobody"), ("cordon", "nobody")]
    for words in refused:
        _, done = run(*words)
        assert isinstance(done.exception, UsageError) and done.stdout == ""
    for words in [
        ("scale", "-1"),
        ("scale", "x"),
        ("scale", str(2**32 + 1)),
        ("scale", "--max", str(2**32 + 1)),
        ("drain",),
        ("drain", "a", "--checkpoint=maybe"),
    ]:
        assert run(*words)[1].exit_code == 2


def test_a_request_that_cannot_be_sent_is_not_sent_empty() -> None:
    async def scenario() -> None:
        client = MasterClient("127.0.0.1", 1, "token")
        with pytest.raises(ValueError, match="out of range"):
            await client.submit(Resize(2**40, "me"))
        await client.close()

    asyncio.run(scenario())


def test_no_longer_waiting_leaves_the_request(
    run: Callable[..., tuple[Client, Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)

    monkeypatch.setattr(wi, "sleep_between_reads", interrupted)
    monkeypatch.setattr(wi, "size_is", lambda *_: lambda status: wi.RequestProgress(False, "waits"))
    client, done = run("scale", "4")
    assert len(client.requests) == 1
    assert "the request is still valid" in done.stderr and done.stdout == ""


def test_the_size_in_the_status() -> None:
    assert scale_lines(ScaleView()) == []
    assert scale_lines(ScaleView(minimum=1, maximum=1, nodes=1)) == ["Size: 1 node trains (1 to 1 allowed)"]
    view = ScaleView(
        2, 8, 2, 6, 4, 43, 5, 4, "kim", "night", True, ("node-d",), "slurm (master)", "2 nodes have not come", 12.34,
        8, "it scales", 6
    )  # fmt: skip
    text = "\n".join(scale_lines(view))
    for part in (
        *(
            "4 of 6 wanted",
            "2 to 8",
            "units of 2",
            "kim: night",
            "Request 5, 4 in effect",
            "edl resume",
            "node-d",
            "slurm",
        ),
        *("2 nodes have not come", "12.3 s", "8 nodes (it scales)"),
    ):
        assert part in text
