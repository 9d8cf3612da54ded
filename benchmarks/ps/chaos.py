"""Compares a training that is exposed to every kind of fault and change with one that is undisturbed.

    python -m benchmarks.ps chaos --data /tmp/clicks

DeepFM of examples/07-click-through on three trainers and two pservers, each with its own launcher. Then, one by one: a
trainer is killed; one is added; a pserver is added, and takes its share of the buckets; one is drained; the process of
one is killed; a whole node with a pserver is killed; and so is the Master's node. For each event: the longest time in
which no trainer made a step, and the longest time between two steps of any trainer that lived through it. A table of
counters, to which every push adds, shows at the end whether an acknowledged push is missing or was applied twice.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import processes, report
from benchmarks.common.etcd import PrivateEtcd
from benchmarks.common.launchers import REPOSITORY
from edl.cli.find import NoMaster, Where, master_of
from edl.errors import EdlError

EXAMPLE = REPOSITORY / "examples" / "07-click-through"
SCRIPT = REPOSITORY / "benchmarks" / "scripts" / "ps_clicks.py"
BAR_S = 2.0
EVENTS = ("trainer", "join", "add", "drain", "kill", "node", "master", "freeze")
CALM_S = 6.0
"""Minimum time in seconds that is watched after an event."""
LIMIT_S = 300.0


class Missed(Exception):
    """The awaited state was not reached."""


@dataclass(frozen=True, slots=True)
class Span:
    """An event, and the time span that is attributed to it."""

    event: str
    began_s: float
    ended_s: float
    note: str = ""


@dataclass(slots=True)
class Outcome:
    """The result of one training."""

    spans: list[Span] = field(default_factory=list)
    times: dict[int, list[float]] = field(default_factory=dict)
    """Times of each trainer's steps, by process."""
    auc: float = 0.0
    lost: int = 0
    doubled: int = 0
    acknowledged: int = 0

    def stop_s(self, span: Span) -> float:
        """The longest time in which no trainer made a step."""
        return _longest(sorted(itertools.chain(*self.times.values())), span)

    def pauses_s(self, span: Span) -> list[float]:
        """The longest pause of each trainer that was there before and after."""
        lived = [one for one in self.times.values() if one and one[0] < span.began_s and one[-1] > span.ended_s]
        return [_longest(one, span) for one in lived]


def _longest(times: list[float], span: Span) -> float:
    """The longest pause. A pause is attributed to the event whose time span contains most of it."""
    pauses = [(b - a, (a + b) / 2) for a, b in itertools.pairwise(times)]
    return max((pause for pause, middle in pauses if span.began_s <= middle <= span.ended_s), default=0.0)


class Training:
    """A job in which each trainer and pserver has its own launcher."""

    def __init__(self, folder: Path, endpoint: str, data: Path, arguments: tuple[str, ...], lease_ttl_s: float) -> None:
        self.folder, self.endpoint, self.data, self.arguments = folder, endpoint, data, arguments
        self.lease_ttl_s = lease_ttl_s
        self.script = SCRIPT
        self.options: tuple[str, ...] = ("--max-restarts=50",)
        self.run, self.job = uuid.uuid4().hex, f"chaos-{uuid.uuid4().hex[:6]}"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.steps = folder / "steps"
        self.steps.mkdir()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        processes.end_run(self.run)
        for process in self.nodes.values():
            process.wait(10)

    def start(self, name: str) -> None:
        """Start a launcher: ``t1`` with a trainer, ``p1`` with a pserver."""
        command = [sys.executable, "-m", "edl.launch", "--run-mode=ps", f"--node-id={name}", f"--rdzv-id={self.job}"]
        command += ["--rdzv-backend=etcd", f"--rdzv-endpoint={self.endpoint}", "--nnodes=1:8", "--servers=1:8"]
        command += [f"--lease-ttl={self.lease_ttl_s:g}", "--shutdown-timeout=60", *self.options]
        command += [f"--log-dir={self.folder / 'logs' / name}", "--pserver-memory=1G"]
        if name.startswith("p"):
            command += ["--role=pserver"]
        else:
            command += [
                "--role=trainer",
                str(self.script),
                f"--folder={self.steps}",
                f"--data={self.data}",
                *self.arguments,
            ]
        extra = {"PYTHONPATH": f"{REPOSITORY}:{EXAMPLE}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env = processes.clean_environment({**extra, processes.RUN_MARK: self.run})
        self.nodes[name] = processes.start(command, env, self.folder / f"{name}.log", self.folder)

    def status(self) -> Any:
        """The status from the Master; None while there is none."""

        async def ask() -> Any:
            async with master_of(Where(self.job, (self.endpoint,))) as client:
                return await asyncio.wait_for(client.status(), 5.0)

        try:
            return asyncio.run(ask())
        except (NoMaster, EdlError, OSError, asyncio.TimeoutError, grpc.RpcError):
            return None

    def settled(self, count: int) -> bool:
        """Whether that many pservers hold everything, with each bucket twice, and no bucket is moving."""
        status = self.status()
        for view in status.services if status is not None else ():
            if view.service == "ps" and view.name == "pservers":
                counts = {one.name: one.value for one in view.counts}
                busy = counts.get("moving_buckets", 1) or counts.get("bare_buckets", 1)
                return counts.get("pservers") == count and not busy
        return False

    def times(self) -> dict[int, list[float]]:
        """The times of each trainer's steps."""
        found = {}
        for path in self.steps.glob("*.times"):
            found[int(path.stem)] = [
                float(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
            ]
        return found

    def living(self) -> set[int]:
        """Trainers that are running and have opened their file of counters."""
        return {found.pid for found in processes.find(self.run)} & {int(one.stem) for one in self.steps.glob("*.books")}

    def training(self, within_s: float = 2.0) -> list[int]:
        """Processes that have recently made a step."""
        since_s = time.monotonic() - within_s
        return sorted(pid for pid, times in self.times().items() if times and times[-1] > since_s)

    def pserver(self, node: str) -> processes.Found:
        """The process of a node's pserver."""
        below = [self.nodes[node].pid]
        for found in processes.find(self.run):
            if found.parent in below:
                below.append(found.pid)
                words = Path(f"/proc/{found.pid}/cmdline").read_bytes().split(b"\0")
                if words[1:4] == [b"-m", b"ps", b"server"]:
                    return found
        raise Missed(f"{node} has no pserver")

    def wait(self, look: Callable[[], object], what: str, every_s: float = 0.2, limit_s: float = LIMIT_S) -> None:
        """Wait until a condition holds. Raises ``Missed``."""
        deadline_s = time.monotonic() + limit_s
        while not look():
            if time.monotonic() > deadline_s:
                raise Missed(f"never in {limit_s:g} s: {what}")
            time.sleep(every_s)


class Chaos:
    """The events and their times."""

    def __init__(self, training: Training) -> None:
        self.job = training
        self.pservers = ["p1", "p2"]
        self.spans: list[Span] = []

    def begin(self) -> None:
        """Start three trainers and two pservers, and wait until all buckets are in place."""
        for name in ("t1", "t2", "t3", *self.pservers):
            self.job.start(name)
        self.job.wait(lambda: len(self.job.training()) == 3, "three trainers that train", limit_s=240)
        self.settle()
        time.sleep(2.0)

    def settle(self) -> None:
        """Wait until everything is where it should be."""
        count = len(self.pservers)
        self.job.wait(lambda: self.job.settled(count), f"{count} pservers with everything in place", every_s=1.0)

    def happen(self, event: str) -> None:
        """Execute one event and wait for its consequences."""
        began_s = time.monotonic()
        note = getattr(self, f"_{event}")() or ""
        settled_s = time.monotonic() - began_s
        time.sleep(max(CALM_S - settled_s, 1.0))
        self.spans.append(Span(event, began_s, time.monotonic(), note or f"all in place after {settled_s:.1f} s"))
        report.progress(f"{event}: {self.spans[-1].note}")

    def _trainer(self) -> None:
        before = self.job.training()
        children = {found.pid for found in processes.find(self.job.run)} & set(before)
        processes.send(next(one for one in processes.find(self.job.run) if one.pid in children), signal.SIGKILL)
        self.job.wait(lambda: len(set(self.job.training()) - set(before)) == 1, "another trainer in its place")

    def _join(self) -> None:
        before = self.job.training()
        self.job.start("t4")
        self.job.wait(lambda: len(set(self.job.training()) - set(before)) == 1, "one more trainer")

    def _add(self) -> None:
        self.pservers.append(f"p{len(self.job.nodes)}")
        self.job.start(self.pservers[-1])
        self.settle()

    def _drain(self) -> None:
        name = self.pservers.pop(0)
        self.job.nodes[name].terminate()
        self.job.wait(lambda: self.job.nodes[name].poll() is not None, f"the end of {name}", limit_s=60)
        if self.job.nodes[name].returncode != 0:
            raise Missed(f"{name} was drained, and ended with status {self.job.nodes[name].returncode}")
        self.settle()

    def _kill(self) -> None:
        processes.send(self.job.pserver(self.pservers[0]), signal.SIGKILL)
        time.sleep(1.0)
        self.settle()

    def _node(self) -> None:
        name = self.pservers.pop()
        self.job.nodes[name].kill()
        self.job.nodes[name].wait()
        time.sleep(self.job.lease_ttl_s + 1)
        if len(self.pservers) > 1:
            self.settle()

    def _master(self) -> str:
        status = self.job.status()
        name = status.master if isinstance(status.master, str) else status.master.node
        self.job.nodes[name].kill()
        self.job.nodes[name].wait()
        self.job.wait(lambda: self.job.status() is not None, "another Master")
        time.sleep(self.job.lease_ttl_s)
        return f"it was {name}"

    def _freeze(self) -> str:
        frozen = self.job.pserver(self.pservers[-1])
        processes.send(frozen, signal.SIGSTOP)
        time.sleep(4 * self.job.lease_ttl_s)
        processes.send(frozen, signal.SIGCONT)
        self.settle()
        return f"frozen for {4 * self.job.lease_ttl_s:g} s"

    def end(self) -> Outcome:
        """Let the training end, and evaluate the result."""
        job = self.job
        job.wait(self._all_rest, "the end of the data", every_s=1.0, limit_s=900)
        reader = max(job.living())
        (job.steps / "measure.new").write_text(str(reader))
        (job.steps / "measure.new").replace(job.steps / "measure")
        job.wait(lambda: (job.steps / "auc").exists(), "the AUC", limit_s=180)
        job.wait(lambda: all(one.poll() is not None for one in job.nodes.values()), "the end of the job")
        outcome = Outcome(self.spans, job.times(), float((job.steps / "auc").read_text()))
        held = np.load(job.steps / "held.npy")[:, 0].astype(np.int64)
        books = np.stack([np.fromfile(path, np.int64).reshape(2, -1) for path in job.steps.glob("*.books")])
        begun, acked = books.sum(axis=0)
        outcome.acknowledged = int(acked.sum())
        outcome.lost = int(np.maximum(acked - held, 0).sum())
        outcome.doubled = int(np.maximum(held - begun, 0).sum())
        return outcome

    def _all_rest(self) -> bool:
        """Whether every running trainer has reached the end of the data."""
        living = self.job.living()
        return bool(living) and living <= {int(path.stem) for path in self.job.steps.glob("*.rests")}


def train(folder: Path, data: Path, events: tuple[str, ...], arguments: tuple[str, ...], ttl_s: float) -> Outcome:
    """Run one training with these events."""
    folder.mkdir()
    with PrivateEtcd() as etcd, Training(folder, etcd.endpoints, data, arguments, ttl_s) as job:
        chaos = Chaos(job)
        chaos.begin()
        report.progress(f"three trainers, two pservers; {', '.join(events) or 'nothing'} to happen")
        if not events:
            began_s = time.monotonic()
            time.sleep(CALM_S)
            chaos.spans.append(Span("nothing", began_s, time.monotonic()))
        for event in events:
            chaos.happen(event)
        return chaos.end()


def make_data(folder: Path, rows: int) -> None:
    """Generate clicks as the example does."""
    for words in (("generate.py", f"--folder={folder}", f"--rows={rows}", "--held-out=50000"), ()):
        raw = sorted(str(path) for path in folder.glob("*.tsv"))
        command = [sys.executable, *(words or ("prepare.py", *raw))]
        subprocess.run(
            command, cwd=EXAMPLE, check=True, env=processes.clean_environment({"PYTHONPATH": str(REPOSITORY)})
        )


def show(outcome: Outcome, calm: Outcome | None) -> bool:
    """Print the results; returns whether they are as good as required."""
    table = Table(title="A pserver job through everything")
    table.add_column("event")
    for heading in ("no trainer made a step", "longest pause of one", "of each that lived through it", "note"):
        table.add_column(heading, justify="right")
    good = outcome.lost == outcome.doubled == 0
    for whose, span in [(one, span) for one in (calm, outcome) if one is not None for span in one.spans]:
        stop_s, pauses = whose.stop_s(span), whose.pauses_s(span)
        good = good and (max([stop_s, *pauses]) <= BAR_S or span.event == "freeze")
        each = ", ".join(report.seconds(pause) for pause in sorted(pauses))
        table.add_row(span.event, report.seconds(stop_s), report.seconds(max(pauses, default=0.0)), each, span.note)
    console = Console(width=max(Console().width, 150))
    console.print(table)
    console.print(
        f"{outcome.acknowledged} counts acknowledged; lost {outcome.lost}, doubled {outcome.doubled} (bar: 0, 0)"
    )
    console.print(f"AUC {outcome.auc:.5f}" + (f", undisturbed {calm.auc:.5f}" if calm else ""))
    return good


@click.command("chaos")
@click.option(
    "--data", type=click.Path(path_type=Path, file_okay=False), help="Made by the example; made if not there."
)
@click.option("--rows", default=400_000, show_default=True, help="Records to train on, if they are to be made.")
@click.option(
    "--events", default=",".join(EVENTS[:-1]), show_default=True, help=f"In this order, of {', '.join(EVENTS)}."
)
@click.option("--batch", default=64, show_default=True)
@click.option("--step-time", default=0.03, show_default=True, help="Seconds to sleep after each step.")
@click.option("--lease-ttl", default=2.0, show_default=True)
@click.option("--calm/--no-calm", default=True, help="Also one without events, to compare with.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Where logs are to stay.")
def main(
    data: Path | None, rows: int, events: str, batch: int, step_time: float, lease_ttl: float, calm: bool,
    json_path: Path | None, keep: Path | None,
) -> None:  # fmt: skip
    """Trainers and pservers killed, added, drained, while DeepFM trains."""
    chosen = tuple(one for one in events.split(",") if one)
    if not set(chosen) <= set(EVENTS):
        raise click.UsageError(f"--events: there are {', '.join(EVENTS)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that everything is cleaned up
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="edl-chaos-", dir=keep))
    try:
        data = (data or folder / "clicks").resolve()
        if not (data / "test.arrow").exists():
            make_data(data, rows)
        arguments = (f"--batch={batch}", f"--step-time={step_time}")
        undisturbed = train(folder / "calm", data, (), arguments, lease_ttl) if calm else None
        outcome = train(folder / "chaos", data, chosen, arguments, lease_ttl)
        good = show(outcome, undisturbed)
        if json_path is not None:
            both = {"chaos": asdict(outcome), "calm": asdict(undisturbed) if undisturbed else None}
            json_path.write_text(json.dumps({"machine": report.machine(), **both}) + "\n")
        sys.exit(0 if good else 1)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
