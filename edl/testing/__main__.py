"""``python -m edl.testing``: run schedules of the simulator, or replay one."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

import click
from rich.console import Console
from rich.progress import track

from edl.testing.sim.pairs import Pair, every_pair, why_impossible
from edl.testing.sim.schedules import KINDS, Result, play, play_seed, shrink


def replay(kind: str, seed: int, *, shorten: bool, trace: bool) -> Result:
    """Run one schedule, shortened first with ``shorten``, and print its faults."""
    schedule = KINDS[kind](seed)
    if shorten:
        schedule = shrink(schedule)
    result = play(schedule, click.echo if trace else None)
    click.echo(f"seed {seed}: {schedule.describe()}")
    for fault in schedule.plan.faults:
        click.echo(f"  {fault}")
    return result


def results(kind: str, seeds: range, jobs: int) -> Iterator[Result]:
    """Run schedules of these seeds, on ``jobs`` processes; yields the results in the order of the seeds."""
    run = functools.partial(play_seed, kind=kind)
    if jobs == 1:
        yield from map(run, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(run, seeds, chunksize=20)


def unseen(done: Iterable[Result]) -> str:
    """Describe the pairs of state and event that these runs have not reached, one line per event."""
    seen: Counter[Pair] = Counter()
    for result in done:
        seen += result.pairs
    every = [pair for pair in every_pair() if not why_impossible(pair)]
    missing: dict[tuple[str, str], list[str]] = {}
    for machine, state, event in every:
        if not seen[machine, state, event]:
            missing.setdefault((machine, event), []).append(state)
    lines = [f"  {machine} {event}: {', '.join(states)}" for (machine, event), states in missing.items()]
    return "\n".join([f"{len(seen)} of {len(every)} possible pairs of state and event reached; not reached:", *lines])


def summary(done: Iterable[Result]) -> str:
    """Summarise the results of several runs in one line."""
    total: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for result in done:
        total["schedules"] += 1
        total["faults"] += result.faults
        total["steps"] += result.steps
        total["worlds"] += result.worlds
        total["milliseconds"] += int(result.virtual_s * 1000)
        total["violations"] += bool(result.violation)
        outcomes[result.outcome or "no outcome"] += 1
    hours = total["milliseconds"] / 3_600_000
    ends = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    return (
        f"{total['schedules']} schedules, {total['faults']} faults, {total['steps']} steps of the machines, "
        f"{hours:.1f} virtual hours, {total['worlds']} worlds formed; {ends}; {total['violations']} violations"
    )


@click.command()
@click.option("--kind", type=click.Choice(list(KINDS)), default="plain", show_default=True, help="Kind of job.")
@click.option("--seed", type=int, help="Replay this one schedule.")
@click.option("--shrink", "shorten", is_flag=True, help="With --seed: leave out the faults that do not matter.")
@click.option("--trace", is_flag=True, help="With --seed: show everything that happens.")
@click.option("--runs", type=click.IntRange(1), default=1000, show_default=True, help="How many schedules to run.")
@click.option("--first-seed", type=int, default=0, show_default=True, help="Seed of the first one.")
@click.option("--pairs", is_flag=True, help="List the pairs of state and event that were not reached.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes to use.")
def main(
    kind: str, seed: int | None, shorten: bool, trace: bool, runs: int, first_seed: int, pairs: bool, jobs: int
) -> None:
    """Run random schedules of faults against the real machines, in virtual time.

    Exits with status 1 if an invariant was violated; each such schedule is printed as a command that replays it.
    """
    if seed is not None:
        result = replay(kind, seed, shorten=shorten, trace=trace)
        click.echo(result.violation or summary([result]))
        sys.exit(bool(result.violation))
    console = Console(stderr=True)
    done = []
    for result in track(results(kind, range(first_seed, first_seed + runs), jobs), "schedules", runs, console=console):
        done.append(result)
        if result.violation:
            again = f"python -m edl.testing --kind={kind} --seed={result.seed} --trace"
            click.echo(f"{again}    # {result.violation.splitlines()[0]}")
    click.echo(summary(done))
    if pairs:
        click.echo(unseen(done))
    sys.exit(any(result.violation for result in done))


if __name__ == "__main__":
    main(prog_name="python -m edl.testing")
