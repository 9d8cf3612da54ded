"""Injects faults into a job of three nodes every few seconds, on a small disk and with few descriptors, and reports
growth.

    python -m benchmarks.endurance --minutes=60 --disk-mb=500 --nofile=512 --kill-every=10

Launchers, their logs, temporary files, the store's data and the checkpoints share one file system of that size. A line
is printed each minute, and a verdict at the end. The exit status is 1 when something grew, was lost or was left behind.
"""

from __future__ import annotations

import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil

from benchmarks.endurance.disk import MB, PARTS, Disk, Usage, small_disk
from benchmarks.endurance.job import NODES, SPARED, Endurance, Held, Plan
from benchmarks.endurance.verdict import Finding, growth, report

POLL_S = 0.1
SAMPLE_S = 10.0
MINUTE_S = 60.0
END_S = 180.0
ALLOWED = {"rss_mb": 10.0, "descriptors": 6.0, "threads": 3.0}
"""Allowed growth over half the run: a launcher that becomes the Master needs slightly more than another."""
ALLOWED_DISK_MB = 10.0
ALLOWED_FILES = 50.0
REDONE_PER_FAULT = 3

Series = list[tuple[float, float]]


@dataclass(slots=True)
class Record:
    """All samples. Times are in seconds since the beginning."""

    launchers: dict[tuple[str, str], Series] = field(default_factory=dict)
    used: Series = field(default_factory=list)
    files: Series = field(default_factory=list)
    processes: Series = field(default_factory=list)
    least_free: int = 1 << 62

    def take(self, t: float, job: Endurance, usage: Usage) -> dict[str, Held | None]:
        """Take one sample of everything."""
        held = {node: job.held(node) for node in NODES}
        for node, found in held.items():
            for what in ALLOWED if found is not None else ():
                self.launchers.setdefault((node, what), []).append((t, float(getattr(found, what))))
        self.used.append((t, usage.used / MB))
        self.files.append((t, usage.files))
        self.processes.append((t, job.processes_now()))
        self.least_free = min(self.least_free, usage.free)
        return held


def line(t: float, job: Endurance, usage: Usage, held: dict[str, Held | None]) -> str:
    """The line that is printed each minute."""
    faults = " ".join(f"{kind.replace(' ', '-')}={count}" for kind, count in sorted(job.faults.items()))
    launchers = " ".join(
        f"{node}={one.rss_mb:.0f}MB/{one.descriptors}fd/{one.threads}t" if one else f"{node}=away"
        for node, one in held.items()
    )
    parts = " ".join(f"{part}={usage.parts[part] / MB:.1f}" for part in PARTS)
    left = job.leftovers()
    return (
        f"{t / MINUTE_S:5.1f} min | faults {sum(job.faults.values())}: {faults} | world {job.world}, step "
        f"{job.steps.last}, redone {job.steps.redone} | {launchers} | disk used {usage.used / MB:.1f} MB, free "
        f"{usage.free / MB:.1f} MB: {parts}, {usage.files} files | {job.processes_now()} processes, left {left or 0}"
    )


def strike_for(job: Endurance, disk: Disk, minutes: float, every_s: float, say: Callable[[str], None]) -> Record:
    """Run the job and inject faults."""
    record, begun = Record(), time.monotonic()
    due = {"fault": every_s, "sample": SAMPLE_S, "minute": MINUTE_S}
    while (t := time.monotonic() - begun) < minutes * MINUTE_S:
        job.poll()
        if t >= due["fault"]:
            due["fault"] += every_s
            done = job.strike()
            if done:
                say(f"        {time.monotonic() - begun:6.0f} s: {done}")
        if t >= due["sample"]:
            due["sample"] += SAMPLE_S
            usage = disk.usage()
            held = record.take(t, job, usage)
            if t >= due["minute"]:
                due["minute"] += MINUTE_S
                print(line(t, job, usage, held), flush=True)
        time.sleep(POLL_S)
    return record


def verdict(job: Endurance, record: Record, statuses: dict[str, int | None], disk: Disk) -> list[Finding]:
    """Evaluate growth by its statistical significance."""
    steps, faults = job.steps, sum(job.faults.values())
    units = {"rss_mb": " MB", "descriptors": "", "threads": ""}
    found = [
        growth(f"launcher {node}: {what}", series, ALLOWED[what], units[what])
        for (node, what), series in sorted(record.launchers.items())
    ]
    found.append(growth("disk used", record.used, ALLOWED_DISK_MB, " MB"))
    found.append(growth("files", record.files, ALLOWED_FILES, ""))
    found.append(growth("processes", record.processes, 3.0, ""))
    found.append(Finding("disk never full", record.least_free > 0, f"least free {record.least_free / MB:.1f} MB"))
    found.append(
        Finding(
            "steps once and in order",
            not steps.wrong,
            f"{steps.last} steps, {len(steps.wrong)} wrong: {steps.wrong[:3]}",
        )
    )
    allowed = REDONE_PER_FAULT * faults
    found.append(Finding("steps made again", steps.redone <= allowed, f"{steps.redone} (allowed {allowed})"))
    found.append(Finding("no launcher ended by itself", not job.ended, ", ".join(job.ended) or "none"))
    found.append(Finding("all end with 0", set(statuses.values()) == {0}, str(statuses)))
    left = job.processes_now()
    found.append(Finding("no process left", not left, str(left)))
    rest = sorted(str(path.relative_to(disk.folder)) for path in (disk.folder / "tmp").glob("*/*"))
    found.append(Finding("no store and no socket left", not rest, f"{len(rest)}: {rest[:5]}"))
    return found


@click.command()
@click.option("--minutes", default=60.0, show_default=True, help="How long faults go on.")
@click.option("--seed", type=int, default=None, help="Of the faults. Default: a new one, which is printed.")
@click.option("--disk-mb", default=500, show_default=True, help="Size of the disk, in millions of bytes.")
@click.option("--nofile", default=512, show_default=True, help="ulimit -n of the launchers, soft and hard.")
@click.option("--kill-every", default=10.0, show_default=True, help="Seconds between two faults.")
@click.option("--workers", default=1, show_default=True, help="Of each node.")
@click.option("--options", default="", help="More options for the launchers.")
@click.option("--script-arguments", default="", help="For scripts/endure_torch.py.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep what the launchers said in this folder.")
@click.option("--quiet", is_flag=True, help="No line for each fault.")
def main(
    minutes: float,
    seed: int | None,
    disk_mb: int,
    nofile: int,
    kill_every: float,
    workers: int,
    options: str,
    script_arguments: str,
    keep: Path | None,
    quiet: bool,
) -> None:
    """Inject faults into a job every few seconds, on a small disk and with few descriptors, to find what grows. edl
    only."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    work = Path(tempfile.mkdtemp(prefix="edl-endurance-work-"))

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    try:
        with small_disk(disk_mb) as disk:
            print(
                f"seed {seed}: {minutes:g} minutes, a fault each {kill_every:g} s, ulimit -n {nofile}, {disk_mb} MB on "
                f"{disk.kind}; launcher {SPARED} is never killed; load {psutil.getloadavg()[0]:.1f}",
                flush=True,
            )
            plan = Plan(disk, work, nofile, workers, tuple(shlex.split(options)), tuple(shlex.split(script_arguments)))
            with Endurance(plan, seed) as job:
                record = strike_for(job, disk, minutes, kill_every, say)
                statuses = job.finish(END_S)
                findings = verdict(job, record, statuses, disk)
        print("\n".join(report(findings)), flush=True)
        print("flat" if all(one.good for one in findings) else "NOT flat", flush=True)
    finally:
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            for log in work.glob("*.log"):
                shutil.copy(log, keep)
        shutil.rmtree(work, ignore_errors=True)
    sys.exit(0 if all(one.good for one in findings) else 1)


if __name__ == "__main__":
    main()
