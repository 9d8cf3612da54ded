"""Other people's training programs, under us as under the launchers they were written for.

Each is run by both launchers, and the results must be equal. Those that CI does not install are skipped and say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import DEADLINE_S, WORKERS, Job

OFFLINE = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
TORCHRUN = ("torch.distributed.run", "--nproc-per-node=2")
PADDLE = ("paddle.distributed.launch", "--nproc_per_node=2")


def installed(*names: str) -> None:
    """Skip the test where one of these is missing."""
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[clients]'")


@dataclass(frozen=True)
class Client:
    """A program, and what it was written for."""

    script: str
    needs: tuple[str, ...]
    launcher: tuple[str, ...]


CLIENTS = (
    Client("client_lightning.py", ("torch", "lightning"), TORCHRUN),
    Client("client_transformers.py", ("torch", "accelerate", "transformers"), TORCHRUN),
    Client("client_fsdp.py", ("torch",), TORCHRUN),
    Client("client_fleet.py", ("paddle",), PADDLE),
)


def seen_by_ranks(folder: Path, world: int = 2) -> list[Any]:
    """Output of each rank at its end."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]


def run_by_original(job: Job, launcher: Sequence[str], script: Path, folder: Path) -> list[Any]:
    """The same program under the launcher it was written for."""
    folder.mkdir()
    command = [sys.executable, "-m", *launcher, str(script), f"--folder={folder}"]
    environment = {**job.base_environment(), "PADDLE_DISTRI_BACKEND": "gloo"}
    log = folder / "original.log"
    with log.open("wb") as output:
        started = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=output)
        try:
            assert started.wait(DEADLINE_S) == 0, log.read_text()[-5000:]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(started.pid, signal.SIGKILL)
            started.wait()
    return seen_by_ranks(folder)


@pytest.mark.slow
@pytest.mark.torch
def test_accelerates_own_test_script_passes(tmp_path: Path) -> None:
    """It ships in the wheel, and checks processes, generators, loaders and training against a lone process."""
    installed("torch", "accelerate")
    print("accelerate", version("accelerate"))
    script = ("-m", "accelerate.test_utils.scripts.test_script")
    with Job(tmp_path, [], "etcd-embedded", nnodes="1", script=script, environment=OFFLINE) as job:
        job.start("a", nproc=2)
        assert job.exit_codes() == {"a": 0}
        said = job.nodes["a"].text
        assert "Distributed environment: DistributedType.MULTI_CPU  Backend: gloo" in said
        assert "Num processes: 2" in said
        assert "Training yielded the same results on one CPU or distributed setup with batch split." in said
        assert "round 2" not in said, "it needed a second try"


@pytest.mark.soak
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_a_client_gets_the_same_results_under_its_own_launcher(tmp_path: Path, client: Client) -> None:
    installed(*client.needs)
    script = WORKERS / client.script
    with Job(tmp_path, [], "etcd-embedded", nnodes="1", script=(str(script),), environment=OFFLINE) as job:
        job.start("a", nproc=2)
        assert job.exit_codes() == {"a": 0}
        assert "round 2" not in job.nodes["a"].text, "it needed a second try"
        ours = seen_by_ranks(job.steps_folder)
        assert [one["world"] for one in ours] == [2, 2]
        assert ours == run_by_original(job, client.launcher, script, tmp_path / "original")


@pytest.mark.soak
@pytest.mark.torch
def test_sharded_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """FSDP2 and DCP; the program compares its result with a lone model that nobody has interrupted."""
    installed("torch")
    script = (str(WORKERS / "client_fsdp.py"),)
    with Job(tmp_path, [], "etcd-embedded", nnodes="1", script=script, arguments=("--kill=1:3",)) as job:
        job.start("a", nproc=2)
        assert job.exit_codes() == {"a": 0}
        ours = seen_by_ranks(job.steps_folder)
        assert [(one["attempt"], one["began_after"]) for one in ours] == [(1, 3), (1, 3)]


@pytest.mark.soak
@pytest.mark.torch
def test_stores_of_the_script_and_recorded_errors(tmp_path: Path) -> None:
    """A script's own stores work (under torchrun of 2.13 ``tcp://`` waits in vain, compare pytorch#191989), and what
    ``@record`` writes is the report."""
    installed("torch")
    script = (str(WORKERS / "client_stores.py"),)
    options, arguments = ("--max-restarts=0",), ("--fail=1",)
    with Job(tmp_path, [], "etcd-embedded", nnodes="1", script=script, options=options, arguments=arguments) as job:
        job.start("a", nproc=2)
        assert job.exit_codes() == {"a": 1}
        assert [one["sum"] for one in seen_by_ranks(job.steps_folder)] == [3, 3]
        root = job.nodes["a"].report()["failures"][0]
        assert (root["rank"], root["exception"]) == (1, "LookupError: rank 1 was told to fail")
        assert "client_stores.py" in root["traceback"]


@pytest.mark.soak
@pytest.mark.paddle
def test_many_gloo_groups_on_one_store_do_not_meet_each_others_addresses(tmp_path: Path) -> None:
    """What ``fleet.init`` does: a group after another, all on Paddle's one store."""
    installed("paddle")
    script = (str(WORKERS / "client_groups.py"),)
    with Job(tmp_path, [], "etcd-embedded", nnodes="1", script=script, options=("--max-restarts=0",)) as job:
        job.start("a", nproc=4)
        assert job.exit_codes() == {"a": 0}
        assert [one["sums"] for one in seen_by_ranks(job.steps_folder, 4)] == [[[6, 2]] * 5, [[6, 4]] * 5] * 2
