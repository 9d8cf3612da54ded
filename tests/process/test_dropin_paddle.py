"""The same command line under paddle.distributed.launch and under us."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.harness import DEADLINE_S, WORKERS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="needs PaddlePaddle")
THEIRS, OURS = "paddle.distributed.launch", "edl.launch"
ADDITIONS = re.compile(r"EDL_|TORCH|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$")
"""What else every worker of ours is told: docs/environment.md."""
PADDLES = {"PADDLE_MASTER_ENDPOINT", "PADDLE_WORKER_ENDPOINT"}
"""Paddle's own in other modes; ours are there in all."""
LEFT_OUT = {"CUSTOM_DEVICE_ROOT"}
"""Paddle sets it, to nothing, where it is imported; its launcher imports it, ours does not."""
HERE = {"PADDLE_BACKUP_ENV_PATH", "PADDLE_LOG_DIR", "POD_NAME"}
"""Paths and names."""


def launch(module: str, folder: Path, *options: str, worker: tuple[str, ...] = ("0",), **env: str) -> int:
    """Run two workers in ``folder``; returns the launcher's status."""
    folder.mkdir()
    others = ("EDL_", "PADDLE_", "POD_", "CUSTOM_DEVICE_ROOT")
    told = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    command = (sys.executable, "-m", module, "--nproc_per_node=2", *options)
    with (folder / "console").open("w") as console:
        ended = subprocess.run(
            (*command, str(WORKERS / "dropin_dump.py"), str(folder), *worker),
            cwd=folder,
            env={**told, "OMP_NUM_THREADS": "1", **env},
            stdout=console,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,
        )
    return ended.returncode


def told(folder: Path, rank: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / f"{rank}.json").read_text())
    return found


def without_addresses(value: str) -> str:
    return re.sub(r"[\d.]+:\d+", "HOST:PORT", value)


@pytest.mark.slow
def test_workers_are_told_the_same_but_for_addresses_and_additions(tmp_path: Path) -> None:
    """Prints what differs, side by side."""
    folders = {THEIRS: tmp_path / "theirs", OURS: tmp_path / "ours"}
    for module, folder in folders.items():
        status = launch(module, folder, "--job_id=same", http_proxy="proxy.invalid:1")
        assert status == 0, (folder / "console").read_text()
        assert "worker 0 was here" in (folder / "console").read_text(), "the first one's output is shown"
        for rank in range(2):
            assert (folder / "log" / f"workerlog.{rank}").read_text() == f"worker {rank} was here\n"
            assert f"PADDLE_TRAINER_ID={rank}\n" in (folder / "log" / f"envlog.{rank}").read_text()
            backup = json.loads((folder / "log" / f"backup_env.{rank}.json").read_text())
            assert backup["PADDLE_TRAINER_ID"] == str(rank)
    for rank in range(2):
        theirs, ours = (told(folder, rank) for folder in folders.values())
        differ = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        for name in differ:
            print(f"{rank} {name:28} {theirs.get(name, '-'):40.40} {ours.get(name, '-'):40.40}")
        assert {name for name in differ if name not in ours} == LEFT_OUT
        added = {name for name in differ if name not in theirs}
        assert {name for name in added if not ADDITIONS.match(name)} == PADDLES
        changed = set(differ) - added - LEFT_OUT - HERE
        assert {name: without_addresses(ours[name]) for name in changed} == {
            name: without_addresses(theirs[name]) for name in changed
        }
        assert all(os.path.isabs(ours[name]) for name in ("PADDLE_BACKUP_ENV_PATH", "PADDLE_LOG_DIR"))
        assert ours["http_proxy_original"] == "proxy.invalid:1"
        assert "http_proxy" not in ours
        assert ours["PADDLE_WORKER_ENDPOINT"] == ours["PADDLE_CURRENT_ENDPOINT"]


@pytest.mark.slow
def test_the_first_failures_status_and_endpoints_by_file(tmp_path: Path) -> None:
    """Paddle finds a list of endpoints that is too long for an environment; the job ends as its worker did."""
    folder = tmp_path / "ours"
    status = launch(
        *(OURS, folder, "--nproc_per_node=9", "--log_level=DEBUG"),
        worker=("7", "ask"),
        PADDLE_NPROC_PER_NODE="2",
        PADDLE_ELASTIC_LEVEL="-1",
        PADDLE_ENV_LIMIT_LEN="20",
    )
    console = (folder / "console").read_text()
    assert status == 7, console
    assert "PADDLE_NPROC_PER_NODE=2 overrides --nproc-per-node=9" in console
    assert "PADDLE_ELASTIC_LEVEL=-1: the first worker failure ends the job" in console
    assert "--log_level=DEBUG: the launcher's own log lines have no levels" in console
    found = told(folder, 1)
    assert "PADDLE_TRAINER_ENDPOINTS" not in found
    assert found["seen by Paddle"].split(",")[1] == found["PADDLE_CURRENT_ENDPOINT"]
    assert len(found["seen by Paddle"].split(",")) == 2
