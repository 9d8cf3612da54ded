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


def run_all(
    rows: list[Row],
    contenders: list[Contender],
    places: dict[str, Place],
    runs: int,
    keep: Path | None,
    patience: float,
) -> tuple[list[Outcome], dict[str, dict[str, str]]]:
    """All runs, contenders in turn so that other load affects them alike, and who is missing from which row and why."""
    outcomes: list[Outcome] = []
    missing: dict[str, dict[str, str]] = {}
    for row in rows:
        able = []
        for one in took_part(row):
            if one not in contenders:
                continue
            reason = WITHOUT.get(row.name, {}).get(one.name) or places[one.name].reason
            if reason:
                missing.setdefault(row.name, {})[one.name] = reason
            else:
                able.append(one)
        for number in range(runs):
            for one in able:
                launcher = LAUNCHERS[one.launcher](sys.executable, places[one.name].python)
                spares = 1 if one.launcher == "nvrx-inprocess" else 0
                outcome = measure(row.name, one.name, Run(launcher, one.framework, keep, spares, patience))
                told = ", ".join(f"{name} {value:.3g}" for name, value in outcome.values.items())
                report.progress(f"{row.name} {number + 1}/{runs} {one.name}: {told or outcome.note}")
                outcomes.append(outcome)
    return outcomes, missing


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the report.")
@click.option(
    "--runs", default=5, show_default=True, type=click.IntRange(0), help="Runs of each contender in each row."
)
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
    old = load(out / "raw.json")
    if runs or old is None:
        if installs:
            install(peers.resolve())
        old = measured(rows, contenders, runs, peers.resolve(), keep.resolve() if keep else None, patience, old)
    (out / "raw.json").write_text(dump(old))
    for row in ROWS:
        if picture := plot(old, row):
            (out / f"{row.name}.svg").write_text(picture)
    (out / "report.md").write_text(render(old))
    click.echo(f"{out / 'report.md'}")


def measured(
    rows: list[Row],
    contenders: list[Contender],
    runs: int,
    peers: Path,
    keep: Path | None,
    patience: float,
    old: Record | None,
) -> Record:
    """The new record, with what it does not replace of the old one."""
    places = {one.name: look(one, peers, sys.executable) for one in contenders}
    versions = {one.name: version(one, places[one.name]) for one in contenders if not places[one.name].reason}
    machine = {**report.machine(), "processor": processor()}
    if old is not None:
        try:
            merged(old, Record(machine, versions))
        except OtherMachine as error:
            raise click.UsageError(f"--out: runs there are of another machine or version: {error}") from None
    outcomes, missing = run_all(rows, contenders, places, runs, keep, patience)
    new = Record(machine, versions, tuple(outcomes), missing)
    return merged(old, new) if old is not None else new


if __name__ == "__main__":
    main()
