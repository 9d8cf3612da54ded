"""Measures the seconds from a fault until training continues, for edl and a peer in turn.

    python -m benchmarks.recovery --framework torch --runs 5 --events worker,node,join,node-silent

Times are taken from the workers' own step logs: from just before the first signal is sent until the last rank of the
next world has completed its first step.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.common import report
from benchmarks.common.cluster_status import master_node, noticed_s
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import Launcher
from benchmarks.common.options import Common, common_options, gather
from benchmarks.common.report import Outcome
from benchmarks.common.steps import World, longest_gap, median_gap, pause, redone

PEERS = {
    "torch": "edl-rejoin,edl,torchrun-tuned",
    "paddle": "edl-rejoin,edl,paddle-launch",
    "lightning": "edl-rejoin,torchrun-tuned",
    "accelerate": "edl-rejoin,torchrun-tuned",
    "transformers": "edl-rejoin,torchrun-tuned",
    "torchtitan": "edl-rejoin,torchrun-tuned",
}
OF_LIBRARIES = "worker,worker-of-2,worker-one-node"
"""The events of frameworks other than torch and paddle, unless others are asked for."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of an event: seconds by metric, and the number of repeated steps."""

    values: dict[str, float]
    redone: int


Look = Callable[[Job, World, float], Figures]
"""Measures from the job, its old world and the time of the event. Raises ``NotReached``."""


@dataclass(frozen=True, slots=True)
class Event:
    """A fault or a planned change. ``strike`` causes it and returns the monotonic time just before; ``look`` waits for
    the outcome."""

    name: str
    bounds: tuple[int, int]
    nodes: int
    strike: Callable[[Job, World], float]
    look: Look
    for_edl_only: bool = field(default=False, kw_only=True)
    spares: int = field(default=0, kw_only=True)
    """Nodes to start besides, for launchers that cannot start a process in place of a killed one."""
    workers: int = field(default=1, kw_only=True)
    """Of each node."""


# --- what happens ----------------------------------------------------------------------------------------------------


def kill_a_worker(job: Job, world: World) -> float:
    """Kill the worker of the last node."""
    return job.kill_worker(world.pids(max(world.nodes()))[0])


def kill_a_node(job: Job, world: World) -> float:
    """Kill the node started last, which never hosts torchrun's store."""
    return job.kill_node(max(job.nodes))


def kill_the_masters_node(job: Job, world: World) -> float:
    """Kill the node that runs edl's Master."""
    return job.kill_node(master_node(job))


def freeze_a_node(job: Job, world: World) -> float:
    """SIGSTOP: no connection breaks, but nothing answers."""
    return job.freeze_node(max(job.nodes))


def add_a_node(job: Job, world: World) -> float:
    """Start one more launcher."""
    return job.start(max(job.nodes) + 1)


def drain_a_node(job: Job, world: World) -> float:
    """SIGTERM to the launcher started last."""
    return job.drain_node(max(job.nodes))


# --- outcomes --------------------------------------------------------------------------------------------------------


def recovery(size: int) -> Look:
    """Wait until the next world has this size."""

    def look(job: Job, old: World, struck_s: float) -> Figures:
        new = job.wait_next(struck_s, size)
        return Figures({"recovery": new.first_s - struck_s}, redone(old, new))

    return look


def recovery_in_two_steps(size: int) -> Look:
    """Wait for the next world, which may lack one worker, and for the one with its replacement."""

    def look(job: Job, old: World, struck_s: float) -> Figures:
        next_one = job.wait_next(struck_s, size, least=size - 1)
        full = job.wait_next(struck_s, size)
        values = {"survivors' first step": next_one.first_s - struck_s, "full size again": full.first_s - struck_s}
        if full is not next_one:
            values["pause for the replacement"] = pause(next_one, full)
        return Figures(values, redone(old, next_one) + (redone(next_one, full) if full is not next_one else 0))

    return look


def recovery_from_silence(size: int) -> Look:
    """Like ``recovery``, and also without the time until the silence is detected, which the lease determines."""

    def look(job: Job, old: World, struck_s: float) -> Figures:
        new = job.wait_next(struck_s, size)
        values = {"recovery": new.first_s - struck_s}
        lost_s = noticed_s(job, struck_s, "node-lost")
        if lost_s is not None:
            values["after the lease"] = new.first_s - lost_s
        return Figures(values, redone(old, new))

    return look


def planned(size: int, since: str) -> Look:
    """A planned change: how long training paused."""

    def look(job: Job, old: World, struck_s: float) -> Figures:
        new = job.wait_next(struck_s, size)
        values = {"pause": new.first_s - old.last_s, since: new.first_s - struck_s}
        stayed = {done[0].pid for done in old.steps.values()} & {done[0].pid for done in new.steps.values()}
        gap_s = longest_gap(job.steps.worlds.values(), stayed, struck_s, new.first_s)
        # No process stays where a launcher restarts all workers.
        return Figures(values | ({"longest gap of who stays": gap_s} if gap_s else {}), redone(old, new))

    return look


def scale_story(job: Job, old: World, struck_s: float) -> Figures:
    """From two to four nodes, which has been started; then down to three and one by draining, and up to four again."""
    job.start(3)
    job.wait_running(4)
    for leaving, size in (((0,), 3), ((1, 2), 1)):
        for node in leaving:
            job.drain_node(node)
        job.wait_running(size)
    for node in (4, 5, 6):
        job.start(node)
    job.wait_running(4)
    values: dict[str, float] = {}
    again = 0
    for before, after in itertools.pairwise(job.steps.whole()):
        if before.formed < old.formed:
            continue
        name = f"pause {before.size} to {after.size}"
        while name in values:
            name += ", again"
        values[name] = pause(before, after)
        again += redone(before, after)
    return Figures(values, again)


EVENTS = {
    event.name: event
    for event in (
        Event("worker", (2, 2), 2, kill_a_worker, recovery(2)),
        Event("worker-of-2", (1, 2), 2, kill_a_worker, recovery_in_two_steps(2)),
        Event("worker-of-4", (1, 4), 4, kill_a_worker, recovery_in_two_steps(4)),
        Event("worker-one-node", (1, 1), 1, kill_a_worker, recovery(2), workers=2),
        Event("node", (1, 4), 3, kill_a_node, recovery(2)),
        Event("node-of-4", (1, 4), 4, kill_a_node, recovery(3)),
        Event("node-master", (1, 4), 3, kill_the_masters_node, recovery(2), for_edl_only=True),
        Event("node-silent", (1, 4), 3, freeze_a_node, recovery_from_silence(2), for_edl_only=True),
        Event("join", (1, 4), 3, add_a_node, planned(4, "from launch")),
        Event("drain", (1, 4), 4, drain_a_node, planned(3, "from signal")),
        Event("scale", (1, 4), 2, add_a_node, scale_story, for_edl_only=True),
    )
}


def measure(
    event: Event,
    launcher: Launcher,
    framework: str,
    keep: Path | None,
    arguments: tuple[str, ...] = (),
    patience: float = 1.0,
) -> Outcome:
    """One run: start, let it train, cause the event, wait for the next world. Never raises for a launcher's failure.
    ``patience``: a factor for its deadline."""
    load = report.load_average()
    first = event.nodes + event.spares
    size = event.nodes * event.workers
    script = launcher.script(framework)
    with launch(
        launcher, script, event.bounds, workers_per_node=event.workers, arguments=arguments, keep=keep,
        first_nodes=first, patience=patience,
    ) as job:  # fmt: skip
        try:
            for node in range(first):
                job.start(node)
                time.sleep(0.2)
            job.wait_running(size)
            time.sleep(random.uniform(0.2, 0.5))  # the fault falls anywhere between two checkpoints
            job.steps.poll()
            old = job.wait_running(size)
            struck_s = event.strike(job, old)
        except NotReached as error:
            return Outcome(event.name, launcher.name, started=False, note=f"did not start: {error}", load=load)
        try:
            figures = event.look(job, old, struck_s)
        except NotReached as error:
            return Outcome(event.name, launcher.name, note=f"never recovered: {error}", load=load)
        values = {**figures.values, "step before the event": median_gap(old, 0.0, struck_s)}
        return Outcome(event.name, launcher.name, values, figures.redone, load=load)


def measure_all(
    common: Common, framework: str, events: list[Event], arguments: tuple[str, ...] = (), patience: float = 1.0
) -> list[Outcome]:
    """All runs, with launchers in turn, so that other load of the machine affects them alike."""
    outcomes: list[Outcome] = []
    for event in events:
        for run in range(common.runs):
            for launcher in common.launchers:
                if event.for_edl_only and not launcher.is_edl:
                    continue
                one = measure(event, launcher, framework, common.keep, arguments, patience)
                told = report.figures(one.values)
                told += f", {one.redone} steps redone" if one.redone is not None else ""
                report.progress(f"{event.name} {run + 1}/{common.runs} {launcher.name}: {told or one.note}")
                outcomes.append(one)
    return outcomes


def default_events(framework: str) -> list[str]:
    """The events to cause if none are named."""
    of_libraries = OF_LIBRARIES.split(",")
    if framework in ("torch", "paddle"):
        return [name for name in EVENTS if name == "worker" or name not in of_libraries]
    return of_libraries


@click.command()
@click.option("--framework", type=click.Choice(sorted(PEERS)), default="torch", show_default=True)
@click.option(
    "--events",
    "event_names",
    default="",
    help=f"Comma list; {', '.join(EVENTS)}. Default: for libraries {OF_LIBRARIES}, else all but the two of these that "
    "are only for them.",
)
@click.option("--patience", default=1.0, show_default=True, help="Wait so many times as long on a busy machine.")
@click.option("--megabytes", default=0, help="Parameters of the model, torch only; by default it is tiny.")
@click.option("--ballast-gigabytes", default=0.0, help="Memory that each worker holds besides, torch only.")
@common_options(default_runs=5)
def main(
    framework: str, event_names: str, patience: float, megabytes: int, ballast_gigabytes: float, names: str, **rest: Any
) -> None:
    """Measure recovery from faults and the pause for planned changes."""
    chosen = event_names.split(",") if event_names else default_events(framework)
    if unknown := [name for name in chosen if name not in EVENTS]:
        raise click.UsageError(f"--events: {', '.join(unknown)} unknown; there are {', '.join(EVENTS)}")
    common = gather(names=names, default_names=PEERS[framework], **rest)
    sizes = {"--megabytes": megabytes, "--ballast-gigabytes": ballast_gigabytes}
    arguments = tuple(f"{option}={value:g}" for option, value in sizes.items() if value)
    if arguments and framework != "torch":
        raise click.UsageError(f"{arguments[0]}: only with --framework=torch, not {framework}")
    outcomes = measure_all(common, framework, [EVENTS[name] for name in chosen], arguments, patience)
    title = ", ".join((f"Recovery, {framework}", *arguments))
    report.show(title, outcomes, own=next((one.name for one in common.launchers if not one.is_edl), "edl"))
    report.write_json(common.json_path, title, outcomes, framework=framework, runs=common.runs, sizes=arguments)


if __name__ == "__main__":
    main()
