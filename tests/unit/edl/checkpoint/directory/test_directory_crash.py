"""A crash, a power cut or an error at every single operation of everything that changes a checkpoint directory."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edl.adapters import files as plain
from edl.adapters.files import PlainFiles
from edl.adapters.remote_files import RemoteFiles
from edl.checkpoint.directory import summed_files
from edl.checkpoint.directory.manifest import folder_name
from edl.errors import CheckpointError
from edl.ports import Files
from edl.wire.records import Version
from tests.support.checkpoint_tools import Crash, Disk, Fault, FaultyFiles, load, open_checkpoint_storage, save, state

KEEP = 2
SHARED_MEMORY = Path("/dev/shm")
DAMAGED = Version(1, 30)
Acknowledge = Callable[[Version], None]


def write_and_prune(files: Files, acknowledge: Acknowledge) -> None:
    """A new run finds what the last one left, and writes three."""
    checkpoint_storage = open_checkpoint_storage(files, "run-2", keep=KEEP)
    checkpoint_storage.check()
    for commit in (40, 50, 60):
        save(checkpoint_storage, commit, 2)
        acknowledge(Version(2, commit))


def write_again(files: Files, acknowledge: Acknowledge) -> None:
    """The same commit, with the same bytes and with others."""
    checkpoint_storage = open_checkpoint_storage(files, "run-2", keep=KEEP)
    checkpoint_storage.check()
    for round_ in (1, 1, 2):
        save(checkpoint_storage, 40, 1, round_=round_)
        acknowledge(Version(1, 40))


def mend(files: Files, acknowledge: Acknowledge) -> None:
    """The same commit when what is there is damaged."""
    files.write(f"{folder_name(DAMAGED)}/state.safetensors", [b"damaged"])
    checkpoint_storage = open_checkpoint_storage(files, "run-2", keep=KEEP)
    checkpoint_storage.check()
    save(checkpoint_storage, DAMAGED.commit)
    acknowledge(DAMAGED)


def write_parts(files: Files, acknowledge: Acknowledge) -> None:
    """A state in parts, the second from another node."""
    for shard in (1, 0):
        checkpoint_storage = open_checkpoint_storage(files, "run-2", keep=KEEP)
        checkpoint_storage.check()
        data = state(40, 2, part=shard, of=2)
        checkpoint_storage.write(Version(2, 40), memoryview(data), shard, 2)
    acknowledge(Version(2, 40))


SCENARIOS = [write_and_prune, write_again, mend, write_parts]
Scenario = Callable[[Files, Acknowledge], None]


def furnish(files: Files) -> None:
    """Three complete checkpoints of an earlier run, and a broken-off one."""
    checkpoint_storage = open_checkpoint_storage(files, "run-1", keep=3)
    checkpoint_storage.check()
    for commit in (10, 20, 30):
        save(checkpoint_storage, commit)
    files.write(f"{folder_name(Version(1, 35))}/state.safetensors", [b"half"])


def complete(files: Files) -> list[Version]:
    """Everything that a reader would take for a checkpoint, oldest first; each is read, and each must be whole."""
    checkpoint_storage = open_checkpoint_storage(files, "reader")
    found = []
    for version in reversed(checkpoint_storage._listed()):
        names = [entry.name for entry in files.entries(folder_name(version))]
        try:
            if checkpoint_storage._inspect(version) is None:
                continue
            checkpoint_storage.verify(version)
        except CheckpointError:
            assert version == DAMAGED
            continue
        if "state.safetensors" in names:
            assert load(checkpoint_storage, version)[0] == version
        found.append(version)
    return found


def check_what_is_left(files: Files, acknowledged: list[Version], at_least: int = KEEP) -> None:
    """Check that acknowledged checkpoints exist or were superseded, that none is mixed, and that writing continues."""
    found = complete(files)
    assert len(found) >= at_least
    newest = open_checkpoint_storage(files).newest()
    assert newest is not None
    assert newest[0] == found[-1]
    if acknowledged:
        assert newest[0] >= acknowledged[-1]
    checkpoint_storage = open_checkpoint_storage(files, "run-3", keep=KEEP)
    checkpoint_storage.check()
    for commit in (70, 80):
        save(checkpoint_storage, commit, 3)
    assert complete(files) == [Version(3, 70), Version(3, 80)]
    left = sorted(entry.name for entry in files.entries())
    assert left == [folder_name(Version(3, 70)), folder_name(Version(3, 80)), "edl.json"]


def run_until_crash(scenario: Scenario, files: Files) -> list[Version]:
    acknowledged: list[Version] = []
    with contextlib.suppress(Crash):
        scenario(files, acknowledged.append)
    return acknowledged


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed_files, "CHUNK_BYTES", 400)


_judged: set[tuple[tuple[tuple[str, bytes | None], ...], tuple[Version, ...]]] = set()
"""What is left, and what was acknowledged. Many faults leave the same, of which the judgement is the same."""


def contents(folder: Path) -> tuple[tuple[str, bytes | None], ...]:
    """All files below, and the folders as ``None``; names without the random part of a probe's."""
    paths = sorted(folder.rglob("*"))
    return tuple((str(path.relative_to(folder)), None if path.is_dir() else path.read_bytes()) for path in paths)


class Bench:
    """A prepared directory, created again for each attempt. Syncs are faked: there are thousands."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._furnished, self._used = folder / "furnished", folder / "used"
        self._patch = patch
        patch.setattr(plain, "os", Disk(Fault()))
        furnish(PlainFiles(self._furnished))

    def attempt(self, scenario: Scenario, fault: Fault) -> tuple[Disk, list[Version]]:
        shutil.rmtree(self._used, ignore_errors=True)
        shutil.copytree(self._furnished, self._used)
        disk = Disk(fault)
        self._patch.setattr(plain, "os", disk)
        acknowledged = run_until_crash(scenario, PlainFiles(self._used))
        self._patch.setattr(plain, "os", Disk(Fault()))
        return disk, acknowledged

    def check(self, acknowledged: list[Version]) -> None:
        left = contents(self._used), tuple(acknowledged)
        if left in _judged:
            return
        check_what_is_left(PlainFiles(self._used), acknowledged)
        _judged.add(left)

    def operations(self, scenario: Scenario) -> list[str]:
        fault = Fault()
        self.attempt(scenario, fault)
        return fault.log


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """In memory where there is such a folder: thousands of directories are made and removed."""
    with tempfile.TemporaryDirectory(prefix="crash-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder:
        yield Bench(Path(folder), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_crash_at_every_operation_on_a_disk(scenario: Scenario, bench: Bench) -> None:
    operations = bench.operations(scenario)
    assert len(operations) > 20
    for at, what in enumerate(operations):
        for halfway in [False, True] if what.startswith("write") else [False]:
            fault = Fault(at, halfway=halfway)
            _, acknowledged = bench.attempt(scenario, fault)
            assert fault.dead
            bench.check(acknowledged)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_power_cut_at_every_operation(scenario: Scenario, bench: Bench) -> None:
    for at in range(len(bench.operations(scenario))):
        disk, acknowledged = bench.attempt(scenario, Fault(at))
        at_risk = disk.unsynced_folders()
        disk.cut_power([])
        bench.check(acknowledged)
        choices = [[folder] for folder in at_risk]
        for lost in [*choices, at_risk] if len(at_risk) > 1 else choices:
            disk, acknowledged = bench.attempt(scenario, Fault(at))
            disk.cut_power(lost)
            bench.check(acknowledged)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_error_at_every_operation(scenario: Scenario, bench: Bench) -> None:
    """The one write fails with the kind of error ``MemoryCheckpoints`` expects, or not at all; the launcher goes on."""
    for at in range(len(bench.operations(scenario))):
        error = OSError(errno.EIO, "injected")

        def tolerant(files: Files, acknowledge: Acknowledge) -> None:
            try:
                scenario(files, acknowledge)
            except CheckpointError as raised:
                assert "injected" in str(raised)
            except OSError:
                assert scenario is mend  # not the checkpoint storage's own writes

        _, acknowledged = bench.attempt(tolerant, Fault(at, error))
        bench.check(acknowledged)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("halfway", [False, True])
def test_crash_at_every_operation_on_a_store(scenario: Scenario, halfway: bool, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    operations = 0
    while True:
        store = RemoteFiles(f"memory://{tmp_path.name}/{scenario.__name__}-{halfway}-{operations}")
        furnish(store)
        fault = Fault(operations, halfway=halfway)
        acknowledged = run_until_crash(scenario, FaultyFiles(store, fault))
        check_what_is_left(store, acknowledged)
        if not fault.dead:
            break
        operations += 1
    assert operations > 10


def test_failed_write_leaves_no_data_behind(tmp_path: Path) -> None:
    """When the disk is full, the half-written file must not keep it full."""
    fault = Fault(error=OSError(errno.EIO, "broken"))
    checkpoint_storage = open_checkpoint_storage(FaultyFiles(PlainFiles(tmp_path), fault))
    checkpoint_storage.check()
    fault.at = fault.count + 1  # the data are written, then comes the manifest
    with pytest.raises(CheckpointError, match="broken"):
        save(checkpoint_storage, 1)
    assert "DONE" in fault.log[fault.at]
    assert [path.name for path in tmp_path.iterdir()] == ["edl.json"]
