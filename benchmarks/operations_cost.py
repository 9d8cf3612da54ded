"""What it costs to look at a job: step time, and the launchers' CPU time and memory, with everything on that reports
and watches, with the defaults, and with everything off.

    python -m benchmarks.operations_cost --seconds 60 --runs 5

Two nodes with a worker each. The defaults are watchdogs, hang detection and stragglers. Everything is also history
files, a notification program and HTTP; every node's metrics are scraped every 5 s, and one reader follows the status as
the dashboard does. Runs of all kinds alternate, so that other load affects them alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.common import report
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import Edl, JobPlan
from benchmarks.common.options import Common, common_options, gather
from benchmarks.common.processes import free_ports
from benchmarks.common.report import Outcome

SCRIPT = "step_cost_torch.py"
TOKEN = "operations-cost-0123456789abcdef"  # noqa: S105 - of a job that this program starts
SKIPPED = 20
"""Steps at the beginning that do not count."""
SCRAPE_S = 5.0
LIMIT_S = 300.0
OFF = ("--watch=off", "--hang-timeout=0", "--stragglers=off")


@dataclasses.dataclass(frozen=True, slots=True)
class Watched(Edl):
    """edl with everything on. ``ports``: for HTTP, by node."""

    ports: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "everything on"

    def command(self, plan: JobPlan, node: int) -> list[str]:
        folder = plan.folder
        tokens = folder / "tokens"
        tokens.write_text(TOKEN)
        tokens.chmod(0o600)
        more = (f"--http-port={self.ports[node]}", f"--http-token-file={tokens}", f"--history-dir={folder / 'history'}")
        extended = dataclasses.replace(self, options=(*more, "--notify=exec:/bin/true", "--notify-on=info"))
        return Edl.command(extended, plan, node)


@dataclasses.dataclass(frozen=True, slots=True)
class Unwatched(Edl):
    """edl with everything off."""

    @property
    def name(self) -> str:
        return "everything off"


class Usual(Edl):
    """edl with what is on by default."""

    @property
    def name(self) -> str:
        return "the defaults"


@contextlib.contextmanager
def readers(ports: tuple[int, ...], job: str) -> Iterator[None]:
    """Scrape all nodes, and follow the status, until the context ends."""
    over = threading.Event()

    def get(port: int, path: str, accept: str = "") -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}", **({"Accept": accept} if accept else {})}
        return urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers), timeout=20
        )

    def scrape() -> None:
        while not over.wait(SCRAPE_S):
            for port in ports:
                with contextlib.suppress(OSError), get(port, "/metrics") as answer:
                    answer.read()

    def follow() -> None:
        while not over.wait(0.5):
            with contextlib.suppress(OSError), get(ports[0], f"/v1/jobs/{job}/status", "text/event-stream") as answer:
                while not over.is_set() and answer.readline():
                    continue

    threads = [threading.Thread(target=one, daemon=True) for one in (scrape, follow)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()


def notes(job: Job) -> list[dict[str, Any]]:
    """The script's lines: one for each step."""
    file = job.plan.folder / "notes"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def used(job: Job) -> tuple[float, float]:
    """CPU seconds of all launchers so far, and their memory in MB."""
    launchers = [psutil.Process(process.pid) for process in job.nodes.values()]
    times = [one.cpu_times() for one in launchers]
    return sum(one.user + one.system for one in times), sum(one.memory_full_info().uss for one in launchers) / 1e6


def measure(launcher: Edl, megabytes: int, seconds: float, keep: Path | None) -> Outcome:
    """One run. Never raises for a launcher's failure."""
    title, load = f"{megabytes} MB", report.load_average()
    ports = launcher.ports if isinstance(launcher, Watched) else ()
    with launch(launcher, SCRIPT, (2, 2), arguments=(f"--megabytes={megabytes}",), keep=keep) as job:
        try:
            job.start(0)
            job.start(1)
            job.wait(lambda: notes(job)[SKIPPED:] or None, f"{SKIPPED} steps", LIMIT_S)
            with readers(ports, job.plan.job_id) if ports else contextlib.nullcontext():
                before, begun_s, begun_cpu_s = len(notes(job)), time.monotonic(), used(job)[0]
                time.sleep(seconds)
                took_s, (cpu_s, memory) = time.monotonic() - begun_s, used(job)
                lines = notes(job)[before:]
        except (NotReached, psutil.Error) as error:
            return Outcome(title, launcher.name, started=False, note=str(error), load=load)
    values = {
        "step": statistics.median(line["step_s"] for line in lines),
        "CPU of both launchers, in a second": (cpu_s - begun_cpu_s) / took_s,
    }
    return Outcome(title, launcher.name, values, note=f"{memory:.1f} MB", load=load)


def memory_line(outcomes: list[Outcome]) -> str:
    """The memory of both launchers together, for each kind of run: median, least and most."""
    found = []
    for name in dict.fromkeys(one.launcher for one in outcomes):
        sizes = [float(one.note.split()[0]) for one in outcomes if one.launcher == name and one.values]
        if sizes:
            found.append(f"{name} {statistics.median(sizes):.0f} MB ({min(sizes):.0f} to {max(sizes):.0f})")
    return f"Memory of both launchers: {', '.join(found)}"


def measure_all(common: Common, megabytes: int, seconds: float) -> list[Outcome]:
    """All runs."""
    outcomes = []
    for run in range(common.runs):
        python = common.launchers[0].python if isinstance(common.launchers[0], Edl) else ""
        ports = tuple(free_ports(2))
        for launcher in (
            Unwatched(python, rejoins=True, options=OFF),
            Usual(python, rejoins=True),
            Watched(python, rejoins=True, ports=ports),
        ):
            one = measure(launcher, megabytes, seconds, common.keep)
            figures = report.figures(one.values)
            report.progress(f"{run + 1}/{common.runs} {launcher.name}: {figures or one.note}")
            outcomes.append(one)
    return outcomes


@click.command()
@click.option("--megabytes", default=10, show_default=True, help="Size of the state.")
@click.option("--seconds", default=60.0, show_default=True, help="Length of a measurement.")
@common_options(default_runs=5)
def main(megabytes: int, seconds: float, names: str, **rest: Any) -> None:
    """Measure what reporting and watching cost."""
    common = gather(names=names, default_names="edl-rejoin", **rest)
    outcomes = measure_all(common, megabytes, seconds)
    title = "What it costs to look at a job, 2 nodes with a worker each"
    report.show(title, outcomes, own="everything off")
    click.echo(memory_line(outcomes))
    report.write_json(common.json_path, title, outcomes, runs=common.runs, seconds=seconds)


if __name__ == "__main__":
    main()
