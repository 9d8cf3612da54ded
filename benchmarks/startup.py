"""Measures the seconds from the launch command to the first completed step of all ranks, for edl and torchrun in turn.

    python -m benchmarks.startup --runs 5

A single node, with one and with two workers: ``torchrun --standalone`` against ``edl.launch`` without an endpoint.
Every start is cold: a new launcher, new workers, an empty folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.common import report
from benchmarks.common.job import NotReached, launch
from benchmarks.common.launchers import Launcher
from benchmarks.common.options import common_options, gather
from benchmarks.common.report import Outcome


def measure(launcher: Launcher, workers: int, keep: Path | None) -> Outcome:
    """Measure one start. Never raises for a launcher's failure."""
    event = f"1 node x {workers}"
    load = report.load_average()
    with launch(launcher, launcher.script("torch"), (1, 1), workers_per_node=workers, alone=True, keep=keep) as job:
        begun_s = job.start(0)
        try:
            world = job.wait_next(begun_s, workers)
        except NotReached as error:
            return Outcome(event, launcher.name, note=f"never started: {error}", load=load)
        return Outcome(event, launcher.name, {"first step": world.first_s - begun_s}, load=load)


@click.command()
@click.option("--workers", default="1,2", show_default=True, help="Workers per node, a comma list.")
@common_options(default_runs=5)
def main(workers: str, **rest: Any) -> None:
    """Measure how long a job takes from its command to its first step."""
    common = gather(default_names="edl,torchrun-default", **rest)
    outcomes: list[Outcome] = []
    for count in (int(text) for text in workers.split(",")):
        for run in range(common.runs):
            for launcher in common.launchers:
                one = measure(launcher, count, common.keep)
                told = report.seconds(one.values["first step"]) if one.values else one.note
                report.progress(f"{one.event} {run + 1}/{common.runs} {launcher.name}: {told}")
                outcomes.append(one)
    title = "From the launch command to the first step of all ranks"
    report.show(title, outcomes)
    report.write_json(common.json_path, title, outcomes, runs=common.runs)


if __name__ == "__main__":
    main()
