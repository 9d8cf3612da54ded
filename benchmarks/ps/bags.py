"""Measures steps of a DeepFM whose 26 features have a table each, against one pserver process.

    python -m benchmarks.ps bags

23 features have one key per example, three have a bag of 0 to 10. Three ways take turns on the same batches, in one
trainer with one thread: a request for each table; one request for all (``EmbeddingCollection``); and the same with
pushes that are on their way during the next step (``step(wait=False)``). With ``--peer-python``, an interpreter that
has Paddle 2.6, Paddle's own parameter servers take turns with them (mode async, SGD, which costs them least), and the
others are compared with them round by round:

    python -m venv /tmp/paddle-2.6
    /tmp/paddle-2.6/bin/pip install paddlepaddle==2.6.2 'numpy<2' 'protobuf==3.20.3' setuptools
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common import processes, report
from benchmarks.common.launchers import REPOSITORY
from benchmarks.ps.steps import Pserver
from ps.client.dense import DenseLayout
from ps.client.frontend import BLOCK
from ps.optimizers import Adagrad, Normal
from ps.spec import TableSpec

FEATURES, BAGS, LONGEST, WIDTH, NUMBERS, KEYS = 26, 3, 10, 8, 13, 1_000_003
OPTIMIZER = Adagrad(0.05, initial_accumulator=1e-5)
INITIAL = Normal(0.02)
NAMES = tuple(f"f{number}" for number in range(FEATURES))
SHAPES = {
    "0.weight": (64, FEATURES * WIDTH + NUMBERS), "0.bias": (64,), "2.weight": (1, 64), "2.bias": (1,),
}  # fmt: skip
TABLES = (
    *(TableSpec(name, WIDTH, OPTIMIZER, INITIAL) for name in NAMES),
    DenseLayout(SHAPES, BLOCK).spec("dense", OPTIMIZER),
)
WAYS = ("a trip per table", "one trip", "one trip, no wait")
PEER = "Paddle 2.6"
SCRIPT = REPOSITORY / "benchmarks" / "scripts" / "paddle_ps_bags.py"
Batch = dict[str, Any]


@dataclass
class Spent:
    """What one way took, by round."""

    rates: list[float] = field(default_factory=list)
    trainer_us: list[float] = field(default_factory=list)
    """CPU time of the trainer per example, in microseconds."""
    server_us: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Spread:
    """The quartiles of a figure over the rounds."""

    low: float
    middle: float
    high: float

    def text(self, digits: int) -> str:
        """The median, with the other quartiles in brackets."""
        low, middle, high = (f"{one:,.{digits}f}" for one in (self.low, self.middle, self.high))
        return f"{middle} ({low} - {high})"


def spread(values: Sequence[float]) -> Spread:
    """The quartiles of two or more values."""
    return Spread(*statistics.quantiles(values, n=4))


def against(one: Spent, base: Spent) -> tuple[Spread, Spread]:
    """How many times as many examples per second as ``base``, and how many times less CPU time of the trainer, both
    within the same round."""
    faster = [mine / other for mine, other in zip(one.rates, base.rates, strict=True)]
    cheaper = [other / mine for mine, other in zip(one.trainer_us, base.trainer_us, strict=True)]
    return spread(faster), spread(cheaper)


class DeepFM:
    """The model, and the three ways to train a batch."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        import edl.torch.ps as ps

        self.torch, self.ps = torch, ps
        layers = {
            name: ps.EmbeddingBag(name, WIDTH, mode="sum", optimizer=OPTIMIZER, initial=INITIAL) for name in NAMES
        }
        self.embeddings = ps.EmbeddingCollection(layers)
        self.layers = layers
        self.deep = nn.Sequential(nn.Linear(FEATURES * WIDTH + NUMBERS, 64), nn.ReLU(), nn.Linear(64, 1))
        ps.Dense(self.deep, OPTIMIZER)

    def batch(self, random: np.random.Generator, size: int) -> Batch:
        """The arguments of each embedding: keys, and offsets for the bags."""
        found: Batch = {}
        for number, name in enumerate(NAMES):
            lengths = random.integers(0, LONGEST + 1, size) if number < BAGS else np.ones(size, np.int64)
            keys = (random.zipf(1.2, lengths.sum()) % KEYS).astype(np.int64)
            offsets = np.cumsum(lengths) - lengths
            found[name] = self.torch.from_numpy(keys), self.torch.from_numpy(offsets)
        return found

    def train(self, batch: Batch, way: int) -> None:
        """One step; labels are derived from the keys."""
        torch = self.torch
        layers = self.layers
        rows = list(self.embeddings(batch).values()) if way else [layers[name](*batch[name]) for name in NAMES]
        vectors = torch.stack(rows, 1)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        numbers = torch.zeros(len(vectors), NUMBERS)
        logit = pairs + self.deep(torch.cat([vectors.flatten(1), numbers], 1)).squeeze(-1)
        labels = (batch[NAMES[-1]][0] % 3 == 0).float()
        torch.nn.functional.binary_cross_entropy_with_logits(logit, labels).backward()
        self.ps.step(wait=way != 2)


class Peer:
    """Paddle's pserver and trainer, each a process."""

    def __init__(self, python: str) -> None:
        ports = processes.free_ports(2)
        common = {
            "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{ports[0]}", "PADDLE_TRAINERS_NUM": "1", "POD_IP": "127.0.0.1",
            "PADDLE_TRAINER_ENDPOINTS": f"127.0.0.1:{ports[1]}", "PADDLE_TRAINER_ID": "0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

        def start(role: str, port: int) -> subprocess.Popen[str]:
            environment = processes.clean_environment({**common, "TRAINING_ROLE": role, "PADDLE_PORT": str(port)})
            return subprocess.Popen(
                [python, str(SCRIPT)], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip

        self.server, self.trainer = start("PSERVER", ports[0]), start("TRAINER", ports[1])
        self._read("ready")

    def _read(self, word: str) -> list[str]:
        assert self.trainer.stdout is not None
        for line in self.trainer.stdout:
            if line.startswith(word):
                return line.split()
        raise click.ClickException(f"the peer's trainer has ended without {word!r}; run {SCRIPT} by hand to see why")

    def round(self, size: int, steps: int) -> tuple[float, float, float]:
        """Train a round; returns seconds, and CPU seconds of trainer and pserver."""
        server = psutil.Process(self.server.pid)
        before_s = sum(server.cpu_times()[:2])
        assert self.trainer.stdin is not None
        self.trainer.stdin.write(f"{size} {steps}\n")
        self.trainer.stdin.flush()
        _, wall_s, cpu_s = self._read("round")
        return float(wall_s), float(cpu_s), sum(server.cpu_times()[:2]) - before_s

    def stop(self) -> None:
        """End both processes."""
        for process in (self.trainer, self.server):
            process.kill()
            process.communicate()


def one_round(model: DeepFM, server: psutil.Process, way: int, work: list[Batch]) -> tuple[float, float, float]:
    """Train these batches; returns seconds, and CPU seconds of trainer and pserver."""
    start, trainer_s, server_s = time.perf_counter(), time.process_time(), sum(server.cpu_times()[:2])
    for batch in work:
        model.train(batch, way)
    model.ps.refresh()  # waits for the last push
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - trainer_s
    return wall_s, cpu_s, sum(server.cpu_times()[:2]) - server_s


def run(model: DeepFM, server: psutil.Process, peer: Peer | None, size: int, rounds: int, steps: int) -> list[Spent]:
    """Measure the ways in turns, on the same batches."""
    random = np.random.default_rng(1)
    found = [Spent() for _ in range(len(WAYS) + (peer is not None))]
    for number in range(rounds + 1):
        work = [model.batch(random, size) for _ in range(steps)]
        for turn in range(len(found)):
            way = (number + turn) % len(found)
            if way < len(WAYS):
                wall_s, trainer_s, server_s = one_round(model, server, way, work)
            else:
                assert peer is not None, "there is one more way with it"
                wall_s, trainer_s, server_s = peer.round(size, steps)
            if number:  # the first round is a warm-up
                found[way].rates.append(size * steps / wall_s)
                found[way].trainer_us.append(1e6 * trainer_s / (size * steps))
                found[way].server_us.append(1e6 * server_s / (size * steps))
    return found


@click.command("bags")
@click.option("--batches", default="512,4096", show_default=True, help="Examples in a step.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=2))
@click.option("--peer-python", help="An interpreter with Paddle 2.6.")
def main(batches: str, rounds: int, peer_python: str | None) -> None:
    """Examples per second and CPU time of a DeepFM with 26 tables: a request for each table, and one for all."""
    import torch

    from ps.client.frontend import part

    torch.set_num_threads(1)
    ways = (*WAYS, PEER) if peer_python else WAYS
    base = len(ways) - 1 if peer_python else 0
    table = Table(
        title=f"DeepFM, 26 tables, one trainer, one pserver, {rounds} rounds, load {report.load_average():.1f}; "
        f"medians (quartiles); the ratios are to {ways[base]!r} in the same round"
    )
    for heading in ("batch", "way", "examples/s", "times the rate", "trainer CPU us", "CPU: 1/", "pserver CPU us"):
        table.add_column(heading, justify="right")
    pserver, peer = Pserver(TABLES), Peer(peer_python) if peer_python else None
    try:
        part._join = lambda plan, specs: pserver.client(1)  # the layers use this instance
        model, server = DeepFM(), psutil.Process(pserver.process.pid)
        for size in map(int, batches.split(",")):
            found = run(model, server, peer, size, rounds, max(3, 8192 // size))
            for way, one in zip(ways, found, strict=True):
                faster, cheaper = against(one, found[base])
                table.add_row(
                    f"{size:,}", way, spread(one.rates).text(0), faster.text(2), spread(one.trainer_us).text(1),
                    cheaper.text(2), f"{statistics.median(one.server_us):.1f}",
                )  # fmt: skip
            table.add_section()
            report.progress(f"{size} examples are done, load {report.load_average():.1f}")
        part.forget()
    finally:
        pserver.stop()
        if peer is not None:
            peer.stop()
    Console(width=150).print(table)
