"""Measures what a script that knows nothing of edl loses when its worker is killed, under edl and a peer in turn.

    python -m benchmarks.peer_venv --peer scripts /tmp/edl-scripts                       # once
    python -m benchmarks.unchanged --edl-python /tmp/edl-scripts/bin/python --peer-python /tmp/edl-scripts/bin/python

The first kill lets edl's launcher learn what the script imports (docs/standby.md), so that the table has it in a row of
its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.common import report
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import Edl, Launcher
from benchmarks.common.options import Common, common_options, gather
from benchmarks.common.report import Outcome
from benchmarks.common.steps import World, median_gap, redone
from benchmarks.recovery import kill_a_worker
from benchmarks.scripts.unchanged_data import write_pictures, write_text

PEERS = {"torch": "edl,torchrun-tuned", "paddle": "edl,paddle-launch"}
CHECKPOINT_EVERY = 20
VARIABLES = {
    "XDG_CACHE_HOME": "{folder}/cache",  # what edl learns is of this run only
    "HF_HOME": "{folder}/huggingface",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A script with its own options. ``prepare`` writes its data into the run's folder, ``{folder}`` in the options."""

    name: str
    framework: str
    script: str
    options: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None
    own_folders: bool = False
    """Each node keeps its own output; measured is the loss of the node with rank 0."""
    synced: bool = False
    """With edl's ``--sync-dir``."""


_EVERY = str(CHECKPOINT_EVERY)
_NANOGPT = ("--data={folder}/text.txt", "--out_dir=out", "--init_from=resume", f"--eval_interval={_EVERY}")
_RUN_CLM = (
    *("--model_type=gpt2", "--config_overrides=n_layer=2,n_head=2,n_embd=32,vocab_size=256,n_positions=32"),
    *("--train_file={folder}/text.txt", "--block_size=32", "--output_dir=out", f"--save_steps={_EVERY}"),
    *("--save_total_limit=3", "--per_device_train_batch_size=8", "--logging_steps=100", "--report_to=none"),
    *("--disable_tqdm=True", "--use_cpu=True", "--ddp_backend=gloo"),
)
_CHECKPOINTS = (f"--checkpoint-every={_EVERY}",)
CASES = {
    case.name: case
    for case in (
        Case("transformers", "torch", "train_transformers.py", _CHECKPOINTS),
        Case("run-clm", "torch", "train_run_clm.py", _RUN_CLM, write_text),
        Case("lightning", "torch", "train_lightning.py", _CHECKPOINTS),
        Case("nanogpt", "torch", "train_nanogpt.py", _NANOGPT, write_text),
        Case("run-clm-own-folders", "torch", "train_run_clm.py", _RUN_CLM, write_text, own_folders=True),
        Case("nanogpt-own-folders", "torch", "train_nanogpt.py", _NANOGPT, write_text, own_folders=True),
        Case("run-clm-sync-dir", "torch", "train_run_clm.py", _RUN_CLM, write_text, own_folders=True, synced=True),
        Case("nanogpt-sync-dir", "torch", "train_nanogpt.py", _NANOGPT, write_text, own_folders=True, synced=True),
        Case("paddleseg", "paddle", "train_paddleseg.py", ("--data={folder}", *_CHECKPOINTS), write_pictures),
    )
}


@dataclass(frozen=True, slots=True)
class Pace:
    """How often and how fast to strike. ``rest_s``: training in peace before each kill after the first."""

    kills: int
    rest_s: float
    patience: float


def kill_the_node_of_rank_0(job: Job, world: World) -> float:
    """SIGKILL launcher, worker and helpers of the node whose output has the checkpoints."""
    return job.kill_node(world.steps[0][-1].node)


@dataclass(frozen=True, slots=True)
class Strike:
    """A kill, ``rest_s`` after the job has come to run. ``size``: of the world after it."""

    name: str
    kill: Callable[[Job, World], float]
    size: int
    rest_s: float


def strikes(case: Case, pace: Pace) -> list[Strike]:
    """All kills of a run."""
    if case.own_folders:
        return [Strike(case.name, kill_the_node_of_rank_0, 1, pace.rest_s)]
    first = Strike(f"{case.name}, first kill", kill_a_worker, 2, 0.0)
    return [first, *(Strike(case.name, kill_a_worker, 2, pace.rest_s) for _ in range(pace.kills - 1))]


def measure(case: Case, launcher: Launcher, keep: Path | None, pace: Pace) -> Iterator[Outcome]:
    """One run: a job whose worker is killed again and again. Never raises for a launcher's failure."""
    if case.synced:
        assert isinstance(launcher, Edl)
        launcher = replace(launcher, options=("--sync-dir=out",))
    load, bounds = report.load_average(), (1, 2) if case.own_folders else (2, 2)
    with launch(
        launcher, case.script, bounds, arguments=case.options, keep=keep, first_nodes=2, patience=pace.patience,
        own_folders=case.own_folders, variables=VARIABLES,
    ) as job:  # fmt: skip
        if case.prepare is not None:
            case.prepare(job.plan.folder)
        todo = strikes(case, pace)
        try:
            for node in range(2):
                job.start(node)
            job.wait_running(2)
        except NotReached as error:
            yield Outcome(todo[0].name, launcher.name, started=False, note=f"did not start: {error}", load=load)
            return
        for strike in todo:
            outcome = _strike(job, strike)
            yield outcome
            if not outcome.values:
                return


def _strike(job: Job, strike: Strike) -> Outcome:
    """Train in peace, kill, and wait until training goes on."""
    launcher = job.launcher.name
    time.sleep(strike.rest_s)
    load = report.load_average()
    try:
        job.steps.poll()
        old = job.wait_running(2)
        struck_s = strike.kill(job, old)
        new = job.wait_next(struck_s, strike.size)
    except NotReached as error:
        return Outcome(strike.name, launcher, note=f"never recovered: {error}", load=load)
    values = {"recovery": new.first_s - struck_s, "step before the kill": median_gap(old, 0.0, struck_s)}
    return Outcome(strike.name, launcher, values, redone(old, new), load=load)


def measure_all(common: Common, cases: list[Case], pace: Pace) -> list[Outcome]:
    """All runs, with launchers in turn, so that other load of the machine affects them alike."""
    outcomes: list[Outcome] = []
    for case in cases:
        for run in range(common.runs):
            for launcher in common.launchers:
                if case.synced and not launcher.is_edl:
                    continue
                for one in measure(case, launcher, common.keep, pace):
                    told = report.figures(one.values)
                    told += f", {one.redone} steps redone" if one.redone is not None else ""
                    report.progress(f"{one.event} {run + 1}/{common.runs} {launcher.name}: {told or one.note}")
                    outcomes.append(one)
                    report.write_json(common.json_path, "Unchanged scripts", outcomes, runs=common.runs)
    return outcomes


@click.command()
@click.option("--framework", type=click.Choice(sorted(PEERS)), default="torch", show_default=True)
@click.option("--scripts", "case_names", default="", help=f"Comma list; there are {', '.join(CASES)}.")
@click.option("--kills", default=3, show_default=True, type=click.IntRange(2), help="Kills in each run.")
@click.option("--rest", "rest_s", default=20.0, show_default=True, help="Seconds of training before each later kill.")
@click.option("--patience", default=1.0, show_default=True, help="Factor for all deadlines, for a busy machine.")
@common_options(default_runs=3)
def main(framework: str, case_names: str, kills: int, rest_s: float, patience: float, names: str, **rest: Any) -> None:
    """Measure what unchanged scripts lose when a worker is killed."""
    chosen = case_names.split(",") if case_names else [one.name for one in CASES.values() if one.framework == framework]
    wrong = [name for name in chosen if name not in CASES or CASES[name].framework != framework]
    if wrong:
        known = ", ".join(name for name, case in CASES.items() if case.framework == framework)
        raise click.UsageError(f"--scripts: {', '.join(wrong)} unknown for --framework={framework}; there are {known}")
    common = gather(names=names, default_names=PEERS[framework], **rest)
    outcomes = measure_all(common, [CASES[name] for name in chosen], Pace(kills, rest_s, patience))
    report.show(f"Unchanged scripts, {framework}, two nodes with one worker each", outcomes, own=_peer(common))


def _peer(common: Common) -> str:
    return next((one.name for one in common.launchers if not one.is_edl), "edl")


if __name__ == "__main__":
    main()
