"""Forms a group by METHOD, adds up the ranks, and leaves the sum in FOLDER in a file named after its rank."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

folder, method = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world)
total = torch.tensor(rank)
dist.all_reduce(total)
dist.destroy_process_group()
(Path(folder) / str(rank)).write_text(f"{total.item()} {dist.is_torchelastic_launched()}")
