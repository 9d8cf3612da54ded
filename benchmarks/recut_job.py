"""Re-cuts a sharded state in real jobs, 2 -> 4 -> 3 -> 1 -> 4 nodes with two workers each: the pauses of the processes
that stay, and the bytes that launchers read for their workers, from their own memory and from other nodes'.

    python -m benchmarks.recut_job --layouts fsdp,hsdp,tp --megabytes 20 --runs 3

Nodes join, one is killed, two are drained. ``benchmarks.recut`` has the least possible bytes.
"""

from __future__ import annotations

import itertools
import re
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.common import report
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import Edl
from benchmarks.common.report import Outcome
from benchmarks.common.steps import pause, redone

WORKERS = 2
STEPS = 5
"""Of each rank in a world, before the next change."""
LAYOUTS = ("fsdp", "hsdp", "tp")
LINE = re.compile(r"re-cut for a worker: (\d+) bytes from this node, (\d+) from others")


def read_bytes(job: Job) -> tuple[int, int]:
    """Bytes that all launchers have read for re-cuts so far: from their own node, from others."""
    texts = (path.read_text(errors="replace") for path in sorted(job.plan.folder.glob("launcher*.log")))
    found = [tuple(map(int, match)) for text in texts for match in LINE.findall(text)]
    return sum(here for here, _ in found), sum(away for _, away in found)


def story(job: Job) -> Iterator[tuple[str, int]]:
    """Change the world; yields the name of each change and the number of nodes after it, once it trains."""
    job.start(0)
    job.start(1)
    job.wait_running(2 * WORKERS, STEPS)
    yield "start", 2
    for nodes, act, touched in ((3, job.start, 2), (4, job.start, 3), (3, job.kill_node, 3)):
        act(touched)
        job.wait_running(nodes * WORKERS, STEPS)
        yield f"{'kill' if act == job.kill_node else 'join'} to {nodes}", nodes
    for nodes, leaving in ((2, 2), (1, 1)):
        job.drain_node(leaving)
        job.wait_running(nodes * WORKERS, STEPS)
        yield f"drain to {nodes}", nodes
    for nodes, new in ((2, 4), (3, 5), (4, 6)):
        job.start(new)
        job.wait_running(nodes * WORKERS, STEPS)
        yield f"join to {nodes}, again" if nodes > 2 else "join to 2", nodes


def measure(layout: str, megabytes: int, keep: Path | None) -> tuple[list[Outcome], dict[str, tuple[int, int]]]:
    """One run: the pauses, and by change the bytes read from the own node and from others."""
    options = ("--replica-size=2",) if layout == "tp" else ()
    launcher = Edl(sys.executable, rejoins=True, options=options)
    arguments = (f"--layout={layout}", f"--megabytes={megabytes}")
    moved: dict[str, tuple[int, int]] = {}
    load = report.load_average()
    with launch(launcher, "recut_torch.py", (1, 4), workers_per_node=WORKERS, arguments=arguments, keep=keep) as job:
        names = []
        before = 0, 0
        try:
            for name, _ in story(job):
                after = read_bytes(job)
                moved[name] = after[0] - before[0], after[1] - before[1]
                before = after
                names.append(name)
        except NotReached as error:
            return [Outcome(layout, "edl", started=False, note=f"after {names}: {error}", load=load)], moved
        worlds = job.steps.whole()
    values: dict[str, float] = {}
    again = 0
    for old, new in itertools.pairwise(worlds):
        metric = f"pause, {old.size} to {new.size} workers"  # a change may pass through another world
        while metric in values:
            metric += ", again"
        values[metric] = pause(old, new)
        again += redone(old, new)
    return [Outcome(layout, "edl", values, again, load=load)], moved


@click.command()
@click.option("--layouts", default=",".join(LAYOUTS), show_default=True, help="Comma list.")
@click.option("--megabytes", default=20, show_default=True, help="Parameters; the state is three times as large.")
@click.option("--runs", default=3, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all runs.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Keep the logs there.")
def main(layouts: str, megabytes: int, runs: int, json_path: Path | None, keep: Path | None) -> None:
    """Measure pauses and bytes of re-cuts in real jobs."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that clean-up runs
    names = layouts.split(",")
    if unknown := [name for name in names if name not in LAYOUTS]:
        raise click.UsageError(f"--layouts: {', '.join(unknown)} unknown; there are {', '.join(LAYOUTS)}")
    outcomes: list[Outcome] = []
    moved: dict[str, list[dict[str, tuple[int, int]]]] = {name: [] for name in names}
    for run in range(runs):
        for name in names:
            found, bytes_read = measure(name, megabytes, keep)
            outcomes += found
            moved[name].append(bytes_read)
            report.progress(f"{name} {run + 1}/{runs}: {found[0].note or found[0].values}, {bytes_read}")
    title = f"Re-cuts of {3 * megabytes} MB of state"
    report.show(title, outcomes)
    for name, found_bytes in moved.items():
        for change in dict.fromkeys(itertools.chain.from_iterable(found_bytes)):
            here, away = zip(*(one[change] for one in found_bytes if change in one), strict=True)
            click.echo(
                f"{name:<6}{change:<18}{statistics.median(here) / 1e6:>9.2f} MB from the own node,"
                f"{statistics.median(away) / 1e6:>9.2f} MB from others"
            )
    report.write_json(json_path, title, outcomes, runs=runs, megabytes=megabytes, moved=moved)


if __name__ == "__main__":
    main()
