"""``python -m edl.testing.commits``: random kill times between a step and the announcement of its commit."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click

from edl.testing.commits.pool import results
from edl.testing.commits.schedule import Played

_LINE_EVERY = 5000
"""Schedules between two lines of progress: seconds on a free machine, minutes on a busy one."""


def report(done: Iterable[Played], line_every: int = _LINE_EVERY) -> bool:
    """Print progress and the result. Stops at the first wrong number; returns whether there was none."""
    played = moments = lines = 0
    for one in done:
        played, moments = played + one.schedules, moments + one.moments
        if one.wrong:
            click.echo(f"wrong after {played} schedules: {one.wrong}")
            return False
        if played // line_every > lines:
            lines = played // line_every
            click.echo(f"{played} schedules, {moments} instructions; no wrong number so far")
    click.echo(f"{played} schedules, {moments} instructions with a fault between them; no wrong number")
    return True


@click.command()
@click.option("--runs", type=click.IntRange(1), default=1000, show_default=True, help="How many schedules to run.")
@click.option("--first-seed", type=int, default=0, show_default=True, help="Seed of the first one.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes to use.")
@click.option("--without-check", is_flag=True, help="Take out the check before the announcement, and find out.")
def main(runs: int, first_seed: int, jobs: int, without_check: bool) -> None:
    """Let peers die at random instructions of a step whose collectives are asynchronous, and compare every announced
    commit with the same steps computed separately. Exits with status 1 at the first wrong number."""
    done = results(range(first_seed, first_seed + runs), jobs, not without_check)
    sys.exit(not report(done))


if __name__ == "__main__":
    main(prog_name="python -m edl.testing.commits")
