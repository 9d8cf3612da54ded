"""Kills at random moments, failures, full disks and flipped bits, one after another, in a job with sharded state.

Four workers on two nodes train under FSDP2 and save every few steps. Whatever happens, every worker that begins finds
exactly the values that plain training has after as many steps (``workers/sharded_torch.py`` compares all of them), and
a run that finds nothing in memory begins from the newest checkpoint that is whole.

``pytest tests/process/test_sharded_soak.py --soak`` does it fifty times; ``EDL_SHARDED_KILLS`` and ``EDL_SHARDED_SEED``
choose other numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import until
from tests.process.test_sharded import NODES, Sharded, run
from tests.support.small_disk import small_disk
from tests.torch_release import since

pytestmark = [pytest.mark.torch, since("2.6", "FSDP2 works on GPUs alone")]
FEW = 4
KILLS = int(os.environ.get("EDL_SHARDED_KILLS", "50"))
SEED = int(os.environ.get("EDL_SHARDED_SEED", "1"))
"""Read here, as ``KILLS`` is: within a test there are no variables of edl."""
WORKER, NODE, ALL, FAIL, FLIP, FULL = "kill a worker", "kill a node", "kill all", "fail", "flip a bit", "fill the disk"
KINDS = (ALL, WORKER, FLIP, NODE, FAIL, FULL)
"""After those that end the run another one begins; a flipped bit goes with the death of all."""
ENDS = (ALL, FLIP, FAIL)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The checkpoint directory on a file system that is easily filled."""
    with small_disk(tmp_path / "checkpoints", "16m") as folder:
        yield folder


def is_whole(folder: Path) -> bool:
    """By the marker alone, and without edl's own code."""
    try:
        files = json.loads((folder / "DONE").read_text())["files"]
        return all(
            len(data := (folder / name).read_bytes()) == said["bytes"] and f"{zlib.crc32(data):08x}" == said["crc32"]
            for name, said in files.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def newest_whole(directory: Path) -> tuple[int, int]:
    """Era and commit; zeros when there is none."""
    return max(whole_ones(directory), default=(0, 0))


def whole_ones(directory: Path) -> list[tuple[int, int]]:
    """Era and commit of each complete checkpoint."""
    names = [folder.name for folder in directory.glob("commit-*") if is_whole(folder)]
    return [(int(name[-10:]), int(name[7:17])) for name in names]


class Soak:
    """One run after another, and what happens to them."""

    def __init__(self, tmp_path: Path, directory: Path, draw: random.Random) -> None:
        self.tmp_path = tmp_path
        self.directory = directory
        self.draw = draw
        self.runs = 0
        self.counts = dict.fromkeys(KINDS, 0)
        self.restarts = self.from_directory = 0
        self.lost: list[int] = []

    def all_of(self, kills: int) -> None:
        kinds: list[str] = []
        while sum(self.counts.values()) < kills:
            self.runs += 1
            expected = newest_whole(self.directory)
            with run(self.tmp_path, self.runs, "--save-every=3", options=("--max-restarts=3",)) as job:
                job.start(*NODES, nproc=2)
                self._began_from(job, expected)
                while sum(self.counts.values()) < kills:
                    kinds = kinds or self.draw.sample(KINDS, len(KINDS))
                    kind = kinds.pop()
                    self.counts[kind] += 1
                    print(f"run {self.runs}: {kind}", flush=True)
                    self._strike(job, kind)
                    assert not job.wrong(), job.wrong()
                    if kind in ENDS:
                        break
                else:
                    self._end(job)

    def _began_from(self, job: Sharded, expected: tuple[int, int]) -> None:
        """The first world of a run finds nothing in memory."""
        first = until(lambda: job.wrong() or job.began(), "a first world has begun", pause_s=0.1)
        assert not isinstance(first, str), first
        began = first[min(first)]
        assert began["commits"] == began["step"] == expected[1], f"{expected} is whole, begun was from {began}"
        assert began["era"] > expected[0]
        self.restarts += 1
        self.from_directory += expected[1] > 0

    def _strike(self, job: Sharded, kind: str) -> None:
        self._trains(job)
        time.sleep(self.draw.uniform(0.0, 0.5))  # any moment, of a save too
        if kind == FAIL:
            self._fail(job)
        elif kind == FULL:
            self._fill(job)
        elif kind in ENDS:
            if kind == FLIP:
                until(lambda: job.wrong() or len(whole_ones(self.directory)) > 1, "there is an older one to begin from")
            self._kill_all(job)
            if kind == FLIP:
                self._flip()
        else:
            last = max(job.began())
            before = max(step.step for step in job.steps())
            if kind == NODE:
                name = self.draw.choice(NODES)
                job.kill(name)
                job.start(name, nproc=2)
            else:
                until(lambda: self._kill_one(job), "a worker that lives")
            again = until(lambda: job.wrong() or {r: b for r, b in job.began().items() if r > last}, "another world")
            assert not isinstance(again, str), again
            self.lost.append(before - again[min(again)]["step"])
            self.restarts += 1

    def _kill_one(self, job: Sharded) -> bool:
        """Some worker; the world may be changing, so that those who have made the last steps are gone."""
        seen = job.seen()
        assert seen is not None
        try:
            os.kill(self.draw.choice(sorted(seen.pids.values())), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _trains(self, job: Sharded) -> None:
        """The workers of the newest world make steps."""
        number = max(job.began(), default=0)
        world = until(lambda: job.wrong() or job.began().get(max(job.began(), default=number)), "a world has begun")
        assert isinstance(world, dict), world
        until(lambda: job.wrong() or _steps_of(job) >= 5, "steps are made", pause_s=0.1)

    def _kill_all(self, job: Sharded) -> None:
        """At once: first all launchers stand still, so that none sees another one die."""
        for node in job.nodes.values():
            node.send(signal.SIGSTOP)
        for node in job.nodes.values():
            node.kill()
        until(lambda: not [one for one in job.processes() if one.status() != "zombie"], "all of it is gone")

    def _flip(self) -> None:
        """One bit, somewhere in the newest checkpoint."""
        era, commit = newest_whole(self.directory)
        if commit:
            folder = self.directory / f"commit-{commit:010d}.era-{era:010d}"
            path = self.draw.choice(sorted(folder.glob("state-*")))
            data = bytearray(path.read_bytes())
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
            path.write_bytes(data)

    def _fill(self, job: Sharded) -> None:
        """Until a checkpoint could not be written; the job goes on."""
        # Who was killed before may not be back yet, and comes with a round of its own.
        until(lambda: job.wrong() or _newest(job)["world"] == 2 * len(NODES), "everybody is back")
        rounds, earlier = max(job.began()), _unwritten(job)
        ballast = self.directory / "ballast"

        def more_failed() -> bool:
            """Fill what has become free since, such as by a checkpoint that was deleted."""
            free = os.statvfs(self.directory)
            with contextlib.suppress(OSError), ballast.open("ab") as file:
                file.write(bytes(free.f_bavail * free.f_frsize))
            return bool(_unwritten(job) - earlier)

        until(lambda: job.wrong() or more_failed(), "a checkpoint that could not be written", pause_s=0.1)
        before = job.steps()[-1].step
        until(lambda: job.wrong() or job.steps()[-1].step > before + 10, "training goes on", pause_s=0.1)
        ballast.unlink()
        assert max(job.began()) == rounds, "a full disk is no reason for another round"

    def _fail(self, job: Sharded) -> None:
        """The script fails for good: what its launchers have then is whole."""
        (job.steps_folder / "fail").touch()
        assert set(job.exit_codes().values()) == {1}
        done = min(max(step.step for step in job.steps() if step.rank == rank) for rank in range(4))
        assert newest_whole(self.directory)[1] >= done, "what was in memory is in the directory"

    def _end(self, job: Sharded) -> None:
        self._trains(job)
        job.stop_at(job.steps()[-1].step + 40)
        assert set(job.exit_codes().values()) == {0}
        assert not job.wrong(), job.wrong()


def _newest(job: Sharded) -> dict[str, Any]:
    """The beginning of the newest world."""
    began = job.began()
    return began[max(began)]


def _unwritten(job: Sharded) -> set[str]:
    """What ``edl events`` says of checkpoints that could not be written; each with its number."""
    return {event["text"] for event in job.events() if "could not be written" in event["text"]}


def _steps_of(job: Sharded) -> int:
    """Steps of the world that runs."""
    steps = job.steps()
    return sum(step.round == steps[-1].round and step.rank == 0 for step in steps) if steps else 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [FEW, pytest.param(KILLS, marks=pytest.mark.soak)])
def test_each_restart_begins_from_the_newest_checkpoint_that_is_whole(tmp_path: Path, disk: Path, kills: int) -> None:
    soak = Soak(tmp_path, disk, random.Random(SEED))
    begun = time.monotonic()
    soak.all_of(kills)
    print(
        f"seed {SEED}: {soak.counts} in {soak.runs} runs, {soak.restarts} restarts, {soak.from_directory} of them from"
    )
    print(f"the directory; steps redone after a kill: {soak.lost}; {time.monotonic() - begun:.0f} s")
