"""Network partitions: at most one side trains, and all nodes come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.harness import Job, alive, until
from tests.process.network import Network, network

LEASE_S = 2.0
MARGIN_S = 4.0
"""For a machine that tests share."""


@pytest.fixture
def hosts() -> Iterator[Network]:
    with network(["a", "b", "c"]) as made:
        yield made


@pytest.mark.soak_but("the Master's host")
@pytest.mark.slow
@pytest.mark.parametrize("which", ["the Master's host", "another host"])
def test_a_host_that_is_cut_off_stops_its_workers_and_comes_back(tmp_path: Path, hosts: Network, which: str) -> None:
    endpoints = [f"{address}:2379" for address in hosts.hosts.values()]
    # Each worker steps on alone: a split brain would show.
    options = (f"--lease-ttl={LEASE_S:g}",)
    with Job(tmp_path, endpoints, "etcd-embedded", options=options, arguments=("--free",)) as job:
        for host in hosts.hosts:
            job.start(host, command=[*hosts.on(host), *job.command(host)])
        job.prefix = hosts.on("a")
        before = job.wait_world(3)
        master = job.status()["master"]
        lost = master if which == "the Master's host" else next(host for host in hosts.hosts if host != master)
        others = [host for host in hosts.hosts if host != lost]
        job.prefix = hosts.on(others[0])

        hosts.pull(lost)
        cut = time.monotonic()
        (orphan,) = before.pids_of(lost)
        until(lambda: not alive(orphan), "the end of the lost worker")
        without = job.wait_world(2, after=before.round)
        assert set(without.nodes.values()) == set(others)
        last = max(step.t for step in job.steps() if step.pid == orphan)
        first = min(step.t for step in job.steps() if step.round == without.round)
        print(f"lost worker's last step {last - cut:.2f} s after the cut, first step without it {first - cut:.2f} s")
        # A lease for the worker's agent, and before that one for a Master to find out that it is one no longer.
        assert last - cut < 2 * LEASE_S + MARGIN_S
        assert job.nodes[lost].running

        hosts.plug(lost)
        after = job.wait_world(3, after=without.round)
        assert after.nodes == {**without.nodes, 2: lost}
        assert job.status()["restarts_used"] == 0


@pytest.mark.soak_but("True")
@pytest.mark.slow
@pytest.mark.parametrize("writing", [False, True])
def test_without_a_majority_everybody_stops_and_goes_on_when_it_is_back(
    tmp_path: Path, hosts: Network, *, writing: bool
) -> None:
    endpoints = [f"{address}:2379" for address in hosts.hosts.values()]
    options = (f"--lease-ttl={LEASE_S:g}",)
    with Job(tmp_path, endpoints, "etcd-embedded", options=options, arguments=("--free",)) as job:
        for host in hosts.hosts:
            job.start(host, command=[*hosts.on(host), *job.command(host, nproc=2)])
        job.prefix = hosts.on("a")
        before = job.wait_world(6)
        master = job.status()["master"]
        for host in hosts.hosts:
            hosts.pull(host)
        if writing:  # the Master has to write this down, and cannot: it must notice the others' silence all the same
            os.kill(before.pids_of(master)[0], signal.SIGKILL)
        until(lambda: not any(alive(pid) for pid in before.pids.values()), "the end of all workers")
        for host in hosts.hosts:
            hosts.plug(host)
        after = job.wait_world(6, after=before.round)
        assert set(after.nodes.values()) == {"a", "b", "c"}
