"""A script that survives whatever its steps raise, and trains on with what is there then. Its weight is a sum of whole
numbers that does not depend on the number of workers, unless a step was made without the others' part."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from edl.worker import session

STEPS = 40
KILLED_AT = 12
DYING_S = 2.0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--framework", choices=("torch", "paddle"), required=True)
    parser.add_argument("--way", choices=("call", "backward", "subgroup"), required=True)
    return parser.parse_args()


options = read_arguments()
edl: Any = importlib.import_module(f"edl.{options.framework}")
if options.framework == "torch":
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    model: Any = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
else:
    import paddle

    paddle.set_default_dtype("float64")
    zero = paddle.nn.initializer.Constant(0.0)
    model = paddle.nn.Linear(1, 1, weight_attr=paddle.ParamAttr(initializer=zero), bias_attr=False)
    optimizer = paddle.optimizer.SGD(learning_rate=1.0, parameters=model.parameters())
state = edl.State(model=model, optimizer=optimizer, step=0)


def part(step: int, rank: int, size: int) -> float:
    """All together: step + 1."""
    return float(step + 1 - (size - 1)) if rank == 0 else 1.0


def by_call(group: Any, parallel: Any, mine: float, size: int) -> None:
    if options.framework == "torch":
        model.weight.grad = torch.full((1, 1), -mine, dtype=torch.float64)
        dist.all_reduce(model.weight.grad, group=group)
    else:
        total = paddle.full([1, 1], mine)
        try:
            edl.all_reduce(total)
        finally:
            (total * model.weight * -1.0).sum().backward()


def by_backward(group: Any, parallel: Any, mine: float, size: int) -> None:
    """The mean over the workers of what each has, times their number."""
    one = torch.ones(1, 1, dtype=torch.float64) if options.framework == "torch" else paddle.ones([1, 1])
    (parallel(one) * -mine * size).sum().backward()


@edl.run  # type: ignore[untyped-decorator]  # of a module that is chosen at run time
def train(state: Any) -> None:
    here = edl.context()
    parallel = edl.parallel(model)
    group = dist.new_group(list(range(here.world_size))) if options.way == "subgroup" else None
    way = by_backward if options.way == "backward" else by_call
    while state.step < STEPS:
        once = options.folder / "killed"
        if state.step == KILLED_AT and here.rank == here.world_size - 1 and not once.exists():
            # The others lose it now, and its launcher a while later: until then nobody tells them.
            once.touch()
            mine = session.current()._group
            assert mine is not None
            mine.abort()
            time.sleep(DYING_S)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            way(group, parallel, part(state.step, here.rank, here.world_size), here.world_size)
        except Exception as error:  # noqa: BLE001 - this is what such scripts do
            print(f"step {state.step} failed, going on: {error}")
        optimizer.step()
        optimizer.zero_grad() if options.framework == "torch" else optimizer.clear_grad()
        state.step += 1
        state.commit()
        time.sleep(0.005)
    found = {"weight": float(model.weight.reshape([-1])[0]), "step": state.step}
    (options.folder / f"{here.rank}.result").write_text(json.dumps(found))


train(state)
