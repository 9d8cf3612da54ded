"""Seconds from a fault to the moment when training is going on again, edl and a peer in turn.

    python -m benchmarks.recovery --framework torch --runs 5 --events worker,node,join,node-silent

Times are taken from the workers' own step logs: from just before the first signal is sent to the completion of the
first step by the last rank of the next world.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.common import report
from benchmarks.common.cluster_status import master_node
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import Launcher
from benchmarks.common.options import Common, common_options, gather
from benchmarks.common.report import Outcome
from benchmarks.common.steps import World

SCRIPT = {"torch": "train_torch.py", "paddle": "train_paddle.py"}
PEERS = {"torch": "edl,torchrun-tuned", "paddle": "edl,paddle-launch"}


@dataclass(frozen=True, slots=True)
class Event:
    """A fault (or a welcome change) and the world it should lead to; one worker per node.

    ``strike`` does it and returns the monotonic time just before.
    """

    name: str
    bounds: tuple[int, int]
    nodes: int
    nodes_after: int
    strike: Callable[[Job, World], float]
    for_edl_only: bool = False
    planned: bool = False
    """A planned change is measured as the pause between the worlds, not from its cause."""


def kill_a_worker(job: Job, world: World) -> float:
    """The worker of the last node."""
    return job.kill_worker(world.pids(max(world.nodes()))[0])


def kill_a_node(job: Job, world: World) -> float:
    """The node started last: never the one that hosts torchrun's store."""
    return job.kill_node(max(job.nodes))


def kill_the_masters_node(job: Job, world: World) -> float:
    """The node whose launcher is edl's Master."""
    return job.kill_node(master_node(job))


def freeze_a_node(job: Job, world: World) -> float:
    """SIGSTOP: no connection breaks, nobody answers."""
    return job.freeze_node(max(job.nodes))


def add_a_node(job: Job, world: World) -> float:
    """One more launcher."""
    return job.start(max(job.nodes) + 1)


EVENTS = {
    event.name: event
    for event in (
        Event("worker", (2, 2), 2, 2, kill_a_worker),
        Event("node", (1, 4), 3, 2, kill_a_node),
        Event("node-master", (1, 4), 3, 2, kill_the_masters_node, for_edl_only=True),
        Event("node-silent", (1, 4), 3, 2, freeze_a_node, for_edl_only=True),
        Event("join", (1, 4), 3, 4, add_a_node, planned=True),
    )
}


def measure(event: Event, launcher: Launcher, framework: str, keep: Path | None) -> Outcome:
    """One run: start, let it train, strike, wait for the next world. Never raises for a launcher's failure."""
    load = report.load_average()
    with launch(launcher, SCRIPT[framework], event.bounds, keep=keep) as job:
        try:
            for node in range(event.nodes):
                job.start(node)
                time.sleep(0.2)
            job.wait_running(event.nodes)
            time.sleep(random.uniform(0.2, 0.5))  # the fault falls anywhere between two checkpoints
            job.steps.poll()
            old = job.wait_running(event.nodes)
            struck_s = event.strike(job, old)
        except NotReached as error:
            return Outcome(event.name, launcher.name, started=False, note=f"did not start: {error}", load=load)
        try:
            new = job.wait_next(struck_s, event.nodes_after)
        except NotReached as error:
            return Outcome(event.name, launcher.name, note=f"never recovered: {error}", load=load)
        return outcome(event, launcher, struck_s, old, new, load)


def outcome(event: Event, launcher: Launcher, struck_s: float, old: World, new: World, load: float) -> Outcome:
    """The figures of a run that came back."""
    values = {"recovery": new.first_s - struck_s}
    if event.planned:
        values = {"pause": new.first_s - old.last_s, "from launch": new.first_s - struck_s}
    redone = max(0, old.last_step - new.first_step + 1)
    return Outcome(event.name, launcher.name, values, redone, load=load)


def measure_all(common: Common, framework: str, events: list[Event]) -> list[Outcome]:
    """All runs, launchers in turn, so that the machine's moods hit them alike."""
    outcomes: list[Outcome] = []
    for event in events:
        for run in range(common.runs):
            for launcher in common.launchers:
                if event.for_edl_only and not launcher.is_edl:
                    continue
                one = measure(event, launcher, framework, common.keep)
                told = ", ".join(f"{metric} {report.seconds(value)}" for metric, value in one.values.items())
                report.progress(f"{event.name} {run + 1}/{common.runs} {launcher.name}: {told or one.note}")
                outcomes.append(one)
    return outcomes


@click.command()
@click.option("--framework", type=click.Choice(sorted(SCRIPT)), default="torch", show_default=True)
@click.option("--events", "event_names", default=",".join(EVENTS), show_default=True, help="Comma list.")
@common_options(default_runs=5)
def main(framework: str, event_names: str, names: str, **rest: Any) -> None:
    """Measure recovery from faults and the pause for a newcomer."""
    unknown = [name for name in event_names.split(",") if name not in EVENTS]
    if unknown:
        raise click.UsageError(f"--events: {', '.join(unknown)} unknown; there are {', '.join(EVENTS)}")
    common = gather(names=names, default_names=PEERS[framework], **rest)
    outcomes = measure_all(common, framework, [EVENTS[name] for name in event_names.split(",")])
    title = f"Recovery, {framework}, one worker per node"
    report.show(title, outcomes)
    report.write_json(common.json_path, title, outcomes, framework=framework, runs=common.runs)


if __name__ == "__main__":
    main()
