"""Launchers and commands of another version of edl beside a running job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import edl
from edl.exit_codes import ExitCode
from tests.process import forking
from tests.process.harness import Job, OutsideEtcd

OTHER = "99.1.0"


def of_another_version(command: list[str]) -> list[str]:
    """A command ``python -m MODULE …`` run by an edl that has another version and is the same otherwise."""
    python, _, module, *rest = command
    program = f"import edl; edl.__version__ = {OTHER!r}; from {module}.__main__ import main; main()"
    return [python, "-c", program, *rest]


@pytest.mark.slow
def test_a_launcher_of_another_version_is_refused_and_training_goes_on(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint]) as job:
        job.start("first")
        before = job.wait_world(1)
        command = of_another_version(job.command("a", "--allow-differences=owner,script,versions"))
        assert job.start("a", command=command).exit_code() == ExitCode.FOREIGN_JOB
        (said,) = [line for line in job.nodes["a"].text.splitlines() if "error" in line]
        for text in (
            f"job {job.name} runs edl {edl.__version__} (started by node first on ",
            f"this launcher is edl {OTHER}",
            f"Install edl {edl.__version__} on this node",
            f"start all launchers with edl {OTHER}",
        ):
            assert text in said
        assert "Traceback" not in job.nodes["a"].text
        where = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={job.name}", "--json")
        command = of_another_version([sys.executable, "-m", "edl.cli", "status", *where])
        asked = forking.run(command, job.base_environment(), job.folder, 120)
        assert asked.returncode == 0 and '"phase": "running"' in asked.stdout
        assert f"job {job.name} runs edl {edl.__version__}, and this command is edl {OTHER}" in asked.stderr
        assert job.wait_steps(3) == before
