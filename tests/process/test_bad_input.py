"""Invalid command lines: a clear message, the right exit status, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.exit_codes import ExitCode
from tests.process.free_ports import free_endpoints
from tests.process.harness import Job, OutsideEtcd
from tests.support.small_disk import small_disk

HAS_STARTED = ("is the Master", "round 1", "serving the store")


def refused(job: Job, code: ExitCode, *texts: str, limit_s: float = 60.0) -> None:
    """The launcher ends with this status, and says so in one message that has all these texts.

    What becomes known after the node has joined stands in the Master's log as well, as the reason why it leaves.
    """
    node = job.nodes["a"]
    assert node.exit_code(limit_s) == code, node.text
    said = [line for line in node.text.splitlines() if "error" in line.lower() and "node a leaves: " not in line]
    assert len(said) == 1, node.text
    for text in texts:
        assert text in said[0], f"{text!r} is missing: {said[0]}"
    assert "Traceback" not in node.text
    assert "Exception" not in node.text
    job.check_nothing_left(10)
    assert not [path for path in job.temporary.glob("*/**/*") if path.is_file()]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, [], "etcd-embedded", nnodes="1") as job:
        yield job


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (["--nnodes=3:2"], ["--nnodes=3:2", "the maximum 2 is below the minimum 3", "--nnodes=2:3"]),
        (["--nnodes=0"], ["--nnodes=0:0", "at least 1"]),
        (["--nnodes=two"], ["--nnodes=two", "not a number of nodes"]),
        (
            ["--node-unit=4", "--nnodes=1:3"],
            ["--node-unit=4", "no node count within --nnodes=1:3 is a multiple of 4", "Raise the maximum to 4"],
        ),
        (["--rdzv-id=a/b"], ["--rdzv-id='a/b'", "'/' not allowed", "Use letters"]),
        (["--rdzv-conf=connect_timeout=x"], ["--rdzv-conf=connect_timeout=x", "'x' is not a number"]),
        (["--rdzv-conf=ca=/nowhere/ca.pem"], ["--rdzv-conf ca=/nowhere/ca.pem", "no such file"]),
        (["--rdzv-backend=zookeeper"], ["--rdzv-backend=zookeeper", "not one of", "etcd-embedded"]),
        (["--rdzv-backend=etcd", "--rdzv-endpoint="], ["--rdzv-backend=etcd needs an address"]),
        (["--rdzv-endpoint=127.0.0.1:x"], ["127.0.0.1:x"]),
        (["--rdzv-endpoint=127.0.0.1:99999"], ["99999"]),
        (["--nproc-per-node=0"], ["--nproc-per-node=0", "from 1 to 4096"]),
        (["--max-restarts=-1"], ["--max-restarts=-1", "must be 0 or more"]),
        (["--lease-ttl=0.5"], ["--lease-ttl=0.5", "from 1 to 3600"]),
        (["--node-id=a/b"], ["--node-id='a/b'", "use 1 to 128 letters"]),
        (["--node-rank=1"], ["--node-rank=1", "below the maximum of --nnodes=1"]),
        (["--tee=7"], ["--tee=7"]),
        (["--nnodes=2"], ["--rdzv-endpoint", "--nnodes=2 needs a store that every node can reach"]),
        (["--fault-tolerance=heroic"], ["--fault-tolerance", "heroic", "elastic"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_settings(job: Job, options: list[str], texts: list[str]) -> None:
    job.start("a", options=options)
    try:
        refused(job, ExitCode.USAGE, *texts)
    finally:
        assert not any(text in job.nodes["a"].text for text in HAS_STARTED)
    assert not list(job.temporary.iterdir()), "nothing was started, yet something was made"


def test_a_missing_script(job: Job) -> None:
    job.script = ("trian.py",)
    job.start("a")
    refused(job, ExitCode.USAGE, "trian.py", "No such file", f"working directory {job.folder}", "-m", "--no-python")


def test_a_script_with_a_syntax_error(job: Job) -> None:
    (job.folder / "broken.py").write_text("import os\nfor x in\n    pass\n")
    job.script = ("broken.py",)
    job.start("a")
    refused(job, ExitCode.USAGE, "broken.py, line 2", "invalid syntax", "Nothing was started")


def test_a_missing_program(job: Job) -> None:
    job.script = ("--no-python", "trian")
    job.start("a")
    refused(job, ExitCode.USAGE, "trian", "no such program on the PATH")


def test_a_missing_module(job: Job) -> None:
    job.script = ("-m", "no.such_module")
    job.start("a")
    refused(
        job,
        ExitCode.USAGE,
        "-m no.such_module: ",
        "finds no module 'no'",
        f"working directory {job.folder}",
        "Install it",
    )


def test_an_endpoint_where_nobody_is(job: Job) -> None:
    (job.endpoints,) = [free_endpoints(1)]
    job.backend = "etcd"
    job.start("a", options=["--rdzv-conf=connect_timeout=2"])
    where = job.endpoints[0]
    refused(job, ExitCode.STORE_UNREACHABLE, where, "after 2 s", "Is etcd running there", "--rdzv-endpoint")


def test_an_endpoint_of_an_unknown_host(job: Job) -> None:
    job.endpoints, job.backend = ["no-such-host.invalid:2379"], "etcd"
    job.start("a", options=["--rdzv-conf=connect_timeout=2"])
    refused(job, ExitCode.STORE_UNREACHABLE, "no-such-host.invalid:2379", "--rdzv-endpoint")


@pytest.mark.slow
def test_a_port_that_another_program_has(job: Job) -> None:
    job.endpoints = free_endpoints(1)
    host, port = job.endpoints[0].split(":")
    with socket.create_server((host, int(port))):
        job.start("a")
        node = job.nodes["a"]
        assert node.exit_code() == ExitCode.PORT_IN_USE, node.text
        assert f"port {port} on {host} is needed for the embedded etcd member" in node.text
        assert "choose other ports with --rdzv-endpoint" in node.text
    refused(job, ExitCode.PORT_IN_USE)


def test_an_address_that_is_not_ours(job: Job) -> None:
    job.start("a", options=["--local-addr=192.0.2.1"])
    refused(job, ExitCode.PORT_IN_USE, "cannot listen on 192.0.2.1", "--local-addr")


def test_other_settings_than_the_running_job(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with (
        Job(tmp_path / "one", [etcd.endpoint], name="same") as running,
        Job(tmp_path / "two", [etcd.endpoint], name="same") as second,
    ):
        running.start("first")
        before = running.wait_world(1)
        second.start("a", options=["--nnodes=1:3", "--lease-ttl=5"])
        refused(
            second,
            ExitCode.JOB_CONFLICT,
            "job same",
            "--nnodes=1:3 (the running job has 1:4)",
            "--lease-ttl=5 (the running job has 10)",
            "another --rdzv-id",
        )
        assert running.wait_steps(3) == before


def test_another_script_than_the_running_job(tmp_path: Path, etcd: OutsideEtcd) -> None:
    other = tmp_path / "other.py"
    other.write_text("print('not what the job trains')\n")
    with (
        Job(tmp_path / "one", [etcd.endpoint], name="same") as running,
        Job(tmp_path / "two", [etcd.endpoint], name="same", script=(str(other),)) as second,
    ):
        running.start("first")
        before = running.wait_world(1)
        second.start("a")
        told = ("script: ", str(other), "by node first on", "another --rdzv-id", "--allow-differences=script")
        refused(second, ExitCode.FOREIGN_JOB, *told)
        assert running.wait_steps(3) == before


def test_a_node_rank_that_another_node_has(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint]) as job:
        job.start("first", options=["--node-rank=0"])
        before = job.wait_world(1)
        job.start("a", options=["--node-rank=0"])
        node = job.nodes["a"]
        assert node.exit_code() == ExitCode.JOB_CONFLICT
        assert "--node-rank=0 is taken" in node.text
        assert "by node first" in node.text
        assert job.wait_steps(3) == before


@pytest.mark.slow
def test_a_framework_that_is_not_installed(job: Job, tmp_path: Path) -> None:
    bare = interpreter_without(tmp_path, "torch")
    (tmp_path / "train.py").write_text("import torch\nprint(torch.__version__)\n")
    job.script = ("train.py",)
    job.start("a", command=[str(bare), *job.command("a")[1:]])
    advice = f"{bare} -m pip install torch"
    refused(job, ExitCode.CANNOT_START_WORKER, "cannot import torch", "No module named 'torch'", advice)


def interpreter_without(folder: Path, package: str) -> Path:
    """An environment that has everything this one has, except one package."""
    made = folder / "venv"
    venv.create(made, symlinks=True)
    (packages,) = made.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(package):
            with contextlib.suppress(FileExistsError):
                (packages / entry.name).symlink_to(entry)
    return made / "bin" / "python"


def test_a_disk_that_is_full_costs_log_lines_and_no_step(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with small_disk(tmp_path / "disk", "16k") as disk:
        options = ("--redirects=3", "--tee=0:2", "--max-restarts=0")
        arguments = ("--steps=30", f"--say={'x' * 30_000}", "--fail=0:20:3", "--fail-rounds=1")
        with Job(tmp_path, [etcd.endpoint], options=options, arguments=arguments) as job:
            job.start("a", options=[f"--log-dir={disk}"])
            node = job.nodes["a"]
            assert node.exit_code() == ExitCode.WORKER_FAILED
            assert job.steps()[-1].step == 19
            said = [line for line in node.text.splitlines() if "No space left" in line]
            # One line for each file: the worker's, the job's history, the report.
            assert 1 <= len(said) == len({line.partition(str(disk))[2].partition(" ")[0] for line in said}) <= 3, said
            assert str(disk) in said[0]
            assert "Traceback" not in node.text
            assert "giving up with status 3" in node.text.split("Root Cause")[1]


def test_a_log_folder_that_cannot_be_made(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint], arguments=("--steps=5",)) as job:
        (tmp_path / "file").write_text("in the way")
        job.start("a", options=[f"--log-dir={tmp_path / 'file'}", "--redirects=3"])
        node = job.nodes["a"]
        assert node.exit_code() == 0, node.text
        assert str(tmp_path / "file") in node.text
        assert "Traceback" not in node.text


@pytest.mark.slow
def test_both_ends_of_a_pipe_that_nobody_reads(tmp_path: Path, etcd: OutsideEtcd) -> None:
    """``edl-run … | head``: the console goes away, the training does not."""
    with Job(tmp_path, [etcd.endpoint], arguments=("--steps=10",)) as job:
        reading, writing = os.pipe()
        os.close(reading)
        process = subprocess.Popen(
            job.command("a"), env=job.base_environment(), stdin=subprocess.DEVNULL, stdout=writing, stderr=writing,
            start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        assert process.wait(60) == 0
        assert job.steps()[-1].step == 10


def test_a_script_that_refuses_its_own_command_line_is_started_once(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "strict.py"
    script.write_text(
        "import argparse\n"
        "print('started', flush=True)\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--folder')\n"
        "parser.add_argument('--data', required=True)\n"
        "parser.parse_args()\n"
    )
    job.script = [str(script)]
    node = job.start("a", options=["--max-restarts=3"])
    assert node.exit_code() == ExitCode.WORKER_FAILED
    assert node.text.count("started") == 1
    assert "starting again would not help" in node.text
    assert "the following arguments are required: --data" in node.text
