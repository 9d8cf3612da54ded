"""Measures time and memory until the first batch of an epoch is known, compared with the frameworks' own samplers.

    python -m benchmarks.sampler --samples 100000000 --runs 5

Each run is a separate process, which imports the framework, creates the sampler, and then takes the first batch of
epoch 1 for rank 1 of 8. The time is that of the last part; the memory is the growth of the process's peak during it. A
second measurement covers the next 1000 batches, because an order that is not stored has to be computed then.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click

from benchmarks.common import report
from benchmarks.common.report import Outcome

WORLD, RANK, BATCH, MORE = 8, 1, 64, 1000
OWN = {"torch": ("edl", "edl computed"), "paddle": ("edl", "edl computed")}
PEERS = {"torch": "DistributedSampler", "paddle": "DistributedBatchSampler"}


def torch_sampler(kind: str, samples: int) -> tuple[Any, Callable[[Any], Iterator[list[int]]]]:
    from torch.utils import data

    from edl.torch.sampler import EDLBatchSampler, EDLDistributedSampler

    if kind == PEERS["torch"]:
        theirs: Any = data.DistributedSampler(range(samples), WORLD, RANK)  # type: ignore[arg-type]
        return theirs, lambda one: iter(data.BatchSampler(one, BATCH, False))
    order = "computed" if kind == "edl computed" else "framework"
    ours = EDLDistributedSampler(range(samples), WORLD, RANK, order=order)
    return ours, lambda one: iter(EDLBatchSampler(one, BATCH))


def paddle_sampler(kind: str, samples: int) -> tuple[Any, Callable[[Any], Iterator[list[int]]]]:
    from paddle import io

    from edl.paddle.sampler import EDLBatchSampler

    if kind == PEERS["paddle"]:
        return io.DistributedBatchSampler(range(samples), BATCH, WORLD, RANK, shuffle=True), iter
    order = "computed" if kind == "edl computed" else "framework"
    return EDLBatchSampler(range(samples), BATCH, WORLD, RANK, shuffle=True, order=order), iter


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(framework: str, kind: str, samples: int) -> dict[str, float]:
    """Run one measurement in a new process."""
    sampler, batches_of = {"torch": torch_sampler, "paddle": paddle_sampler}[framework](kind, samples)
    sampler.set_epoch(1)
    before = peak_bytes()
    begun_s = time.perf_counter()
    batches = batches_of(sampler)
    assert len(next(batches)) == BATCH
    first_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    assert all(len(batch) == BATCH for batch in islice(batches, MORE))
    return {"first": first_s, "more": time.perf_counter() - begun_s, "memory": peak_bytes() - before}


def run(framework: str, kind: str, samples: int) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.sampler", "--samples", str(samples)]
    done = subprocess.run([*command, "--measure", f"{framework}/{kind}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def tell(framework: str, values: dict[str, list[dict[str, float]]]) -> None:
    """Print medians, spread, and each median relative to the framework's own."""
    peer = values[PEERS[framework]]
    shown = (
        ("first", "first batch", 1.0, "s"), ("more", f"next {MORE} batches", 1.0, "s"), ("memory", "memory", 1e6, "MB"),
    )  # fmt: skip
    for key, name, unit, text in shown:
        base = statistics.median(one[key] for one in peer)
        for kind, runs in values.items():
            found = sorted(one[key] / unit for one in runs)
            middle = statistics.median(found)
            ratio = middle * unit / base
            print(
                f"{framework:7} {name:18} {kind:24} median {middle:10.4g} {text:2}  "
                f"({found[0]:.4g} - {found[-1]:.4g})  {ratio:.4f} x {PEERS[framework]}"
            )


@click.command()
@click.option("--samples", default=100_000_000, show_default=True)
@click.option("--runs", default=5, show_default=True)
@click.option("--frameworks", default="torch", show_default=True, help="torch, paddle or both, with a comma.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all runs.")
@click.option("--measure", "measured", default="", hidden=True)
def main(samples: int, runs: int, frameworks: str, json_path: Path | None, measured: str) -> None:
    """Measure what it costs to begin an epoch."""
    if measured:
        framework, _, kind = measured.partition("/")
        print(json.dumps(measure(framework, kind, samples)))
        return
    outcomes: list[Outcome] = []
    for framework in frameworks.split(","):
        values: dict[str, list[dict[str, float]]] = {}
        for number in range(runs):
            for kind in (PEERS[framework], *OWN[framework]):
                load = report.load_average()
                report.progress(f"{framework}, run {number + 1} of {runs}: {kind}")
                found = run(framework, kind, samples)
                values.setdefault(kind, []).append(found)
                outcomes.append(Outcome(f"{framework}: an epoch of {samples} samples begins", kind, found, load=load))
        tell(framework, values)
    report.write_json(json_path, "An epoch begins", outcomes, samples=samples, runs=runs)


if __name__ == "__main__":
    main()
