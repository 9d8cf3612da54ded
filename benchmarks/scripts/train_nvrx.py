"""``train_torch.py`` in NVRx's wrapper, which calls it again in the same processes when another one has died. At most
``--most`` ranks train; the others are in reserve."""

import argparse
import os
from datetime import timedelta

import torch
import torch._dynamo  # DDP needs it: a rank in reserve must have imported it before it is called
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

from benchmarks.scripts.card import device
from benchmarks.scripts.step_writer import StepWriter
from benchmarks.scripts.train_torch import arguments, train

parser = argparse.ArgumentParser()
parser.add_argument("--most", type=int, required=True, help="ranks that train")
args = arguments(parser)
log = StepWriter(args.workdir)
torch.set_num_threads(1)
where = device()
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(host, port + 1, size, is_master=rank == 0, multi_tenant=True)  # type: ignore[attr-defined]


# Each interval is as short as for the other launchers; a silent rank is given up after 3 s, as with edl's lease.
wrapper = inprocess.Wrapper(
    store_kwargs={"host_name": host, "port": port, "timeout": timedelta(seconds=60)},
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(args.most), inprocess.rank_assignment.ShiftRanks()
    ),
    monitor_thread_interval=timedelta(seconds=0.1),
    monitor_process_interval=timedelta(seconds=0.1),
    heartbeat_interval=timedelta(seconds=0.5),
    heartbeat_timeout=timedelta(seconds=3),
    progress_watchdog_interval=timedelta(seconds=0.5),
    last_call_wait=timedelta(seconds=0.1),
)


def again(call: inprocess.CallWrapper | None = None) -> None:
    """Train in the world that the wrapper has put into the environment. It passes itself by the type of the parameter,
    which must therefore be no string."""
    assert call is not None
    dist.init_process_group(
        "gloo" if where.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore(f"call{call.iteration}", store),  # type: ignore[attr-defined]
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=30),
    )
    train(args, log, where)
    dist.destroy_process_group()


wrapper(again)()
