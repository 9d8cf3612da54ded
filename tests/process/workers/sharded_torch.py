"""FSDP2 under ``State(sharded=True)``. After each restore every value is compared with the right one, bit for bit.

Gradients do not depend on the weights, and are sums of few small whole numbers, so every order of additions gives the
same: plain torch in one process computes what AdamW has to come to after any number of steps, at any world size. A
difference is written to ``FOLDER/wrong`` and ends the worker.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import edl.torch as edl
from edl.torch.sharded import DTensor

try:
    from torch.distributed.tensor import Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import Shard, distribute_tensor  # type: ignore[attr-defined]

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # up to torch 2.5
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]

ROWS = 24
"""Of a global batch; divisible by every world size that the tests use."""
SHAPES = ((13, 5), (3,), (8, 2, 3), ())
"""Dimensions that worlds do not divide, one that leaves workers without a part, and a scalar, which is not cut."""


class Block(nn.Module):
    """Parameters, a buffer, and a state that is no tensor."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        shapes = [(shape[0] * width, *shape[1:]) if number == 0 and shape else shape for shape in SHAPES]
        self.weights = nn.ParameterList(nn.Parameter(torch.full(shape, number + 1.0)) for shape in shapes if shape)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.seen: torch.Tensor
        self.calls: dict[str, Any] = {"calls": 0, "names": ("a", None), "scale": torch.ones(2)}

    def forward(self, batch: torch.Tensor) -> Any:
        self.seen += torch.tensor([1, 2])
        self.calls = {**self.calls, "calls": self.calls["calls"] + 1, "scale": self.calls["scale"] + 1}
        total: Any = 0.0
        for index, weight in enumerate(self.weights):
            pattern = torch.arange(weight.numel(), dtype=weight.dtype).remainder(7).view(weight.shape) - 3
            if isinstance(weight, DTensor):  # tensor parallel
                pattern = distribute_tensor(pattern, weight.device_mesh, weight.placements)
            inner = (weight * pattern).sum()
            inner = inner.full_tensor() if isinstance(inner, DTensor) else inner
            total = total + inner * batch[:, index].sum() / len(batch)
        return total

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.calls)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state


def build(width: int) -> nn.Module:
    return nn.Sequential(Block(0, width), Block(1, width))


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    total: Any = sum(block(batch) for block in model.children())
    total.backward()
    optimizer.step()


def rows(step: int) -> torch.Tensor:
    """Whole numbers, a multiple of what their mean is divided by."""
    generator = torch.Generator("cpu").manual_seed(step)
    drawn = torch.randint(-4, 5, (ROWS, len(SHAPES)), generator=generator, device="cpu")
    return drawn.to(device, torch.float64) * ROWS


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.125, weight_decay=0.5, foreach=False)


class Expected:
    """The same training in plain torch, by one process."""

    def __init__(self, width: int) -> None:
        self.model = build(width)
        self.optimizer = optimizer_of(self.model)
        self.step = 0

    def upto(self, step: int) -> Expected:
        assert step >= self.step
        while self.step < step:
            advance(self.model, self.optimizer, rows(self.step))
            self.step += 1
        return self

    def differences(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        """Everything that this worker has of a model and its optimizer and that is not right."""
        found = _differ("", model.state_dict(), self.model.state_dict())
        return found + _differ("optimizer", optimizer.state_dict(), self.optimizer.state_dict())


def _differ(path: str, mine: Any, right: Any) -> list[str]:
    if isinstance(right, dict):
        if not isinstance(mine, dict) or mine.keys() != right.keys():
            return [f"{path}: {mine!r:.200} instead of {right!r:.200}"]
        return [line for key in right for line in _differ(f"{path}.{key}", mine[key], right[key])]
    if isinstance(right, (list, tuple)) and len(mine) == len(right):
        return [line for i, one in enumerate(right) for line in _differ(f"{path}.{i}", mine[i], one)]
    if isinstance(right, torch.Tensor):
        if isinstance(mine, DTensor):
            right, mine = _part(right, mine), mine.to_local()
        # Where an optimizer makes its step counter depends on the default device; a restored one is on the host.
        there = mine.device == right.device or path.endswith(".step")
        same = (
            there and mine.shape == right.shape and mine.dtype == right.dtype and torch.equal(mine.cpu(), right.cpu())
        )
    else:
        same = type(mine) is type(right) and mine == right
    return [] if same else [f"{path}: {mine!r:.200} instead of {right!r:.200}"]


def _part(whole: torch.Tensor, mine: Any) -> torch.Tensor:
    """What this worker should have of a tensor: cut by the tensor-parallel dimension first, which FSDP2 marks by
    another class for its own."""
    mesh = mine.device_mesh
    marked = [type(placement).__name__ == "_StridedShard" for placement in mine.placements]
    for at in sorted(range(len(marked)), key=marked.__getitem__):
        placement, number = mine.placements[at], mesh.get_coordinate()[at]
        if not placement.is_replicate():
            parts = whole.chunk(mesh.size(at), placement.dim)
            whole = parts[number] if number < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000, help="unless FOLDER/last-step says otherwise")
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--width", type=int, default=1, help="how often as large one tensor is made")
    parser.add_argument("--fail-at", type=int, default=0, help="raise an error at this step, as if FOLDER/fail existed")
    parser.add_argument(
        "--hsdp", action="store_true", help="shard within pairs of workers, which are copies of each other"
    )
    parser.add_argument("--tp", action="store_true", help="cut tensors for pairs of workers, and shard these pieces")
    parser.add_argument("--restart", action="store_true", help="build the model once: each world gets new processes")
    return parser.parse_args()


options = read_arguments()
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.set_default_device(device)
    os.environ["NCCL_HOSTID"] = f"host-{os.getpid()}"  # lets NCCL take several ranks on one card
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def shard(mesh: Any) -> dict[str, Any]:
    model = build(options.width)
    if options.hsdp:
        sizes = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
    if options.tp:
        both = edl.mesh(tp=2)
        for weights in (block.weights for block in model.children() if isinstance(block, Block)):
            for index, weight in enumerate(weights):
                weights[index] = nn.Parameter(distribute_tensor(weight.detach(), both["tp"], [Shard(0)]))
        mesh = both["dp"]
    for child in model.children():
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": optimizer_of(model)}


if options.restart:
    edl.connect()
    state = edl.State(sharded=True, **shard(edl.mesh()), step=0, told=[])
else:
    state = edl.State(build=shard, step=0, told=[])
right = Expected(options.width)


def check(when: str) -> None:
    global right
    if state.step < right.step:  # the same process, some steps back
        right = Expected(options.width)
    wrong = right.upto(state.step).differences(state.model, state.optimizer) if state.step else []
    if state.told != list(range(state.step)):
        wrong.append(f"told: {state.told} at step {state.step}")
    if wrong:
        text = "\n".join([f"{when} step {state.step}, rank {dist.get_rank()}:", *wrong])
        (options.folder / f"wrong-{os.getpid()}").write_text(text)
        raise SystemExit(text)


def last_step() -> int:
    file = options.folder / "last-step"
    return int(file.read_text()) if file.exists() else int(options.steps)


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    check("restored")
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    with (options.folder / f"began-{here.round}.{here.rank}").open("w") as began:
        json.dump({**fixed, "step": state.step, "commits": state.commits, "era": state.era}, began)
    log = (options.folder / f"{here.node}.{here.round}.{here.rank}.{os.getpid()}.steps").open("a", buffering=1)
    with log:
        while state.step < last_step():
            replica = 2 if options.tp else 1
            mine = rows(state.step)[here.rank // replica :: here.world_size // replica]
            advance(state.model, state.optimizer, mine)
            state.told.append(state.step)
            state.step += 1
            if state.step == options.fail_at or (options.folder / "fail").exists():
                raise RuntimeError("told to fail")
            begun = time.monotonic()
            if options.save_every and state.step % options.save_every == 0:
                state.save()
            else:
                state.commit()
            took = time.monotonic() - begun
            log.write(json.dumps({"t": time.monotonic(), "step": state.step, "loss": took, **fixed}) + "\n")
            time.sleep(options.pause)
    check("ended after")


train(state)
