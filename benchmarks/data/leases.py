"""Measures how fast the Master leases shards: the machine alone, and through its real shell and one gRPC stream per
node.

    python -m benchmarks.data leases --runs 5

The store is in memory: in mode "steps" no lease is written to it. Nodes are fake agents in separate processes, which
send the next request as soon as they get an answer and report every shard as finished. Recovery: a new machine loads
the stored data of the old one, takes over the running world, and answers the first lease. The machine alone is measured
in CPU time, everything else in wall-clock time.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from data_service.leases.machine import LeaseMachine
from data_service.ledger import Ledger
from data_service.manifest import Manifest, ManifestBuilder
from data_service.protocol.messages import DataSetOptions, Lease, LeasesGranted, Open, RegisterFiles, decode, encode
from edl.adapters.clock import SystemClock
from edl.adapters.transport import Connection, MasterServer
from edl.config import JobSpec, NodeRange, Timeouts
from edl.master.election import MasterInfo
from edl.master.service import Caller, Effect, Keep, Said, TellWorker, WorldBegan
from edl.master.shell import MasterDeps, MasterShell
from edl.ports import Put
from edl.testing.memory_store import MemoryStore
from edl.types import FencingToken, Incarnation, JobId, NodeId, Rank, Round
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Attach, MasterMessage, Ready, ServiceFromWorker, ServiceToWorker, StartRound
from edl.wire.records import Member, NodeInfo, World

NAME = "train"
TTL_S = 100_000.0
DEADLINE_S = 30.0
GOALS = {
    "leases/s, 1 shard each": 3000.0,
    "shards/s, 128 per lease": 100_000.0,
}


def big(shards: int, files: int = 1000) -> Manifest:
    """A data set of that many shards of 65,536 records."""
    builder = ManifestBuilder("ipc")
    for file in range(files):
        builder.file(f"/data/part-{file:05d}.arrow", 1 << 30)
        for place in range(shards // files):
            builder.shard(place << 16, (place + 1) << 16, 1 << 16)
    return builder.build()


def world_of(nodes: int) -> World:
    """A world with one worker on each node."""
    members = [Member(NodeId(f"n{i}"), Incarnation(i + 1), "h", 1, Rank(i), (1,)) for i in range(nodes)]
    return World(Round(1), tuple(members), 0)


class Alone:
    """The machine without anything around it."""

    def __init__(self, manifest: Manifest, nodes: int = 16) -> None:
        self.machine = LeaseMachine()
        self.kept: dict[str, bytes] = {}
        self.nodes = nodes
        self.ids = 0
        self.do(self.machine.load({}, 0.0))
        self.do(self.machine.step(WorldBegan(world_of(nodes)), 0.0))
        self.encoded = manifest.encode()
        self.register_s = self.timed(
            lambda: self.say(0, RegisterFiles(self.next(), NAME, self.encoded, DataSetOptions()))
        )
        for rank in range(nodes):
            self.say(rank, Open(self.next(), NAME, rank))

    def next(self) -> int:
        self.ids += 1
        return self.ids

    def timed(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def do(self, effects: tuple[Effect, ...]) -> str:
        told = ""
        for effect in effects:
            if isinstance(effect, Keep):
                self.kept[effect.name] = effect.value
            elif isinstance(effect, TellWorker):
                told = effect.body
        return told

    def say(self, rank: int, word: RegisterFiles | Open | Lease) -> str:
        return self.do(self.machine.step(Said(Caller(NodeId(f"n{rank}"), 0), Round(1), encode(word)), 1.0))

    def rate(self, want: int, over_s: float) -> float:
        """Leases per second of CPU time, including encoding and decoding of the messages on the Master's side only."""
        hands: list[list[list[int]]] = [[] for _ in range(self.nodes)]
        callers = [Caller(NodeId(f"n{rank}"), 0) for rank in range(self.nodes)]
        spent_s, leases = 0.0, 0
        while spent_s < over_s:
            rank = leases % self.nodes
            word = {"word": "lease", "id": self.next(), "dataset": NAME, "epoch": 0, "want": want}
            body = json.dumps({**word, "finished": [[row[0], row[5]] for row in hands[rank]]})
            start = time.process_time()
            effects = self.machine.step(Said(callers[rank], Round(1), body), 1.0)
            spent_s += time.process_time() - start
            hands[rank] = granted_rows(json.loads(self.do(effects)))
            leases += 1
        return leases / spent_s


def granted_rows(answer: dict[str, Any]) -> list[list[int]]:
    """The leased shards in an answer, as rows of ``Manifest.rows``. Raises ``RuntimeError`` if there are none: a rate
    of empty answers says nothing."""
    rows: list[list[int]] = answer.get("rows", [])
    if not rows:
        raise RuntimeError(f"no shard was leased: {str(answer)[:200]}")
    return rows


def alone(shards: int, over_s: float) -> dict[str, float]:
    """One run of the machine by itself."""
    manifest = big(shards)
    found: dict[str, float] = {}
    master = Alone(manifest)
    found["register"] = master.register_s
    found["leases/s, 1 shard each"] = master.rate(1, over_s)
    found["shards/s, 128 per lease"] = 128 * master.rate(128, over_s)
    ledger = Ledger.of(manifest)
    for shard in range(0, shards, 3):
        ledger.take(shard, 1 << 16, True)
    text = ledger.encode()
    gc.collect()
    after = Alone.__new__(Alone)
    after.machine, after.kept, after.nodes, after.ids = LeaseMachine(), {}, master.nodes, 1000
    start = time.perf_counter()
    after.machine.load(master.kept, 0.0)
    found["load"] = time.perf_counter() - start
    after.machine.step(WorldBegan(world_of(after.nodes), taken_over=True), 0.0)
    after.say(0, RegisterFiles(after.next(), NAME, master.encoded, DataSetOptions()))
    for rank in range(after.nodes):
        after.say(rank, Open(after.next(), NAME, rank, ledger=text if rank == 0 else ""))
    granted = decode(after.say(0, Lease(after.next(), NAME, 0, 1)))
    found["recovery to the first lease"] = time.perf_counter() - start
    assert isinstance(granted, LeasesGranted) and granted.leases, granted
    return found


# --- through the shell and gRPC --------------------------------------------------------------------------------------


async def never_refuses(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """A connection check for fake nodes, which listen nowhere: they always count as alive."""
    return False


async def serve(manifest_path: Path, nodes: int, processes: int, want: int, over_s: float) -> dict[str, float]:
    """Run a Master and processes with many agents; returns their combined measurements."""
    clock = SystemClock()
    store = MemoryStore(clock)
    keys = JobKeys(JobId("bench"))
    spec = JobSpec(JobId("bench"), NodeRange(nodes, nodes), timeouts=Timeouts(lease_ttl_s=30.0, join_grace_s=0))
    revision = store.write_now([Put(keys.master, plain.dumps(MasterInfo(NodeId("n0"), "127.0.0.1", 1)))])
    assert revision is not None
    infos = []
    for node in range(nodes):
        lease = Incarnation(store.grant_now(TTL_S))
        infos.append(NodeInfo(NodeId(f"n{node}"), lease, "127.0.0.1", 1, 1))
        store.write_now([Put(keys.node(infos[-1].node), plain.dumps(infos[-1]), lease)])
    deps = MasterDeps(
        store,
        clock,
        keys,
        spec,
        NodeId("n0"),
        never_refuses,
        lambda text: None,
        time.time,
        "",
        lambda: (LeaseMachine(),),
    )
    shell = MasterShell(deps, FencingToken(revision))
    running = asyncio.ensure_future(shell.run())
    server = MasterServer(lambda: "secret", 30.0)
    port = await server.start("127.0.0.1")
    server.serve(shell)
    cpu_s = time.process_time()
    crews = []
    for number in range(processes):
        mine = [[info.node, info.incarnation] for info in infos[number::processes]]
        arguments = json.dumps([port, mine, str(manifest_path), want, over_s])
        crews.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.data.leases", arguments, stdout=asyncio.subprocess.PIPE
            )
        )
    try:
        said = [await asyncio.wait_for(crew.communicate(), over_s + DEADLINE_S) for crew in crews]
    finally:
        for crew in crews:
            if crew.returncode is None:
                crew.kill()
    rates = [json.loads(out) for out, _ in said]
    cpu_s = time.process_time() - cpu_s
    running.cancel()
    server.serve(None)
    await server.stop()
    leases = sum(rate["leases"] for rate in rates)
    return {
        "leases": sum(rate["leases"] / rate["seconds"] for rate in rates),
        "shards": sum(rate["shards"] / rate["seconds"] for rate in rates),
        "master_us": cpu_s / max(1, leases) * 1e6,
    }


class Crew:
    """The agents of one process, each with its own stream and one worker."""

    def __init__(self, port: int, nodes: list[tuple[str, int]], manifest: Path, want: int, over_s: float) -> None:
        self.port, self.nodes, self.want, self.over_s = port, nodes, want, over_s
        self.manifest = manifest
        self.leases = self.shards = 0
        self.began_s = self.ended_s = 0.0
        self.over = asyncio.Event()

    async def run(self) -> None:
        streams = [asyncio.ensure_future(self.agent(NodeId(name), Incarnation(life))) for name, life in self.nodes]
        await self.over.wait()
        print(json.dumps({"leases": self.leases, "shards": self.shards, "seconds": self.ended_s - self.began_s}))
        sys.stdout.flush()
        for stream in streams:
            stream.cancel()

    async def agent(self, node: NodeId, life: Incarnation) -> None:
        connection = Connection("127.0.0.1", self.port, "secret", 30.0)
        ids = 0
        info = NodeInfo(node, life, "127.0.0.1", 1, 1)

        def opened() -> None:
            connection.send(Attach(info, Round(0), Round(0), False))
            connection.send(Ready(Round(0), (1, 2)))

        def say(body: str) -> None:
            connection.send(ServiceFromWorker("data", 0, Round(1), body))

        async def heard(message: MasterMessage) -> None:
            nonlocal ids
            if isinstance(message, StartRound):
                member = message.world.member(node)
                assert member is not None
                if member.first_rank == 0:
                    say(encode(RegisterFiles(1, NAME, self.manifest.read_bytes(), DataSetOptions())))
                else:
                    say(encode(Open(2, NAME, member.first_rank)))
            if not isinstance(message, ServiceToWorker):
                return
            word = json.loads(message.body)
            if word["word"] == "registered":
                say(encode(Open(2, NAME, 0)))
                return
            if word["word"] == "refused":
                raise RuntimeError(word["text"])
            finished = []
            if word["word"] == "granted":
                rows, now_s = granted_rows(word), time.perf_counter()
                self.began_s = self.began_s or now_s
                self.leases += 1
                self.shards += len(rows)
                finished = [[row[0], row[5]] for row in rows]
                if now_s - self.began_s > self.over_s:
                    self.ended_s = now_s
                    self.over.set()
                    return
            ids = max(ids, 10) + 1
            fields = {"word": "lease", "id": ids, "dataset": NAME, "epoch": 0, "want": self.want, "finished": finished}
            say(json.dumps(fields))

        print(await connection.run(opened, heard), file=sys.stderr)


@click.command("leases")
@click.option("--runs", default=5, show_default=True)
@click.option("--shards", default=1_000_000, show_default=True)
@click.option("--nodes", default=16, show_default=True, help="Fake agents, one worker each.")
@click.option("--processes", default=2, show_default=True, help="That they live in.")
@click.option("--seconds", "over_s", default=2.0, show_default=True, help="Of each measurement.")
def main(runs: int, shards: int, nodes: int, processes: int, over_s: float) -> None:
    """Leases of shards: the machine alone, and through the Master's shell over gRPC."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "manifest"
        path.write_bytes(big(shards).encode())
        for run in range(runs):
            for name, value in alone(shards, over_s).items():
                found.setdefault(f"machine: {name}", []).append(value)
            for want, name in ((1, "leases/s, 1 shard each"), (128, "shards/s, 128 per lease")):
                rate = asyncio.run(serve(path, nodes, processes, want, over_s))
                found.setdefault(f"gRPC: {name}", []).append(rate["leases" if want == 1 else "shards"])
                found.setdefault(f"gRPC: Master's CPU us per lease of {want}", []).append(rate["master_us"])
            report.progress(f"run {run + 1} of {runs}")
    table = Table(title=f"{shards:,} shards, {nodes} nodes, {report.machine()}")
    for heading in ("what", "median", "min", "max", "goal"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for what, values in found.items():
        goal = GOALS.get(what.partition(": ")[2])
        table.add_row(what, *(shown(one) for one in (statistics.median(values), min(values), max(values))), shown(goal))
    Console(width=150).print(table)


def shown(value: float | None) -> str:
    """Format a number for the table."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


if __name__ == "__main__":
    crew_port, crew_nodes, crew_manifest, crew_want, crew_over_s = json.loads(sys.argv[1])
    asyncio.run(Crew(crew_port, crew_nodes, Path(crew_manifest), crew_want, crew_over_s).run())
