"""Behaviors that PyTorch's own launcher tests check, applied to edl: one test for each behavior in ``test_run.py``,
``launch_test.py`` and ``api_test.py`` below ``test/distributed/launcher``. docs/torchrun.md has the table."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edl.errors import UsageError
from edl.exit_codes import ExitCode
from edl.launch.api import JobFailed, LaunchConfig, elastic_launch
from tests.process import forking
from tests.process.free_ports import free_endpoints
from tests.process.harness import DEADLINE_S, ROOT, WORKERS, OutsideEtcd, until
from tests.process.workers import suite_functions

PYTHON, SHELL, GROUP = (str(WORKERS / name) for name in ("suite_rank.py", "suite_rank.sh", "suite_group.py"))
USUAL = ("--monitor-interval=1", "--start-method=spawn")
"""Options that nearly each of theirs gives."""


class Lines:
    """Runs command lines in a folder, and shows which ranks have run."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        self._folder = folder
        self.environment = {
            **forking.plain_environment(),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            "SUITE_PARENT": "seen",
            forking.MARK: uuid.uuid4().hex,
        }

    def run(self, *words: str, module: str = "edl.launch", **env: str) -> subprocess.CompletedProcess[str]:
        """The launcher's end and all that it and its workers have said."""
        return forking.run([sys.executable, "-m", module, *words], self.environment | env, self._folder, DEADLINE_S)

    def succeeds(self, *words: str, ranks: int, **env: str) -> str:
        """Run a line that each of ``ranks`` workers is to come through; returns what was said."""
        done = self.run(*words, **env)
        assert done.returncode == 0, done.stderr
        assert self.ranks() == set(range(ranks))
        return done.stdout + done.stderr

    def refused(self, *words: str, text: str, **env: str) -> None:
        """Run a line that is refused with one that says why, before a worker is started."""
        done = self.run(*words, **env)
        assert done.returncode == ExitCode.USAGE
        assert re.search(text, done.stderr), done.stderr
        assert self.ranks() == set()

    def ranks(self) -> set[int]:
        return {int(path.name) for path in self.out.iterdir() if path.name.isdecimal()}

    def told(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / str(rank)).read_text())
        return found

    def forget(self) -> None:
        for path in self.out.iterdir():
            path.unlink()


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    return Lines(tmp_path)


# --- test_run.py: what runs ------------------------------------------------------------------------------------------


def test_a_python_script_runs_once_on_each_rank_with_the_parents_environment(lines: Lines) -> None:
    lines.succeeds("--nnodes=1", "--nproc-per-node=4", "--rdzv-id=17", *USUAL, PYTHON, str(lines.out), "--x", ranks=4)
    found = [lines.told(rank) for rank in range(4)]
    assert all(one["arguments"] == ["--x"] for one in found)
    assert {one["environment"]["SUITE_PARENT"] for one in found} == {"seen"}
    assert [one["environment"]["LOCAL_RANK"] for one in found] == ["0", "1", "2", "3"]
    assert {one["environment"]["TORCHELASTIC_RUN_ID"] for one in found} == {"17"}


def test_the_elder_launchers_address_options_run_as_well(lines: Lines) -> None:
    (endpoint,) = free_endpoints(1)
    port = endpoint.rpartition(":")[2]
    static = ("--master-addr=localhost", f"--master-port={port}", "--node-rank=0")
    said = lines.succeeds("--nnodes=1", "--nproc-per-node=4", *USUAL, *static, PYTHON, str(lines.out), ranks=4)
    assert "a job of one node has a private store" in said


@pytest.mark.parametrize(("nproc", "ranks"), [(["--nproc-per-node=4"], 4), ([], 1)], ids=["four", "default"])
def test_any_program_runs_with_no_python_and_not_as_a_module(lines: Lines, nproc: list[str], ranks: int) -> None:
    words = ("--nnodes=1", *nproc, *USUAL, "--no-python")
    lines.refused(*words, "--module", SHELL, str(lines.out), text="--module and --no-python exclude each other")
    lines.succeeds(*words, SHELL, str(lines.out), ranks=ranks)


def test_variables_stand_for_options(lines: Lines) -> None:
    told = {"NNODES": "1", "NPROC_PER_NODE": "4", "RDZV_ID": "18", "MONITOR_INTERVAL": "1", "START_METHOD": "spawn"}
    env = {f"PET_{name}": value for name, value in {**told, "NO_PYTHON": "1"}.items()}
    lines.refused(SHELL, str(lines.out), text="exclude each other", **env, PET_MODULE="1")
    lines.succeeds(SHELL, str(lines.out), ranks=4, **env, PET_MODULE="0")


def test_run_path_takes_a_file_of_python(lines: Lines) -> None:
    lines.succeeds("--run-path", "--nnodes=1", "--nproc-per-node=4", *USUAL, PYTHON, str(lines.out), ranks=4)


def test_a_module_runs_as_one(lines: Lines, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "mod.py").write_text(Path(PYTHON).read_text())
    lines.succeeds("--nproc-per-node=2", "-m", "pack.mod", "--", str(lines.out), "--depth=24", ranks=2)
    assert lines.told(0)["arguments"] == ["--depth=24"]


# --- test_run.py: how many -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "env", "ranks"),
    [
        ("auto", {}, os.cpu_count()),
        ("cpu", {}, os.cpu_count()),
        # torch asks the driver, and its tests replace it; here the list of visible devices counts.
        ("auto", {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ("xpu", {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
    ],
    ids=["auto", "cpu", "auto-of-gpus", "gpu", "xpu"],
)
def test_workers_are_counted_by_devices_or_cores(lines: Lines, nproc: str, env: dict[str, str], ranks: int) -> None:
    lines.succeeds(f"--nproc-per-node={nproc}", *USUAL, "--no-python", SHELL, str(lines.out), ranks=ranks, **env)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--nproc-per-node=unknown", "--nproc-per-node=unknown: must be a number"),
        ("--nnodes=2:20:30", "--nnodes=2:20:30"),
        ("--logs_specs=DOESNOT_EXIST", "--logs-specs=DOESNOT_EXIST"),
        ("--rdzv-backend=supervisor", "--rdzv-backend=supervisor: not one of"),
    ],
)
def test_what_theirs_raises_for_is_refused_in_a_line(lines: Lines, word: str, text: str) -> None:
    lines.refused("--run-path", word, PYTHON, str(lines.out), text=text)


# --- test_run.py: where they meet ------------------------------------------------------------------------------------


def test_a_standalone_job_runs(lines: Lines) -> None:
    lines.succeeds("--nnodes=1", "--nproc-per-node=4", "--standalone", *USUAL, PYTHON, str(lines.out), ranks=4)


QUOTED = "--rdzv-conf='join_timeout=5,last_call_timeout=1,timeout=5'"


def test_an_elastic_job_of_one_node_runs_with_a_quoted_configuration(lines: Lines) -> None:
    (endpoint,) = free_endpoints(1)
    store = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint.replace('127.0.0.1', 'localhost')}", QUOTED)
    words = ("--nnodes=1:2", "--nproc-per-node=4", *store, "--rdzv-id=19", *USUAL)
    lines.succeeds(*words, PYTHON, str(lines.out), ranks=4)


def test_a_failing_worker_ends_the_elastic_job_with_one_report(lines: Lines) -> None:
    (endpoint,) = free_endpoints(1)
    store = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", QUOTED, "--rdzv-id=20", "--max-restarts=0")
    done = lines.run("--nnodes=1:2", "--nproc-per-node=2", *store, *USUAL, PYTHON, str(lines.out), SUITE_STATUS="3")
    assert done.returncode == ExitCode.WORKER_FAILED
    assert done.stderr.count("Root Cause") == 1, done.stderr


def test_two_launchers_of_one_line_share_the_ranks(lines: Lines) -> None:
    (endpoint,) = free_endpoints(1)
    store = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv_conf=timeout=60", "--rdzv-id=21")
    words = ("--nnodes=1:2", "--nproc-per-node=4", *store, "--join-grace=60", *USUAL, PYTHON, str(lines.out))
    with ThreadPoolExecutor() as threads:
        ends = list(threads.map(lambda _: lines.run(*words), range(2)))
    assert [end.returncode for end in ends] == [0, 0], ends
    assert lines.ranks() == set(range(8))


def test_a_job_that_has_ended_leaves_its_store_so_that_the_next_of_its_name_runs(lines: Lines) -> None:
    """Theirs: the rendezvous is shut down once."""
    (endpoint,) = free_endpoints(1)
    store = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=22")
    for _ in range(2):
        lines.succeeds("--nproc-per-node=2", *store, *USUAL, PYTHON, str(lines.out), ranks=2)
        lines.forget()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_launcher_and_its_workers(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import os, threading\nprint('pid', os.getpid())\nthreading.Event().wait()\n")
    env = {**forking.plain_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with log.open("wb") as file:
        words = [sys.executable, "-m", "edl.launch", "--nproc-per-node=2", *USUAL, str(script)]
        process = forking.start(words, {**env, forking.MARK: uuid.uuid4().hex}, tmp_path, file, file)
    try:
        until(lambda: log.read_text().count("pid ") == 2, "two workers")
        process.send_signal(number)
        expected = {signal.SIGTERM: ExitCode.TERMINATED, signal.SIGINT: ExitCode.INTERRUPTED}[number]
        assert process.wait(DEADLINE_S) == expected
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    for pid in re.findall(r"pid (\d+)", log.read_text()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


# --- test_run.py: what is written ------------------------------------------------------------------------------------


def test_teed_lines_begin_as_the_template_says(lines: Lines) -> None:
    words = ("--nproc-per-node=4", "--redirect=3", "--tee=3", *USUAL, "--no-python", SHELL, str(lines.out))
    said = lines.succeeds(*words, ranks=4, TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[rank${rank}]: ")
    for rank in range(4):
        assert f"[rank{rank}]: rank {rank} was here" in said


def test_a_virtual_local_rank_shows_each_worker_one_device(lines: Lines) -> None:
    """Theirs compares compiled kernels, which name the device."""
    words = ("--nproc-per-node=2", "--redirect=3", "--tee=3", *USUAL, "--virtual-local-rank", PYTHON, str(lines.out))
    lines.succeeds(*words, ranks=2, CUDA_VISIBLE_DEVICES="4,5")
    seen = [lines.told(rank)["environment"] for rank in range(2)]
    assert [(one["LOCAL_RANK"], one["CUDA_VISIBLE_DEVICES"]) for one in seen] == [("0", "4"), ("0", "5")]


@pytest.mark.torch
@pytest.mark.parametrize("method", ["env://", pytest.param("tcp://localhost:", marks=pytest.mark.soak)])
def test_scripts_form_a_group_and_know_that_a_launcher_has_started_them(lines: Lines, method: str) -> None:
    pytest.importorskip("torch")
    (endpoint,) = free_endpoints(1)
    port = endpoint.rpartition(":")[2]
    words = (
        "--run-path",
        "--nproc-per-node=2",
        "--master-addr=localhost",
        f"--master-port={port}",
        "--logs_specs=default",
    )
    lines.succeeds(*words, GROUP, str(lines.out), method + (port if method[-1] == ":" else ""), ranks=2)
    assert {(lines.out / str(rank)).read_text() for rank in range(2)} == {"1 True"}


# --- launch_test.py --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_elder_launcher_gives_each_script_its_local_rank(lines: Lines) -> None:
    script = lines.out.parent / "last.py"
    script.write_text(
        "import argparse, os\nparser = argparse.ArgumentParser()\nparser.add_argument('--local-rank', type=int)\n"
        "parser.add_argument('folder')\nfound = parser.parse_args()\n"
        "assert found.local_rank == int(os.environ['LOCAL_RANK'])\n"
        "open(os.path.join(found.folder, os.environ['RANK']), 'w').close()\n"
    )
    words = ("--nproc-per-node=2", "--master-addr=localhost", "--node-rank=0", *USUAL, str(script), str(lines.out))
    done = lines.run(*words, module="edl.launch.torch")
    assert (done.returncode, lines.ranks()) == (0, {0, 1}), done.stderr


@pytest.mark.slow
def test_with_use_env_it_does_not(lines: Lines) -> None:
    done = lines.run("--nproc-per-node=2", "--use-env", *USUAL, PYTHON, str(lines.out), module="edl.launch.torch")
    assert (done.returncode, lines.ranks()) == (0, {0, 1}), done.stderr
    assert lines.told(0)["arguments"] == []


# --- api_test.py -----------------------------------------------------------------------------------------------------


def theirs(endpoint: str, nodes: tuple[int, int], nproc: int, **more: Any) -> Any:
    """A config as their tests make it: torch's own class where that is installed."""
    fields = {"rdzv_backend": "etcd", "monitor_interval": 0.1, "start_method": "spawn", "max_restarts": 0, **more}
    made: Callable[..., Any] = LaunchConfig
    with contextlib.suppress(ImportError):
        from torch.distributed.launcher.api import LaunchConfig as Torchs

        made = Torchs
    return made(nodes[0], nodes[1], nproc, rdzv_endpoint=endpoint, **fields)


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what workers leave."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def ranks_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entrypoint", "before"),
    [(sys.executable, ["-u", PYTHON]), pytest.param(SHELL, [], marks=pytest.mark.soak)],
    ids=["python", "bash"],
)
def test_scripts_run_from_python_one_call_after_another_on_one_store(
    etcd: OutsideEtcd, quiet: Path, entrypoint: str, before: Sequence[str]
) -> None:
    """Calls without a name on a shared store are jobs of their own."""
    for _ in range(2):
        assert elastic_launch(theirs(etcd.endpoint, (1, 1), 4), entrypoint)(*before, str(quiet)) == {}
        assert ranks_of(quiet) == {"0", "1", "2", "3"}
        for path in quiet.iterdir():
            path.unlink()


@pytest.mark.slow
def test_a_function_returns_by_rank(etcd: OutsideEtcd, quiet: Path) -> None:
    found = elastic_launch(theirs(etcd.endpoint, (1, 1), 4), suite_functions.ten_and_rank)()
    assert found == {0: 10, 1: 11, 2: 12, 3: 13}


@pytest.mark.slow
@pytest.mark.torch
def test_a_sum_over_a_static_rendezvous_with_a_rank(quiet: Path) -> None:
    pytest.importorskip("torch")
    from tests.process.workers import suite_sum

    (endpoint,) = free_endpoints(1)
    config = theirs(endpoint, (1, 1), 4, rdzv_backend="static", rdzv_configs={"rank": 0})
    assert elastic_launch(config, suite_sum.sum_of_ranks)() == dict.fromkeys(range(4), 6)


def test_an_elastic_call_runs_with_the_nodes_that_there_are(etcd: OutsideEtcd, quiet: Path) -> None:
    config = theirs(etcd.endpoint, (1, 2), 4, run_id=uuid.uuid4().hex)
    elastic_launch(config, sys.executable)("-u", PYTHON, str(quiet))
    assert ranks_of(quiet) == {"0", "1", "2", "3"}
    with pytest.raises(UsageError, match="Give the same run_id on every node"):
        elastic_launch(theirs(etcd.endpoint, (1, 2), 4), sys.executable)("-u", PYTHON, str(quiet))


@pytest.mark.slow
def test_a_failure_is_raised_to_the_caller_with_its_root_cause(
    etcd: OutsideEtcd, quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUITE_STATUS", "3")
    with pytest.raises(JobFailed) as script:
        elastic_launch(theirs(etcd.endpoint, (1, 1), 2), sys.executable)("-u", PYTHON, str(quiet))
    assert script.value.failures[0].exit_code == 3
    with pytest.raises(JobFailed, match="on purpose") as function:
        elastic_launch(theirs(etcd.endpoint, (1, 1), 2), suite_functions.fail)()
    assert "suite_functions.py" in function.value.failures[0].traceback


def test_an_error_of_the_launcher_itself_is_raised_as_what_it_is(quiet: Path) -> None:
    """Theirs replaces the agent by one that raises; ours cannot reach its store."""
    (nobody,) = free_endpoints(1)
    config = LaunchConfig(
        1, 1, 1, run_id="x", rdzv_backend="etcd", rdzv_endpoint=nobody, rdzv_configs={"connect_timeout": 1}
    )
    with pytest.raises(Exception, match=nobody) as raised:
        elastic_launch(config, suite_functions.ten_and_rank)()
    assert not isinstance(raised.value, JobFailed)


@pytest.mark.slow
def test_launchers_in_processes_of_their_own_share_the_ranks(etcd: OutsideEtcd, quiet: Path, tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(
        "import sys\nfrom edl.launch.api import LaunchConfig, elastic_launch\nif __name__ == '__main__':\n"
        "    endpoint, name, *command = sys.argv[1:]\n"
        "    config = LaunchConfig(1, 2, 4, run_id=name, rdzv_backend='etcd', rdzv_endpoint=endpoint,\n"
        "                          options={'join_grace': 60})\n"
        "    elastic_launch(config, sys.executable)('-u', *command)\n"
    )
    words = [sys.executable, str(script), etcd.endpoint, uuid.uuid4().hex, PYTHON, str(quiet)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    callers = [subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        assert [caller.wait(DEADLINE_S) for caller in callers] == [0, 0]
    finally:
        for caller in callers:
            caller.kill()
            caller.wait()
    assert ranks_of(quiet) == {str(rank) for rank in range(8)}
