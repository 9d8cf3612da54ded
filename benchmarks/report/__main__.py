"""Runs edl and all peers in turn, and writes one report.

    python -m benchmarks.report --out DIR --runs 3
    python -m benchmarks.report --out DIR --only worker,node,dlrover    # two rows of one contender

DIR gets ``report.md``, a picture for each row, and ``raw.json`` with every run. A second call replaces the rows that it
measures and keeps the others. ``--runs 0`` writes the report again from ``raw.json``.
"""

from __future__ import annotations

import importlib.metadata
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

import edl
from benchmarks.common import report
from benchmarks.common.contenders import LAUNCHERS
from benchmarks.common.etcd import binary
from benchmarks.common.report import Outcome
from benchmarks.peer_venv import PEERS, NotInstalled, make
from benchmarks.report.contenders import CONTENDERS, WITHOUT, Contender, Place, environment_of, look
from benchmarks.report.measure import Run, measure
from benchmarks.report.record import OtherMachine, Record, dump, load, merged
from benchmarks.report.render import plot, render, took_part
from benchmarks.report.rows import ROWS, Row


def processor() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def version(contender: Contender, place: Place) -> str:
    """The version of a contender and of its framework."""
    framework = {"torch": "torch", "paddle": "paddlepaddle"}[contender.framework]
    of_framework = f"{framework} {importlib.metadata.version(framework)}"
    if contender.launcher.startswith("edl"):
        return f"edl {edl.__version__}, {of_framework}, {etcd_version()}"
    return f"{place.version}, {of_framework}" if place.version else of_framework


def etcd_version() -> str:
    """The version of the etcd that the benchmark starts."""
    lines = subprocess.run([binary(), "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0].replace(" Version:", "") if lines else "etcd"


def chosen(only: str) -> tuple[list[Row], list[Contender]]:
    """Rows and contenders by a comma list of the names of both; all of a kind that is not named."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    rows = [row for row in ROWS if row.name in words]
    contenders = [one for one in CONTENDERS if one.name in words]
    known = {*(row.name for row in ROWS), *(one.name for one in CONTENDERS)}
    if unknown := [word for word in words if word not in known]:
        raise click.UsageError(f"--only: {', '.join(unknown)} unknown; there are {', '.join(sorted(known))}")
    return rows or list(ROWS), contenders or list(CONTENDERS)


def install(peers: Path) -> None:
    """Make the environments that do not exist yet; one that failed is tried again."""
    for name, peer in PEERS.items():
        folder = environment_of(name, peers)
        if (folder / "bin" / "python").exists() and look(_of_peer(name), peers, "").version:
            continue
        report.progress(f"installing {name} in {folder}")
        try:
            make(folder, peer)
        except NotInstalled as error:
            report.progress(f"{name} cannot be installed here: {error}")


def _of_peer(name: str) -> Contender:
    return next(one for one in CONTENDERS if one.peer == name)


@dataclass(frozen=True, slots=True)
class Session:
    """One call of the program. ``places``: of the contenders that take part, by name."""

    out: Path
    runs: int
    keep: Path | None
    patience: float
    places: dict[str, Place]
    machine: dict[str, object]
    versions: dict[str, str]

    def record(self, outcomes: list[Outcome], missing: dict[str, dict[str, str]]) -> Record:
        return Record(self.machine, self.versions, tuple(outcomes), missing)


def run_row(session: Session, row: Row, contenders: list[Contender]) -> Iterator[Record]:
    """All runs of a row, contenders in turn so that other load affects them alike; what is known after each run."""
    present = [one for one in took_part(row) if one in contenders]
    reasons = {
        one.name: reason
        for one in present
        if (reason := WITHOUT.get(row.name, {}).get(one.name) or session.places[one.name].reason)
    }
    missing = {row.name: reasons} if reasons else {}
    outcomes: list[Outcome] = []
    yield session.record(outcomes, missing)
    for number in range(session.runs):
        for one in present:
            if one.name not in reasons:
                outcome = _once(session, row, one)
                told = ", ".join(f"{name} {value:.3g}" for name, value in outcome.values.items())
                report.progress(f"{row.name} {number + 1}/{session.runs} {one.name}: {told or outcome.note}")
                outcomes.append(outcome)
                yield session.record(outcomes, missing)


def _once(session: Session, row: Row, contender: Contender) -> Outcome:
    launcher = LAUNCHERS[contender.launcher](sys.executable, session.places[contender.name].python)
    spares = 1 if contender.launcher == "nvrx-inprocess" else 0
    run = Run(launcher, contender.framework, session.keep, spares, session.patience)
    return measure(row.name, contender.name, run)


def write(out: Path, record: Record) -> None:
    """Write the report, its pictures and its data."""
    (out / "raw.json").write_text(dump(record))
    for row in ROWS:
        if picture := plot(record, row):
            (out / f"{row.name}.svg").write_text(picture)
    (out / "report.md").write_text(render(record))


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the report.")
@click.option("--runs", default=5, show_default=True, type=click.IntRange(0), help="Of each contender in each row.")
@click.option("--only", default="", help="Comma list of rows and contenders; default: all.")
@click.option(
    "--peers",
    default=Path("/tmp/venvs"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder with the environments of the peers, peers-NAME.",
)
@click.option("--install", "installs", is_flag=True, help="First make the environments that are missing.")
@click.option("--patience", default=1.0, show_default=True, help="Factor for all deadlines, for a busy machine.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Keep the logs of all runs there.")
def main(out: Path, runs: int, only: str, peers: Path, installs: bool, keep: Path | None, patience: float) -> None:
    """Measure edl and its peers side by side, and write DIR/report.md."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rows, contenders = chosen(only)
    for folder in (out, keep):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    record = load(out / "raw.json")
    if record is not None and not runs:
        write(out, record)
    else:
        if installs:
            install(peers.resolve())
        places = {one.name: look(one, peers.resolve(), sys.executable) for one in contenders}
        versions = {one.name: version(one, places[one.name]) for one in contenders if not places[one.name].reason}
        machine = {**report.machine(), "processor": processor()}
        kept = keep.resolve() if keep else None
        measure_rows(Session(out, runs, kept, patience, places, machine, versions), rows, contenders, record)
    click.echo(f"{out / 'report.md'}")


def measure_rows(session: Session, rows: list[Row], contenders: list[Contender], record: Record | None) -> None:
    """Measure, and write all that is known after each run, so that a later failure loses nothing."""
    record = record or session.record([], {})
    try:
        merged(record, session.record([], {}))
    except OtherMachine as error:
        raise click.UsageError(f"--out={session.out}: has runs of another machine or version: {error}") from None
    for row in rows:
        before = record
        for known in run_row(session, row, contenders):
            record = merged(before, known)
            write(session.out, record)


if __name__ == "__main__":
    main()
