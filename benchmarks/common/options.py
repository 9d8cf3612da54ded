"""Command-line options common to the benchmark programs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.common.contenders import LAUNCHERS
from benchmarks.common.launchers import Launcher

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Common:
    """Values of the options that every program has."""

    runs: int
    launchers: tuple[Launcher, ...]
    json_path: Path | None
    keep: Path | None


def common_options(default_runs: int) -> Callable[[F], F]:
    """Add ``--runs --launchers --edl-python --peer-python --json --keep``."""
    existing = click.Path(path_type=Path, file_okay=False)
    options = [
        click.option("--runs", default=default_runs, show_default=True, help="Runs of each launcher and event."),
        click.option("--launchers", "names", default="", help=f"Comma list, taken in turn: {', '.join(LAUNCHERS)}."),
        click.option("--edl-python", default=sys.executable, help="Python that runs edl."),
        click.option("--peer-python", default=sys.executable, help="Python that runs the peers (see peer_venv.py)."),
        click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all runs."),
        click.option("--keep", type=existing, help="Keep the logs of all runs in this folder."),
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def gather(
    *,
    default_names: str,
    runs: int,
    names: str,
    edl_python: str,
    peer_python: str,
    json_path: Path | None,
    keep: Path | None,
) -> Common:
    """Check the values. Also turns SIGTERM into an orderly exit, so that clean-up runs."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen = [name.strip() for name in (names or default_names).split(",") if name.strip()]
    unknown = [name for name in chosen if name not in LAUNCHERS]
    if unknown:
        raise click.UsageError(f"--launchers: {', '.join(unknown)} unknown; there are {', '.join(LAUNCHERS)}")
    if runs < 1:
        raise click.UsageError(f"--runs={runs}: must be at least 1")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    launchers = tuple(LAUNCHERS[name](edl_python, peer_python) for name in chosen)
    return Common(runs, launchers, json_path, keep.resolve() if keep is not None else None)
