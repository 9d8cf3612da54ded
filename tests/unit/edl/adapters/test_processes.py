"""The agent's end of a fork server, with a fork server that says what a test wants."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable

import pytest

from edl.adapters.processes import ForkServerProcesses
from edl.config import Standby
from edl.ports import CommandKind, WorkerCommand
from edl.wire.fork_server import LARGEST_BYTES, Message, Signal, Spawn, Spawned, decode, encode
from edl.wire.process_events import ForkServerLost, ProcessEvent, WorkerExited, WorkerSuspended

DEADLINE_S = 60.0
NO_PID = 1 << 23
"""Larger than any pid of Linux."""


class Scripted:
    """A fork server whose messages are in the socket before the agent's loop looks at it."""

    def __init__(self) -> None:
        command = WorkerCommand(CommandKind.PROGRAM, "true", ())
        self.processes = ForkServerProcesses(command, Standby.NONE, 3, {})
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.theirs.settimeout(5.0)
        self.processes._socket = ours
        asyncio.get_running_loop().add_reader(ours, self.processes._readable)

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.theirs.send(encode(message))

    def asked(self) -> Message:
        return decode(socket.recv_fds(self.theirs, LARGEST_BYTES, 4)[0])

    async def spawn(self) -> int:
        return await self.processes.spawn({}, 0, 0)

    def close(self) -> None:
        self.processes._lost()
        self.theirs.close()


def run(test: Callable[[Scripted], Awaitable[None]]) -> None:
    async def main() -> None:
        scripted = Scripted()
        try:
            await asyncio.wait_for(test(scripted), DEADLINE_S)
        finally:
            scripted.close()

    asyncio.run(main())


def test_a_worker_that_ends_at_once_is_known_before_its_end() -> None:
    """Its end arrives together with that of another worker, which the consumer is waiting for."""

    async def test(scripted: Scripted) -> None:
        known: set[int] = set()
        unknown: list[ProcessEvent] = []
        seen: list[ProcessEvent] = []

        async def start() -> None:
            known.add(await scripted.spawn())

        async def consume() -> None:
            async for event in scripted.processes.events():
                if isinstance(event, (WorkerExited, WorkerSuspended)) and event.pid not in known:
                    unknown.append(event)
                seen.append(event)
                if len(seen) == 3:
                    break

        consumer = asyncio.ensure_future(consume())
        first, second = asyncio.ensure_future(start()), asyncio.ensure_future(start())
        await asyncio.sleep(0)
        assert [scripted.asked(), scripted.asked()] == [Spawn(1), Spawn(2)]
        scripted.say(Spawned(1, 11))
        await first
        scripted.say(WorkerExited(11, 0), Spawned(2, 12), WorkerSuspended(12), WorkerExited(12, 0))
        await second
        await consumer
        assert seen == [WorkerExited(11, 0), WorkerSuspended(12), WorkerExited(12, 0)]
        assert not unknown

    run(test)


@pytest.mark.parametrize("ended", [False, True], ids=["lives", "has ended"])
def test_a_worker_whose_caller_is_cancelled_as_it_is_made(ended: bool) -> None:
    async def test(scripted: Scripted) -> None:
        caller = asyncio.ensure_future(scripted.spawn())
        await asyncio.sleep(0)
        assert scripted.asked() == Spawn(1)
        scripted.say(Spawned(1, 11), *([WorkerExited(11, 0)] if ended else []))
        scripted.processes._readable()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        if not ended:
            assert scripted.asked() == Signal(11, 9)
            scripted.say(WorkerExited(11, -9))
        other = asyncio.ensure_future(scripted.spawn())
        await asyncio.sleep(0)
        assert scripted.asked() == Spawn(2)
        scripted.say(Spawned(2, 12), WorkerExited(12, 3))
        assert await other == 12
        assert await anext(scripted.processes.events()) == WorkerExited(12, 3), "nothing of the one that nobody knows"

    run(test)


def test_a_fork_server_that_dies_with_a_new_worker() -> None:
    async def test(scripted: Scripted) -> None:
        caller = asyncio.ensure_future(scripted.spawn())
        await asyncio.sleep(0)
        assert scripted.asked() == Spawn(1)
        scripted.processes._process = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220
        scripted.say(Spawned(1, NO_PID))
        scripted.theirs.close()
        assert await caller == NO_PID
        events = scripted.processes.events()
        lost = {await anext(events), await anext(events)}
        assert lost == {WorkerExited(NO_PID, -9), ForkServerLost("killed by signal 9")}

    run(test)


def test_workers_share_the_standard_input_of_this_process() -> None:
    async def test(scripted: Scripted) -> None:
        spawned = asyncio.ensure_future(scripted.processes.spawn({}, 1, 2))
        await asyncio.sleep(0)
        _, descriptors, _, _ = socket.recv_fds(scripted.theirs, LARGEST_BYTES, 4)
        assert [os.fstat(one) for one in descriptors[1:]] == [os.fstat(number) for number in range(3)]
        for one in descriptors:
            os.close(one)
        scripted.say(Spawned(1, 11))
        await spawned

    run(test)
