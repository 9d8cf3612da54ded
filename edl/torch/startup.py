"""What a worker start needs to know about torch. Called by name from ``edl.worker.frameworks``."""

from __future__ import annotations

import sys
from collections.abc import Mapping

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def why_unsafe() -> str:
    """Why a process that has imported torch must not be forked; empty when it may.

    Looks only at what is loaded: asking CUDA anything would initialise it.
    """
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "CUDA was initialised while modules were imported"
    return ""


def before_script(imported_under: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Apply a thread count that this worker's environment sets differently from the one torch was imported with."""
    for name in _THREADS:
        wanted = environment.get(name, "")
        if wanted.isdigit() and int(wanted) > 0 and wanted != imported_under.get(name):
            import torch

            torch.set_num_threads(int(wanted))
            return
