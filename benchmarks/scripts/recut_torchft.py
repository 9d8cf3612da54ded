"""``recut_torch.py`` with torchft, under HSDP: FSDP2 over the workers of a node, torchft's replication between nodes.

Each launcher of one node is a replica group. Its all-reduce is a hook of FSDP2, as in torchtitan's trainer for torchft,
whose documentation is what torchft's refers to. A step has the same samples however many groups take part.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.process_group import ManagedProcessGroup

from benchmarks.scripts.recut_parts import arguments, loss_of, model_of, shard
from benchmarks.scripts.replica_worlds import formed
from benchmarks.scripts.step_writer import StepWriter

WAIT = timedelta(seconds=30)


def average_between_groups(model: Any, manager: Manager) -> None:
    """Average each gradient over the replica groups when FSDP2 has averaged it within this one."""
    between = ManagedProcessGroup(manager)
    between.register("between_nodes")

    def hook(gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient, group=between, op=dist.ReduceOp.AVG)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(hook)


def main() -> None:
    args = arguments()
    log = StepWriter(args.workdir)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    within, size = dist.get_rank(), dist.get_world_size()
    model = model_of(args.megabytes)
    optimizer = shard(model, init_device_mesh("cpu", (size,), mesh_dim_names=("shard",)))

    def load(kept: dict[str, Any]) -> None:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=WAIT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"node{os.environ.get('EDL_BENCH_NODE', '0')}",
        timeout=WAIT,
        hostname="127.0.0.1",
        init_sync=False,  # all groups begin with the same weights
    )
    average_between_groups(model, manager)
    managed = Optimizer(manager, optimizer)
    known = (-1, 0)
    while manager.current_step() < args.steps:
        managed.zero_grad()  # starts the quorum
        groups, group = manager.num_participants(), manager.participating_rank()  # waits for it
        before = manager.current_step()
        # A group that receives the weights takes part from the next step on; its gradients do not count.
        loss = loss_of(model, before, (group or 0) * size + within, groups * size)
        loss.backward()
        managed.step()
        if manager.current_step() > before and group is not None:
            world = manager._quorum_id, groups
            if world != known:
                common = formed(args.workdir, f"{world[0]}-{world[1]}")
                log.group(group * size + within, groups * size, common)
                known = world
            log.step(manager.current_step(), loss.item())
        time.sleep(args.pause_ms / 1000)


if __name__ == "__main__":
    main()
