"""Behaviors that Paddle's own launcher tests check, applied to edl: one test for each case of ``test_run.py``
(collective 1 to 4, ps 1 to 4) and of ``test_cpuonly_launch.sh``, and the needs of fleet scripts beyond. docs/paddle.md
has the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edl.exit_codes import ExitCode
from tests.process import forking
from tests.process.free_ports import free_endpoints
from tests.process.harness import DEADLINE_S, ROOT, WORKERS

ROLE, RANK, SUM, FLEET = (
    str(WORKERS / name) for name in ("suite_role.py", "suite_rank.py", "suite_paddle_sum.py", "suite_fleet.py")
)
EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
"""Devices that are not there, as their tests have them."""
ADDRESSED = {"PADDLE_PORT", "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_GLOO_HTTP_ENDPOINT"}
"""Variables with ports in them."""
NAMED = {"PADDLE_BACKUP_ENV_PATH", "PADDLE_LOG_DIR", "POD_NAME"}
UNUSED = {"PADDLE_GLOO_FS_PATH"}
"""Paddle's for a rendezvous by files, which it does not ask for."""


class Lines:
    """Runs command lines in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir()
        self.environment = {
            **forking.plain_environment(),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            forking.MARK: uuid.uuid4().hex,
        }

    def run(self, *words: str, module: str = "edl.launch", **env: str) -> subprocess.CompletedProcess[str]:
        """The launcher's end and all that it and its first worker have said."""
        return forking.run([sys.executable, "-m", module, *words], self.environment | env, self.folder, DEADLINE_S)

    def succeeds(self, *words: str, **env: str) -> str:
        done = self.run(*words, **env)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout + done.stderr

    def port(self) -> str:
        (endpoint,) = free_endpoints(1)
        return endpoint.rpartition(":")[2]

    def roles(self) -> list[dict[str, Any]]:
        """Environment of the processes of a job with pservers, pservers first."""
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))]


def files(folder: Path, job: str) -> set[str]:
    """Files in the log folder that Paddle's tests count; the pod's file has a different name in each run."""
    kept = [path.name for path in folder.iterdir() if path.is_file()]
    pods = [name for name in kept if name.startswith(f"{job}.") and name.endswith(".log")]
    assert len(pods) == 1, kept
    return {name for name in kept if not name.startswith(("envlog", "backup_env"))} - set(pods)


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    return Lines(tmp_path)


# --- test_run.py: collective -----------------------------------------------------------------------------------------

TOLD = {"PADDLE_MASTER", "PADDLE_GLOBAL_RANK", "PADDLE_LOCAL_RANK", "PADDLE_GLOBAL_SIZE", "PADDLE_LOCAL_SIZE"}


def ranked(lines: Lines) -> tuple[str, ...]:
    return RANK, str(lines.out)


def test_a_name_and_a_folder_are_enough(lines: Lines) -> None:
    said = lines.succeeds("--job_id", "test1", "--log_dir", "logs", *ranked(lines))
    assert "rank 0 was here" in said
    assert files(lines.folder / "logs", "test1") == {"workerlog.0"}
    assert json.loads((lines.out / "0").read_text())["environment"].keys() >= TOLD


def test_each_device_gets_a_worker_and_a_log(lines: Lines) -> None:
    lines.succeeds("--job_id", "test2", "--devices", "0,1,2", "--log_dir", "logs", *ranked(lines), **EIGHT)
    assert files(lines.folder / "logs", "test2") == {"workerlog.0", "workerlog.1", "workerlog.2"}


def test_two_nodes_meet_at_a_master(lines: Lines) -> None:
    words = ("--job_id", "test3", "--devices", "0,1", "--master", f"127.0.0.1:{lines.port()}", "--nnodes", "2")
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda name: lines.succeeds(*words, "--log_dir", name, *ranked(lines), **EIGHT), ("l1", "l2")))
    for name in ("l1", "l2"):
        assert files(lines.folder / name, "test3") == {"workerlog.0", "workerlog.1"}
    assert {path.name for path in lines.out.iterdir()} == {str(rank) for rank in range(4)}


def test_a_configuration_of_auto_parallel_is_handed_on_and_no_tuner_runs_first(lines: Lines) -> None:
    """Differs on purpose: theirs runs the script once more, as a tuner."""
    config = lines.folder / "auto.json"
    words = ("--job_id", "test4", "--devices", "0,1", "--log_dir", "logs", "--auto_parallel_config", str(config))
    config.write_text('{"tuner_run_mode": "tuner_and_run"}')
    done = lines.run(*words, *ranked(lines), **EIGHT)
    assert done.returncode == ExitCode.USAGE
    assert "its tuner_run_mode is tuner_and_run, but edl has no tuner" in done.stderr
    config.write_text('{"tuner_run_mode": "run_only"}')
    lines.succeeds(*words, *ranked(lines), **EIGHT)
    assert files(lines.folder / "logs", "test4") == {"workerlog.0", "workerlog.1"}
    told = json.loads((lines.out / "1").read_text())["environment"]
    assert (told["PADDLE_AUTO_PARALLEL_CONFIG"], told["PADDLE_AUTO_PARALLEL_STAGE"]) == (str(config), "run")


# --- test_run.py: pservers -------------------------------------------------------------------------------------------

ASKED = {"PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_ROLE"}


def roles_of(found: list[dict[str, Any]]) -> list[str]:
    assert all(one.keys() >= ASKED for one in found)
    return [one["TRAINING_ROLE"] for one in found]


def test_the_mode_alone_is_one_pserver_and_one_trainer(lines: Lines) -> None:
    said = lines.succeeds("--run_mode", "ps", "--log_dir", "logs", ROLE, str(lines.out))
    assert roles_of(lines.roles()) == ["PSERVER", "TRAINER"]
    assert "a PSERVER was here" in said, "as there, the console shows the first process"


def test_pservers_and_trainers_run_the_script_and_have_logs_of_their_own(lines: Lines) -> None:
    lines.succeeds(*("--job_id", "ps2", "--server_num=2", "--trainer_num=2", "--log_dir", "logs"), ROLE, str(lines.out))
    found = lines.roles()
    assert roles_of(found) == ["PSERVER", "PSERVER", "TRAINER", "TRAINER"]
    assert files(lines.folder / "logs", "ps2") == {"serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"}
    assert (lines.folder / "logs" / "workerlog.1").read_text() == "a TRAINER was here\n"
    assert [one.get("PADDLE_TRAINER_ID") for one in found[:2]] == [None, None]
    assert {one["PADDLE_TRAINER_ID"] for one in found[2:]} == {"0", "1"}
    for one in found:
        mine = f"{one['POD_IP']}:{one['PADDLE_PORT']}"
        role = "PADDLE_PSERVERS_IP_PORT_LIST" if one["PADDLE_ROLE"] == "PSERVER" else "PADDLE_TRAINER_ENDPOINTS"
        assert mine in one[role].split(",")


def test_two_nodes_have_pservers_and_trainers_each(lines: Lines) -> None:
    words = ("--job_id", "ps3", "--master", f"127.0.0.1:{lines.port()}", "--nnodes", "2", "--server_num=1")
    more = ("--trainer_num=1", ROLE, str(lines.out))
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda name: lines.succeeds(*words, "--log_dir", name, *more), ("l1", "l2")))
    for name in ("l1", "l2"):
        assert files(lines.folder / name, "ps3") == {"serverlog.0", "workerlog.0"}
    found = lines.roles()
    assert roles_of(found) == ["PSERVER", "PSERVER", "TRAINER", "TRAINER"]
    assert len({one["PADDLE_PSERVERS_IP_PORT_LIST"] for one in found}) == 1
    assert {one["PADDLE_TRAINER_ID"] for one in found[2:]} == {"0", "1"}


def test_lists_of_addresses_say_which_they_are(lines: Lines) -> None:
    servers, trainers = ",".join(free_endpoints(2)), ",".join(free_endpoints(2))
    lines.succeeds(
        *("--job_id", "ps4", "--log_dir", "logs", "--servers", servers, "--trainers", trainers), ROLE, str(lines.out)
    )
    found = lines.roles()
    assert {one["PADDLE_PSERVERS_IP_PORT_LIST"] for one in found} == {servers}
    assert {one["PADDLE_TRAINER_ENDPOINTS"] for one in found} == {trainers}
    for text, role in ((servers, "PSERVER"), (trainers, "TRAINER")):
        ports = {one["PADDLE_PORT"] for one in found if one["PADDLE_ROLE"] == role}
        assert ports == {one.rpartition(":")[2] for one in text.split(",")}
    assert files(lines.folder / "logs", "ps4") == {"serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"}


# --- beyond their tests ----------------------------------------------------------------------------------------------


def test_a_failed_pserver_has_all_of_them_started_again(lines: Lines) -> None:
    words = ("--server_num=1", "--trainer_num=1", ROLE, str(lines.out))
    done = lines.run("--max_restart=0", *words, SUITE_SERVER_STATUS="7")
    assert done.returncode == 7, done.stderr
    (lines.out / "again").unlink()
    said = lines.succeeds(*words, SUITE_SERVER_STATUS="7")
    assert "round 2: 1 node, 2 workers" in said


@pytest.mark.soak
@pytest.mark.paddle
def test_pservers_and_trainers_are_told_what_paddles_launcher_tells_them(lines: Lines) -> None:
    """But for ports and names. Prints what differs, side by side."""
    pytest.importorskip("paddle")
    words = ("--server_num=2", "--trainer_num=1", ROLE, str(lines.out))
    found = {}
    for module in ("paddle.distributed.launch", "edl.launch"):
        done = lines.run(*words, module=module)
        assert done.returncode == 0, done.stderr
        found[module] = [
            {name: value for name, value in one.items() if name.startswith(("PADDLE_", "POD_", "TRAINING_"))}
            for one in lines.roles()
        ]
        for path in lines.out.iterdir():
            path.unlink()
    for theirs, ours in zip(*found.values(), strict=True):
        for name in sorted(theirs.keys() | ours.keys()):
            print(f"{name:30} {theirs.get(name, '-'):40.40} {ours.get(name, '-'):40.40}")
        assert theirs.keys() - ours.keys() == UNUSED
        assert ours.keys() - theirs.keys() == set()
        same = ours.keys() & theirs.keys() - ADDRESSED - NAMED - {"POD_IP"}
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
        for name in ADDRESSED:
            assert ours[name].count(",") == theirs[name].count(",")


@pytest.mark.paddle
def test_paddles_own_role_maker_finds_the_roles(lines: Lines) -> None:
    pytest.importorskip("paddle")
    lines.succeeds("--server_num=1", "--worker_num=2", FLEET, str(lines.out))
    answers = sorted(path.read_text() for path in lines.out.iterdir())
    assert answers == ["server 0 of 1 and 2", "worker 0 of 1 and 2", "worker 1 of 1 and 2"]


# --- test_cpuonly_launch.sh ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.paddle
def test_workers_on_cpus_add_up_over_gloo(lines: Lines) -> None:
    pytest.importorskip("paddle")
    lines.succeeds("--nproc_per_node=4", "--backend=gloo", SUM, str(lines.out))
    assert {path.name: path.read_text() for path in lines.out.iterdir()} == dict.fromkeys("0123", "6")


def test_an_unknown_backend_is_refused_in_a_line(lines: Lines) -> None:
    done = lines.run("--nproc_per_node=4", "--backend=random_str", *ranked(lines))
    assert done.returncode == ExitCode.USAGE
    assert "--backend=random_str: is not one of Paddle's backends. Use gloo, nccl, bkcl or auto" in done.stderr
    assert not list(lines.out.iterdir())


# --- of the legacy launcher ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--selected_gpus=0,1"], "--selected_gpus=0,1 is not used: this node has no GPUs"),
        (["--hosts=127.0.0.1"], "--hosts=127.0.0.1: Paddle's launchers ignore it as well"),
    ],
)
def test_what_a_paddle_without_gpus_passes_over_is_passed_over(lines: Lines, words: list[str], text: str) -> None:
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("this host has GPUs")
    said = lines.succeeds(*words, *ranked(lines))
    assert text in said
    assert [path.name for path in lines.out.iterdir()] == ["0"]


@pytest.mark.slow
def test_one_word_changed_is_enough_where_no_option_is_only_paddles(lines: Lines) -> None:
    done = lines.run("--nproc_per_node=2", *ranked(lines), module="edl.launch.paddle")
    assert done.returncode == 0, done.stderr
    logs = {path.name for path in (lines.folder / "log").glob("workerlog.*")}
    assert logs == {"workerlog.0", "workerlog.1"}
