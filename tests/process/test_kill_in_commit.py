"""Workers are killed at any moment of a commit; what is held is always one whole commit."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.checkpoint.memory.memory_checkpoints import BufferGrant, MemoryCheckpoints
from edl.testing.memory_copies import MemoryCopies, MemoryNetwork
from edl.testing.snapshots import JOB, fill_of
from edl.types import NodeId
from edl.wire.local import STATE, Committed
from edl.wire.records import Version

SCRIPT = Path(__file__).parent / "workers" / "committer.py"
LIVES = 200
SIZES = (200_000, 400_000, 1_000_000)
MOST_COMMITS = 5
"""How many a worker makes before its end is near: counted, so that a slow machine kills in the same places."""
LAST_MOMENT_S = 0.003
"""How much later it is killed at most: somewhere in its next commit."""
LIMIT_S = 120.0


@pytest.fixture
def forker() -> Iterator[socket.socket]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, subprocess.Popen([sys.executable, str(SCRIPT), str(far.fileno())], pass_fds=[far.fileno()]) as process:
        far.close()
        yield near
        near.shutdown(socket.SHUT_RDWR)
        process.wait(LIMIT_S)


class Life:
    """One worker, from its fork to its end."""

    def __init__(self, memory: MemoryCheckpoints, forker: socket.socket, commits: int, later_s: float) -> None:
        self.memory = memory
        self._left, self._later_s = commits, later_s
        self.agent, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            socket.send_fds(forker, [b"fork"], [far.fileno()])
            self.pid = int(forker.recv(64))
        self.agent.setblocking(False)

    async def run(self, commit: int, size: int) -> int:
        """Serve it until it is dead; returns the last commit that it made."""
        grant = await self.memory.want(0, STATE, size)
        while True:
            if self._left == 0:
                asyncio.get_running_loop().call_later(self._later_s, os.kill, self.pid, signal.SIGKILL)
            self._left -= 1
            commit += 1
            assert isinstance(grant, BufferGrant), grant
            if not self._tell(grant, commit):
                return commit - 1
            answer = await self._hear()
            if not answer:
                return commit - 1
            number, filled = json.loads(answer)
            message = Committed(STATE, number, filled, 1, commit, 0, 1, False)
            self.memory.committed(0, message)
            grant = await self.memory.want(0, STATE, filled)

    async def _hear(self) -> bytes:
        while True:
            try:
                return await asyncio.get_running_loop().sock_recv(self.agent, 1024)
            except ConnectionResetError:
                continue  # it died before it read all it was told; what it said before comes next

    def _tell(self, grant: BufferGrant, commit: int) -> bool:
        descriptors = [] if grant.descriptor is None else [grant.descriptor]
        try:
            socket.send_fds(self.agent, [json.dumps([grant.buffer, grant.size, commit]).encode()], descriptors)
        except BrokenPipeError:
            return False
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True


async def value_held(memory: MemoryCheckpoints) -> tuple[Version, int]:
    """The newest that is held, and what all its bytes are."""
    version = memory.holdings()[-1].version
    descriptor, size = await memory.piece(9, STATE, version, 0)
    try:
        return version, fill_of(os.pread(descriptor, size, 0))
    finally:
        os.close(descriptor)
        memory.restored(9)


async def kill_often(forker: socket.socket) -> tuple[int, int]:
    """Returns how many commits there were, and how many workers lived to make one."""
    network, chance = MemoryNetwork(), random.Random(3)
    names = (NodeId("a"), NodeId("b"))
    copies = {name: MemoryCopies(network) for name in names}
    here, there = (
        MemoryCheckpoints(
            name, JOB, limit_bytes=64 << 20, copies=copies[name], checkpoint_storage=None, on_kept=lambda *_: None
        )
        for name in names
    )
    here.start("a", 1)
    there.start("b", 1)
    here.keep_with(names[1], "b", 1)
    commit = useful = 0
    try:
        for _ in range(LIVES):
            life = Life(here, forker, chance.randint(0, MOST_COMMITS), chance.random() * LAST_MOMENT_S)
            running = life.run(commit, chance.choice(SIZES))
            before, commit = commit, await asyncio.wait_for(running, LIMIT_S)
            life.agent.close()
            here.forget_worker(0)
            useful += commit > before
            if commit:
                assert await value_held(here) == (Version(1, commit), commit % 251)
                assert await here.copied_before_leaving(LIMIT_S)
                assert await value_held(there) == (Version(1, commit), commit % 251)
        assert here.usage().workers < 3 * 1.1 * max(SIZES)
        return commit, useful
    finally:
        await here.close()
        await there.close()


def test_no_moment_to_die_leaves_a_mixture(forker: socket.socket) -> None:
    commits, useful = asyncio.run(kill_often(forker))
    assert commits > LIVES
    assert useful > LIVES / 4
