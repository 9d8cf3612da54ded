"""Re-cuts a sharded state in real jobs, 2 -> 4 -> 3 -> 1 -> 4 nodes with two workers each: the pauses of the processes
that stay, the steps repeated, and the bytes that edl's launchers read for their workers, against the least possible.

    python -m benchmarks.recut_job --layouts fsdp,hsdp,tp --megabytes 20 --runs 3
    python -m benchmarks.recut_job --layouts hsdp --peer-python /tmp/venvs/peers-torchft/bin/python

Nodes join, one is killed, two are drained (SIGTERM to the launcher). With ``--peer-python`` torchft goes through the
same changes beside each run of HSDP: a node is a replica group. Exit status 1 if edl broke a promise: another loss than
an undisturbed run's at any step, a process that was restarted, or anything written but logs.
"""

from __future__ import annotations

import itertools
import re
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from benchmarks import recut
from benchmarks.common import processes, report
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import Edl, Launcher, Torchft
from benchmarks.common.losses import Difference, largest_difference, losses
from benchmarks.common.model_sizes import shapes
from benchmarks.common.report import Outcome
from benchmarks.common.steps import World, longest_gap, redone

WORKERS = 2
STEPS = 5
"""Of each rank in a world, before the next change."""
LAYOUTS = ("fsdp", "hsdp", "tp")
LEASE_S = 10.0
TOLERANCE = 1e-5
"""Of the loss, between a run with changes and an undisturbed one."""
ARRAYS, BYTES = 3, 4
"""Adam has two numbers for each parameter."""
LINE = re.compile(r"re-cut for a worker: (\d+) bytes from this node, (\d+) from others")
WAY = (2, 4, 3, 1, 4)
"""Numbers of nodes, one after another."""


@dataclass(frozen=True, slots=True)
class Change:
    """Its name, the number of nodes after it, what happens, and to which node."""

    name: str
    nodes: int
    act: Callable[[Job, int], float]
    node: int


def changes(way: Sequence[int]) -> list[Change]:
    """Nodes come and go one at a time; who leaves is the one that came last. The first to leave is killed, the others
    are drained."""
    found: list[Change] = []
    present, fresh = list(range(way[0])), way[0]
    for goal in way[1:]:
        while len(present) != goal:
            if len(present) < goal:
                word, act, node, fresh = "join", Job.start, fresh, fresh + 1
                present.append(node)
            else:
                killed = any(one.act is Job.kill_node for one in found)
                word, act = ("drain", Job.drain_node) if killed else ("kill", Job.kill_node)
                node = present.pop()
            name = f"{word} to {len(present)}"
            while any(one.name == name for one in found):
                name += ", again"
            found.append(Change(name, len(present), act, node))
    return found


@dataclass(frozen=True, slots=True)
class Bytes:
    """What launchers have read for a change: from their own node, from others; and the least from others."""

    own: int
    others: int
    least: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What all runs have in common. ``patience``: a factor for deadlines."""

    way: tuple[int, ...]
    megabytes: int
    keep: Path | None
    patience: float


@dataclass(slots=True)
class Run:
    """One run of a launcher with a layout. ``losses``: of each step; ``restarted``: pids beyond the first ones of a
    node, by node; ``written``: files that are no logs."""

    launcher: str
    layout: str
    outcomes: list[Outcome] = field(default_factory=list)
    moved: dict[str, Bytes] = field(default_factory=dict)
    losses: list[tuple[int, float]] = field(default_factory=list)
    restarted: dict[int, list[int]] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)


def read_bytes(job: Job) -> tuple[int, int]:
    """Bytes that all launchers have read for re-cuts so far: from their own node, from others."""
    texts = (path.read_text(errors="replace") for path in sorted(job.plan.folder.glob("launcher*.log")))
    found = [tuple(map(int, match)) for text in texts for match in LINE.findall(text)]
    return sum(here for here, _ in found), sum(away for _, away in found)


def mesh(layout: str, workers: int, megabytes: int) -> recut.Mesh:
    """How a layout cuts the model of the scripts."""
    of = shapes(megabytes)
    if layout == "fsdp":
        return recut.Mesh((workers,), dict.fromkeys(of, ((0, 0),)), of)
    if layout == "hsdp":
        return recut.Mesh((workers // 2, 2), dict.fromkeys(of, ((1, 0),)), of)
    layers = list(dict.fromkeys(name.partition(".")[0] for name in of))
    whole = ((0, 0),)
    by_column, by_row = ((1, 0), *whole), ((1, 1), *whole)
    cuts: recut.Cuts = dict.fromkeys(of, whole)
    for at, layer in enumerate(layers[: len(layers) // 2 * 2]):
        cuts[f"{layer}.weight"] = by_row if at % 2 else by_column
        cuts[f"{layer}.bias"] = whole if at % 2 else by_column
    return recut.Mesh((workers // 2, 2), cuts, of)


def least_bytes(layout: str, megabytes: int, old: World, new: World) -> int:
    """The fewest bytes that have to go from one node to another. Under FSDP2 and with tensor parallelism a node also
    has the copy of the node before it; under HSDP nothing is copied, nor by the node of a job of one."""
    at = {rank: done[0].node for rank, done in sorted(old.steps.items())}
    nodes = list(dict.fromkeys(at.values()))
    held: dict[int, set[int]] = {node: {rank for rank, its in at.items() if its == node} for node in nodes}
    if layout != "hsdp" and len(nodes) > 1:
        own = {node: set(ranks) for node, ranks in held.items()}
        for before, node in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            held[node] |= own[before]
    after = [done[0].node for _, done in sorted(new.steps.items())]
    meshes = mesh(layout, old.size, megabytes), mesh(layout, new.size, megabytes)
    return ARRAYS * BYTES * recut.least(*meshes, held, after)


def make_change(job: Job, run: Run, one: Change, megabytes: int) -> None:
    """Make one change and measure it. Raises ``NotReached``."""
    load, read, old = report.load_average(), read_bytes(job), job.steps.newest()
    assert old is not None, "it trains"
    struck_s = one.act(job, one.node)
    new = job.wait_next(struck_s, one.nodes * WORKERS)
    job.wait_running(one.nodes * WORKERS, STEPS)
    stayed = {done[0].pid for done in old.steps.values()} & {done[0].pid for done in new.steps.values()}
    values = {
        "pause of who stays": longest_gap(job.steps.worlds.values(), stayed, struck_s, new.first_s),
        "from the event to all": new.first_s - struck_s,
    }
    passed = [world for world in job.steps.whole() if old.formed <= world.formed <= new.formed]
    again = sum(redone(before, after) for before, after in itertools.pairwise(passed))
    run.outcomes.append(Outcome(one.name, f"{run.launcher}, {run.layout}", values, again, load=load))
    if job.launcher.is_edl:
        own, others = (now - then for now, then in zip(read_bytes(job), read, strict=True))
        run.moved[one.name] = Bytes(own, others, least_bytes(run.layout, megabytes, old, new))


def script_arguments(layout: str, megabytes: int) -> tuple[str, ...]:
    return (f"--layout={layout}", f"--megabytes={megabytes}")


def measure(launcher: Launcher, layout: str, plan: Plan) -> Run:
    """One run through all changes, up to the first that does not come about."""
    script = "recut_torch.py" if launcher.is_edl else "recut_torchft.py"
    run = Run("edl" if launcher.is_edl else launcher.name, layout)
    with launch(
        launcher, script, (1, max(plan.way)), workers_per_node=WORKERS, keep=plan.keep, patience=plan.patience,
        arguments=script_arguments(layout, plan.megabytes),
    ) as job:  # fmt: skip
        name = "start"
        try:
            for node in range(plan.way[0]):
                job.start(node)
            job.wait_running(plan.way[0] * WORKERS, STEPS)
            for one in changes(plan.way):
                name = one.name
                make_change(job, run, one, plan.megabytes)
        except NotReached as error:
            load, started = report.load_average(), name != "start"
            run.outcomes.append(Outcome(name, f"{run.launcher}, {layout}", started=started, note=str(error), load=load))
        run.losses = list(losses(job.steps.whole()))
        pids = {node: sorted(found) for node, found in job.steps.pids_by_node.items()}
        run.restarted = {node: found for node, found in pids.items() if len(found) > WORKERS}
        logs = ("steps", "launcher*.log", "node*-logs", "quorums")
        run.written = [path.name for path in job.plan.folder.iterdir() if not any(map(path.match, logs))]
    return run


def undisturbed(layout: str, steps: int, plan: Plan) -> dict[int, float]:
    """The losses of a job of one node that nothing happens to."""
    arguments = (*script_arguments(layout, plan.megabytes), f"--steps={steps}", "--pause-ms=0")
    with launch(
        edl(layout), "recut_torch.py", (1, 1), workers_per_node=WORKERS, alone=True, arguments=arguments, keep=plan.keep
    ) as job:
        job.start(0)

        def done() -> bool | None:
            world = job.steps.newest()
            return (world is not None and world.last_step >= steps) or None

        job.wait(done, f"{steps} undisturbed steps", plan.patience * (60 + steps))
        return dict(losses(job.steps.whole()))


def edl(layout: str) -> Edl:
    # A launcher that eight workers leave no processor must not lose its lease; a killed one is noticed without it.
    options = ("--replica-size=2",) if layout == "tp" else ()
    return Edl(sys.executable, rejoins=True, options=options, lease_ttl_s=LEASE_S)


def broken_promises(run: Run, difference: Difference) -> Iterator[str]:
    """What a run of edl should not have done."""
    if difference.relative > TOLERANCE:
        yield f"losses differ by {difference}; at most {TOLERANCE:g} is allowed"
    for node, pids in run.restarted.items():
        yield f"node {node} has had {len(pids)} worker processes instead of {WORKERS}: {pids}"
    if run.written:
        yield f"more than logs was written: {', '.join(sorted(run.written))}"
    yield from (f"{one.event}: {one.note}" for one in run.outcomes if one.note)


def show_bytes(runs: list[Run]) -> None:
    """The medians over the runs, for each layout and change."""
    for layout in dict.fromkeys(run.layout for run in runs):
        moved = [run.moved for run in runs if run.layout == layout and run.moved]
        for name in dict.fromkeys(itertools.chain.from_iterable(moved)):
            found = [one[name] for one in moved if name in one]
            own, others, least = (
                statistics.median(getattr(one, part) for one in found) / 1e6 for part in ("own", "others", "least")
            )
            ratio = f"{others / least:.3f}x" if least else "-"
            click.echo(
                f"edl, {layout:<6}{name:<18}{others:>9.2f} MB from other nodes, least possible {least:>8.2f} ({ratio}),"
                f"{own:>9.2f} MB from the own node"
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far the losses of a run are from undisturbed ones, and what edl should not have done."""

    difference: Difference
    broken: list[str]


def judge(runs: list[Run], plan: Plan) -> dict[str, Verdict]:
    """Compare each run with an undisturbed one, and print the verdicts. Returns them by run."""
    verdicts: dict[str, Verdict] = {}
    for layout in dict.fromkeys(run.layout for run in runs):
        mine = [run for run in runs if run.layout == layout]
        steps = max((step for run in mine for step, _ in run.losses), default=0)
        reference = undisturbed(layout, steps, plan) if steps else {}
        numbers = dict.fromkeys((run.launcher for run in mine), 0)
        for run in mine:
            numbers[run.launcher] += 1
            who = f"{run.launcher}, {layout}, run {numbers[run.launcher]}"
            difference = largest_difference(run.losses, reference) if run.losses else Difference(0.0, 0, 0)
            broken = list(broken_promises(run, difference)) if run.launcher == "edl" else []
            restarted = sum(len(pids) - WORKERS for pids in run.restarted.values())
            click.echo(f"{who}: largest difference of the loss {difference}; {restarted} processes restarted")
            for promise in broken:
                click.echo(f"{who}: PROMISE BROKEN: {promise}")
            verdicts[who] = Verdict(difference, broken)
    return verdicts


def measure_all(names: list[str], runs: int, peer: str, plan: Plan) -> list[Run]:
    """All runs, edl and torchft in turn."""
    done: list[Run] = []
    for number in range(runs):
        for name in names:
            for launcher in (edl(name), *((Torchft(peer),) if peer and name == "hsdp" else ())):
                try:
                    run = measure(launcher, name, plan)
                except processes.NotStarted as error:
                    run = Run(launcher.name, name, [Outcome("start", launcher.name, started=False, note=str(error))])
                told = "; ".join(f"{one.event}: {one.note or report.figures(one.values)}" for one in run.outcomes)
                report.progress(f"{run.launcher}, {name} {number + 1}/{runs}: {told}")
                done.append(run)
    return done


def _way(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-4](,[1-4])+", text):
        raise click.UsageError(f"--way={text}: must be numbers of nodes from 1 to 4, such as 2,4,3,1,4")
    return tuple(map(int, text.split(",")))


@click.command()
@click.option("--layouts", default=",".join(LAYOUTS), show_default=True, help="Comma list.")
@click.option("--way", default=",".join(map(str, WAY)), show_default=True, help="Numbers of nodes, each 1 to 4.")
@click.option("--megabytes", default=20, show_default=True, help="Parameters; the state is three times as large.")
@click.option("--runs", default=3, show_default=True)
@click.option("--peer-python", default="", help="Python with torchft (peer_venv.py), to run it beside HSDP.")
@click.option("--patience", default=1.0, show_default=True, help="Wait so many times as long on a busy machine.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all runs.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Keep the logs there.")
def main(
    layouts: str,
    way: str,
    megabytes: int,
    runs: int,
    peer_python: str,
    patience: float,
    json_path: Path | None,
    keep: Path | None,
) -> None:
    """Measure pauses and bytes of re-cuts in real jobs, and check what they promise."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that clean-up runs
    names = layouts.split(",")
    if unknown := [name for name in names if name not in LAYOUTS]:
        raise click.UsageError(f"--layouts: {', '.join(unknown)} unknown; there are {', '.join(LAYOUTS)}")
    plan = Plan(_way(way), megabytes, keep.resolve() if keep else None, patience)
    done = measure_all(names, runs, peer_python, plan)
    title = f"Re-cuts of {3 * megabytes} MB of state"
    outcomes = [one for run in done for one in run.outcomes]
    report.show(title, outcomes, own="torchft, hsdp")
    show_bytes(done)
    verdicts = judge(done, plan)
    moved = [[run.launcher, run.layout, {name: [one.own, one.others, one.least] for name, one in run.moved.items()}]
             for run in done if run.moved]  # fmt: skip
    said = {who: asdict(one) for who, one in verdicts.items()}
    report.write_json(json_path, title, outcomes, runs=runs, megabytes=megabytes, way=way, moved=moved, verdicts=said)
    if any(one.broken for one in verdicts.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
