"""Measures the seconds from a request for another size to the world that has it, and from SIGTERM to the orderly exit.

    python -m benchmarks.scale --runs 10

*started*: nodes are launchers on this host that the Master starts and gives back (``--scheduler=process``), so growing
includes the start of a launcher and of a worker. *spares*: the launchers are already there and waiting. Times are taken
from the workers' own step logs, up to the completion of the first step by the last rank of the new world. *from
command* counts from just before ``edl scale`` is started, *from acceptance* from the time when the request was in the
store, and *pause* is how long training paused. *leave* and *end*: SIGTERM with 30 s grace to one launcher of two, and
to both.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.common import processes, report
from benchmarks.common.cluster_status import noticed_s
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import REPOSITORY, Edl, JobPlan
from benchmarks.common.options import common_options, gather
from benchmarks.common.report import Outcome
from benchmarks.common.steps import World, pause, redone

SIZES = (2, 3, 2, 3, 1)
"""Sizes after the initial one node."""
GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Scaled(Edl):
    """edl with a way to get nodes."""

    kind: str = "edl"
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.kind

    def command(self, plan: JobPlan, node: int) -> list[str]:
        whole = Edl.command(self, plan, node)
        return [*whole[:3], *self.options, f"--checkpoint-dir={plan.folder / 'checkpoints'}", *whole[3:]]


def ask(job: Job, launcher: Scaled, nodes: int) -> float:
    """Run ``edl scale``; returns the monotonic time just before. Raises ``NotReached``."""
    command = [launcher.python, "-m", "edl.cli", "scale", str(nodes), "--no-wait"]
    command += [f"--rdzv-endpoint={job.plan.endpoint}", f"--rdzv-id={job.plan.job_id}"]
    env = processes.clean_environment({"PYTHONPATH": str(REPOSITORY)})
    begun_s = time.monotonic()
    done = subprocess.run(command, env=env, cwd=job.plan.folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReached(f"edl scale {nodes}: exit status {done.returncode}, {done.stderr.strip()[-200:]}")
    return begun_s


def resize(job: Job, launcher: Scaled, old: World, nodes: int) -> Outcome:
    """Measure one resize of a world that trains."""
    load = report.load_average()
    event = f"{old.size} to {nodes}"
    begun_s = ask(job, launcher, nodes)
    new = job.wait_next(begun_s, nodes)
    values = {"from command": new.first_s - begun_s}
    accepted_s = noticed_s(job, begun_s, "scale")
    if accepted_s is not None:
        values["from acceptance"] = new.first_s - accepted_s
    return Outcome(event, launcher.name, values | {"pause": pause(old, new)}, redone(old, new), load=load)


def resizes(launcher: Scaled, nodes: int, keep: Path | None) -> list[Outcome]:
    """Measure all resizes one after the other. ``nodes``: launchers that are started by hand."""
    found: list[Outcome] = []
    with launch(launcher, launcher.script("torch"), (1, 3), keep=keep) as job:
        try:
            for node in range(nodes):
                job.start(node)
            world = job.wait_running(nodes)
            if nodes > 1:
                ask(job, launcher, 1)
            world = job.wait_running(1) if nodes > 1 else world
            for size in SIZES:
                found.append(resize(job, launcher, world, size))
                world = job.wait_running(size, steps=60)
        except NotReached as error:
            size = SIZES[len(found)]
            return [*found, Outcome(f"to {size}", launcher.name, note=str(error), load=report.load_average())]
    return found


# --- SIGTERM ---------------------------------------------------------------------------------------------------------


def leave(launcher: Scaled, doomed: tuple[int, ...], keep: Path | None) -> Outcome:
    """Send SIGTERM to some of two launchers and measure their exit."""
    load = report.load_average()
    event = "leave" if len(doomed) == 1 else "end"
    with launch(launcher, launcher.script("torch"), (1, 2), keep=keep) as job:
        try:
            for node in (0, 1):
                job.start(node)
            old = job.wait_running(2, steps=60)
            begun_s = time.monotonic()
            for node in doomed:
                job.drain_node(node)
            codes = [job.nodes[node].wait(2 * GRACE_S) for node in doomed]
        except (NotReached, subprocess.TimeoutExpired) as error:
            return Outcome(event, launcher.name, note=str(error), load=load)
        ended_s = time.monotonic()
        values = {"orderly exit": ended_s - begun_s}
        saved_s = checkpoint_s(job.plan.folder / "checkpoints", begun_s)
        if saved_s is not None:
            values["committed checkpoint"] = saved_s - begun_s
        again = None
        if len(doomed) == 1:
            new = job.wait_next(begun_s, 1)
            values["pause"] = pause(old, new)
            again = redone(old, new)
        return Outcome(
            event, launcher.name, values, again, note=f"exit status {codes}" if any(codes) else "", load=load
        )


def checkpoint_s(folder: Path, after_s: float) -> float | None:
    """When the first checkpoint after a given time was complete; both are monotonic times of this host in seconds."""
    offset_s = time.time() - time.monotonic()
    times = [path.stat().st_mtime - offset_s for path in folder.glob("commit-*/DONE")]
    return min((at_s for at_s in times if at_s > after_s), default=None)


@click.command()
@common_options(default_runs=10)
def main(**rest: Any) -> None:
    """Measure resizes on request, and graceful leaving. edl only."""
    common = gather(default_names="edl-rejoin", **rest)
    python = next((one.python for one in common.launchers if isinstance(one, Edl)), "")
    if not python or len(common.launchers) > 1:
        raise click.UsageError("--launchers: this is about edl only")
    started = Scaled(python, rejoins=True, kind="started", options=("--scheduler=process",))
    spares = Scaled(python, rejoins=True, kind="spares")
    graceful = Scaled(python, rejoins=True, kind="by hand", options=(f"--shutdown-timeout={GRACE_S:g}",))
    stories: list[tuple[str, Callable[[], list[Outcome]]]] = [
        ("started", lambda: resizes(started, 1, common.keep)),
        ("spares", lambda: resizes(spares, 3, common.keep)),
        ("leave", lambda: [leave(graceful, (1,), common.keep)]),
        ("end", lambda: [leave(graceful, (0, 1), common.keep)]),
    ]
    outcomes: list[Outcome] = []
    for run in range(common.runs):
        for name, story in stories:
            for one in story():
                told = report.figures(one.values)
                report.progress(f"{run + 1}/{common.runs} {name} {one.event}: {told} {one.note}")
                outcomes.append(one)
    outcomes.sort(key=lambda one: (len(one.event), one.event))
    title = "Scaling on request, and leaving with 30 s grace; torch on CPU, one worker per node"
    report.show(title, outcomes, own="started")
    report.write_json(common.json_path, title, outcomes, runs=common.runs, grace_s=GRACE_S)


if __name__ == "__main__":
    main()
