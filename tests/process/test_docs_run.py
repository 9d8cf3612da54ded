"""Commands of the documentation, run as they are written: those that need no job, and all others in one job.

Which commands those are, and what is substituted in them, is in ``tests/support/docs_steps.py``. What becomes of all
others is in ``docs_commands.py``; ``tests/unit/test_docs_commands.py`` holds that no command is forgotten.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import DEADLINE_S, ROOT, WORKERS, Job, OutsideEtcd, until
from tests.support.docs_steps import ALONE, BEFORE_THE_END, HTTP, IN_THE_JOB, Step, substituted

SHELL = re.compile(r"[|<>$;&(]|^(?!edl )")
"""Lines that need a shell."""
NODES = ("node-a", "node-b", "node-c", "node-d")


def programs(folder: Path) -> Path:
    """A folder with the programs that the documentation calls, as an installation has them."""
    found = folder / "bin"
    found.mkdir()
    for name, words in {"edl": "-m edl.cli", "python": ""}.items():
        (found / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (found / name).chmod(0o755)
    return found


class Shell:
    """Runs the steps in one folder. ``problems``: of all steps, so that one failure does not hide the next."""

    def __init__(self, folder: Path, environment: Mapping[str, str], job: Job | None = None) -> None:
        self.folder = folder
        self.environment = {**environment, "PATH": f"{programs(folder)}:{environment['PATH']}"}
        self.job = job
        self.problems: list[str] = []

    def run(self, step: Step, **values: str) -> None:
        """Run one step. Its status has to be 0, and it has to print what the step says."""
        try:
            self._run(substituted(step, **values), step)
        except (AssertionError, subprocess.TimeoutExpired) as problem:
            self.problems.append(str(problem))

    def _run(self, line: str, step: Step) -> None:
        if step.follows:
            said = self._follow(line, step.says)
        else:
            done = self._command(line, step.stdin.replace("{folder}", str(self.folder)))
            said = done.stdout
            assert done.returncode == 0, f"{line}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
            assert "Traceback" not in done.stderr, f"{line}\n{done.stderr}"
        assert re.search(step.says, said), f"{line} did not print {step.says!r} but\n{said}"

    def _command(self, line: str, stdin: str) -> subprocess.CompletedProcess[str]:
        if self.job is not None and not SHELL.search(line):
            return self.job.edl(*shlex.split(line)[1:])
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def _follow(self, line: str, says: str) -> str:
        output = self.folder / "follow.out"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", line], cwd=self.folder, env=self.environment, stdout=file, start_new_session=True
            )
        try:
            until(lambda: re.search(says, output.read_text()) or process.poll() is not None, f"{says!r} from {line}")
            assert process.poll() is None, f"{line} ended with {process.returncode}: {output.read_text()}"
            return output.read_text()
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.mark.slow
def test_commands_that_need_no_job(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("sklearn")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.store").write_text("127.0.0.1:2379\n")
    (tmp_path / "train").mkdir()
    (tmp_path / "denylist").mkdir()
    columns = {name: [1, None, 3] for name in ("I1", "I2", "I3")} | {name: [1, 2, 3] for name in ("C1", "C2")}
    for day in (1, 2):
        parquet.write_table(pa.table(columns), tmp_path / "train" / f"day-{day}.parquet")
    with Job(tmp_path, ()) as nothing:  # it holds that no process stays behind
        shell = Shell(tmp_path, nothing.base_environment())
        for step in ALONE:
            shell.run(step)
        assert not shell.problems, "\n\n".join(shell.problems)


def join(job: Job, name: str) -> None:
    """Start a node, once another of its name has ended, and wait until it trains."""
    if name in job.nodes:
        job.nodes[name].exit_code()
    job.start(name, nproc=2)
    job.wait_status(
        lambda seen: any(node["node"] == name and node["state"] == "running" for node in seen["nodes"]),
        f"{name} in the world",
    )


@pytest.mark.slow
def test_commands_of_a_job(tmp_path: Path, own_etcd: OutsideEtcd) -> None:
    page_me = tmp_path / "page-me"
    page_me.write_text("#!/bin/sh\ncat > /dev/null\n")
    page_me.chmod(0o755)
    channels = tmp_path / "channels"
    channels.write_text(f"exec:{page_me}\n")
    channels.chmod(0o600)
    options = (
        *("--checkpoint-dir=checkpoints", "--history-dir=history", f"--notify-file={channels}", "--http-port=0"),
        *("--global-batch=48", "--autoscale=throughput", "--redirects=3", "--lease-ttl=60"),
    )
    where = {"EDL_RDZV_ENDPOINT": own_etcd.endpoint, "EDL_RDZV_ID": "digits"}
    script = (str(WORKERS / "rejoin_plain.py"),)
    job = Job(tmp_path, [own_etcd.endpoint], name="digits", nnodes="1:16", options=options, script=script)
    job.environment = where
    with job as running:
        for name in NODES:
            running.start(name, nproc=2)
        running.wait_world(2 * len(NODES))
        values = {"job": "digits", "endpoint": own_etcd.endpoint, "http": str(running.status()["http"])}
        shell = Shell(tmp_path, running.base_environment(), running)
        for step in IN_THE_JOB:
            if step.line.startswith("curl") and shutil.which("curl") is None:
                continue
            if step.start:
                join(running, step.start)
            if step.line.startswith("curl "):
                step = replace(step, run=f"{HTTP}; curl -sf {step.line.removeprefix('curl ')}")
            shell.run(step, **values)
        for step in BEFORE_THE_END:
            shell.run(step, **values)
        assert not shell.problems, "\n\n".join(shell.problems)
        assert running.nodes["node-a"].exit_code() == ExitCode.KILLED
