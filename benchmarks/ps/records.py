"""Checks that every record is in the parameters exactly once. Real processes are killed at random while pservers stall.

    python -m benchmarks.ps records --kills 200

Three trainers and two pservers, each with its own launcher. A trainer adds 1 to the row of each record, and to one of
97 rows that records share, with plain SGD and a learning rate of 1, so the tables count the records. Repeatedly a
pserver is stopped (SIGSTOP) for a moment and a trainer killed meanwhile, most likely during a push; or a trainer, a
pserver, or the Master's launcher is killed. At the end every row must be exactly the sum of its records.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
from rich.console import Console

from benchmarks.common import processes, report
from benchmarks.common.etcd import PrivateEtcd
from benchmarks.common.launchers import REPOSITORY
from benchmarks.ps.chaos import Training

SCRIPT = REPOSITORY / "benchmarks" / "scripts" / "ps_records.py"
SHARED = 97
STALLED, PLAIN, PSERVER, MASTER = "trainer, a pserver stalled", "trainer", "pserver", "master"
WEIGHTS = {STALLED: 12, PLAIN: 4, PSERVER: 2, MASTER: 1}
NODES = ("t1", "t2", "t3", "p1", "p2")


@dataclass(slots=True)
class Ledger:
    """The result of one job."""

    records: int = 0
    epochs: int = 0
    wrong: int = 0
    """Records that are not in their row exactly once per epoch."""
    examples: dict[int, float] = field(default_factory=dict)
    """Some of them, with the number of times they were counted."""
    shared_wrong: int = 0
    pushes: int = 0
    """Number of acknowledged pushes."""
    begun: int = 0
    """Number of pushes that were begun."""
    held: int = 0
    """Number of pushes that pservers have counted."""
    kills: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether every record was counted exactly once per epoch."""
        return self.epochs > 0 and not self.wrong and not self.shared_wrong


class Killing:
    """The faults, one after the other."""

    def __init__(self, job: Training, seed: int, stall_s: float) -> None:
        self.job, self.rng, self.stall_s = job, random.Random(seed), stall_s
        self.kills: Counter[str] = Counter()

    def one(self, kinds: dict[str, int]) -> None:
        """Inject one fault; returns when all trainers train again."""
        kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
        time.sleep(self.rng.uniform(0.05, 0.4))
        if kind == STALLED:
            self._stalled()
        elif kind == PLAIN:
            self._kill_trainer()
        elif kind == PSERVER:
            self._kill_pserver()
        else:
            self._kill_master()
        self.kills[kind] += 1
        self.job.wait(lambda: len(self._training()) >= 3, f"three trainers that train again after: {kind}")

    def _training(self) -> set[int]:
        return self.job.living() & set(self.job.training(3.0))

    def _stalled(self) -> None:
        stopped = self.job.pserver(self.rng.choice(("p1", "p2")))
        processes.send(stopped, signal.SIGSTOP)
        try:
            time.sleep(self.rng.uniform(0.0, self.stall_s))
            self._kill_trainer(wait=False)
            time.sleep(self.rng.uniform(0.0, self.stall_s))
        finally:
            processes.send(stopped, signal.SIGCONT)

    def _kill_trainer(self, wait: bool = True) -> None:
        victim = self.rng.choice(sorted(self._training() or self.job.living()))
        processes.send(next(one for one in processes.find(self.job.run) if one.pid == victim), signal.SIGKILL)
        if wait:
            self.job.wait(lambda: victim not in self.job.living(), "its end")

    def _kill_pserver(self) -> None:
        self.job.wait(lambda: self.job.settled(2), "everything in place", every_s=0.5, limit_s=300)
        processes.send(self.job.pserver(self.rng.choice(("p1", "p2"))), signal.SIGKILL)
        time.sleep(0.5)
        self.job.wait(lambda: self.job.settled(2), "everything in place", every_s=0.5, limit_s=300)

    def _kill_master(self) -> None:
        """Kill the Master's node, including its trainer or pserver."""
        self.job.wait(lambda: self.job.settled(2), "everything in place", every_s=0.5, limit_s=300)
        name = self._master()
        self.job.nodes[name].kill()
        self.job.nodes[name].wait()
        self.job.wait(lambda: self._master() not in ("", name), "another Master", every_s=0.5)
        time.sleep(self.job.lease_ttl_s + 1)
        self.job.start(name)
        self.job.wait(lambda: self.job.settled(2), "everything in place", every_s=0.5, limit_s=300)

    def _master(self) -> str:
        status = self.job.status()
        if status is None:
            return ""
        return status.master if isinstance(status.master, str) else str(status.master.node)


def make_data(folder: Path, records: int) -> None:
    """Write one file of numbered records."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": np.arange(records)})
    with pa.OSFile(str(folder / "records.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def run(
    folder: Path, kills: int, *, seed: int = 0, records: int = 20_000, kinds: dict[str, int] | None = None,
    stall_s: float = 0.6, arguments: tuple[str, ...] = (), options: tuple[str, ...] = (),
) -> Ledger:  # fmt: skip
    """Run one job with that many kills; returns its counts at the end. Raises ``benchmarks.ps.chaos.Missed``."""
    make_data(folder / "data", records)
    began_s = time.monotonic()
    arguments += (f"--records={records}", *(("--add",) if "--ps-mode=sync" in options else ()))
    with PrivateEtcd() as etcd, Training(folder, etcd.endpoints, folder / "data", arguments, 2.0) as job:
        job.script, job.options = SCRIPT, ("--max-restarts=100000", "--slot-strikes=0", *options)
        for name in NODES:
            job.start(name)
        job.wait(lambda: len(job.training()) == 3 and job.settled(2), "three trainers that train", limit_s=240)
        killing = Killing(job, seed, stall_s)
        for number in range(kills):
            killing.one(kinds or WEIGHTS)
            report.progress(
                f"{number + 1} of {kills} kills in {time.monotonic() - began_s:.0f} s: {dict(killing.kills)}"
            )
        _stop(job)
        ledger = _read(job, records)
        ledger.kills, ledger.seconds = dict(killing.kills), time.monotonic() - began_s
        return ledger


def _stop(job: Training) -> None:
    """Stop two epochs later, so that all trainers learn about it in time."""
    now = max(int(path.read_text() or 0) for path in job.steps.glob("*.epoch"))
    (job.steps / "epochs.new").write_text(str(now + 2))
    (job.steps / "epochs.new").replace(job.steps / "epochs")
    job.wait(lambda: len(_resting(job)) >= 3, "the end of the epoch", every_s=0.5, limit_s=600)


def _resting(job: Training) -> set[int]:
    return job.living() & {int(path.stem) for path in job.steps.glob("*.rests")}


def _read(job: Training, records: int) -> Ledger:
    reader = min(_resting(job))
    (job.steps / "read").touch()
    path = job.steps / f"{reader}.held.npz"
    job.wait(path.exists, "what pservers hold", limit_s=120)
    job.wait(lambda: all(one.poll() is not None for one in job.nodes.values()), "the end of the job", limit_s=120)
    return count(job.steps, path, records)


def count(steps: Path, held: Path, records: int) -> Ledger:
    """Compare what pservers held at the end with what there was to be counted. ``steps``: the folder with the trainers'
    counters. ``held``: the file that one of them has written."""
    with np.load(held) as arrays:
        own, together, epochs = np.abs(arrays["own"]), np.abs(arrays["together"]), int(arrays["epochs"])
        pushes = round(float(np.abs(arrays["pushes"]).sum()))
    books = np.stack([np.fromfile(one, np.int64)[:2] for one in steps.glob("*.books")])
    begun, acked = (int(total) for total in books.sum(axis=0))
    wrong = np.flatnonzero((own != epochs).any(axis=1))
    each = np.bincount(np.arange(records) % SHARED, minlength=SHARED) * epochs
    return Ledger(
        records, epochs, len(wrong), {int(one): float(own[one, 0]) for one in wrong[:8]},
        int(np.count_nonzero((together != each[:, None]).any(axis=1))), acked, begun, pushes,
    )  # fmt: skip


@click.command("records")
@click.option("--kills", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--records", default=20_000, show_default=True)
@click.option("--mode", type=click.Choice(["async", "sync"]), default="async", show_default=True)
@click.option("--staleness", default=0, show_default=True)
@click.option("--only", default="", help=f"Only this kind of kill: {'; '.join(WEIGHTS)}.")
@click.option("--stall", default=0.6, show_default=True, help="Longest stall before and after a kill, in seconds.")
@click.option("--accumulate", default=1, show_default=True, help="Batches of a push.")
@click.option("--mixed", default=1, show_default=True, help="Shards that are read at once.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Where logs are to stay.")
def main(
    kills: int, seed: int, records: int, mode: str, staleness: int, only: str, stall: float, accumulate: int,
    mixed: int, json_path: Path | None, keep: Path | None,
) -> None:  # fmt: skip
    """Count every record of a job whose processes are killed at random."""
    if only and only not in WEIGHTS:
        raise click.UsageError(f"--only: there are {'; '.join(WEIGHTS)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="edl-records-", dir=keep))
    options = (f"--ps-mode={mode}", *((f"--staleness={staleness}",) if staleness else ()))
    arguments = (f"--accumulate={accumulate}", f"--mixed={mixed}")
    try:
        ledger = run(
            folder, kills, seed=seed, records=records, kinds={only: 1} if only else None, stall_s=stall,
            arguments=arguments, options=options,
        )  # fmt: skip
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    console = Console(width=max(Console().width, 120))
    console.print(f"{sum(ledger.kills.values())} kills in {ledger.seconds:.0f} s: {dict(ledger.kills)}")
    console.print(
        f"{ledger.records} records, {ledger.epochs} epochs, {ledger.pushes} pushes acknowledged; records not exactly "
        f"once an epoch: {ledger.wrong} {ledger.examples}; shared rows that are wrong: {ledger.shared_wrong}"
    )
    if json_path is not None:
        json_path.write_text(json.dumps({"machine": report.machine(), **asdict(ledger)}) + "\n")
    sys.exit(0 if ledger.exact else 1)


if __name__ == "__main__":
    main()
