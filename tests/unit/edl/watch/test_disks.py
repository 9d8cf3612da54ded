"""The watchdogs of a directory, held against plain rules on random samples."""

from __future__ import annotations

import dataclasses
import random

import pytest

from edl.watch import disks
from edl.watch.disks import DirectorySample, DiskMemory, look
from edl.watch.readings import Sight
from edl.watch.table import OFF, WatchLimits

ABOUT = "checkpoint directory /c"
GIB = 1 << 30
FINE = DirectorySample(ABOUT, 0.0, True, "", 500 * GIB, 1000 * GIB, 10**6, 10**7, "", 0.01)


def sights(
    sample: DirectorySample, limits: WatchLimits | None = None, memory: DiskMemory | None = None
) -> dict[str, Sight]:
    _, readings = look(memory or DiskMemory(), sample, limits or WatchLimits())
    return {one.name: one.sight for one in readings}


def drawn(random_: random.Random, at_s: float) -> DirectorySample:
    total = random_.randrange(1, 2000) * GIB
    inodes = random_.choice([0, 10**6])
    return DirectorySample(
        ABOUT,
        at_s,
        random_.random() < 0.5,
        random_.choice(["", "", "", "Stale file handle"]),
        random_.randrange(0, total),
        total,
        random_.randrange(0, 3000) if inodes else 0,
        inodes,
        random_.choice(["", "", "Disk quota exceeded"]),
        random_.choice([0.01, 29.0, 31.0]),
        random_.choice([0, 100 * GIB]),
        random_.choice([0.0, 600.0]),
    )


def expected(sample: DirectorySample, history: list[DirectorySample], limits: WatchLimits) -> dict[str, Sight]:
    """The rules once more, over the whole history."""
    fired = {
        "disk-space": sample.free_bytes < max(limits.of("disk-space"), sample.checkpoint_bytes),
        "disk-inodes": sample.total_inodes > 0 and sample.free_inodes < limits.of("disk-inodes"),
        "disk-write": bool(sample.write_error) or sample.write_s > limits.of("disk-write"),
    }
    seen = [one for one in (*history, sample) if not one.error and one.at_s >= sample.at_s - 3600]
    rate = sample.checkpoint_bytes / sample.checkpoint_every_s if sample.checkpoint_every_s else 0.0
    if seen and sample.at_s - seen[0].at_s >= 600:
        used = [one.total_bytes - one.free_bytes for one in (seen[0], sample)]
        rate = (used[1] - used[0]) / (sample.at_s - seen[0].at_s)
    fired["disk-full-in"] = rate > 0 and sample.free_bytes / rate < limits.of("disk-full-in")
    found = {name: Sight.FIRED if is_fired else Sight.CLEAR for name, is_fired in fired.items()}
    if sample.error:
        found |= dict.fromkeys(("disk-space", "disk-inodes", "disk-full-in"), Sight.BLIND)
    return found


@pytest.mark.parametrize("seed", range(200))
def test_random_samples_follow_the_rules(seed: int) -> None:
    random_ = random.Random(seed)
    limits = WatchLimits((("disk-full-in", random_.choice([600.0, 3600.0, 1e6])),))
    history: list[DirectorySample] = []
    memory, at_s = DiskMemory(), 0.0
    for _ in range(40):
        at_s += random_.choice([60.0, 90.0, 700.0])
        sample = drawn(random_, at_s)
        memory, readings = look(memory, sample, limits)
        assert {one.name: one.sight for one in readings} == expected(sample, history, limits)
        assert all(one.text for one in readings if one.sight is not Sight.CLEAR)
        history.append(sample)
        assert len(memory.used) <= 62


def test_a_file_system_that_cannot_be_asked_is_not_healthy() -> None:
    found = sights(dataclasses.replace(FINE, error="the file system has not answered for 40 s", write_s=40.0))
    assert found == {
        "disk-space": Sight.BLIND,
        "disk-inodes": Sight.BLIND,
        "disk-full-in": Sight.BLIND,
        "disk-write": Sight.FIRED,
    }


def test_the_next_checkpoint_has_to_fit() -> None:
    sample = dataclasses.replace(FINE, free_bytes=20 * GIB, checkpoint_bytes=21 * GIB)
    _, readings = look(DiskMemory(), sample, WatchLimits())
    (text,) = [one.text for one in readings if one.name == "disk-space"]
    assert text.startswith("20.0 GiB free, and the last checkpoint took 21.0 GiB: the next one does not fit")


def test_until_the_growth_is_measured_checkpoints_count_as_never_removed() -> None:
    sample = dataclasses.replace(FINE, free_bytes=100 * GIB, checkpoint_bytes=30 * GIB, checkpoint_every_s=900.0)
    assert sights(sample)["disk-full-in"] is Sight.FIRED
    settled = DiskMemory(((-900.0, FINE.total_bytes - 100 * GIB),))
    assert sights(sample, memory=settled)["disk-full-in"] is Sight.CLEAR


def test_a_failed_write_is_reported_by_each_node() -> None:
    _, readings = look(
        DiskMemory(), dataclasses.replace(FINE, free_bytes=0, write_error="Permission denied"), WatchLimits()
    )
    shared = {one.name: one.shared for one in readings if one.sight is Sight.FIRED}
    assert shared == {"disk-space": True, "disk-write": False}


def test_a_watchdog_that_is_off_says_nothing() -> None:
    assert set(sights(FINE, WatchLimits((("disk-inodes", OFF),)))) == set(disks.NAMES) - {"disk-inodes"}
