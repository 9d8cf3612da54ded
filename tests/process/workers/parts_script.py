"""A plain script each of whose ranks saves a part of the checkpoint, as ``torch.distributed.checkpoint`` does: a folder
for each step, with a file for each rank. It starts from the newest folder, and fails if that one is not whole.

Every rank notes the step that it has loaded: ``FOLDER/NODE.ROUND.RANK.loaded``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

OUT = Path("out")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    node, round = os.environ["EDL_NODE_ID"], int(os.environ["EDL_ROUND"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    step = load()
    (options.folder / f"{node}.{round}.{rank}.loaded").write_text(json.dumps(step))
    steps = (options.folder / f"{node}.{round}.{rank}.{os.getpid()}.steps").open("a", buffering=1)
    fixed = {"rank": rank, "world": world, "round": round, "pid": os.getpid(), "node": node}
    last = options.folder / "last-step"
    while not (last.exists() and step >= int(last.read_text())):
        step += 1
        steps.write(json.dumps({"t": time.monotonic(), "step": step, **fixed}) + "\n")
        time.sleep(0.2)
        here = OUT / f"step-{step}"
        here.mkdir(parents=True, exist_ok=True)
        (here / f"{rank}-of-{world}").write_text(f"rank {rank} of {world}, step {step}")


def load() -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    found = [int(one.name[5:]) for one in OUT.glob("step-*") if one.name[5:].isdecimal()]
    step = max(found, default=0)
    parts = {one.name for one in (OUT / f"step-{step}").glob("*")}
    worlds = {int(part.partition("-of-")[2]) for part in parts}
    if step and not any({f"{rank}-of-{world}" for rank in range(world)} <= parts for world in worlds):
        raise SystemExit(f"step-{step} is not whole: {sorted(parts)}")
    return step


if __name__ == "__main__":
    main()
