"""Draws loss curves of one training: undisturbed, and through 2 → 5 → 1 → 3 workers with two policies.

    python -m benchmarks.curves --svg docs/loss-curves.svg

The training is ``examples/06-same-curve``. Nodes join and leave gracefully.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.common import processes
from benchmarks.common.etcd import PrivateEtcd
from benchmarks.common.launchers import REPOSITORY
from benchmarks.curves.drawing import Curve, draw

PACED = Path(__file__).with_name("paced.py")
SCRIPT = REPOSITORY / "examples" / "06-same-curve" / "train.py"
DEADLINE_S = 240.0
SLOW_S = 1.0
"""Pause in seconds after each step while a change is awaited."""
BATCH = 64
KEPT = (f"--global-batch={BATCH}", "--local-batch=32")
LINEAR = ("--local-batch=32", "--lr-rule=linear", "--lr-reference=2", "--lr-warmup=20")
LOGICAL = (f"--global-batch={BATCH}", "--local-batch=32", "--logical-ranks=32")


class Job:
    """Launchers of one run, one per node."""

    def __init__(self, folder: Path, endpoint: str, options: tuple[str, ...], steps: int) -> None:
        self.folder, self.endpoint, self.options = folder, endpoint, options
        self.curve = folder / "curve.csv"
        self.run = uuid.uuid4().hex
        self.name = f"curves-{self.run[:8]}"
        self.nodes: dict[str, Any] = {}
        self.steps = steps
        self._pace = folder / "pace"
        self._script = [str(PACED), str(self._pace), str(SCRIPT), f"--curve={self.curve}", f"--steps={steps}"]
        self.pace(0.0)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        left = processes.end_run(self.run)
        for process in self.nodes.values():
            process.wait(timeout=5.0)
        if left:
            raise RuntimeError(f"processes that SIGKILL did not end: {left}")

    def pace(self, seconds: float) -> None:
        """Set the pause after each step, in seconds."""
        fresh = self._pace.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.replace(self._pace)

    def start(self, name: str, workers: int, nnodes: str = "1:3") -> None:
        """Start a node with that many workers."""
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)}
        env = processes.clean_environment({**own, processes.RUN_MARK: self.run, processes.NODE_MARK: name})
        command = [
            sys.executable, "-m", "edl.launch", f"--nnodes={nnodes}", f"--nproc-per-node={workers}",
            f"--rdzv-id={self.name}", "--rdzv-backend=etcd", f"--rdzv-endpoint={self.endpoint}", f"--node-id={name}",
            f"--log-dir={self.folder / name}", *self.options, *self._script,
        ]  # fmt: skip
        self.nodes[name] = processes.start(command, env, self.folder / f"{name}.log", self.folder)

    def rows(self) -> list[list[str]]:
        """The rows written by rank 0."""
        if not self.curve.exists():
            return []
        with self.curve.open(newline="") as file:
            return [row for row in csv.reader(file) if len(row) == 5]

    def wait(self, holds: Callable[[list[list[str]]], bool], what: str) -> None:
        """Wait until the condition holds for the rows written by rank 0."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not holds(self.rows()):
            if time.monotonic() > deadline_s or all(one.poll() is not None for one in self.nodes.values()):
                tails = {name: (self.folder / f"{name}.log").read_text()[-500:] for name in self.nodes}
                raise RuntimeError(f"{self.name}: {what}: {tails}")
            time.sleep(0.05)

    def wait_world(self, size: int) -> None:
        """Wait until a world of this size makes steps."""
        self.wait(lambda rows: bool(rows) and rows[-1][2] == str(size), f"a world of {size}")

    def wait_step(self, step: int) -> None:
        """Wait until this step has been made."""
        self.wait(lambda rows: bool(rows) and int(rows[-1][0]) >= step, f"step {step}")


def alone(job: Job) -> None:
    """Train with one worker from the first step to the last."""
    job.start("alone", 1, nnodes="1")
    job.wait_step(job.steps)


def changing(job: Job) -> None:
    """Train with 2, 5, 1 and 3 workers, for about a quarter of the steps each."""
    quarter = job.steps // 4
    job.pace(SLOW_S)
    job.start("a", 1)
    job.start("b", 1)
    job.wait_world(2)
    job.start("c", 3)
    reach(job, quarter)
    job.wait_world(5)
    reach(job, 2 * quarter)
    job.nodes["b"].terminate()
    job.nodes["c"].terminate()
    job.wait_world(1)
    job.start("d", 2)
    reach(job, 3 * quarter)
    job.wait_world(3)
    job.pace(0.0)
    job.wait_step(job.steps)


def reach(job: Job, step: int) -> None:
    """Train fast up to this step, then slowly."""
    job.pace(0.02)
    job.wait_step(step)
    job.pace(SLOW_S)


def measure(way: Callable[[Job], None], options: tuple[str, ...], steps: int) -> Curve:
    """Execute one run."""
    with (
        tempfile.TemporaryDirectory(prefix="edl-curves-") as name,
        PrivateEtcd() as etcd,
        Job(Path(name), etcd.endpoints, options, steps) as job,
    ):
        way(job)
        rows = {int(row[0]): row for row in job.rows()}
    return [(int(row[1]), int(row[2]), float.fromhex(row[3])) for _, row in sorted(rows.items())]


@click.command()
@click.option("--steps", default=240, show_default=True)
@click.option("--svg", type=click.Path(path_type=Path), help="Where the picture goes.")
@click.option("--json", "result", type=click.Path(path_type=Path), help="Where the numbers go.")
def main(steps: int, svg: Path | None, result: Path | None) -> None:
    """Run, compare and draw."""
    curves = {
        "undisturbed": measure(alone, KEPT, steps),
        "kept global batch": measure(changing, KEPT, steps),
        "kept local batch, linear LR": measure(changing, LINEAR, steps),
        "logical ranks, undisturbed": measure(alone, LOGICAL, steps),
        "logical ranks": measure(changing, LOGICAL, steps),
    }
    plain = curves["undisturbed"]
    for name, other in (("kept global batch", plain), ("logical ranks", curves["logical ranks, undisturbed"])):
        pairs = list(zip(curves[name], other, strict=True))
        worst = max(abs(one[2] - two[2]) / abs(two[2]) for one, two in pairs)
        equal = sum(one[2] == two[2] for one, two in pairs)
        print(f"{name}: largest relative difference from undisturbed {worst:.2e}; {equal} of {len(pairs)} bit-equal")
    for name, curve in curves.items():
        worlds = [size for before, (_, size, _) in zip([(0, 0, 0.0), *curve], curve, strict=False) if size != before[1]]
        last = [loss for _, _, loss in curve[-20:]]
        print(f"{name}: workers {worlds}, {curve[-1][0]} samples, mean loss of the last 20 steps {sum(last) / 20:.4f}")
    if result:
        result.write_text(json.dumps(curves))
    if svg:
        shown = {name: curves[name] for name in ("undisturbed", "kept global batch", "kept local batch, linear LR")}
        svg.write_text(draw(shown))


if __name__ == "__main__":
    main()
