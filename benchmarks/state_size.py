"""Measures what the size of a state costs: the first commits, later ones, and the restore after a worker was killed.

    python -m benchmarks.state_size --gigabytes 1,4 --events kill,join

The state is on the card if there is one, which all ranks share. ``kill``: one node, one worker; ``kill to step`` is the
time from SIGKILL to the first step of the new process: noticing, a forked process, the card's context, the restore and
one step. ``join``: a second node joins the first; ``pause`` is the time that the worker of the first is without a step.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.common import report
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import Launcher
from benchmarks.common.options import Common, common_options, gather
from benchmarks.common.report import Outcome
from benchmarks.common.steps import longest_gap, pause, redone

SCRIPT = "state_torch.py"
COMMITS = 8
SETTLED = 3
"""Commits before this one use buffers that are being made."""
LIMIT_S = 300.0


def notes(job: Job, key: str) -> list[dict[str, Any]]:
    """The script's notes that have this key."""
    file = job.plan.folder / "notes"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in map(json.loads, lines) if key in line]


def check_restored(job: Job) -> None:
    """Raise ``RuntimeError`` if a worker has restored something wrong."""
    if wrong := [note["wrong"] for note in notes(job, "restored") if note["wrong"]]:
        raise RuntimeError(f"the restored state is wrong in tensors {wrong}")


def measure_join(launcher: Launcher, gigabytes: float, keep: Path | None) -> Outcome:
    """A second node joins. Never raises for a launcher's failure."""
    title = f"{gigabytes:g} GB, join"
    load = report.load_average()
    with launch(launcher, SCRIPT, (1, 2), keep=keep, patience=LIMIT_S / launcher.deadline_s) as job:
        try:
            (job.plan.folder / "gigabytes").write_text(str(gigabytes))
            job.start(0)
            old = job.wait_running(1, COMMITS)
            begun_s = job.start(1)
            new = job.wait_next(begun_s, 2)
            job.wait_running(2, COMMITS)
        except NotReached as error:
            return Outcome(title, launcher.name, started=False, note=str(error), load=load)
        check_restored(job)
        stayed_s = longest_gap(job.steps.worlds.values(), set(old.pids(0)), begun_s, new.first_s)
        values = {"pause": pause(old, new), "longest gap of who stays": stayed_s, "from launch": new.first_s - begun_s}
        return Outcome(title, launcher.name, values, redone=redone(old, new), load=load)


def measure_kill(launcher: Launcher, gigabytes: float, keep: Path | None) -> Outcome:
    """The only worker is killed. Never raises for a launcher's failure."""
    title = f"{gigabytes:g} GB"
    load = report.load_average()
    with launch(launcher, SCRIPT, (1, 1), keep=keep) as job:
        try:
            (job.plan.folder / "gigabytes").write_text(str(gigabytes))
            job.start(0)
            job.wait(lambda: notes(job, "step")[COMMITS:] or None, f"{COMMITS} commits", LIMIT_S)
            pid = notes(job, "step")[-1]["pid"]
            struck_s = job.kill_worker(pid)
            again = job.wait(
                lambda: [note for note in notes(job, "step") if note["pid"] != pid] or None, "a step", LIMIT_S
            )
        except NotReached as error:
            return Outcome(title, launcher.name, started=False, note=str(error), load=load)
        commits = [note["commit_s"] for note in notes(job, "step") if note["pid"] == pid]
        check_restored(job)
        restored = notes(job, "restored")[-1]
        values = {
            "first commit": commits[0],
            "second": commits[1],
            "later": statistics.median(commits[SETTLED:]),
            "kill to restored": restored["t"] - struck_s,
            "kill to step": again[0]["t"] - struck_s,
        }
        return Outcome(title, launcher.name, values, load=load)


EVENTS = {"kill": measure_kill, "join": measure_join}


def measure_all(common: Common, sizes: list[float], events: list[str]) -> list[Outcome]:
    """All runs of all events and sizes."""
    outcomes = []
    for event, size in itertools.product(events, sizes):
        for run in range(common.runs):
            for launcher in common.launchers:
                one = EVENTS[event](launcher, size, common.keep)
                figures = report.figures(one.values)
                report.progress(f"{one.event} {run + 1}/{common.runs} {launcher.name}: {figures or one.note}")
                outcomes.append(one)
                time.sleep(0.5)
    return outcomes


@click.command()
@click.option("--gigabytes", default="1", show_default=True, help="Comma list of state sizes in GB.")
@click.option("--events", default="kill", show_default=True, help=f"Comma list of {', '.join(EVENTS)}.")
@common_options(default_runs=3)
def main(gigabytes: str, events: str, names: str, **rest: Any) -> None:
    """Measure commits, restores and joins by the size of the state."""
    if unknown := [name for name in events.split(",") if name not in EVENTS]:
        raise click.BadParameter(f"{', '.join(unknown)} is not one of {', '.join(EVENTS)}", param_hint="--events")
    common = gather(names=names, default_names="edl-rejoin", **rest)
    outcomes = measure_all(common, [float(size) for size in gigabytes.split(",")], events.split(","))
    title = "Size of the state, torch"
    report.show(title, outcomes)
    report.write_json(common.json_path, title, outcomes, runs=common.runs)


if __name__ == "__main__":
    main()
