"""Checks and settings of torch for starting a worker. Called by name from ``edl.worker.frameworks``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from edl.torch import pending_collectives
from edl.worker.wait_until_open import LONGEST_WAIT_S, wait_until_open

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def why_unsafe() -> str:
    """Why a process that has imported torch must not be forked; empty when it may.

    Only looks at loaded modules: any query of CUDA would initialise it.
    """
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "CUDA was initialised while modules were imported"
    return ""


def before_script(imported_under: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Apply the worker's own thread count, make ranks other than 0 wait for the store instead of sleeping, and report
    collectives that stay pending once the script forms a group.

    When torch 2.x's store client finds the port closed, it retries after about half a second. (Measured: the first step
    of a restarted world took 0.5 s instead of 0.1 s whenever a rank was faster than rank 0.)
    """
    _apply_threads(imported_under, environment)
    if "torch.distributed" in sys.modules:
        pending_collectives.set_up(os.environ)  # noqa: TID251  torch's own settings
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    original = getattr(rendezvous, "TCPStore", None)
    if rendezvous is None or original is None or getattr(original, "_edl_waits", False):
        return

    def waiting_store(*arguments: Any, **named: Any) -> Any:
        pending_collectives.begin()
        call = dict(zip(("host_name", "port", "world_size", "is_master", "timeout"), arguments, strict=False)) | named
        if not call.get("is_master", False) and call.get("port"):
            given = call.get("timeout")  # init_process_group's
            longest_s = LONGEST_WAIT_S if given is None else min(LONGEST_WAIT_S, given.total_seconds())
            wait_until_open((call["host_name"], call["port"]), longest_s)
        return original(*arguments, **named)

    waiting_store._edl_waits = True  # type: ignore[attr-defined]
    rendezvous.TCPStore = waiting_store  # type: ignore[attr-defined]


def _apply_threads(imported_under: Mapping[str, str], environment: Mapping[str, str]) -> None:
    for name in _THREADS:
        wanted = environment.get(name, "")
        if wanted.isdigit() and int(wanted) > 0 and wanted != imported_under.get(name):
            import torch

            torch.set_num_threads(int(wanted))
            return
