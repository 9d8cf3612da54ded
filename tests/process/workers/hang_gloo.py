"""A plain torch script in which one rank leaves the others alone in a collective: in the first round only.

With ``--spins`` they spin while they wait, as with NCCL: CPU time says nothing about it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def left_alone(total: torch.Tensor, *, spins: bool) -> None:
    """Wait for a sum that never comes."""
    work = dist.all_reduce(total, async_op=True)
    while spins and work is not None and not work.is_completed():
        pass
    if work is not None:
        work.wait()


def gone_astray() -> None:
    """What the rank does that should have been there."""
    time.sleep(3600)


def evaluate(file: Path) -> None:
    """Compute for a while, without a word."""
    while not file.exists():
        sum(range(100_000))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--hang-after", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--spins", action="store_true")
    parser.add_argument("--evaluate", action="store_true", help="rank 0 works alone until FOLDER/evaluated exists")
    options = parser.parse_args()
    rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dist.init_process_group("gloo")
    began = time.monotonic()
    agreed, last = torch.zeros(1), 1_000_000 if first else 20
    for step in itertools.count():
        agreed[0] = float(time.monotonic() - began > options.hang_after)
        dist.all_reduce(agreed)  # all ranks stop in the same step
        with (options.folder / f"{rank}.steps").open("a") as log:
            line = {"t": time.monotonic(), "step": step, "rank": rank, "world": dist.get_world_size()}
            place = {"round": int(os.environ["EDL_ROUND"]), "pid": os.getpid(), "node": os.environ["EDL_NODE_ID"]}
            log.write(json.dumps(line | place) + "\n")
        if agreed[0] > 0 and first and options.evaluate:
            if rank == 0:
                evaluate(options.folder / "evaluated")
            first, last = False, step + 100
        elif agreed[0] > 0 and first:
            gone_astray() if rank == 1 else left_alone(torch.ones(1024), spins=options.spins)
        if step == last:
            break
        time.sleep(0.05)
        print("step", step, flush=True)  # by which the launcher sees that it lives
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
