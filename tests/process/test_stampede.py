"""A scheduler starts many launchers at once and kills half of them before they know each other: those that live form
the job, and nothing of the others stays.

``pytest tests/process/test_stampede.py --soak`` does it with two hundred.
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import psutil
import pytest

from tests.process.harness import DEADLINE_S, Job, OutsideEtcd, until

ELECTED = re.compile(r"this node is the Master \(token \d+\)")
DEPOSED = "no longer the Master"


def masters(job: Job, names: list[str]) -> list[str]:
    """Elected nodes among these."""
    return [name for name in names for _ in ELECTED.findall(job.nodes[name].text)]


PROBE = re.compile(r"[a-z0-9_]{8}")
"""A file of four bytes with which Python's ``tempfile`` tries out a folder. It stays if the launcher is killed then."""


def files(folder: Path) -> list[str]:
    """All that lie below it, but for the notes of killed launchers, which the next one or ``edl status`` removes."""
    found = (path for path in folder.rglob("*") if not (path.is_dir() or path.match("*@*.json")))
    return [str(path) for path in found if not PROBE.fullmatch(path.name)]


def stampede(
    folder: Path, etcd: OutsideEtcd, count: int, options: tuple[str, ...], limit_s: float, *, with_master: bool
) -> None:
    """``with_master``: wait until one of them is the Master, which is then among those that are killed."""
    names = [f"n{number}" for number in range(count)]
    begun = time.monotonic()
    options = (*options, "--standby=none", "--max-restarts=0")
    with Job(folder, [etcd.endpoint], nnodes=f"1:{count}", options=options, arguments=("--pause=0.1",)) as job:
        job.start(*names)
        started = time.monotonic()
        first = until(lambda: masters(job, names), "a Master", limit_s) if with_master else []
        others = [name for name in names if name not in first]
        random.Random(count).shuffle(others)
        doomed = [*first, *others][: count // 2]
        living = sorted(set(names) - set(doomed))
        for name in doomed:
            job.nodes[name].send()
        for name in doomed:
            job.nodes[name].process.wait()
        killed = time.monotonic()
        seen = job.wait_world(len(living), limit_s=limit_s)
        formed = time.monotonic()
        assert sorted(seen.nodes.values()) == living
        status = job.status()
        assert sorted(node["node"] for node in status["nodes"]) == living, "no stale node"
        assert {node["state"] for node in status["nodes"]} == {"running"}
        assert status["restarts_used"] == 0
        elected, fallen = masters(job, living), masters(job, doomed)
        assert len(elected) == 1, f"{elected} were elected one after the other, beside {fallen}, which were killed"
        assert not [name for name in living if DEPOSED in job.nodes[name].text]
        launchers = [psutil.Process(job.nodes[name].process.pid) for name in living]
        memory = sum(process.memory_info().rss for process in launchers) / 1e6
        cpu = sum(sum(process.cpu_times()[:2]) for process in launchers)
        job.end_soon()
        assert {job.nodes[name].exit_code(limit_s) for name in living} == {0}
        print(
            f"{count} launchers in {started - begun:.1f} s, {len(doomed)} killed {killed - started:.1f} s later, "
            f"world of {len(living)} {formed - killed:.1f} s after that, in round {seen.round}; Masters "
            f"{len(fallen)} killed, {len(elected)} elected; launchers' RSS {memory:.0f} MB, CPU {cpu:.0f} s; all ended "
            f"after {time.monotonic() - formed:.1f} s"
        )
        until(lambda: not files(job.temporary), f"no file of {files(job.temporary)}")


@pytest.mark.soak_but("the Master among them")
@pytest.mark.slow
@pytest.mark.parametrize("with_master", [False, True], ids=["before there is a Master", "the Master among them"])
def test_half_of_twelve_are_killed_at_once(tmp_path: Path, etcd: OutsideEtcd, with_master: bool) -> None:
    stampede(tmp_path, etcd, 12, (), DEADLINE_S, with_master=with_master)


OVERLOADED = ("--lease-ttl=30", "--recover-timeout=1200", "--rdzv-conf=connect_timeout=600,request_timeout=30")
"""Two hundred share the processors of one machine here: these limits are about networks, not about that."""


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_half_of_two_hundred_are_killed_at_once(tmp_path: Path, own_etcd: OutsideEtcd) -> None:
    stampede(tmp_path, own_etcd, 200, OVERLOADED, 1200.0, with_master=True)
