"""The same command line under torchrun and under edl: environment of the workers, and signals."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import DEADLINE_S, ROOT, WORKERS, until

THEIRS, OURS = "torch.distributed.run", "edl.launch"
OF_A_LAUNCHER = (
    "EDL_",
    "PADDLE_",
    "PET_",
    "TORCHELASTIC_",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "OMP_NUM_THREADS",
)
ADDRESSES = {
    "MASTER_ADDR": r"[\w.-]+",
    "MASTER_PORT": r"\d+",
    "TORCHELASTIC_RUN_ID": r"[\w.-]+",
    "TORCHELASTIC_ERROR_FILE": r"/.+/attempt_0/\d/error\.json",
}
"""What is another one in each job, and what it looks like in both."""
EXPLAINED = {"TORCHELASTIC_USE_AGENT_STORE": ("True", "False")}
"""There and here: the worker of rank 0 serves the store, not the launcher. docs/torchrun.md says why."""


def command(module: str, folder: Path, *options: str, script: str, arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", module, "--nproc_per_node=2", *options, str(WORKERS / script), *arguments]


def base() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_LAUNCHER)}
    return {**kept, "PYTHONPATH": str(ROOT)}


def seen(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_workers_find_what_torchrun_would_tell_them(tmp_path: Path) -> None:
    """Prints what differs, side by side."""
    page = set(re.findall(r"`([A-Za-z_]+)`", (ROOT / "docs" / "environment.md").read_text()))
    folders = {THEIRS: tmp_path / "theirs", OURS: tmp_path / "ours"}
    for module, folder in folders.items():
        folder.mkdir()
        words = command(
            *(module, folder, "--max-restarts=2", "--role=teacher"),
            script="dropin_look.py",
            arguments=(str(folder), "--rank=${local_rank}", "--nnodes", "$$", "${other}"),
        )
        ended = subprocess.run(
            words, env=base(), cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert ended.returncode == 0, ended.stderr
        assert sorted(ended.stdout.splitlines()) == ["worker 0 was here", "worker 1 was here"]
    for rank in range(2):
        theirs, ours = (seen(folder, rank) for folder in folders.values())
        told, given = theirs.pop("environment"), ours.pop("environment")
        differ = sorted(name for name in told.keys() | given.keys() if told.get(name) != given.get(name))
        for name in differ:
            print(f"{rank} {name:30} {told.get(name, '-'):38.38} {given.get(name, '-'):38.38}")
        assert [name for name in differ if name not in given] == []
        assert [name for name in differ if name not in told and name not in page] == []
        changed = [name for name in differ if name in told and name in given]
        assert set(changed) <= ADDRESSES.keys() | EXPLAINED.keys()
        for name, shape in ADDRESSES.items():
            assert re.fullmatch(shape, told[name]), told[name]
            assert re.fullmatch(shape, given[name]), given[name]
        for name, (there, here) in EXPLAINED.items():
            assert (told[name], given[name]) == (there, here)
        for found, folder in ((theirs, folders[THEIRS]), (ours, folders[OURS])):
            assert found.pop("directory") == str(folder)
            found["command"] = [word.replace(str(folder), "FOLDER") for word in found["command"]]
        assert ours == theirs
        assert ours["arguments"] == [f"--rank={rank}", "--nnodes", "$", "${other}"]


def test_a_worker_reads_the_launchers_input(tmp_path: Path) -> None:
    """A worker that is restarted reads on where the first one stopped."""
    script = tmp_path / "train.py"
    script.write_text("import os\nline = os.read(0, 4)\nprint(line)\nassert line == b'two\\n'\n")
    words = [sys.executable, "-m", OURS, "--nproc_per_node=1", "--max-restarts=1", str(script)]
    ended = subprocess.run(
        words, env=base(), cwd=tmp_path, input=b"one\ntwo\n", capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert ended.stdout.splitlines() == [b"b'one\\n'", b"b'two\\n'"]


@pytest.mark.slow
def test_signals_for_workers_are_passed_on_and_those_to_handle_end_the_node(tmp_path: Path) -> None:
    """SIGUSR1 to the worker that handles it, and not to the one that would die; then SIGUSR2 to both."""
    log = tmp_path / "console"
    words = command(
        *(OURS, tmp_path, "--signals-to-handle=SIGTERM,SIGUSR2", "--drain-signals=TERM", f"--log-dir={tmp_path}"),
        script="dropin_signals.py",
        arguments=("USR1", "USR2"),
    )
    with log.open("w") as console:
        launcher = subprocess.Popen(words, env=base(), stdout=console, stderr=subprocess.STDOUT)
    try:
        until(lambda: log.read_text().count(" waits\n") == 2, "both workers")
        launcher.send_signal(signal.SIGUSR1)
        until(lambda: "rank 0 got SIGUSR1" in log.read_text(), "the signal")
        until(lambda: "SIGUSR1 is not passed to process" in log.read_text(), "the remark about the other worker")
        launcher.send_signal(signal.SIGUSR2)
        assert launcher.wait(DEADLINE_S) == ExitCode.TERMINATED
    finally:
        launcher.kill()
        launcher.wait()
    text = log.read_text()
    assert [text.count(f"rank {rank} got SIGUSR2") for rank in range(2)] == [1, 1]
    assert text.count("rank 1 got") == 1
