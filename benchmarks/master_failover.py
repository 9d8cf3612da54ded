"""Measures whether training notices the death of edl's Master, whose node is killed while it is only a spare.

    python -m benchmarks.master_failover --runs 3

The job may have two nodes and gets four, so two are spares. At first the Master is usually a member of the world; then
it is killed and replaced by a new node, until a spare is elected. Then that one is killed, and the gaps between the
workers' steps around that time are compared with those just before.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from benchmarks.common import report
from benchmarks.common.cluster_status import master_node
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import Launcher
from benchmarks.common.options import common_options, gather
from benchmarks.common.report import Outcome
from benchmarks.common.steps import World, median_gap

MEMBERS = 2
SPARES = 2
ATTEMPTS = 8
WINDOW_S = 5.0
SETTLE_S = 2.0
"""Pause in seconds after the last change and the last status call, before the quiet window begins."""


def spare_master(job: Job) -> tuple[int, World]:
    """Wait until a spare is the Master; returns ``(its node, the running world)``. Raises ``NotReached`` after too many
    tries."""
    for _ in range(ATTEMPTS):
        world = job.wait_running(MEMBERS)
        master = master_node(job)
        if master not in world.nodes():
            return master, world
        job.start(max(job.nodes) + 1)
        time.sleep(SETTLE_S)
        struck_s = job.kill_node(master)
        job.wait_next(struck_s, MEMBERS)
        time.sleep(SETTLE_S)  # the election
    raise NotReached(f"no spare became Master in {ATTEMPTS} elections")


def wait_new_master(job: Job, old: int) -> None:
    """Wait until ``edl status`` shows another node. Called only after the measured window, since it costs CPU time."""
    deadline_s = time.monotonic() + job.launcher.deadline_s
    while time.monotonic() < deadline_s:
        try:
            if master_node(job) != old:
                return
        except NotReached:
            pass  # there is no Master at the moment
        time.sleep(0.5)
    raise NotReached("no new Master was elected")


def measure(launcher: Launcher, keep: Path | None) -> Outcome:
    """Measure one failover."""
    load = report.load_average()
    event = "Master killed"
    with launch(launcher, "train_torch.py", (MEMBERS, MEMBERS), etcd_members=3, keep=keep) as job:
        try:
            for node in range(MEMBERS + SPARES):
                job.start(node)
            job.wait_running(MEMBERS)
            time.sleep(SETTLE_S)  # spares join
            master, world = spare_master(job)
            time.sleep(SETTLE_S + WINDOW_S)
        except NotReached as error:
            return Outcome(event, launcher.name, started=False, note=f"did not start: {error}", load=load)
        struck_s = job.kill_node(master)
        time.sleep(WINDOW_S)
        job.steps.poll()
        try:
            wait_new_master(job, master)
        except NotReached as error:
            return Outcome(event, launcher.name, note=f"never recovered: {error}", load=load)
        return outcome(event, launcher, job, world, struck_s, load)


def outcome(event: str, launcher: Launcher, job: Job, world: World, struck_s: float, load: float) -> Outcome:
    """Gaps of all ranks before and after. A new world formed since then means that training was affected."""
    end_s = struck_s + WINDOW_S
    after = [*world.gaps(struck_s, end_s), world.silence(end_s)]
    if job.steps.newest() is not world:
        return Outcome(event, launcher.name, note="training was interrupted: a new world was formed", load=load)
    values = {
        "median step": median_gap(world, struck_s - WINDOW_S, struck_s),
        f"longest gap, {WINDOW_S:g} s before": max(world.gaps(struck_s - WINDOW_S, struck_s)),
        f"longest gap, {WINDOW_S:g} s after": max(after),
    }
    return Outcome(event, launcher.name, values, 0, load=load)


@click.command()
@common_options(default_runs=3)
def main(**rest: Any) -> None:
    """Show that the death of the Master does not delay training. Only edl launchers have a Master."""
    common = gather(default_names="edl", **rest)
    if any(not launcher.is_edl for launcher in common.launchers):
        raise click.UsageError("--launchers: only edl and edl-embedded have a Master")
    outcomes = []
    for run in range(common.runs):
        for launcher in common.launchers:
            one = measure(launcher, common.keep)
            told = report.figures(one.values)
            report.progress(f"failover {run + 1}/{common.runs} {launcher.name}: {told or one.note}")
            outcomes.append(one)
    title = "Steps of the workers around the death of the Master"
    report.show(title, outcomes)
    report.write_json(common.json_path, title, outcomes, runs=common.runs, window_s=WINDOW_S)


if __name__ == "__main__":
    main()
