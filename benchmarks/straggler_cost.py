"""What measuring the times of a rank costs in each step: DistributedDataParallel in one process, with edl's hooks and
without in turn.

    python -m benchmarks.straggler_cost --steps 400 --rounds 10

Blocks with and without hooks alternate in one process, so that other load affects both alike. A world of one rank waits
for nobody, so the step is as short as a step with hooks can be.
"""

from __future__ import annotations

import statistics
import time

import click
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from edl.torch import backward_end
from edl.worker.framework import CollectiveWaits
from edl.worker.step_times import StepMeter, Totals
from edl.worker.waits import now

WAITS = 2
"""CollectiveWaits in collectives of a step: for the gradients, and for another one."""


def block(ddp: DistributedDataParallel, steps: int, measured: bool) -> float:
    """Median seconds of a step."""
    meter, waits, times = StepMeter(), CollectiveWaits(), []
    batch = torch.ones(16, 64)
    if measured:
        backward_end.note(ddp)
    for _ in range(steps):
        began_s = time.perf_counter()
        ddp(batch).mean().backward()
        if measured:
            waits.add(backward_end.computed, now())
            for _ in range(WAITS - 1):
                waits.add(now(), now())
            meter.passed(1, time.monotonic(), lambda: Totals(waits.waited_s, 0.0, 0.0, 0.0))
        times.append(time.perf_counter() - began_s)
    backward_end.forget()
    return statistics.median(times)


@click.command()
@click.option("--steps", default=400, show_default=True, help="Steps of a block.")
@click.option("--rounds", default=10, show_default=True, help="Blocks of each kind.")
def main(steps: int, rounds: int) -> None:
    """Print the step time with and without measuring."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    block(ddp, steps, measured=False)
    pairs = [(block(ddp, steps, measured=False), block(ddp, steps, measured=True)) for _ in range(rounds)]
    without, with_hooks = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    cost = statistics.median(on - off for off, on in pairs) * 1e6
    print(f"step without {without:.1f} us, with {with_hooks:.1f} us: {cost:.1f} us more, {cost / 10_000:.3%} of 10 ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
