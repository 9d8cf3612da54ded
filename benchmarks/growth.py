"""Measures how the Master's work grows with the number of nodes of a job.

    python -m benchmarks.growth --nodes 50,100,200,300,1000

A real Master (its shell, its election, its leases) on a real etcd serves real streams. The nodes are light: one process
runs them all, each with its own stream that answers as a launcher does but trains nothing. For each number of nodes it
measures how long it takes until all are attached, until the first and the last have been told to start, until the
others have been told to start again after one is lost, and until all are attached to the next Master after this one has
died; the CPU time that the Master spent on each, the longest time for which its event loop was blocked, and how much it
wrote. The nodes share the machine with the Master, so times are those of two programs on these cores; CPU times are the
Master's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import multiprocessing
import random
import resource
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.common.etcd import PrivateEtcd
from edl.adapters.clock import SystemClock, wall_clock_s
from edl.adapters.etcd import EtcdStore
from edl.adapters.garbage import collect_rarely
from edl.adapters.transport import Connection, MasterClient, MasterServer, refuses
from edl.agent.shell import LONGEST_RECONNECT_PAUSE_S, RECONNECT_PAUSE_S
from edl.config import JobSpec, NodeRange, Timeouts
from edl.master.candidate import Candidate, CandidateCallbacks
from edl.master.election import MasterInfo
from edl.master.shell import MasterDeps, MasterShell
from edl.ports import Condition, Delete, Operation, Put
from edl.simulate.loglog import draw
from edl.tasks import Backoff
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire import codec, edl_pb2, plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Attach, MasterMessage, Pace, Ready, StartRound, StopRound
from edl.wire.rank_pace import RankPace
from edl.wire.records import Member, NodeInfo, World

HOST = "127.0.0.1"
SECRET = "growth"  # noqa: S105 - of nothing
JOB = JobId("growth")
MASTER = NodeId("master")
LEASE_S = 3.0
TIMEOUT_S = 300.0
SETTLE_S = 1.0
IDLE_S = 10.0
MINUTE_S = 60.0
LOOK_S, SELDOM_S = 0.02, 0.25
"""Seconds between two checks of the event loop's lag. They cost 1.5 % of a core, so there are fewer while idle cost is
measured."""
AT_ONCE = 100
"""Keys of nodes in one transaction."""


# --- the nodes -------------------------------------------------------------------------------------------------------


def light(data: bytes) -> MasterMessage:
    """A message of the Master without the members of its world: each launcher decodes them on its own host, but all
    nodes here share one core. ``decoding_s`` measures what that leaves out."""
    envelope = edl_pb2.FromMaster.FromString(data)
    if envelope.WhichOneof("body") != "start_round":
        return codec.decode_master(data)
    start = envelope.start_round
    return StartRound(World(Round(start.world.round), (), start.world.restarts), start.reason)


def decoding_s(infos: Sequence[NodeInfo]) -> float:
    """Seconds that one launcher needs to decode the start of such a world: the median of five measurements."""
    members = tuple(
        Member(info.node, info.incarnation, info.host, info.slots, Rank(8 * index), (1, 2))
        for index, info in enumerate(infos)
    )
    data = codec.encode_master(StartRound(World(Round(1), members, 0), ""))

    def once() -> float:
        began_s = time.perf_counter()
        codec.decode_master(data)
        return time.perf_counter() - began_s

    return statistics.median(once() for _ in range(5))


class LightConnection(Connection):
    """Decodes messages without their members; see ``light``."""

    decode = staticmethod(light)


class Node:
    """A launcher's end of the stream to the Master."""

    def __init__(self, info: NodeInfo, port: int, lease_s: float, seen: Callable[[Round, float], None]) -> None:
        self.info = info
        self.attached = asyncio.Event()
        self._port = port
        self._lease_s = lease_s
        self._seen = seen
        self._round = Round(0)
        self._running = Round(0)
        self._connection: Connection | None = None
        self.task = asyncio.ensure_future(self._live())

    async def _live(self) -> None:
        pauses = Backoff(RECONNECT_PAUSE_S, LONGEST_RECONNECT_PAUSE_S)
        while True:
            connection = LightConnection(HOST, self._port, SECRET, self._lease_s)
            heard = _Heard(self, connection)
            await connection.run(heard.opened, heard.heard)
            if self.attached.is_set():
                pauses.reset()
            self.attached.clear()
            await asyncio.sleep(pauses.next())

    def say(self, connection: Connection) -> None:
        """Send the messages of a launcher that has attached."""
        connection.send(Attach(self.info, self._round, self._running, False))
        if not self._running:
            self.ready(connection)
        self._connection = connection
        self.attached.set()

    def ready(self, connection: Connection) -> None:
        """Report that no worker is running here."""
        self._running = Round(0)
        connection.send(Ready(self._round, (1, 2)))

    def start(self, number: Round) -> None:
        """Report that workers are running here."""
        self._round = self._running = number
        self._seen(number, time.monotonic())

    def report(self, commit: int) -> None:
        """Send the pace of its workers, which differs each time."""
        if self._connection is not None:
            step_s = random.uniform(0.2, 0.3)
            ranks = tuple(RankPace(slot, step_s, 1.2 * step_s, 0.3, samples=32.0) for slot in range(self.info.slots))
            self._connection.send(Pace(self._running, commit, step_s, ranks=ranks, holders=2))


@dataclass
class _Heard:
    """One stream of a node."""

    node: Node
    connection: Connection

    def opened(self) -> None:
        self.node.say(self.connection)

    async def heard(self, message: MasterMessage) -> None:
        if isinstance(message, StartRound):
            self.node.start(message.world.round)
        elif isinstance(message, StopRound):
            self.node.ready(self.connection)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for tells nobody
        await asyncio.sleep(0.01)


def _all_there(times: Sequence[float], nodes: int) -> bool:
    return len(times) >= nodes


def nodes_process(pipe: Pipe, infos: Sequence[NodeInfo], port: int, lease_s: float) -> None:
    """Run all nodes; answers the requests of the main process."""
    collect_rarely()
    asyncio.run(_nodes(pipe, infos, port, lease_s))


async def _nodes(pipe: Pipe, infos: Sequence[NodeInfo], port: int, lease_s: float) -> None:
    started: dict[Round, list[float]] = {}
    paces: asyncio.Future[None] | None = None

    def seen(number: Round, at_s: float) -> None:
        started.setdefault(number, []).append(at_s)

    nodes = [Node(info, port, lease_s, seen) for info in infos]
    while True:
        order, argument = await asyncio.to_thread(pipe.recv)
        if order == "attached":
            await asyncio.gather(*(node.attached.wait() for node in nodes))
            pipe.send(time.monotonic())
        elif order == "started":
            times = started.setdefault(argument, [])
            await _until(functools.partial(_all_there, times, len(nodes)))
            pipe.send((min(times), max(times)))
        elif order == "lose":
            lost = nodes.pop()
            lost.task.cancel()
            pipe.send(lost.info.node)
        elif order == "pace":
            paces = asyncio.ensure_future(_report(nodes, argument))
            pipe.send(None)
        elif order == "end":
            if paces is not None:
                paces.cancel()
            return


async def _report(nodes: Sequence[Node], every_s: float) -> None:
    """Let all nodes report their pace, evenly spread over this time, again and again."""
    for commit in itertools.count(1):
        for node in nodes:
            node.report(commit)
            await asyncio.sleep(every_s / len(nodes))


# --- the Master ------------------------------------------------------------------------------------------------------


class CountingStore(EtcdStore):
    """Counts what is written to the store."""

    writes = written_bytes = 0

    async def write(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = (), *, repeatable: bool = False
    ) -> int | None:
        self.writes += 1
        self.written_bytes += sum(len(one.value) for one in operations if isinstance(one, Put))
        return await super().write(operations, conditions, repeatable=repeatable)


@dataclass
class Spent:
    """Resources spent between two times."""

    seconds: float
    cpu_s: float
    lag_s: float
    writes: int
    written_bytes: int


@dataclass
class Meter:
    """Measures CPU time, event loop and store of this process."""

    store: CountingStore
    lag_s: float = 0.0
    look_s: float = LOOK_S
    _since: tuple[float, float, int, int] = (0.0, 0.0, 0, 0)

    async def watch(self) -> None:
        """Measure the event loop's lag."""
        while True:
            due_s = time.monotonic() + self.look_s
            await asyncio.sleep(self.look_s)
            self.lag_s = max(self.lag_s, time.monotonic() - due_s)

    def begin(self) -> None:
        """Start a measurement."""
        self.lag_s = 0.0
        self._since = (time.monotonic(), time.process_time(), self.store.writes, self.store.written_bytes)

    def spent(self, until_s: float | None = None) -> Spent:
        """The resources spent since ``begin``."""
        begun_s, cpu_s, writes, size = self._since
        return Spent(
            (until_s or time.monotonic()) - begun_s,
            time.process_time() - cpu_s,
            self.lag_s,
            self.store.writes - writes,
            self.store.written_bytes - size,
        )


class Masters:
    """One launcher's part in repeated elections."""

    def __init__(self, store: CountingStore, server: MasterServer, port: int, spec: JobSpec) -> None:
        self._store, self._server, self._port, self._spec = store, server, port, spec
        self._keeping: asyncio.Future[None] | None = None
        self._running: asyncio.Future[None] | None = None
        self.deposed = 0
        self.shell: MasterShell | None = None

    async def begin(self) -> None:
        """Wait to be elected."""
        deps = MasterDeps(
            *(self._store, SystemClock(), JobKeys(JOB), self._spec, MASTER, refuses, self._heard, wall_clock_s)
        )
        callbacks = CandidateCallbacks(
            lambda master, token: None, self._elected, lambda outcome: None, lambda lease: None
        )
        candidate = Candidate(deps, MasterInfo(MASTER, HOST, self._port, ""), callbacks)
        self._keeping = asyncio.ensure_future(self._keep(candidate))
        self._running = asyncio.ensure_future(candidate.run())
        await _until(lambda: self.shell is not None and self.shell.serving)

    async def end(self) -> None:
        """End as if the launcher had died: its key is deleted with its lease."""
        for task in (self._running, self._keeping):
            assert task is not None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._store.write([Delete(JobKeys(JOB).master)])

    def _heard(self, text: str) -> None:
        self.deposed += "no longer the Master" in text or "stepping down as Master" in text

    def _elected(self, shell: MasterShell | None) -> None:
        self.shell = shell
        self._server.serve(shell)

    async def _keep(self, candidate: Candidate) -> None:
        from edl.errors import LeaseLost

        lease_s = self._spec.timeouts.lease_ttl_s
        while True:
            lease = Incarnation(await self._store.grant_lease(lease_s))
            candidate.registered(lease)
            with contextlib.suppress(LeaseLost):
                while True:
                    await self._store.renew_lease(lease)
                    await asyncio.sleep(lease_s / 3)
            candidate.unregistered()


@dataclass
class Result:
    """The results for one number of nodes."""

    nodes: int
    phases: dict[str, Spent] = field(default_factory=dict)
    status_s: float = 0.0
    idle_share: float = 0.0
    deposed: int = 0
    peak_mb: float = 0.0
    decoding_s: float = 0.0


Ask = Callable[..., Any]
"""Sends a request to the process of the nodes; see ``_nodes``."""


@contextlib.asynccontextmanager
async def _nodes_beside(infos: Sequence[NodeInfo], port: int, lease_s: float) -> AsyncIterator[Ask]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=nodes_process, args=(theirs, infos, port, lease_s), daemon=True)
    process.start()

    async def ask(order: str, argument: object = None) -> Any:
        ours.send((order, argument))
        return await asyncio.wait_for(asyncio.to_thread(ours.recv), TIMEOUT_S)

    try:
        yield ask
    finally:
        ours.send(("end", None))
        await asyncio.to_thread(process.join, 10)
        process.kill()


async def _look(result: Result, meter: Meter, port: int) -> None:
    """Measure the cost of a status request, and of doing nothing."""
    client = MasterClient(HOST, port, SECRET, timeout_s=60.0)
    asked_s = time.monotonic()
    await client.status()
    result.status_s = time.monotonic() - asked_s
    await client.close()
    meter.look_s = SELDOM_S
    meter.begin()
    await asyncio.sleep(IDLE_S)
    idle, meter.look_s = meter.spent(), LOOK_S
    result.idle_share = idle.cpu_s / idle.seconds


async def _endure(masters: Masters, meter: Meter, ask: Ask, minutes: int, keys: JobKeys) -> None:
    """Lose a node each minute, and once, in the middle, the Master."""
    for minute in range(1, minutes + 1):
        meter.begin()
        began_s = time.monotonic()
        if minute == minutes // 2 + 1:
            await masters.end()
            await masters.begin()
            await _until(lambda: masters.shell is not None and not masters.shell.misses_nodes)
        assert masters.shell is not None
        number = masters.shell.status().round + 1
        lost = await ask("lose")
        await meter.store.write([Delete(keys.node(lost))])
        await ask("started", Round(number))
        spent = meter.spent()
        await asyncio.sleep(max(0.0, MINUTE_S - (time.monotonic() - began_s)))
        rest = meter.spent()
        resident_mb = psutil.Process().memory_info().rss / 2**20
        print(
            f"minute {minute:2}: re-formed in {spent.seconds:.1f} s; CPU {rest.cpu_s:.1f} s, "
            f"longest lag {rest.lag_s:.2f} s, {rest.writes} writes, {rest.written_bytes / 1000:.0f} kB, "
            f"{resident_mb:.0f} MB, {masters.deposed} times deposed",
            flush=True,
        )


async def _register(store: EtcdStore, keys: JobKeys, infos: Sequence[NodeInfo]) -> None:
    """Register a new job and the keys of its nodes."""
    await store.write([Delete(keys.prefix, prefix=True)])
    for begin in range(0, len(infos), AT_ONCE):
        await store.write([Put(keys.node(info.node), plain.dumps(info)) for info in infos[begin : begin + AT_ONCE]])


@dataclass
class Bench:
    """A Master whose nodes are attached, or about to be."""

    store: CountingStore
    keys: JobKeys
    masters: Masters
    meter: Meter
    infos: Sequence[NodeInfo]
    port: int
    victim: socket.socket
    """Where the last node listens."""
    ask: Ask


@contextlib.asynccontextmanager
async def master_with_nodes(count: int, endpoint: str, lease_s: float = LEASE_S) -> AsyncIterator[Bench]:
    """A Master in this process, and this number of nodes in another one that begin to attach."""
    collect_rarely()
    store, keys = CountingStore([endpoint], request_timeout_s=5.0), JobKeys(JOB)
    spec = JobSpec(JOB, NodeRange(1, count), timeouts=Timeouts(join_grace_s=120.0, lease_ttl_s=lease_s))
    meter = Meter(store)
    server = MasterServer(lambda: SECRET, lease_s)
    port = await server.start(HOST)
    victim = socket.create_server((HOST, 0))
    watching = asyncio.ensure_future(meter.watch())
    masters = Masters(store, server, port, spec)
    infos = [
        NodeInfo(NodeId(f"node-{index:04}"), Incarnation(index + 1), HOST, listens, 8)
        for index, listens in enumerate([*[port] * (count - 1), victim.getsockname()[1]])
    ]
    await _register(store, keys, infos)
    await masters.begin()
    meter.begin()
    async with _nodes_beside(infos, port, lease_s) as ask:
        yield Bench(store, keys, masters, meter, infos, port, victim, ask)
    await masters.end()
    watching.cancel()
    victim.close()
    await server.stop()
    await store.close()


async def measure(count: int, endpoint: str, minutes: int = 0, lease_s: float = LEASE_S) -> Result:
    """All measurements with this number of nodes. ``minutes``: duration of the losses afterwards."""
    result = Result(count)
    async with master_with_nodes(count, endpoint, lease_s) as bench:
        masters, meter, ask = bench.masters, bench.meter, bench.ask
        result.phases["attach"] = meter.spent(await ask("attached"))
        meter.begin()
        _, last_s = await ask("started", Round(1))
        result.phases["form"] = meter.spent(last_s)
        await asyncio.sleep(SETTLE_S)
        meter.begin()
        bench.victim.close()  # it is known to be dead as soon as its stream ends
        await ask("lose")
        await bench.store.write([Delete(bench.keys.node(bench.infos[-1].node))])
        _, last_s = await ask("started", Round(2))
        result.phases["re-form"] = meter.spent(last_s)
        await asyncio.sleep(SETTLE_S)
        await _look(result, meter, bench.port)
        await masters.end()
        meter.begin()
        await masters.begin()
        await _until(lambda: masters.shell is not None and not masters.shell.misses_nodes)
        result.phases["failover"] = meter.spent()
        await _endure(masters, meter, ask, minutes, bench.keys)
        result.decoding_s = decoding_s(bench.infos)
    result.deposed, result.peak_mb = masters.deposed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return result


# --- what is printed -------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """One line per number of nodes and phase."""
    lines = ["nodes  phase     seconds  CPU s  longest lag s  writes  kB written"]
    for one in results:
        for phase, spent in one.phases.items():
            lines.append(
                f"{one.nodes:5}  {phase:8} {spent.seconds:8.2f} {spent.cpu_s:6.2f} {spent.lag_s:14.3f} "
                f"{spent.writes:7} {spent.written_bytes / 1000:11.0f}"
            )
        lines.append(
            f"{one.nodes:5}  status {one.status_s:.3f} s, idle {one.idle_share:.1%} of a core, {one.deposed} times "
            f"deposed, at most {one.peak_mb:.0f} MB; a launcher decodes the start in {1000 * one.decoding_s:.1f} ms"
        )
    return "\n".join(lines)


def exponents(results: Sequence[Result]) -> str:
    """The power of the number of nodes with which a figure grows: the slope of its logarithm."""
    if len(results) < 2:
        return ""
    sizes = [math.log(one.nodes) for one in results]
    lines = ["grows with the nodes to the power of"]
    for phase in results[0].phases:
        found = []
        for name in ("cpu_s", "writes", "written_bytes"):
            values = [math.log(max(getattr(one.phases[phase], name), 1e-3)) for one in results]
            found.append(f"{name} {statistics.linear_regression(sizes, values).slope:.2f}")
        lines.append(f"  {phase:8} {', '.join(found)}")
    return "\n".join(lines)


@click.command()
@click.option("--nodes", default="50,100,200,300,1000", help="Numbers of nodes.")
@click.option("--minutes", default=0, help="Afterwards lose a node each minute for so long, and once the Master.")
@click.option("--plot", type=click.Path(path_type=Path), help="Where a picture (SVG) of the Master's CPU time goes.")
def main(nodes: str, minutes: int, plot: Path | None) -> None:
    """Print the table and the exponents."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results = []
    for count in (int(one) for one in nodes.split(",")):
        with PrivateEtcd() as etcd:
            results.append(asyncio.run(measure(count, etcd.endpoints, minutes)))
            print(table(results[-1:]), flush=True)
    print("\n" + table(results) + "\n\n" + exponents(results))
    if plot is not None:
        lines = {
            phase: [(float(one.nodes), max(one.phases[phase].cpu_s, 1e-3)) for one in results]
            for phase in results[0].phases
        }
        plot.write_text(draw(lines, "nodes", "CPU seconds of the Master"))


if __name__ == "__main__":
    main()
