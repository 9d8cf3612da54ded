"""The device that a script trains on: the card if there is one, which all ranks of this machine share."""

from __future__ import annotations

import os

import torch

_ONE_CARD = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def device() -> torch.device:
    """Call before a process group is formed: NCCL takes two ranks on one card only if each appears to be a host."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    os.environ.update(_ONE_CARD, NCCL_HOSTID=f"process-{os.getpid()}")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)
