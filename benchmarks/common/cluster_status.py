"""Queries a running edl job with the users' own commands."""

from __future__ import annotations

import json
import subprocess
import time

from benchmarks.common import processes
from benchmarks.common.job import Job, NotReached
from benchmarks.common.launchers import REPOSITORY, Edl, node_name


def _ask(job: Job, word: str) -> tuple[str, str]:
    """Run ``edl WORD --json`` and return its output and its errors. Raises ``NotReached``."""
    if not isinstance(job.launcher, Edl):
        raise NotReached(f"{job.launcher.name} has no Master")
    command = [job.launcher.python, "-m", "edl.cli", word, "--json"]
    command += [f"--rdzv-endpoint={job.plan.endpoint}", f"--rdzv-id={job.plan.job_id}"]
    env = processes.clean_environment({"PYTHONPATH": str(REPOSITORY)})
    try:
        done = subprocess.run(command, env=env, cwd=job.plan.folder, capture_output=True, timeout=20.0, check=False)
    except subprocess.TimeoutExpired:
        raise NotReached(f"edl {word} gave no answer in 20 s") from None
    said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
    return done.stdout.decode(errors="replace"), f"exit status {done.returncode}, {said[0]}"


def master_id(job: Job) -> str:
    """Node id of the Master. Raises ``NotReached`` when the status command does not report one."""
    answer, complaint = _ask(job, "status")
    try:
        master = json.loads(answer)["master"]
        return str(master["node"] if isinstance(master, dict) else master)
    except (ValueError, KeyError, TypeError):
        raise NotReached(f"edl status names no Master: {complaint}") from None


def master_node(job: Job) -> int:
    """Index of the simulated node that runs the Master."""
    name = master_id(job)
    for node in job.nodes:
        if node_name(node) == name:
            return node
    raise NotReached(f"the Master is on {name!r}, which is no node of this run")


def noticed_s(job: Job, after_s: float, kind: str) -> float | None:
    """Time of the first event of a kind in the job's history after a given time. Both are monotonic times of this host
    in seconds. Call it when nothing is being measured any more."""
    offset_s = time.time() - time.monotonic()
    try:
        answer, _ = _ask(job, "events")
        entries = [json.loads(line) for line in answer.splitlines()]
    except (NotReached, ValueError):
        return None
    times = [entry["at_s"] - offset_s for entry in entries if entry["kind"] == kind]
    return min((at_s for at_s in times if at_s > after_s), default=None)
