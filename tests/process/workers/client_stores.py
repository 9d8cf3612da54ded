"""Stores that a script makes for itself beside the group's own, and the error file that ``@record`` writes.

Under an agent that serves the group's store, rank 0's own stores must still be served by rank 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.errors import record

TIMEOUT = datetime.timedelta(seconds=60)


def agree_on_port(rank: int) -> int:
    """A free port of rank 0's, known to all."""
    port = 0
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
    shared = torch.tensor([port])
    dist.broadcast(shared, 0)
    return int(shared.item())


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--fail", type=int, default=-1, metavar="RANK")
    options = parser.parse_args()
    dist.init_process_group("gloo")  # env://: MASTER_ADDR and MASTER_PORT
    rank, world = dist.get_rank(), dist.get_world_size()

    store = TCPStore("127.0.0.1", agree_on_port(rank), world, rank == 0, TIMEOUT)
    store.set(f"from-{rank}", str(os.getpid()))
    met = [int(store.get(f"from-{other}")) for other in range(world)]
    assert met[rank] == os.getpid()

    address = f"tcp://127.0.0.1:{agree_on_port(rank)}"
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=TIMEOUT)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    (options.folder / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "world": world, "sum": total.item()}))
    dist.barrier()
    dist.destroy_process_group()
    if rank == options.fail:
        raise LookupError(f"rank {rank} was told to fail")


if __name__ == "__main__":
    main()
