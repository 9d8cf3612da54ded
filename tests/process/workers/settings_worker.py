"""A script that notes, at each commit on each rank, under which settings the next step is taken."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--framework", default="torch")
parser.add_argument("--batch-size", type=int, default=0)
parser.add_argument("--plain", action="store_true", help="take no part in worlds beyond the environment")
options = parser.parse_args()
edl: Any = importlib.import_module(f"edl.{options.framework}")


def together() -> None:
    """A barrier of all ranks."""
    if options.framework == "torch":
        torch = importlib.import_module("torch")
        torch.distributed.all_reduce(torch.ones(1))
    else:
        paddle = importlib.import_module("paddle")
        edl.all_reduce(paddle.ones([1]))


def last_step() -> float:
    file = options.folder / "last-step"
    return int(file.read_text()) if file.exists() else float("inf")


def train(state: Any) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    name = f"{here.node}.{here.round}.{here.rank}.{os.getpid()}"
    with (
        (options.folder / f"{name}.steps").open("a", buffering=1) as steps,
        (options.folder / f"{name}.settings").open("a", buffering=1) as log,
    ):
        while True:
            held = dataclasses.asdict(edl.settings(options.batch_size))
            told = {name: text for name, text in os.environ.items() if name in ("EDL_SETTINGS", "EDL_LOCAL_BATCH")}
            log.write(json.dumps({"commit": state.commits, **fixed, **held, **told}) + "\n")
            if state.commits >= last_step():
                return
            together()
            steps.write(json.dumps({"t": time.monotonic(), "step": state.commits + 1, **fixed}) + "\n")
            state.commit()
            time.sleep(0.02)


def plain() -> None:
    name = f"{os.environ['EDL_NODE_ID']}.{os.environ['EDL_ROUND']}.{os.environ['RANK']}"
    held = dataclasses.asdict(edl.settings(options.batch_size))
    told = {name: text for name, text in os.environ.items() if name.startswith("EDL_")}
    (options.folder / f"{name}.plain").write_text(json.dumps({"world": int(os.environ["WORLD_SIZE"]), **held, **told}))
    while not (options.folder / "enough").exists():
        time.sleep(0.05)


if options.plain:
    plain()
else:
    edl.run(train)(edl.State(step=0))
