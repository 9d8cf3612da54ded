"""A card that all ranks of a test share, which NCCL accepts if each process claims to be a host of its own."""

from __future__ import annotations

import pytest


def _is_there() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


NEEDS_CARD = pytest.mark.skipif(not _is_there(), reason="needs a GPU, and pytest --card")
OVER_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""Workers set ``NCCL_HOSTID``, which differs between them."""
