"""torch's process groups that end and begin again in the same processes, while peers die, stop or never come."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.forking import Forker

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "workers" / "torch_member.py"
SOON_S = 30.0
"""An abort takes milliseconds; the machine may be busy."""


class Member:
    """A process that takes part in groups."""

    def __init__(self, forker: Forker) -> None:
        self.process = forker.start(SCRIPT)
        self._answers: queue.Queue[str] = queue.Queue()
        self._round = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(line)

    def tell(self, **order: Any) -> None:
        self._round = order.setdefault("round", self._round)
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self, timeout_s: float = 180.0) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._answers.get(timeout=timeout_s))
        return answer

    def idle(self) -> bool:
        try:
            self.tell(do="sizes")
            return "threads" in self.hear(5)
        except (queue.Empty, OSError):  # it is busy, or dead
            return False

    def end(self) -> None:
        self.process.end()


class Members:
    """Three of them, and the rounds they go through."""

    def __init__(self) -> None:
        self.round = 0
        self.all: list[Member] = []
        self._forker = Forker.of("torch")
        self._held: list[socket.socket] = []
        self.fill()

    def fill(self) -> None:
        """Replace dead members."""
        fresh = [Member(self._forker) for _ in range(3 - len(self.all))]
        assert all(member.hear()["ready"] for member in fresh)
        self.all += fresh

    def kill(self, member: Member) -> None:
        self.all.remove(member)
        member.end()

    def end(self) -> None:
        for ending in self.all:
            ending.end()
        for held in self._held:
            held.close()

    def reserve(self) -> str:
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        self._held.append(held)
        if len(self._held) > 4:
            self._held.pop(0).close()
        return f"127.0.0.1:{held.getsockname()[1]}"

    def begin(self, chosen: list[Member], work: str, master: str = "", **more: Any) -> None:
        self.round += 1
        master = master or self.reserve()
        for rank, member in enumerate(chosen):
            member.tell(do="round", round=self.round, rank=rank, size=len(chosen), master=master, work=work, **more)

    def work(self, chosen: list[Member], work: str, **more: Any) -> list[Any]:
        self.begin(chosen, work, **more)
        answers = [member.hear() for member in chosen]
        assert all("result" in answer for answer in answers), answers
        return [answer["result"] for answer in answers]

    def busy(self, chosen: list[Member], work: str, **more: Any) -> None:
        self.begin(chosen, work, **more)
        for member in chosen:
            assert member.hear() == {"busy": True}


def aborted(members: list[Member]) -> None:
    """Abort their groups: what they were blocked in fails soon, as the loss of peers."""
    for member in members:
        member.tell(do="abort")
    for member in members:
        answer = member.hear(30)
        assert answer.get("lost") is True, answer
        assert answer["after_s"] < SOON_S, answer


@pytest.fixture(scope="module")
def members() -> Iterator[Members]:
    every = Members()
    yield every
    every.end()


@pytest.fixture
def three(members: Members) -> Members:
    for member in list(members.all):
        if not member.idle():  # the test before has failed
            members.kill(member)
    members.fill()
    return members


@pytest.mark.slow
@pytest.mark.parametrize("work", ["all-reduce", "ddp-for-ever", "subgroup"])
def test_survivors_of_a_kill_form_the_next_group_and_grow_back(three: Members, work: str) -> None:
    for _ in range(2):
        three.busy(three.all, work)
        time.sleep(0.05)
        three.kill(three.all[-1])
        aborted(three.all)
        assert three.work(three.all, "once") == [3.0, 3.0]
        small = three.work(three.all, "ddp")
        assert small[0] == small[1]
        three.fill()
        assert three.work(three.all, "once") == [6.0, 6.0, 6.0]
        large = three.work(three.all, "ddp")
        assert large[0] == large[1] == large[2] != small[0]


def test_the_next_gradients_are_not_touched_by_a_ddp_that_was_cut_off_in_its_backward(three: Members) -> None:
    """Its model is the same, and somebody still holds it."""
    alone = three.all[:2]
    for parallel in (False, True):
        for _ in range(3):
            three.busy(alone, "ddp-for-ever", parallel=parallel)
            aborted(alone)
        one, other = three.work(alone, "ddp", parallel=parallel)
        again = three.work(alone, "ddp", parallel=parallel)
        assert one == other == again[0] == again[1]


def test_an_abort_frees_a_worker_whose_peer_is_stopped(three: Members) -> None:
    three.busy(three.all, "all-reduce")
    stopped = three.all[-1]
    os.kill(stopped.process.pid, signal.SIGSTOP)
    time.sleep(0.1)
    aborted(three.all[:2])
    assert three.work(three.all[:2], "once") == [3.0, 3.0]
    os.kill(stopped.process.pid, signal.SIGCONT)
    aborted([stopped])
    assert three.work(three.all, "once") == [6.0, 6.0, 6.0]


def silent_host() -> socket.socket:
    """Accepts, as the kernel does for a stopped process, and never answers."""
    return socket.create_server(("127.0.0.1", 0))


@pytest.mark.parametrize("absent", ["others", "rank 0", "rank 0 hangs"])
def test_an_abort_frees_a_worker_whose_peers_never_come(three: Members, absent: str) -> None:
    three.round += 1
    with silent_host() as host:
        master = f"127.0.0.1:{host.getsockname()[1]}" if absent == "rank 0 hangs" else three.reserve()
        rank = 0 if absent == "others" else 1
        waiting = three.all[0]
        waiting.tell(do="round", round=three.round, rank=rank, size=2, master=master, work="once")
        time.sleep(0.3)
        aborted([waiting])
    assert three.work(three.all[:2], "once") == [3.0, 3.0]


@pytest.mark.parametrize("lame", [0, 1])
def test_an_abort_frees_a_worker_whose_peer_dies_between_publishing_its_address_and_calling(
    three: Members, lame: int
) -> None:
    """gloo then waits for a call, with no connection that could be cut."""
    three.round += 1
    master = three.reserve()
    for rank, member in enumerate(three.all[:2]):
        member.tell(
            do="round", round=three.round, rank=rank, size=2, master=master, work="all-reduce", lame=rank == lame
        )
    dead, waiting = three.all[lame], three.all[1 - lame]
    assert dead.hear() == {"published": True}
    time.sleep(0.2)
    if lame == 1:  # rank 0's store goes with rank 0
        three.kill(dead)
    aborted([waiting])
    assert three.work([waiting, three.all[-1]], "once") == [3.0, 3.0]
    if lame == 0:
        three.kill(dead)


def test_aborts_at_any_moment_of_forming(three: Members) -> None:
    """Some groups are complete before the abort, some are not; the next one always is."""
    for step in range(15):
        three.begin(three.all, "all-reduce")
        time.sleep(step * 0.0005)
        for member in three.all:
            member.tell(do="abort")
        for member in three.all:
            answer = member.hear(30)
            answer = member.hear(30) if answer == {"busy": True} else answer
            assert answer.get("lost") is True, answer
    assert three.work(three.all, "once") == [6.0, 6.0, 6.0]


def test_the_scripts_own_connections_survive(three: Members) -> None:
    one = three.all[:1]
    three.begin(one, "own-connection")
    assert one[0].hear() == {"busy": True}
    one[0].tell(do="abort")
    assert one[0].hear()["result"] == "still there"


@pytest.mark.slow
def test_connections_that_others_open_meanwhile_are_never_cut(three: Members) -> None:
    """By other threads, while groups form, work, lose a peer and are aborted at any moment."""
    for member in three.all:
        member.tell(do="traffic")
        assert "opened" in member.hear()
    for step in range(12):
        three.begin(three.all, "all-reduce")
        time.sleep(step * 0.01)
        for member in three.all:
            member.tell(do="abort")
        for member in three.all:
            answer = member.hear(30)
            answer = member.hear(30) if answer == {"busy": True} else answer
            assert answer.get("lost") is True, answer
            assert answer["after_s"] < SOON_S, answer
    for _ in range(3):
        three.busy(three.all, "subgroup")
        three.kill(three.all[-1])
        aborted(three.all)
        assert three.work(three.all, "once") == [3.0, 3.0]
        three.fill()
    for member in three.all[:2]:
        member.tell(do="traffic")
        answer = member.hear()
        assert answer["cut"] == [] and answer["opened"] > 0, answer


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def settled(now: dict[str, Any], first: dict[str, Any]) -> bool:
    """Nothing of the last rounds is left: what they retire goes a moment later."""
    return bool(now["threads"] <= first["threads"] and now["descriptors"] <= first["descriptors"] + 2)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("count", [60, 200])
def test_many_rounds_leave_no_descriptors_threads_or_memory_behind(
    three: Members, count: int, request: pytest.FixtureRequest
) -> None:
    if count > 60 and not request.config.getoption("--soak"):
        pytest.skip("takes a while: run with --soak")
    pair = three.all[:2]

    def sizes(member: Member) -> dict[str, Any]:
        member.tell(do="sizes")
        return member.hear()

    def rounds(count: int) -> None:
        for number in range(count):
            if number % 4 == 0:
                three.busy(pair, "ddp-for-ever", parallel=number % 8 == 0)
                aborted(pair)
            else:
                assert len(set(three.work(pair, "ddp", restore=number % 2))) == 1

    rounds(20)
    before = [sizes(member) for member in pair]
    rounds(count)
    for member, first in zip(pair, before, strict=True):
        assert within(10, lambda member=member, first=first: settled(sizes(member), first)), sizes(member)  # type: ignore[misc]
        last = sizes(member)
        assert last["kilobytes"] <= first["kilobytes"] + 8_000, (first, last)
