"""``Data``: a data set that the workers of a job read together, as torch tensors."""

from __future__ import annotations

from typing import Any

import torch

from data_service.loader.loader import Loader
from data_service.loader.worker_context import SessionContext, WorkerContext
from edl.torch.framework import current


class Data(Loader):
    """``Data("train", "data/*.parquet", batch_size=64)``: batches are dicts of tensors by column name. The arguments
    are those of ``Loader``."""

    def _make_context(self) -> WorkerContext:
        return SessionContext(current())

    def _tensor(self, array: Any) -> Any:
        return torch.from_numpy(array)
