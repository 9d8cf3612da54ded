"""Measures how good a model gets: DeepFM in one process, and with 2 pservers and 3 trainers in each mode and framework.

    python -m benchmarks.ps auc [--frameworks=torch,paddle] [--modes=sync,async,geo]

The scripts are those of examples/07-click-through, on data of its generator; the AUC is that of the same held-out
records. One update of a parameter averages over the same number of records everywhere: in mode sync a trainer's batch
is a third of the single process's, since three trainers make an update together. The single process runs with several
orders of the records: the differences between their AUCs are the noise against which other differences are judged. All
trainers begin together and make the same number of steps. Otherwise those that start first or are left at the end of
the data would make updates from fewer records, and the noise of the last ones would show in the model.
"""

from __future__ import annotations

import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.common import processes, report

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "07-click-through"
BARS = {"sync": 0.002, "async": 0.005, "geo": 0.005}
TRAINERS, SERVERS = 3, 2
BATCH = 384
STEPS = 1000
"""Steps of the single process. Its records are those of the other runs together."""
BATCHES = {"sync": BATCH // TRAINERS, "async": BATCH, "geo": BATCH // TRAINERS}
HELD_OUT = re.compile(r"held out: AUC ([0-9.]+)")
SPARE = 1.04
"""There are more records than are used, because a trainer may still hold the last ones when another has none."""
LIMIT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Run:
    """One training run."""

    framework: str
    mode: str
    auc: float
    seconds: float


def environment(folder: Path) -> dict[str, str]:
    return processes.clean_environment({"PYTHONPATH": str(EXAMPLE.parents[1]), "TMPDIR": str(folder)})


def prepare(folder: Path, rows: int, held_out: int) -> None:
    made = [sys.executable, str(EXAMPLE / "generate.py"), f"--folder={folder}", f"--rows={rows}"]
    subprocess.run([*made, f"--held-out={held_out}"], check=True, env=environment(folder))
    raw = sorted(map(str, folder.glob("*.tsv")))
    subprocess.run(
        [sys.executable, str(EXAMPLE / "prepare.py"), *raw], check=True, env=environment(folder), stdout=sys.stderr
    )


def script(framework: str, folder: Path, steps: int, batch: int, *more: str) -> list[str]:
    data = [f"--train={folder}/train-*.arrow", f"--test={folder}/test.arrow"]
    return [str(EXAMPLE / f"train_{framework}.py"), *data, f"--steps={steps}", f"--batch={batch}", *more]


def measured(command: Sequence[str], framework: str, mode: str, folder: Path) -> Run:
    """Run it to its end; its log stays in ``folder``."""
    report.progress(f"{framework}, {mode}")
    log = folder / f"{framework}-{mode}-{secrets.token_hex(2)}.log"
    began = time.monotonic()
    process = processes.start(command, environment(folder), log, folder)
    try:
        status = process.wait(LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 15)
            process.wait()
    found = HELD_OUT.search(log.read_text())
    if status or not found:
        raise click.ClickException(f"{framework}, {mode}: status {status}, no AUC. The end of its log:\n{tail(log)}")
    return Run(framework, mode, float(found[1]), time.monotonic() - began)


def tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-25:])


def launched(framework: str, mode: str, folder: Path, steps: int) -> list[str]:
    options = [f"--servers={SERVERS}:{SERVERS}", f"--servers-per-node={SERVERS}", f"--nproc-per-node={TRAINERS}"]
    job = ["--run-mode=ps", f"--ps-mode={mode}", f"--rdzv-id=auc-{secrets.token_hex(4)}"]
    return [sys.executable, "-m", "edl.launch", *job, *options,
            *script(framework, folder, steps * BATCH // BATCHES[mode] // TRAINERS, BATCHES[mode],
                    f"--trainers={TRAINERS}")]  # fmt: skip


def show(framework: str, alone: Sequence[Run], others: Sequence[Run]) -> bool:
    """Print one framework's table; returns whether every difference is within its limit."""
    base = statistics.mean(run.auc for run in alone)
    noise = statistics.stdev([run.auc for run in alone]) if len(alone) > 1 else float("nan")
    table = Table(title=f"DeepFM, {framework}: AUC on the held-out records")
    for heading in ("run", "AUC", "difference", "bar", "seconds"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    orders = f"one process, {len(alone)} orders, deviation {noise:.5f}"
    table.add_row(orders, f"{base:.5f}", "", "", f"{statistics.mean(run.seconds for run in alone):.0f}")
    good = True
    for run in others:
        within = abs(run.auc - base) <= BARS[run.mode]
        good &= within
        bar = f"{BARS[run.mode]:g}" + ("" if within else " MISSED")
        name = f"{SERVERS} pservers, {TRAINERS} trainers, {run.mode}"
        table.add_row(name, f"{run.auc:.5f}", f"{run.auc - base:+.5f}", bar, f"{run.seconds:.0f}")
    Console(width=120).print(table)
    return good


@click.command("auc")
@click.option("--frameworks", default="torch,paddle", show_default=True)
@click.option("--modes", default="sync,async,geo", show_default=True)
@click.option("--steps", default=STEPS, show_default=True, help="Of the single process.")
@click.option("--held-out", default=100_000, show_default=True)
@click.option("--orders", default=2, show_default=True, help="Runs of the single process.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Data and logs stay there.")
def main(frameworks: str, modes: str, steps: int, held_out: int, orders: int, folder: Path | None) -> None:
    """AUC in every mode against a single process."""
    good = True
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with nullcontext(str(folder.resolve())) if folder else tempfile.TemporaryDirectory(prefix="edl-auc-") as name:
        place = Path(name)
        if not (place / "test.arrow").exists():
            prepare(place, int(SPARE * steps * BATCH), held_out)
        for framework in frameworks.split(","):
            alone = [
                measured(
                    [sys.executable, *script(framework, place, steps, BATCH, f"--seed={n}")], framework, "alone", place
                )
                for n in range(orders)
            ]
            others = [
                measured(launched(framework, mode, place, steps), framework, mode, place) for mode in modes.split(",")
            ]
            good &= show(framework, alone, others)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
