"""Measures one run of one contender in one row."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import recovery
from benchmarks.common import processes, report
from benchmarks.common.cluster_status import master_node
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import Launcher, Meeting
from benchmarks.common.report import Outcome
from benchmarks.common.steps import World, median_gap
from benchmarks.recovery import EVENTS, Event, Figures

WINDOW_S = 10.0
"""Length of a measurement of steps, memory and CPU time."""
STALL_WINDOW_S = 20.0
"""How long training is watched after what is outside the nodes was killed."""
SETTLE_S = 3.0
MANY_STEPS = 50


@dataclass(frozen=True, slots=True)
class Run:
    """One run to make. ``spares``: see ``recovery.Event``. ``patience``: a factor for the launcher's deadline."""

    launcher: Launcher
    framework: str
    keep: Path | None = None
    spares: int = 0
    patience: float = 1.0


def kill_the_leader(job: Job, world: World) -> float:
    """Kill what decides about the job."""
    if job.launcher.is_edl:
        return job.kill_node(master_node(job))
    return job.kill_node(0) if job.launcher.meeting is Meeting.PORTS else job.kill_outside()


def kill_the_store(job: Job, world: World) -> float:
    """Kill the etcd outside the nodes."""
    return job.kill_outside()


def goes_on(job: Job, old: World, struck_s: float) -> Figures:
    """After the leader's death: the stall of those who are left."""
    if job.launcher.is_edl or job.launcher.meeting is Meeting.PORTS:
        new = job.wait_next(struck_s, old.size - 1)
        return Figures({"training stalls for": new.first_s - struck_s}, max(0, old.last_step - new.first_step + 1))
    return stall(job, old, struck_s)


def stall(job: Job, old: World, struck_s: float) -> Figures:
    """The longest time without a step of any rank within the window, which must not last until its end."""
    end_s = struck_s + STALL_WINDOW_S
    job.wait(lambda: time.monotonic() > end_s or None, "training goes on", STALL_WINDOW_S + 10)
    ranks = [done for world in job.steps.worlds.values() for done in world.steps.values()]
    times = sorted(step.t for done in ranks for step in done if step.t < end_s)
    gap_s = longest_silence(times, struck_s, end_s)
    if end_s - times[-1] > STALL_WINDOW_S / 2:
        raise NotReached(f"no step in the last {end_s - times[-1]:.0f} s of the {STALL_WINDOW_S:g} s after")
    return Figures({"training stalls for": gap_s}, 0)


def longest_silence(times: list[float], begin_s: float, end_s: float) -> float:
    """The longest time between two of the sorted ``times`` that reaches into ``[begin_s, end_s]``, or from the last one
    to the end."""
    marks = [max((t for t in times if t <= begin_s), default=begin_s)]
    marks += [t for t in times if begin_s < t < end_s] + [end_s]
    return max(after - before for before, after in itertools.pairwise(marks))


LEADER = Event("leader", (1, 4), 3, kill_the_leader, goes_on)
STORE = Event("store", (1, 4), 3, kill_the_store, stall)
BY_EVENT = {name: EVENTS[name] for name in ("worker", "node", "join", "drain")} | {"leader": LEADER, "store": STORE}


def _of_event(name: str) -> Callable[[Run], Outcome]:
    def measure(run: Run) -> Outcome:
        event = BY_EVENT[name]
        if event.bounds[0] == event.bounds[1]:
            event = dataclasses.replace(event, spares=run.spares)
        return recovery.measure(event, run.launcher, run.framework, run.keep, patience=run.patience)

    return measure


def _start(run: Run) -> Outcome:
    def figures(job: Job) -> dict[str, float]:
        begun_s = job.start(0)
        job.start(1)
        return {"first step": job.wait_next(begun_s, 2).first_s - begun_s}

    return _two_nodes(run, "start", figures)


def _steady(run: Run) -> Outcome:
    def figures(job: Job) -> dict[str, float]:
        begun_s = _train(job)
        time.sleep(WINDOW_S)
        job.steps.poll()
        world = job.steps.newest()
        if world is None or world.silence(time.monotonic()) > WINDOW_S / 2:
            raise NotReached("training has stopped by itself")
        return {"step": median_gap(world, begun_s, begun_s + WINDOW_S)}

    return _two_nodes(run, "steady", figures, "--pause-ms=0")


def _idle(run: Run) -> Outcome:
    def figures(job: Job) -> dict[str, float]:
        _train(job)
        places = {"per node": range(2), "outside": (processes.OUTSIDE,)}
        before = {place: helpers(job, nodes) for place, nodes in places.items()}
        begun_s = time.monotonic()
        time.sleep(WINDOW_S)
        took_s = time.monotonic() - begun_s
        values: dict[str, float] = {}
        for place, nodes in places.items():
            now = helpers(job, nodes)
            cpu_s = sum(one.cpu_s - before[place].get(pid, Used()).cpu_s for pid, one in now.items())
            share = 100 * cpu_s / took_s / len(nodes)
            memory = sum(one.memory_bytes for one in now.values()) / 1e6 / len(nodes)
            values |= {f"memory {place}": memory, f"CPU {place}": share} if now else {}
        return values

    return _two_nodes(run, "idle", figures)


@dataclass(frozen=True, slots=True)
class Used:
    """What a process has used so far."""

    cpu_s: float = 0.0
    memory_bytes: int = 0


def helpers(job: Job, nodes: Sequence[int]) -> dict[int, Used]:
    """All processes of some nodes that write no steps, by pid."""
    found = {}
    for node in nodes:
        for one in processes.find(job.run, node):
            if one.pid in job.steps.pids:
                continue
            try:
                process = psutil.Process(one.pid)
                times = process.cpu_times()
                found[one.pid] = Used(times.user + times.system, process.memory_full_info().pss)
            except psutil.Error:
                continue  # it has ended meanwhile
    return found


def _train(job: Job) -> float:
    """Start two nodes and let them train for a while; returns the time from which on they are measured."""
    job.start(0)
    job.start(1)
    job.wait_running(2, steps=MANY_STEPS)
    time.sleep(SETTLE_S)
    return time.monotonic()


def _two_nodes(run: Run, row: str, figures: Callable[[Job], dict[str, float]], *arguments: str) -> Outcome:
    load = report.load_average()
    script = run.launcher.script(run.framework)
    with launch(
        run.launcher, script, (2, 2), arguments=arguments, keep=run.keep, first_nodes=2, patience=run.patience
    ) as job:
        try:
            return Outcome(row, run.launcher.name, figures(job), load=load)
        except NotReached as error:
            return Outcome(row, run.launcher.name, started=row == "start", note=str(error), load=load)


MEASURES: dict[str, Callable[[Run], Outcome]] = {
    **{name: _of_event(name) for name in BY_EVENT},
    "start": _start,
    "steady": _steady,
    "idle": _idle,
}
"""By row."""


def measure(row: str, contender: str, run: Run) -> Outcome:
    """One run. Never raises for a launcher's failure, or for that of what it needs outside its nodes."""
    try:
        outcome = MEASURES[row](run)
    except processes.NotStarted as error:
        outcome = Outcome(row, contender, started=False, note=f"did not start: {error}", load=report.load_average())
    return dataclasses.replace(outcome, event=row, launcher=contender)
