"""A trainer that needs no others and uses no pserver: it counts its steps, and says in which place it made each."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from edl.worker import trainer


def fail_on(number: int, frame: FrameType | None) -> None:
    sys.exit(75)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--early", action="store_true", help="the one with rank 0 ends at once")
    options = parser.parse_args()
    signal.signal(signal.SIGUSR1, fail_on)
    one = trainer.attach()
    print(f"EDL_PS={os.environ['EDL_PS']} PADDLE_ROLE={os.environ['PADDLE_ROLE']}", flush=True)
    step = 0
    with (options.folder / f"{os.getpid()}.steps").open("a", buffering=1) as log:
        while not (options.folder / "last-step").exists():
            step += 1
            number, rank, world = one.place()
            line = {
                "t": time.monotonic(), "step": step, "rank": rank, "world": world, "round": number,
                "pid": os.getpid(), "node": one.seat.node,
            }  # fmt: skip
            log.write(json.dumps(line) + "\n")
            if options.early and rank == 0:
                return
            time.sleep(options.pause)


main()
