"""Measures what the dashboard costs the Master of a large job: CPU time, and bytes a second to each browser.

    python -m benchmarks.dashboard_cost --nodes 1000 --readers 0,1,10 --seconds 30

A real Master on a real etcd with light nodes in another process, as in ``benchmarks.growth``; each reports the pace of
its 8 workers every 5 s, so that something changes all the time. Readers follow the live status over HTTP as the page
does, in a third process. CPU time is that of the Master's process; the difference to no readers is what they cost.
*once*: the whole status, which a page gets first.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

import aiohttp
import click

from benchmarks.common.etcd import PrivateEtcd
from benchmarks.growth import HOST, JOB, SECRET, SETTLE_S, Bench, master_with_nodes
from edl.adapters.clock import SystemClock
from edl.agent.workers.step_rate import EVERY_S
from edl.errors import EdlError
from edl.metrics.facts import NodeFacts
from edl.types import Round
from edl.web.front import Web, WebDeps
from edl.web.settings import HttpSettings
from edl.wire.node_requests import OutputLines, OutputRequest


class NoWorkers:
    """The output of workers that write nothing."""

    async def output(self, node: str, request: OutputRequest) -> OutputLines:
        """No lines."""
        return OutputLines((), request.after)

    async def stacks(self, node: str) -> OutputLines:
        """No lines."""
        return OutputLines((), 1)


async def no_facts() -> NodeFacts:
    """Metrics of a node are not asked for."""
    raise EdlError("there are no metrics here")


@dataclass(frozen=True, slots=True)
class Cost:
    """One measurement."""

    readers: int
    cpu_share: float
    """Of one core."""
    lag_s: float
    """Longest time for which the Master's event loop was blocked."""
    whole_kb: float
    """The whole status."""
    kb_per_s: float
    """To one reader, after that."""
    events_per_s: float


def readers_process(pipe: Pipe, url: str, readers: int, seconds: float) -> None:
    """Follow the status with this number of readers; sends the mean of bytes and events over all."""
    pipe.send(asyncio.run(_read_all(url, readers, seconds)))


async def _read_all(url: str, readers: int, seconds: float) -> tuple[float, float, float]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {SECRET}"}) as session:
        found = await asyncio.gather(*(_read(session, url, seconds) for _ in range(readers)))
    whole, more, events = (sum(values) / len(found) for values in zip(*found, strict=True))
    return whole, more, events


async def _read(session: aiohttp.ClientSession, url: str, seconds: float) -> tuple[int, int, int]:
    """Bytes of the first event, bytes of the others, and how many."""
    sizes, size, until_s = [], 0, time.monotonic() + seconds
    async with session.get(url, headers={"Accept": "text/event-stream"}) as response:
        response.raise_for_status()
        async for data in response.content.iter_any():
            *ended, rest = data.split(b"\n\n")
            for part in ended:
                sizes.append(size + len(part) + 2)
                size = 0
            size += len(rest)
            if time.monotonic() > until_s:
                break
    return sizes[0], sum(sizes[1:]), len(sizes) - 1


async def follow(bench: Bench, url: str, readers: int, seconds: float) -> Cost:
    """Measure with this number of readers."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    bench.meter.begin()
    if not readers:
        await asyncio.sleep(seconds)
        spent = bench.meter.spent()
        return Cost(0, spent.cpu_s / spent.seconds, spent.lag_s, 0.0, 0.0, 0.0)
    process = context.Process(target=readers_process, args=(theirs, url, readers, seconds), daemon=True)
    process.start()
    whole, more, events = await asyncio.to_thread(ours.recv)
    spent = bench.meter.spent()
    await asyncio.to_thread(process.join, 10)
    share = spent.cpu_s / spent.seconds
    return Cost(readers, share, spent.lag_s, whole / 1e3, more / seconds / 1e3, events / seconds)


async def measure(nodes: int, endpoint: str, readers: list[int], seconds: float) -> list[Cost]:
    """One measurement for each number of readers."""
    web = Web(WebDeps(JOB, HttpSettings(0), lambda: SECRET, print, SystemClock().now_s))
    async with master_with_nodes(nodes, endpoint) as bench:
        await bench.ask("started", Round(1))
        await bench.ask("pace", EVERY_S)
        await asyncio.sleep(SETTLE_S + EVERY_S)
        url = web.listen(HOST)
        web.begin(lambda: url, no_facts, NoWorkers())
        web.use_master(bench.masters.shell)
        try:
            return [await follow(bench, f"{url}/v1/jobs/{JOB}/status", one, seconds) for one in readers]
        finally:
            await web.leave()


@click.command()
@click.option("--nodes", default=1000, help="Number of nodes.")
@click.option("--readers", default="0,1,10,0", help="Numbers of browsers, one measurement each.")
@click.option("--seconds", default=30.0, help="Duration of each.")
def main(nodes: int, readers: str, seconds: float) -> None:
    """Print the table."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with PrivateEtcd() as etcd:
        found = asyncio.run(measure(nodes, etcd.endpoints, [int(one) for one in readers.split(",")], seconds))
    print(f"{nodes} nodes, {8 * nodes} workers, a report of each node every {EVERY_S:g} s")
    print("readers  CPU % of a core  longest lag s  once kB  kB/s to each  events/s")
    for one in found:
        print(
            f"{one.readers:7} {100 * one.cpu_share:16.1f} {one.lag_s:14.3f} {one.whole_kb:8.0f} {one.kb_per_s:13.1f} "
            f"{one.events_per_s:9.2f}"
        )


if __name__ == "__main__":
    main()
