"""A plain script that saves where it runs, as nanoGPT does: rank 0 overwrites one file in place, then replaces another.

Every rank notes what it has loaded when it starts: ``FOLDER/NODE.ROUND.RANK.loaded``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

OUT = Path("out")
PIECES = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", type=int, default=200_000)
    options = parser.parse_args()
    node, round, rank = os.environ["EDL_NODE_ID"], int(os.environ["EDL_ROUND"]), int(os.environ["RANK"])
    file = OUT / "ckpt.bin"
    content = file.read_bytes() if file.exists() else b""
    step = int(content[:10]) if content else 0
    whole = not content or content == saved(step, options.size)
    latest = (OUT / "latest").read_text() if (OUT / "latest").exists() else ""
    note = {"node": node, "round": round, "rank": rank, "step": step, "whole": whole, "latest": latest}
    (options.folder / f"{node}.{round}.{rank}.loaded").write_text(json.dumps(note))
    steps = (options.folder / f"{node}.{round}.{rank}.{os.getpid()}.steps").open("a", buffering=1)
    fixed = {"rank": rank, "world": int(os.environ["WORLD_SIZE"]), "round": round, "pid": os.getpid(), "node": node}
    last = options.folder / "last-step"
    while not (last.exists() and step >= int(last.read_text())):
        step += 1
        steps.write(json.dumps({"t": time.monotonic(), "step": step, **fixed}) + "\n")
        if rank == 0:
            # The test compares what has been saved, so the launcher's SIGTERM waits until that is whole.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            save(step, options.size)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        time.sleep(0.3)


def saved(step: int, size: int) -> bytes:
    return f"{step:10d}".encode() * (size // 10)


def save(step: int, size: int) -> None:
    OUT.mkdir(exist_ok=True)
    content = saved(step, size)
    with (OUT / "ckpt.bin").open("wb", buffering=0) as file:
        for start in range(0, size, size // PIECES):
            file.write(content[start : start + size // PIECES])
    (OUT / "latest.new").write_text(str(step))
    (OUT / "latest.new").replace(OUT / "latest")


if __name__ == "__main__":
    main()
