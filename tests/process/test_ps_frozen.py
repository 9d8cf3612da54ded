"""A pserver that is frozen, and later thaws: training goes on without it, and nothing that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from edl.adapters.etcd import EtcdStore
from edl.exit_codes import ExitCode
from edl.types import JobId
from edl.wire.keys import JobKeys
from tests.process.harness import OutsideEtcd, alive, stopped, until

pytest.importorskip("numba")
from tests.process.test_ps_elastic import Counting, counting


def begun(job: Counting, pservers: int) -> None:
    job.train("t1", "t2")
    job.serve(*(f"p{n + 1}" for n in range(pservers)))
    until(lambda: len(job.trainers()) == 2, "two trainers that train")
    job.settled(pservers)


def in_their_order(job: Counting) -> list[str]:
    """Log lines of the trainers' launchers about unresponsive pservers."""
    text = job.nodes["t1"].text + job.nodes["t2"].text
    return [line for line in text.splitlines() if "does not respond, and other pservers hold all its data" in line]


def test_frozen_and_thawed(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with counting(tmp_path, etcd) as job:
        begun(job, 2)
        (frozen,) = job.pservers("p1")
        with stopped(frozen.pid) as at:
            until(lambda: in_their_order(job), "the Master goes on without it")
            print(f"taken for dead after {time.monotonic() - at:.1f} s")
            job.all_go_on()
            print(f"all go on after {time.monotonic() - at:.1f} s")
            assert alive(frozen.pid)
        job.settled(2)  # it has come back, empty, as another one
        job.all_go_on()
        job.end()
        assert set(job.exit_codes().values()) == {ExitCode.OK}


@pytest.mark.soak
def test_frozen_for_long(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with counting(tmp_path, etcd) as job:
        begun(job, 2)
        (frozen,) = job.pservers("p1")
        with stopped(frozen.pid):
            job.nodes["p1"].says("did not answer for")
            until(lambda: not alive(frozen.pid), "its end")
        job.settled(2)
        job.end()
        assert set(job.exit_codes().values()) == {ExitCode.OK}


@pytest.mark.soak
def test_the_only_one_is_waited_for(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with counting(tmp_path, etcd) as job:
        job.train("t1")
        job.serve("p1")
        until(job.trainers, "a trainer that trains")
        (frozen,) = job.pservers("p1")
        with stopped(frozen.pid) as at:
            until(lambda: time.monotonic() - at > 8, "longer than a lease and the Master's wait")
        before = job.made(job.trainers()[0])
        until(lambda: job.made(job.trainers()[0]) > before + 50, "the same trainer goes on")
        assert os.path.exists(f"/proc/{frozen.pid}")
        job.end()
        assert set(job.exit_codes().values()) == {ExitCode.OK}


@pytest.mark.soak
@pytest.mark.parametrize("pservers", [1, 2])
def test_the_store_freezes_for_longer_than_a_lease(tmp_path: Path, etcd: OutsideEtcd, pservers: int) -> None:
    """All leases have ended when it thaws. Nobody else has taken over: pservers keep what they hold."""
    with counting(tmp_path, etcd) as job:
        nodes = [f"p{n + 1}" for n in range(pservers)]
        job.train("t1")
        job.serve(*nodes)
        until(job.trainers, "a trainer that trains")
        if pservers > 1:
            job.settled(pservers)
        held = [one.pid for node in nodes for one in job.pservers(node)]
        assert etcd.member.pid is not None and len(held) == pservers
        with stopped(etcd.member.pid) as at:
            until(lambda: time.monotonic() - at > 6, "three leases")
        made = len(job.steps())
        until(lambda: len(job.steps()) > made + 200 and job.trainers(), "more steps")
        assert all(alive(pid) for pid in held)
        job.end()
        assert set(job.exit_codes().values()) == {ExitCode.OK}


@pytest.mark.slow
@pytest.mark.parametrize("master_too", [False, True])
def test_all_leases_end_although_they_were_renewed(tmp_path: Path, etcd: OutsideEtcd, master_too: bool) -> None:
    """As by an etcd whose leader was frozen and does not know yet that another one has been elected (etcd#15247)."""
    with counting(tmp_path, etcd) as job:
        begun(job, 2)
        held = [one.pid for node in ("p1", "p2") for one in job.pservers(node)]
        store = EtcdStore([etcd.endpoint], 60.0)

        async def end_leases() -> None:
            entries = (await store.read(JobKeys(JobId(job.name)).prefix)).entries
            for lease in {entry.lease for entry in entries if entry.lease and (master_too or "/helpers/" in entry.key)}:
                await store.revoke_lease(lease)
            await store.close()

        asyncio.run(end_leases())
        job.nodes["p1"].says("the lease has ended: 1 pserver continues under a new one, as a Master knows them")
        job.settled(2)
        made = len(job.steps())
        until(lambda: len(job.steps()) > made + 200 and len(job.trainers()) == 2, "more steps by two trainers")
        assert all(alive(pid) for pid in held)
        assert not any("rolling" in node.text for node in job.nodes.values())
        job.end()
        assert set(job.exit_codes().values()) == {ExitCode.OK}
