"""Checkpoint storage: retention, foreign directories, and errors."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.adapters.files import PlainFiles
from edl.checkpoint.directory.manifest import (
    DirectoryOwner,
    Retention,
    folder_name,
    folder_version,
    owner_text,
    parse_owner,
)
from edl.errors import CheckpointError, JobConflict, SettingError
from edl.exit_codes import ExitCode
from edl.rendezvous.phrases import amount
from edl.wire.records import Version
from tests.support.checkpoint_tools import Fault, FaultyFiles, load, open_checkpoint_storage, save, state
from tests.support.small_disk import small_disk

versions = st.builds(Version, st.integers(0, 3), st.integers(0, 30))


def commits(folder: Path) -> list[int]:
    """Commits of all folders, complete or not."""
    found = (folder_version(path.name) for path in folder.iterdir())
    return sorted(version.commit for version in found if version is not None)


# --- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [(2, 0, [80, 90]), (3, 0, [70, 80, 90]), (3, 40, [0, 40, 70, 80, 90]), (99, 0, list(range(0, 100, 10)))],
)
def test_retention(keep: int, every: int, left: list[int], tmp_path: Path) -> None:
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path), keep=keep, every=every)
    for commit in range(0, 100, 10):
        save(checkpoint_storage, commit)
    assert commits(tmp_path) == left


@given(st.sets(versions), st.sets(versions, max_size=2), st.integers(2, 5), st.integers(0, 7))
def test_surplus_is_old_and_never_all(complete: set[Version], spared: set[Version], keep: int, every: int) -> None:
    surplus = Retention(keep, every).surplus(complete, spared)
    kept = complete - set(surplus)
    assert surplus == sorted(set(surplus))
    assert len(kept) >= min(len(complete), keep)
    assert not set(surplus) & spared
    assert sorted(complete)[-keep:] == sorted(kept)[-keep:]
    assert not any(every and version.commit % every == 0 for version in surplus)


@given(st.sets(versions), st.sets(versions), st.integers(2, 5))
def test_overtaken_would_be_surplus(unfinished: set[Version], complete: set[Version], keep: int) -> None:
    retention = Retention(keep)
    for version in retention.overtaken(unfinished - complete, sorted(complete)):
        assert version in retention.surplus({*complete, version})


@pytest.mark.parametrize(
    ("keep", "every", "flag"),
    [(1, 0, "--checkpoint-keep=1"), (0, 0, "--checkpoint-keep"), (3, -1, "--checkpoint-keep-every")],
)
def test_impossible_retention(keep: int, every: int, flag: str) -> None:
    with pytest.raises(SettingError, match=flag):
        Retention(keep, every)


@given(versions)
def test_folder_names(version: Version) -> None:
    assert folder_version(folder_name(version)) == version


def test_an_abandoned_line_is_the_older_one_however_far_it_had_come(tmp_path: Path) -> None:
    old = open_checkpoint_storage(PlainFiles(tmp_path), "run-1", keep=2)
    for commit in (100, 110):
        save(old, commit, 1)
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path), "run-2", keep=2)
    for commit in (10, 20, 30):
        save(checkpoint_storage, commit, 2)
    assert commits(tmp_path) == [20, 30]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path), keep=2)
    for commit in (10, 20):
        save(checkpoint_storage, commit)
    path = tmp_path / folder_name(Version(1, 20)) / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert load(checkpoint_storage)[0] == Version(1, 10)
    save(checkpoint_storage, 30)
    assert commits(tmp_path) == [10, 20, 30]
    save(checkpoint_storage, 40)
    save(checkpoint_storage, 50)
    assert commits(tmp_path) == [40, 50]


def test_the_first_launcher_of_a_run_tidies_up(tmp_path: Path) -> None:
    open_checkpoint_storage(PlainFiles(tmp_path), "run-1").check()
    left = tmp_path / folder_name(Version(1, 5))
    left.mkdir()
    (left / "state.safetensors.0123abcd.tmp").write_bytes(b"half")
    (tmp_path / ".probe-run-1-01").touch()
    (tmp_path / ".probe-run-2-01").touch()
    open_checkpoint_storage(PlainFiles(tmp_path), "run-1").check()
    assert left.exists()  # of this run: it may still be being written
    open_checkpoint_storage(PlainFiles(tmp_path), "run-2").check()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".probe-run-2-01", "edl.json"]
    left.mkdir()
    open_checkpoint_storage(PlainFiles(tmp_path), "run-2").check()
    assert left.exists()


def test_a_half_written_owner_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "edl.json.0123abcd.tmp").touch()
    save(open_checkpoint_storage(PlainFiles(tmp_path)), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder_name(Version(1, 1)), "edl.json"]


def test_what_this_run_left_goes_once_it_is_overtaken(tmp_path: Path) -> None:
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path), keep=2)
    save(checkpoint_storage, 10)
    (tmp_path / folder_name(Version(1, 15))).mkdir()
    (tmp_path / folder_name(Version(1, 15)) / "state.safetensors").write_bytes(b"half")
    save(checkpoint_storage, 20)
    assert commits(tmp_path) == [10, 15, 20]
    save(checkpoint_storage, 30)
    assert commits(tmp_path) == [20, 30]


def test_trouble_with_old_ones_does_not_fail_the_new_one(tmp_path: Path) -> None:
    fault = Fault(error=OSError(errno.EACCES, "Permission denied"))
    said: list[str] = []
    checkpoint_storage = open_checkpoint_storage(FaultyFiles(PlainFiles(tmp_path), fault), keep=2, said=said)
    for commit in (10, 20):
        save(checkpoint_storage, commit)
    fault.at = fault.count + 3  # manifest gone, state, manifest; then the deletion
    save(checkpoint_storage, 30)
    (line,) = said
    assert f"cannot delete the checkpoint {tmp_path / folder_name(Version(1, 10))}: Permission denied" in line
    assert checkpoint_storage.newest() == (Version(1, 30), False)
    save(checkpoint_storage, 40)
    assert commits(tmp_path) == [30, 40]


# --- whose it is -----------------------------------------------------------------------------------------------------


def test_another_jobs_directory_is_refused(tmp_path: Path) -> None:
    open_checkpoint_storage(PlainFiles(tmp_path), job="first").check()
    with pytest.raises(JobConflict, match=r"belongs to job first, this is job second: .*--adopt-checkpoint"):
        open_checkpoint_storage(PlainFiles(tmp_path), job="second").check()
    with pytest.raises(CheckpointError, match="belongs to job first"):
        save(open_checkpoint_storage(PlainFiles(tmp_path), job="second"), 1, job="second")


def test_another_jobs_checkpoints_without_an_owner_are_refused(tmp_path: Path) -> None:
    save(open_checkpoint_storage(PlainFiles(tmp_path), job="first"), 1, job="first")
    for content in (None, b"", b"{"):
        (tmp_path / "edl.json").unlink()
        if content is not None:
            (tmp_path / "edl.json").write_bytes(content)
        with pytest.raises(JobConflict, match="holds checkpoints of job first, this is job second"):
            open_checkpoint_storage(PlainFiles(tmp_path), job="second").check()
        open_checkpoint_storage(PlainFiles(tmp_path), job="first").check()


def test_adopting(tmp_path: Path) -> None:
    files = PlainFiles(tmp_path)
    theirs = open_checkpoint_storage(files, "run-1", job="first")
    for commit in (10, 20):
        save(theirs, commit, job="first")
    (tmp_path / folder_name(Version(1, 25))).mkdir()
    mine = open_checkpoint_storage(files, "run-2", job="second", keep=2, adopt=True)
    mine.check()
    assert mine.newest() == (Version(1, 20), False)
    assert load(mine)[1] == state(20, job="first")
    for commit in (30, 40, 50):
        save(mine, commit, 2, job="second")
    assert commits(tmp_path) == [10, 20, 40, 50]  # those of others stay
    with pytest.raises(CheckpointError, match="job second has taken over"):
        save(theirs, 30, job="first")
    later = open_checkpoint_storage(files, "run-3", job="second")
    later.check()
    assert load(later)[0] == Version(2, 50)
    with pytest.raises(CheckpointError, match="written by job first and is not replaced"):
        save(later, 20, 1, job="second")


def test_another_run_takes_over(tmp_path: Path) -> None:
    files = PlainFiles(tmp_path)
    first, second = open_checkpoint_storage(files, "run-1"), open_checkpoint_storage(files, "run-2")
    first.check()
    save(first, 10)
    second.check()
    before = commits(tmp_path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="another run of job job has taken over the checkpoint directory"):
            save(first, 20)
    with pytest.raises(JobConflict, match="End one of the two"):
        open_checkpoint_storage(files, "run-1").check()  # a late node of the old run does not take it back
    assert commits(tmp_path) == before
    save(second, 20, 2)
    save(open_checkpoint_storage(files, "run-2"), 30, 2)


@pytest.mark.parametrize("taken_over", [True, False])
def test_what_another_node_has_completed_stays_when_this_one_fails(tmp_path: Path, taken_over: bool) -> None:
    """All nodes write the last commit of a job that fails. Its next run begins from it."""

    class Slow(FaultyFiles):
        def write(self, name: str, pieces: object, *, new: bool = False) -> str:
            if name.endswith("state.safetensors"):
                save(open_checkpoint_storage(PlainFiles(tmp_path), "run-1"), 10)
                if taken_over:
                    open_checkpoint_storage(PlainFiles(tmp_path), "run-2").check()
                else:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().write(name, pieces, new=new)  # type: ignore[arg-type]

    checkpoint_storage = open_checkpoint_storage(Slow(PlainFiles(tmp_path), Fault()), "run-1")
    with contextlib.nullcontext() if taken_over else pytest.raises(CheckpointError, match="Input/output error"):
        save(checkpoint_storage, 10)  # there already is what it would have written
    assert commits(tmp_path) == [10]
    assert load(open_checkpoint_storage(PlainFiles(tmp_path), "run-2"))[0] == Version(1, 10)


def test_two_nodes_that_write_one_commit_with_different_values_leave_one_that_can_be_used(tmp_path: Path) -> None:
    """Such as running statistics, which each worker has for itself: the manifest is that of the file."""

    class Slow(FaultyFiles):
        def write(self, name: str, pieces: object, *, new: bool = False) -> str:
            if name.endswith("DONE"):
                theirs = memoryview(state(10, round_=7))
                open_checkpoint_storage(PlainFiles(tmp_path), "run-1").write(Version(1, 10), theirs)
            return super().write(name, pieces, new=new)  # type: ignore[arg-type]

    save(open_checkpoint_storage(Slow(PlainFiles(tmp_path), Fault()), "run-1"), 10)
    assert load(open_checkpoint_storage(PlainFiles(tmp_path), "run-1"))[0] == Version(1, 10)


def test_taken_over_in_the_middle_of_a_write(tmp_path: Path) -> None:
    class Takeover(FaultyFiles):
        def write(self, name: str, pieces: object, *, new: bool = False) -> str:
            stamp = super().write(name, pieces, new=new)  # type: ignore[arg-type]
            if name.endswith("state.safetensors"):
                open_checkpoint_storage(PlainFiles(tmp_path), "run-2").check()
            return stamp

    checkpoint_storage = open_checkpoint_storage(Takeover(PlainFiles(tmp_path), Fault()), "run-1")
    with pytest.raises(CheckpointError, match="has taken over"):
        save(checkpoint_storage, 10)
    assert commits(tmp_path) == []


def test_all_launchers_of_a_run_at_once(tmp_path: Path) -> None:
    """They probe, claim and tidy up at the same time, and none stumbles over another's files."""
    open_checkpoint_storage(PlainFiles(tmp_path), "run-0").check()
    errors: list[Exception] = []

    def launcher(run: str) -> None:
        try:
            open_checkpoint_storage(PlainFiles(tmp_path), run).check()
        except (CheckpointError, JobConflict) as error:
            errors.append(error)

    for round_ in range(5):
        threads = [threading.Thread(target=launcher, args=(f"run-{round_ + 1}",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert [path.name for path in tmp_path.iterdir()] == ["edl.json"]


def test_newer_owner(tmp_path: Path) -> None:
    (tmp_path / "edl.json").write_text(json.dumps({"format": 2}, indent=1) + "\n")
    with pytest.raises(CheckpointError, match=r"cannot determine the owner .*format 2, newer"):
        open_checkpoint_storage(PlainFiles(tmp_path)).check()


def test_owners_remember_only_so_many_runs() -> None:
    owner = DirectoryOwner("job", "run-0")
    for number in range(1, 300):
        owner = owner.succeeded_by("job", f"run-{number}")
    assert len(owner.before) == 100
    assert owner.before[-1] == "run-298"
    assert parse_owner(owner_text(owner)) == owner


def test_an_emptied_directory_is_claimed_again(tmp_path: Path) -> None:
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path))
    checkpoint_storage.check()
    (tmp_path / "edl.json").unlink()
    save(checkpoint_storage, 10)
    assert (tmp_path / "edl.json").exists()


# --- when nothing can be written -------------------------------------------------------------------------------------


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="Not a directory") as caught:
            open_checkpoint_storage(PlainFiles(place)).check()
        assert str(tmp_path / "file") in str(caught.value)
        assert "There is a file where a folder is needed" in str(caught.value)


def test_no_right_to_write(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match=r"Permission denied.*Give this launcher's user"):
            open_checkpoint_storage(PlainFiles(tmp_path / "new")).check()
    finally:
        tmp_path.chmod(0o700)


def test_a_file_system_that_takes_no_files() -> None:
    with pytest.raises(CheckpointError, match="/proc/edl"):
        open_checkpoint_storage(PlainFiles("/proc/edl")).check()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    with small_disk(tmp_path / "small", "1m") as folder:
        yield folder


def test_a_full_disk(disk: Path) -> None:
    checkpoint_storage = open_checkpoint_storage(PlainFiles(disk), keep=2)
    checkpoint_storage.check()
    for commit in (10, 20):
        save(checkpoint_storage, commit, size=200_000)
    before = PlainFiles(disk).free_bytes()
    with pytest.raises(CheckpointError) as caught:
        save(checkpoint_storage, 30, size=2_000_000)
    said = str(caught.value)
    for part in ("no space is left", "it needs 1.9 MiB", "KiB free", "--checkpoint-keep", str(disk)):
        assert part in said
    assert PlainFiles(disk).free_bytes() == before
    save(checkpoint_storage, 40, size=200_000)
    assert commits(disk) == [20, 40]
    assert load(checkpoint_storage)[0] == Version(1, 40)


def test_a_disk_mounted_read_only(disk: Path) -> None:
    checkpoint_storage = open_checkpoint_storage(PlainFiles(disk))
    save(checkpoint_storage, 10)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(CheckpointError, match=r"mounted read-only.*Mount it read-write"):
        open_checkpoint_storage(PlainFiles(disk)).check()
    with pytest.raises(CheckpointError, match="mounted read-only"):
        save(checkpoint_storage, 20)
    assert load(checkpoint_storage)[0] == Version(1, 10)


LIMITED = """
import resource, signal, sys
from edl.adapters.files import PlainFiles
from edl.errors import CheckpointError
from tests.support.checkpoint_tools import open_checkpoint_storage, save
checkpoint_storage = open_checkpoint_storage(PlainFiles(sys.argv[1]))
save(checkpoint_storage, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    save(checkpoint_storage, 20, size=100_000)
except CheckpointError as error:
    print(error)
assert checkpoint_storage.newest()[0].commit == 10
"""


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[5],
    )
    assert finished.returncode == 0, finished.stderr
    assert "File too large" in finished.stdout
    assert "ulimit -f" in finished.stdout
    assert commits(tmp_path) == [10]


def test_a_place_that_returns_something_else(tmp_path: Path) -> None:
    class Liar(FaultyFiles):
        def read(self, name: str) -> bytes:
            return b"?" if name.startswith(".probe") else super().read(name)

    with pytest.raises(CheckpointError, match="does not return what was just written to it"):
        open_checkpoint_storage(Liar(PlainFiles(tmp_path), Fault())).check()


def test_exit_codes() -> None:
    assert CheckpointError.exit_code is ExitCode.CHECKPOINT_UNUSABLE
    assert JobConflict.exit_code is ExitCode.JOB_CONFLICT


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_amounts(count: int, shown: str) -> None:
    assert amount(count) == shown
