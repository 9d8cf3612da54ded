"""What commits cost when nothing happens: the step time of DistributedDataParallel with a commit in each step, without
commits in the same processes, and of the same loop under torchrun.

    python -m benchmarks.step_cost --megabytes 1,10,100 --runs 5

Two nodes with a worker each. With edl, blocks of five steps with commits and without alternate within a run, and runs
of edl and torchrun alternate, so that other load affects all alike.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import click

from benchmarks.common import report
from benchmarks.common.job import Job, NotReached, launch
from benchmarks.common.launchers import Launcher
from benchmarks.common.options import Common, common_options, gather
from benchmarks.common.report import Outcome

SCRIPT = "step_cost_torch.py"
BLOCK = 5
SKIPPED = 2 * BLOCK
"""Steps at the beginning, while buffers are made."""
LIMIT_S = 300.0


def notes(job: Job) -> list[dict[str, Any]]:
    """The script's lines: one for each step."""
    file = job.plan.folder / "notes"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def measure(launcher: Launcher, megabytes: int, steps: int, keep: Path | None) -> Outcome:
    """One run. Never raises for a launcher's failure."""
    title = f"{megabytes} MB"
    load = report.load_average()
    arguments = (f"--megabytes={megabytes}", f"--block={BLOCK}", *(() if launcher.is_edl else ("--plain",)))
    with launch(launcher, SCRIPT, (2, 2), arguments=arguments, keep=keep) as job:
        try:
            job.start(0)
            job.start(1)
            job.wait(lambda: notes(job)[SKIPPED + steps - 1 :] or None, f"{SKIPPED + steps} steps", LIMIT_S)
        except NotReached as error:
            return Outcome(title, launcher.name, started=False, note=str(error), load=load)
        lines = notes(job)[SKIPPED : SKIPPED + steps]
    without = [line["step_s"] for line in lines if not line["commits"]]
    values = {"step without commit": statistics.median(without)}
    committing = [line for line in lines if line["commits"]]
    if committing:
        values["step with commit"] = statistics.median(line["step_s"] for line in committing)
        values["blocked by a commit"] = statistics.median(line["commit_s"] for line in committing)
    return Outcome(title, launcher.name, values, load=load)


def measure_all(common: Common, sizes: list[int], steps: int) -> list[Outcome]:
    """All runs of all sizes."""
    outcomes = []
    for size in sizes:
        for run in range(common.runs):
            for launcher in common.launchers:
                one = measure(launcher, size, steps, common.keep)
                figures = report.figures(one.values)
                report.progress(f"{one.event} {run + 1}/{common.runs} {launcher.name}: {figures or one.note}")
                outcomes.append(one)
    return outcomes


@click.command()
@click.option("--megabytes", default="1,10,100", show_default=True, help="Comma list of sizes of the state.")
@click.option("--steps", default=40, show_default=True, help="Steps of a run that count; a multiple of 10.")
@common_options(default_runs=5)
def main(megabytes: str, steps: int, names: str, **rest: Any) -> None:
    """Measure the step time with and without commits by the size of the state."""
    if steps < 2 * BLOCK or steps % (2 * BLOCK):
        raise click.UsageError(f"--steps={steps}: must be a multiple of {2 * BLOCK}")
    common = gather(names=names, default_names="edl-rejoin,torchrun-tuned", **rest)
    outcomes = measure_all(common, [int(size) for size in megabytes.split(",")], steps)
    title = "Step time by the size of the state, 2 nodes with a worker each"
    report.show(title, outcomes, own="torchrun-tuned")
    report.write_json(common.json_path, title, outcomes, runs=common.runs, steps=steps)


if __name__ == "__main__":
    main()
