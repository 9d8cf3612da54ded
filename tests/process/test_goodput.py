"""What the slots of a real job spend their time on, through the loss of a worker, of a node and of the Master."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edl.cli.find import Where, master_of
from edl.errors import EdlError
from edl.master.goodput.slot_use import SlotUse
from tests.process.harness import ROOT, Job, OutsideEtcd, until

SCRIPT = str(ROOT / "tests" / "process" / "workers" / "rejoin_plain.py")
SLOTS = 2
"""Of each node."""


@pytest.fixture
def job(tmp_path: Path, etcd: OutsideEtcd) -> Iterator[Job]:
    options = ("--slot-strikes=0",)
    with Job(tmp_path, [etcd.endpoint], script=(SCRIPT,), arguments=("--pause=0.02",), options=options) as job:
        yield job


@dataclass(frozen=True)
class Seen:
    """The accounts at a moment between two times."""

    from_s: float
    to_s: float
    spent: dict[str, float]

    @property
    def whole_s(self) -> float:
        return sum(self.spent.values())


def look(job: Job) -> Seen:
    from_s = time.monotonic()
    status = job.status()
    return Seen(from_s, time.monotonic(), {one["name"]: one["value"] for one in status["goodput"]})


def check_sum(before: Seen, now: Seen, slots: int) -> None:
    """The parts have grown by the time that has passed, of so many slots."""
    grown = now.whole_s - before.whole_s
    assert slots * (now.from_s - before.to_s) <= grown <= slots * (now.to_s - before.from_s)
    assert list(now.spent) == [use.value for use in SlotUse]


def costs(job: Job) -> list[str]:
    return [one["text"] for one in job.events() if one["kind"] == "world-underway" and "the change took" in one["text"]]


@pytest.mark.slow
def test_every_second_of_every_slot_is_accounted_for(job: Job) -> None:
    for name in "abc":
        job.start(name, nproc=SLOTS)
    seen = job.wait_world(6)
    job.wait_steps(20, 6)
    first = look(job)
    assert first.spent["starting"] > 0

    os.kill(seen.pids[5], signal.SIGKILL)
    seen = job.wait_world(6, after=seen.round)
    job.wait_steps(20, 6)
    second = look(job)
    check_sum(first, second, 6)
    assert second.spent["redone"] >= first.spent["redone"]
    assert second.spent["useful"] > first.spent["useful"]
    after_worker = len(costs(job))
    assert after_worker >= 1  # the others may have gone on alone until the worker was replaced

    job.kill("b")  # its slots count until it is known to be gone
    job.wait_world(4, after=seen.round)
    job.wait_steps(20, 4)
    third = look(job)
    job.wait_steps(20, 4)
    check_sum(third, look(job), 4)
    assert len(costs(job)) > after_worker

    master = job.status()["master"]
    (other,) = {"a", "c"} - {master}
    job.kill(master)
    job.wait_world(2, after=job.status()["round"] - 1)
    job.wait_steps(20, 2)
    fourth = look(job)
    assert job.status()["master"] == other
    assert fourth.whole_s > third.whole_s
    assert fourth.spent["useful"] > third.spent["useful"]
    job.wait_steps(20, 2)
    check_sum(fourth, look(job), 2)

    job.end_soon()
    assert job.exit_codes()[other] == 0
    assert "; goodput " in job.nodes[other].text


def quick_look(job: Job) -> Seen:
    """As ``look``, without the time that a new process takes."""

    async def ask() -> Seen:
        async with master_of(Where(job.name, tuple(job.endpoints))) as client:
            from_s = time.monotonic()
            status = await client.status()
            return Seen(from_s, time.monotonic(), {one.name: one.value for one in status.goodput})

    def answer() -> Seen | None:
        try:
            return asyncio.run(ask())
        except EdlError:  # no Master at this moment
            return None

    found = until(answer, "a status")
    assert found is not None
    return found


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_parts_add_up_over_twenty_faults(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly, as far as one can tell from outside; a killed launcher counts until it is found dead."""
    job.options = (*job.options, "--max-restarts=100")
    for name in "abc":
        job.start(name, nproc=SLOTS)
    seen = job.wait_world(6)
    job.wait_steps(20, 6)
    rng, master_kills = random.Random(7), 0
    before = quick_look(job)
    counted = expected = 0.0
    for number in range(20):
        if number % 4 == 3:
            master = job.status()["master"]
            name = master if number % 8 == 7 else rng.choice(sorted({*"abc"} - {master}))
            master_kills += name == master
            job.kill(name)
            job.wait_world(4, after=seen.round)
            job.start(name, nproc=SLOTS)
        else:
            os.kill(rng.choice(sorted(seen.pids.values())), signal.SIGKILL)
        seen = job.wait_world(6, after=seen.round)
        job.wait_steps(20, 6)
        now = quick_look(job)
        if number % 4 == 3:
            grown, took_s = now.whole_s - before.whole_s, now.to_s - before.from_s
            assert 4 * took_s * 0.9 <= grown <= 6 * took_s
        else:
            check_sum(before, now, 6)
            counted += now.whole_s - before.whole_s
            expected += 3 * (now.from_s + now.to_s - before.from_s - before.to_s)
        before = now
    with capsys.disabled():
        parts = ", ".join(f"{use} {value:.2f}" for use, value in before.spent.items() if value)
        print(f"\n20 faults, {master_kills} of them the Master's; {before.whole_s:.2f} slot-seconds: {parts}")
        print(f"while all nodes stayed: {counted:.3f} counted, {expected:.3f} passed ({counted / expected - 1:+.4%})")
        print(*costs(job)[-8:], sep="\n")
    assert abs(counted / expected - 1) < 0.001
    assert master_kills >= 2
    job.end_soon()
    assert set(job.exit_codes().values()) == {0}
