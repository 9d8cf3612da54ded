"""A job of fixed size that lost workers and nodes has the losses of one that lost none: to the last bit, with dropout,
random batches and noisy data. Real launchers, real workers, SIGKILL at random moments.

``pytest tests/process/test_same_numbers.py --soak`` kills twenty times.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from tempfile import gettempdir

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd

SCRIPTS = {"torch": WORKERS / "gpt_torch.py", "paddle": WORKERS / "gpt_paddle.py"}
PAUSE_S = 0.02
"""After each step, so that kills fall all over a run."""
OPTIONS = ("--max-restarts=1000", "--slot-strikes=0", "--join-grace=30")


def job(etcd: OutsideEtcd, folder: Path, framework: str, nodes: int, *arguments: str) -> Job:
    # torch's loading processes talk through sockets in there, whose paths may not be long.
    return Job(folder, [etcd.endpoint], nnodes=str(nodes), script=(str(SCRIPTS[framework]),), options=OPTIONS,
               arguments=arguments, environment={"TMPDIR": gettempdir()})  # fmt: skip


def losses(job: Job, steps: int, world: int, lost: int = 0) -> dict[tuple[int, int], str]:
    """Every loss by step and rank, with all its bits. Steps that were done again must have come to the same. ``lost``:
    so many may not have been written down, by workers that were killed when the others had just done the step."""
    found: dict[tuple[int, int], str] = {}
    for one in job.steps():
        assert one.world == world
        assert found.setdefault((one.step, one.rank), one.loss.hex()) == one.loss.hex(), "done again: other numbers"
    wanted = {(step, rank) for step in range(1, steps + 1) for rank in range(world)}
    assert found.keys() <= wanted and {step for step, _ in found} == {step for step, _ in wanted}
    assert len(wanted - found.keys()) <= lost
    return found


def strike(job: Job, draw: random.Random, names: list[str], per_node: int, whole_node: bool) -> None:
    """Kill one rank, or a node that is started again."""
    seen = job.wait_steps(draw.randint(2, 6))
    time.sleep(draw.random() * 2 * PAUSE_S)
    if whole_node:
        name = draw.choice(names)
        job.kill(name)
        job.start(name, nproc=per_node)
    else:
        os.kill(seen.pids[draw.randrange(len(seen.pids))], signal.SIGKILL)
    job.wait_world(seen.world, after=seen.round)


def compare(etcd: OutsideEtcd, folder: Path, framework: str, nodes: int, per_node: int, kills: int, *more: str) -> None:
    """Train the same twice, once with kills."""
    seed = random.randrange(1 << 30)
    draw, steps, world = random.Random(seed), 30 + 25 * kills, nodes * per_node
    print(f"seed {seed}")
    names = [f"n{number}" for number in range(nodes)]
    arguments = (f"--steps={steps}", *more)
    with job(etcd, folder / "calm", framework, nodes, *arguments) as calm:
        calm.start(*names, nproc=per_node)
        assert set(calm.exit_codes().values()) == {0}
        expected = losses(calm, steps, world)
    with job(etcd, folder / "hit", framework, nodes, *arguments, f"--pause={PAUSE_S}") as hit:
        hit.start(*names, nproc=per_node)
        hit.wait_world(world)
        for number in range(kills):
            strike(hit, draw, names, per_node, whole_node=nodes > 1 and number % 4 == 1)
        assert set(hit.exit_codes().values()) == {0}
        assert len({one.round for one in hit.steps()}) > kills
        found = losses(hit, steps, world, lost=kills * per_node)
    different = sorted(place for place in found if found[place] != expected[place])
    assert not different, f"{len(different)} of {len(found)} losses differ, first at (step, rank) {different[0]}"


@pytest.mark.slow
@pytest.mark.soak_but("torch")
@pytest.mark.timeout(900)
def test_a_few_kills_change_no_bit(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    compare(etcd, tmp_path, framework, nodes=2, per_node=2, kills=2)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (2, 2)])
def test_twenty_kills_change_no_bit(
    etcd: OutsideEtcd, tmp_path: Path, framework: str, nodes: int, per_node: int
) -> None:
    compare(etcd, tmp_path, framework, nodes, per_node, 20)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nor_where_other_processes_load_the_data(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    compare(etcd, tmp_path, framework, 1, 2, 4, "--loader-workers=2")
