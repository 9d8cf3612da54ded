"""SIGKILL at random moments while checkpoints are written: what is found then is complete, and as new as it can be.

As a program, this file forks writers, kills them and looks: ``test_checkpoint_storage_kill.py FOLDER KILLS SEED``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edl.adapters.files import PlainFiles
from edl.checkpoint.directory.manifest import folder_version
from edl.checkpoint.directory.writer import FileCheckpointStorage
from edl.wire.records import Version
from tests.support.checkpoint_tools import load, open_checkpoint_storage, save

ROOT = Path(__file__).parents[2]
KEEP = 2
LONGEST_LIFE_S = 0.1
SIZES = (10, 3_000, 200_000, 2_000_000)


def newest(checkpoint_storage: FileCheckpointStorage) -> Version:
    found = checkpoint_storage.newest()
    return found[0] if found is not None else Version()


def write_for_ever(files: PlainFiles, era: int, acknowledge: int) -> None:
    """A run of the job: goes on from where the last one was, and says after each checkpoint that it is safe."""
    checkpoint_storage = open_checkpoint_storage(files, f"run-{era}", keep=KEEP, every=50)
    checkpoint_storage.check()
    commit = newest(checkpoint_storage).commit
    while True:
        commit += 1
        save(checkpoint_storage, commit, era, size=SIZES[commit % len(SIZES)])
        os.write(acknowledge, commit.to_bytes(8, "little"))


def one_life(files: PlainFiles, era: int, life_s: float) -> int:
    """Fork a writer and kill it. Returns the last commit that it said was safe, 0 for none."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            write_for_ever(files, era, writing)
        finally:
            os._exit(1)
    os.close(writing)
    time.sleep(life_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the writer failed by itself"
    return int.from_bytes(said[-8:], "little")


def lives(folder: Path, kills: int, seed: int) -> str:
    """Returns a summary."""
    files = PlainFiles(folder)
    draw = random.Random(seed)
    safe = in_vain = 0
    for era in range(1, kills + 1):
        acknowledged = one_life(files, era, draw.uniform(0.0, LONGEST_LIFE_S))
        in_vain += acknowledged == 0
        safe = max(safe, acknowledged)
        checkpoint_storage = open_checkpoint_storage(files, "reader")
        found = newest(checkpoint_storage)
        assert safe <= found.commit <= safe + 1, f"life {era}: {safe} was said to be safe, {found} was found"
        if found != Version():
            assert load(checkpoint_storage)[0] == found  # every byte is of that commit
        safe = found.commit
        complete = [
            version
            for version in checkpoint_storage._folders.versions()
            if checkpoint_storage._inspect(version) is not None
        ]
        assert len(complete) >= min(KEEP, found.commit)
    checkpoint_storage = open_checkpoint_storage(files, "run-last", keep=KEEP, every=50)
    checkpoint_storage.check()
    for commit in (safe + 1, safe + 2):
        save(checkpoint_storage, commit, kills + 1)
    left = sorted(entry.name for entry in files.entries())
    versions = [version for name in left if (version := folder_version(name)) is not None]
    assert len(left) == len(versions) + 1, left  # and the owner's file
    for version in versions:
        assert version.commit > safe or version.commit % 50 == 0, f"{version} should have been deleted"
        assert load(checkpoint_storage, version)[0] == version
    return f"{kills} kills, {in_vain} before the first checkpoint of a life, {safe} checkpoints"


@pytest.mark.parametrize("kills", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_killed_at_random_moments(kills: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kills > 60 and not request.config.getoption("--soak"):
        pytest.skip("takes a while: run with --soak")
    seed = random.randrange(1_000_000)
    finished = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "checkpoints"), str(kills), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert finished.returncode == 0, f"seed {seed}: {finished.stderr}"
    print(f"seed {seed}: {finished.stdout}")


if __name__ == "__main__":
    print(lives(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
