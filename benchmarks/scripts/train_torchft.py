"""``train_torch.py`` with torchft: the same model, batches and step log; a replica that joins receives the weights from
another one. Each launcher of one node is one replica group."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.scripts.replica_worlds import formed
from benchmarks.scripts.sized_model import INPUTS, sized_model
from benchmarks.scripts.step_writer import StepWriter


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=Path, required=True, help="step logs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=10.0, help="sleep per step")
    parser.add_argument("--megabytes", type=int, default=0, help="of parameters")
    args = parser.parse_args()
    log = StepWriter(args.workdir)
    torch.set_num_threads(1)
    model = sized_model(args.megabytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(kept: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"node{os.environ.get('EDL_BENCH_NODE', '0')}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    parallel = DistributedDataParallel(manager, model)
    managed = Optimizer(manager, optimizer)
    generator = torch.Generator()
    known = (-1, 0)
    while manager.current_step() < args.steps:
        managed.zero_grad()  # starts the quorum
        generator.manual_seed(manager.current_step())
        loss = parallel(torch.randn(16, INPUTS, generator=generator)).square().mean()
        loss.backward()
        before = manager.current_step()
        managed.step()
        if manager.current_step() > before:
            # A replica that receives the weights takes part from the next step on, in the same quorum.
            world = manager._quorum_id, manager.num_participants()
            rank = manager.participating_rank()
            if rank is not None:
                if world != known:
                    log.group(rank, world[1], formed(args.workdir, f"{world[0]}-{world[1]}"))
                    known = world
                log.step(manager.current_step())
        time.sleep(args.pause_ms / 1000)


if __name__ == "__main__":
    main()
