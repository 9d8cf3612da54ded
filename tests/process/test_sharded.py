"""Sharded state under real FSDP2: four workers on two nodes, every restored value compared with the right one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.exit_codes import ExitCode
from tests.process.card import NEEDS_CARD, OVER_SOCKETS
from tests.process.harness import ROOT, WORKERS, Job, OutsideEtcd, until
from tests.support.small_disk import small_disk
from tests.torch_release import since

pytestmark = [pytest.mark.torch, since("2.6", "FSDP2 works on GPUs alone")]
SCRIPT = WORKERS / "sharded_torch.py"
NODES = ("a", "b")


class Sharded(Job):
    """A job whose launchers share a checkpoint directory; several of them, one after another, are runs of one job."""

    @property
    def directory(self) -> Path:
        return self.folder.parent / "checkpoints"

    def began(self) -> dict[int, dict[str, Any]]:
        """By round: where rank 0 began, once all ranks of it have."""
        found: dict[int, dict[str, Any]] = {}
        for path in self.steps_folder.glob("began-*.0"):
            text = path.read_text()
            if text:
                one = json.loads(text)
                others = [path.with_suffix(f".{rank}") for rank in range(one["world"])]
                if all(other.exists() and other.read_text() for other in others):
                    assert {json.loads(other.read_text())["step"] for other in others} == {one["step"]}
                    found[one["round"]] = one
        return found

    def wrong(self) -> str:
        return "\n".join(path.read_text() for path in self.steps_folder.glob("wrong-*"))

    def complete(self) -> list[Path]:
        return sorted(path.parent for path in self.directory.glob("commit-*/DONE"))


@contextlib.contextmanager
def run(tmp_path: Path, number: int, *arguments: str, options: tuple[str, ...] = (), **named: Any) -> Iterator[Sharded]:
    """The job's run of this number, in a store of its own: one that had a run before remembers how that ended."""
    folder = tmp_path / f"run-{number}"
    folder.mkdir()
    # On a busy machine a launcher may come to its turn too late for the default lease, which costs a round.
    options = (f"--checkpoint-dir={tmp_path / 'checkpoints'}", "--lease-ttl=20", *options)
    script = (str(SCRIPT),)
    with OutsideEtcd(folder / "etcd") as etcd:
        named |= {"name": "sharded", "nnodes": "1:2", "script": script, "arguments": arguments}
        with Sharded(folder, [etcd.endpoint], options=options, **named) as job:
            yield job


def ended(job: Sharded, code: int = 0) -> dict[int, dict[str, Any]]:
    codes = job.exit_codes()
    assert not job.wrong(), job.wrong()
    assert set(codes.values()) == {code}, job.nodes["a"].text[-3000:]
    return job.began()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_what_launchers_have_when_a_job_fails_is_a_checkpoint(tmp_path: Path, size: int) -> None:
    """At the size that it had, and at half of it."""
    with run(tmp_path, 1, "--fail-at=9", options=("--max-restarts=0",)) as first:
        first.start(*NODES, nproc=2)
        ended(first, 1)
        there = [path.name for path in first.complete()]
        # A node that does not have the others' parts of commit 8 also writes the newest commit that it has whole.
        assert set(there) - {"commit-0000000007.era-0000000001"} == {
            "commit-0000000005.era-0000000001",
            "commit-0000000008.era-0000000001",
        }
    with run(tmp_path, 2, "--steps=12", "--fail-at=0") as second:
        second.start(*NODES[:size], nproc=2)
        began = ended(second)
        assert [(one["step"], one["world"], one["era"]) for one in began.values()] == [(8, 2 * size, 2)]
    assert [path.name for path in second.complete()][-1] == "commit-0000000010.era-0000000002"


def saved(tmp_path: Path) -> list[Path]:
    """Checkpoints of commits 5, 10, 15 and 20, of a run that has come to its end there."""
    with run(tmp_path, 1, "--steps=20", options=("--checkpoint-keep=9",)) as job:
        job.start(*NODES, nproc=2)
        ended(job)
        # The last may still be on its way when the workers end; that it gets there is part of what is tested.
        assert [path.name[7:17] for path in job.complete()] == ["0000000005", "0000000010", "0000000015", "0000000020"]
        return job.complete()


def flip(folder: Path) -> None:
    path = folder / "state-00003-of-00004.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)


def flip_header(folder: Path) -> None:
    path = folder / "state-00001-of-00004.safetensors"
    data = bytearray(path.read_bytes())
    data[data.index(b"offset")] ^= 1
    path.write_bytes(data)


def truncate(folder: Path) -> None:
    path = folder / "state-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def lose(folder: Path) -> None:
    (folder / "state-00000-of-00004.safetensors").unlink()


def mix(folder: Path) -> None:
    """Two whole files, each under the other's name; the sums are those of the names."""
    first, second = (folder / f"state-0000{number}-of-00004.safetensors" for number in (0, 1))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def pickle_instead(folder: Path) -> None:
    """Write a checkpoint as an older edl did, with metadata that run a command when unpickled."""
    evil = folder.parent.parent / "evil"
    for path in folder.iterdir():
        path.unlink()
    (folder / ".metadata").write_bytes(f"cos\nsystem\n(S'touch {evil}'\ntR.".encode())
    (folder / "structure.json").write_text("{}")
    sums = {
        path.name: {"bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}
        for path in sorted(folder.iterdir())
    }
    commit, era = int(folder.name[7:17]), int(folder.name[-10:])
    text = {"format": 1, "job": "sharded", "run": "r", "era": era, "commit": commit, "shards": 0, "files": sums}
    (folder / "DONE").write_text(json.dumps({**text, "written_at": ""}, indent=1) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damages", "size"),
    [
        pytest.param((flip, truncate, lose), 2, id="damaged files"),
        pytest.param((pickle_instead, flip_header, mix), 1, id="other content", marks=pytest.mark.soak),
    ],
)
def test_a_restart_begins_from_the_newest_that_is_whole(
    tmp_path: Path, damages: tuple[Callable[[Path], None], ...], size: int
) -> None:
    checkpoints = saved(tmp_path)
    for damage, folder in zip(damages, reversed(checkpoints), strict=False):
        damage(folder)
    with run(tmp_path, 2, "--steps=30", options=("--max-restarts=0", "--checkpoint-keep=9")) as job:
        job.start(*NODES[:size], nproc=2)
        began = ended(job)
        assert [(one["step"], one["world"]) for one in began.values()] == [(5, 2 * size)]
        said = "".join(node.text for node in job.nodes.values())
        for folder in checkpoints[1:]:
            assert f"checkpoint {folder} is not used: " in said
        print(*[line for line in said.splitlines() if "is not used" in line], sep="\n")
    assert not (tmp_path / "evil").exists(), "something was unpickled"


@pytest.mark.slow
def test_checkpoints_of_which_none_is_whole_end_the_job_with_the_reasons(tmp_path: Path) -> None:
    for folder in saved(tmp_path):
        flip(folder)
    with run(tmp_path, 2) as job:
        job.start(*NODES, nproc=2)
        assert set(job.exit_codes().values()) == {ExitCode.CHECKPOINT_UNUSABLE}
        said = job.nodes["a"].text + job.nodes["b"].text
        assert said.count("the checksum of state-00003-of-00004.safetensors differs") >= 4


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The checkpoint directory on a file system with room for two checkpoints and a part of a third one."""
    with small_disk(tmp_path / "checkpoints", "1100k") as folder:
        yield folder


@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_and_not_the_job(tmp_path: Path, disk: Path) -> None:
    """And what could not be written leaves no room taken; once there is room again, checkpoints are written again."""
    ballast = disk / "ballast"

    def errors() -> list[str]:
        """Fill what has become free since, such as by a checkpoint that was deleted; what ``edl events`` says of it."""
        free = os.statvfs(disk)
        with contextlib.suppress(OSError), ballast.open("ab") as file:
            file.write(bytes(free.f_bavail * free.f_frsize))
        return [event["text"] for event in job.events() if "could not be written" in event["text"]]

    with run(tmp_path, 1, "--width=64", options=("--checkpoint-keep=2",)) as job:
        job.start(*NODES, nproc=2)
        until(lambda: len(job.complete()) >= 2, "two checkpoints")
        told = until(errors, "an error in edl events")
        assert "no space is left" in told[0] and "Free some space" in told[0], told[0]
        here = job.steps()[-1].step
        until(lambda: job.steps()[-1].step > here + 20, "training goes on")
        before = {path.name for path in job.complete()}
        assert len(before) >= 2 and not job.wrong()
        ballast.unlink()
        until(lambda: {path.name for path in job.complete()} - before, "another checkpoint")
        job.stop_at(job.steps()[-1].step + 60)
        assert list(ended(job)) == [1], "one round"
    left = [path for path in disk.glob("commit-*") if not (path / "DONE").exists()]
    assert not left, "what could not be written takes no room"


def slow_disk(folder: Path) -> dict[str, str]:
    """An environment in which everything takes half a second to become durable."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, time\nsync = os.fsync\nos.fsync = lambda descriptor: (time.sleep(0.5), sync(descriptor))[1]\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.mark.slow
def test_the_end_of_the_job_waits_for_what_was_saved(tmp_path: Path) -> None:
    """Every step is saved, quicker than it can be written; the last one is there when the launchers have ended."""
    slow = slow_disk(tmp_path / "slow")
    with run(tmp_path, 1, "--steps=4", "--save-every=1", "--pause=0", environment=slow) as job:
        job.start(*NODES, nproc=2)
        ended(job)
        assert [path.name[7:17] for path in job.complete()] == ["0000000002", "0000000003", "0000000004"]


@pytest.mark.parametrize("cut", ["", "--hsdp", "--tp"], ids=["fsdp", "hsdp", "tp"])
@NEEDS_CARD
def test_on_a_card_sharded_state_is_cut_anew_in_processes_that_stay(tmp_path: Path, cut: str) -> None:
    arguments = ("--save-every=0", "--pause=0.02", *([cut] if cut else []))
    options = ("--replica-size=2",) if cut else ()
    with run(tmp_path, 1, *arguments, options=options, environment=OVER_SOCKETS) as job:
        job.start("a", "b", nproc=2)
        first = job.wait_world(4)
        job.wait_steps(5)
        job.kill("b")
        del job.nodes["b"]
        second = job.wait_world(2, after=first.round)
        assert second.pids_of("a") == first.pids_of("a"), "the survivors' processes go on"
        job.start("c", nproc=2)
        third = job.wait_world(4, after=second.round)
        assert third.pids_of("a") == first.pids_of("a"), "the survivors' processes go on"
        job.wait_steps(5)
        os.kill(third.pids_of("c")[0], signal.SIGKILL)
        fourth = job.wait_world(4, after=third.round)
        assert fourth.pids_of("a") == first.pids_of("a"), "the survivors' processes go on"
        job.end_soon(10)
        began = ended(job)
        assert all(one["step"] > 0 for round, one in began.items() if round > first.round), "from memory"
