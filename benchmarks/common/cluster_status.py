"""Ask a running edl job who its Master is, through the command that users have for it."""

from __future__ import annotations

import json
import subprocess

from benchmarks.common import processes
from benchmarks.common.job import Job, NotReached
from benchmarks.common.launchers import REPOSITORY, Edl, node_name


def master_id(job: Job) -> str:
    """Node id of the Master. Raises ``NotReached`` when the status command does not say."""
    if not isinstance(job.launcher, Edl):
        raise NotReached(f"{job.launcher.name} has no Master")
    command = [job.launcher.python, "-m", "edl.cli", "status", "--json"]
    command += [f"--rdzv-endpoint={job.plan.endpoint}", f"--rdzv-id={job.plan.job_id}"]
    env = processes.clean_environment({"PYTHONPATH": str(REPOSITORY)})
    try:
        done = subprocess.run(command, env=env, cwd=job.plan.folder, capture_output=True, timeout=20.0, check=False)
    except subprocess.TimeoutExpired:
        raise NotReached("edl status gave no answer in 20 s") from None
    try:
        master = json.loads(done.stdout)["master"]
        return str(master["node"] if isinstance(master, dict) else master)
    except (ValueError, KeyError, TypeError):
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        raise NotReached(f"edl status (exit status {done.returncode}) names no Master: {said[0]}") from None


def master_node(job: Job) -> int:
    """Index of the simulated node whose launcher is the Master."""
    name = master_id(job)
    for node in job.nodes:
        if node_name(node) == name:
            return node
    raise NotReached(f"the Master is on {name!r}, which is no node of this run")
