"""Measures what a commit costs a worker, what the agent's background work costs training, and how fast copies travel.

    python -m benchmarks.commit --size 1000 --runs 7

The agent is a separate process with real in-memory checkpoints, as in a job. A commit is the header, the copy of all
arrays into the agent's memory file, and its announcement; it is compared with a plain copy of the same arrays. The
first two commits use new buffers and are reported separately. Then training steps are timed with and without the agent
computing checksums, writing to the disk and copying to another node.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common import report
from benchmarks.common.report import Outcome
from edl.adapters.clock import SystemClock, wall_clock_s
from edl.adapters.copies import TcpCopies
from edl.adapters.files import PlainFiles
from edl.checkpoint.directory.manifest import Retention
from edl.checkpoint.directory.writer import FileCheckpointStorage, WriterIdentity
from edl.checkpoint.memory.buffer_table import BufferRefusal, SnapshotStream
from edl.checkpoint.memory.memory_checkpoints import BufferGrant, MemoryCheckpoints
from edl.checkpoint.memory.snapshot_pool import MemorySnapshotPool
from edl.ports import Label
from edl.tasks import end
from edl.testing.snapshots import make_snapshot
from edl.types import NodeId
from edl.wire import snapshot
from edl.wire.local import STATE, Buffer, Committed, NoBuffer, Want
from edl.wire.local import decode_to_agent as decode
from edl.wire.local import encode_to_agent as encode
from edl.wire.local import encode_to_worker as answer_bytes
from edl.wire.records import Holding, Version

JOB = "benchmark"
TOKEN = "token"  # noqa: S105 - nobody else is there
MB = 1_000_000
ARRAYS = 64
STEP_S = 0.03
KEPT = b"kept"


# --- the agent's process ---------------------------------------------------------------------------------------------


async def serve(agent: socket.socket, folder: str, limit_bytes: int, peer_port: int) -> None:
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[bytes] = asyncio.Queue()
    checkpoint_storage = FileCheckpointStorage(
        PlainFiles(folder), WriterIdentity(JOB, "run"), Retention(), wall_clock_s=wall_clock_s, say=print
    )
    memory = MemoryCheckpoints(
        NodeId("agent"),
        JOB,
        limit_bytes=limit_bytes,
        copies=TcpCopies(NodeId("agent"), lambda: TOKEN, SystemClock()),
        checkpoint_storage=checkpoint_storage,
        on_kept=lambda *_: told.put_nowait(KEPT),
    )
    memory.enter(Version(), (NodeId("agent"),), writes=True)
    passing_on = asyncio.create_task(_pass_on(told, agent))
    try:
        while data := await loop.sock_recv(agent, 65536):
            message = decode(data)
            if isinstance(message, Committed) and message.save and peer_port:
                memory.keep_with(NodeId("peer"), "127.0.0.1", peer_port)
            match message:
                case Want():
                    grant = await memory.want(0, message.stream, message.size)
                case Committed():
                    memory.committed(0, message)
                    grant = await memory.want(0, message.stream, message.size)
                case other:
                    raise AssertionError(other)
            _answer(agent, grant)
    finally:
        await memory.close()
        await end(passing_on)


async def _pass_on(told: asyncio.Queue[bytes], agent: socket.socket) -> None:
    while True:
        agent.send(await told.get())


def _answer(agent: socket.socket, grant: BufferGrant | BufferRefusal) -> None:
    if isinstance(grant, BufferRefusal):
        agent.send(answer_bytes(NoBuffer(STATE, grant.why)))
        return
    descriptors = [] if grant.descriptor is None else [grant.descriptor]
    socket.send_fds(agent, [answer_bytes(Buffer(STATE, grant.buffer, grant.size))], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


# --- the worker ------------------------------------------------------------------------------------------------------


class Numpy:
    """NumPy arrays, copied one after the other."""

    name = "numpy"

    def __init__(self, count: int, size: int) -> None:
        self.arrays = [np.full(size, number, np.uint8) for number in range(count)]
        self._copies = [np.zeros(size, np.uint8) for _ in range(count)]

    def plain(self) -> None:
        for source, target in zip(self.arrays, self._copies, strict=True):
            np.copyto(target, source)

    def copy_out(self, views: list[memoryview]) -> None:
        for source, view in zip(self.arrays, views, strict=True):
            np.copyto(np.frombuffer(view, np.uint8), source)


class Torch:
    """Tensors, copied as ``edl.torch`` does it."""

    name = "torch"

    def __init__(self, count: int, size: int) -> None:
        import torch

        from edl.torch.arrays import TorchArrays

        self.arrays = [torch.full((size,), number, dtype=torch.uint8) for number in range(count)]
        self._copies = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
        self._out = TorchArrays()

    def plain(self) -> None:
        for source, target in zip(self.arrays, self._copies, strict=True):
            target.copy_(source)

    def copy_out(self, views: list[memoryview]) -> None:
        self._out.copy_out(self.arrays, views)


class Worker:
    """The worker's side of commits."""

    def __init__(self, agent: socket.socket, kind: Any, size: int) -> None:
        self.agent = agent
        self.kind = kind
        leaves = [snapshot.Leaf(f"array.{number:03}", "U8", (size,), size) for number in range(ARRAYS)]
        self.layout = snapshot.Layout(leaves)
        self.maps: dict[int, mmap.mmap] = {}
        self.grant: Buffer | None = None
        self.commits = 0
        self.kept = threading.Event()
        self.granted = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        agent.send(encode(Want(STATE, self._plan().size)))

    def _plan(self) -> snapshot.SnapshotPlan:
        return self.layout.plan(snapshot.Meta(JOB, 1, self.commits, 1, 0, 1, self.kind.name), {"steps": self.commits})

    def _listen(self) -> None:
        from edl.wire.local import decode_to_worker

        while True:
            data, descriptors, _, _ = socket.recv_fds(self.agent, 65536, 1)
            if not data:
                return
            if data == KEPT:
                self.kept.set()
                continue
            message = decode_to_worker(data)
            assert isinstance(message, Buffer), message
            for descriptor in descriptors:
                populate = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self.maps[message.buffer] = mmap.mmap(descriptor, message.size, flags=populate)
                os.close(descriptor)
            self.grant = message
            self.granted.set()

    def commit(self, save: bool = False) -> float:
        """Make one commit; returns the seconds that training stood still."""
        assert self.granted.wait(60)
        self.granted.clear()
        assert self.grant is not None
        begun_s = time.perf_counter()
        self.commits += 1
        plan = self._plan()
        view = memoryview(self.maps[self.grant.buffer])
        plan.write_header(view)
        self.kind.copy_out([view[offset : offset + size] for _, offset, size in plan.leaves])
        message = Committed(STATE, self.grant.buffer, plan.size, 1, self.commits, 0, 1, save)
        self.agent.send(encode(message))
        return time.perf_counter() - begun_s


def timed(work: Callable[[], Any]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


# --- what is measured ------------------------------------------------------------------------------------------------


def commits(worker: Worker, runs: int) -> list[Outcome]:
    """Measure commits and plain copies in turn."""
    kind = worker.kind
    event = f"{kind.name}: copy of the state"
    kind.plain()
    first = [Outcome(f"{kind.name}: commit into a new buffer", "edl", {"seconds": worker.commit()}) for _ in range(2)]
    rest = []
    for _ in range(runs):
        assert worker.granted.wait(60)
        load = report.load_average()
        rest.append(Outcome(event, "plain copy", {"seconds": timed(kind.plain)}, load=load))
        rest.append(Outcome(event, "edl", {"seconds": worker.commit()}, load=load))
    return [*first, *rest]


def training(worker: Worker, runs: int) -> list[Outcome]:
    """Measure steps without and with the agent's background work, in turn."""
    side = 256
    while timed(partial(_step, side)) < STEP_S:
        side = side * 5 // 4
    step = partial(_step, side)
    outcomes = []
    for _ in range(runs):
        alone = [timed(step) for _ in range(round(2 / STEP_S))]
        worker.kept.clear()
        worker.commit(save=True)
        beside: list[float] = []
        begun_s = time.perf_counter()
        while not worker.kept.is_set() and time.perf_counter() - begun_s < 60:
            beside.append(timed(step))
        event = "mean step while the agent works"
        outcomes.append(Outcome(event, "without", {"seconds": statistics.fmean(alone)}))
        outcomes.append(
            Outcome(event, "edl", {"seconds": statistics.fmean(beside), "until it is written": sum(beside)})
        )
    return outcomes


def _step(side: int) -> None:
    matrix = np.ones((side, side), np.float32)
    np.matmul(matrix, matrix)


def travel(port: int, size: int, runs: int) -> list[Outcome]:
    """Measure copies to another process over loopback; the sender computes the checksum beforehand."""
    mine = MemorySnapshotPool(NodeId("bench"), JOB, 4 * size, lambda: None)
    copies = TcpCopies(NodeId("bench"), lambda: TOKEN, SystemClock())
    outcomes = []
    for commit in range(1, runs + 2):
        holding = Holding(Version(1, commit))
        data = make_snapshot(holding, commit, size, JOB)
        label = Label(NodeId("bench"), holding, len(data))
        arrival = mine.incoming(SnapshotStream.of_worker(0, STATE), label)
        arrival.view[:] = data
        arrival.accept(zlib.crc32(data))
        loan = mine.borrow(holding.version, 0)
        assert loan is not None
        seconds = timed(partial(copies.put, "127.0.0.1", port, loan))
        loan.release()
        event = "copy to another node" if commit > 2 else "copy to another node, into new memory"
        outcomes.append(Outcome(event, "edl", {"seconds": seconds}))
    mine.close()
    return outcomes


def _helper(*arguments: str, descriptor: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.commit", *arguments]
    return subprocess.Popen(command, pass_fds=[descriptor])


def _told(process: subprocess.Popen[bytes], near: socket.socket) -> None:
    near.shutdown(socket.SHUT_RDWR)
    process.wait(30)


def _as_peer(descriptor: int, limit_bytes: int) -> None:
    """Run as another node: receive copies until the socket ends."""
    told = socket.socket(fileno=descriptor)
    snapshot_pool = MemorySnapshotPool(NodeId("peer"), JOB, limit_bytes, lambda: None)
    copies = TcpCopies(NodeId("peer"), lambda: TOKEN, SystemClock())
    told.send(str(copies.start(snapshot_pool, "127.0.0.1")).encode())
    told.recv(1)


@click.command()
@click.option("--size", "megabytes", default=1000, show_default=True, help="Megabytes of state.")
@click.option("--runs", default=7, show_default=True)
@click.option("--frameworks", default="numpy,torch", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Checkpoint directory; else a temporary one.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all runs.")
@click.option("--replicate/--no-replicate", default=False, help="Also copy to another node while training is timed.")
@click.option("--as-agent", "agent", default=-1, hidden=True)
@click.option("--as-peer", "peer", default=-1, hidden=True)
@click.option("--peer-port", default=0, hidden=True)
def main(
    megabytes: int,
    runs: int,
    frameworks: str,
    folder: Path | None,
    json_path: Path | None,
    replicate: bool,
    agent: int,
    peer: int,
    peer_port: int,
) -> None:
    """Measure commits, their background work, and copies between nodes."""
    size = megabytes * MB // ARRAYS
    limit = 4 * megabytes * MB
    if agent >= 0:
        own = socket.socket(fileno=agent)
        own.setblocking(False)
        asyncio.run(serve(own, str(folder), limit, peer_port))
        return
    if peer >= 0:
        _as_peer(peer, 2 * limit)
        return
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        near_peer, far_peer = socket.socketpair()
        other = _helper("--as-peer", str(far_peer.fileno()), "--size", str(megabytes), descriptor=far_peer.fileno())
        port = int(near_peer.recv(64))
        for name in frameworks.split(","):
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            options = ["--size", str(megabytes), "--folder", f"{place}/{name}", "--peer-port", str(port * replicate)]
            process = _helper("--as-agent", str(far.fileno()), *options, descriptor=far.fileno())
            far.close()
            worker = Worker(near, {"numpy": Numpy, "torch": Torch}[name](ARRAYS, size), size)
            outcomes += commits(worker, runs)
            if name == frameworks.split(",")[0]:
                outcomes += training(worker, min(runs, 5))
            _told(process, near)
        outcomes += travel(port, megabytes * MB, runs)
        _told(other, near_peer)
    title = f"A state of {megabytes} MB"
    report.show(title, outcomes, own="plain copy")
    _ratios(outcomes, megabytes)
    report.write_json(json_path, title, outcomes, runs=runs, megabytes=megabytes)


def _ratios(outcomes: list[Outcome], megabytes: int) -> None:
    def median(event: str, launcher: str) -> float:
        return statistics.median(
            one.values["seconds"] for one in outcomes if (one.event, one.launcher) == (event, launcher)
        )

    for event in dict.fromkeys(one.event for one in outcomes):
        launchers = {one.launcher for one in outcomes if one.event == event}
        base = next(iter(launchers - {"edl"}), None)
        if base is not None:
            print(f"{event}: {median(event, 'edl') / median(event, base):.3f} x {base}")
        else:
            print(f"{event}: {megabytes / 1000 / median(event, 'edl'):.2f} GB/s")


if __name__ == "__main__":
    main()
