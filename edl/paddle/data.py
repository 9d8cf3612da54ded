"""``Data``: a data set that the workers of a job read together, as Paddle tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from data_service.loader.loader import Loader
from data_service.loader.worker_context import SessionContext, WorkerContext
from edl.paddle.framework import FRAMEWORK

_WIDER = {"uint16": np.int32, "uint32": np.int64}
"""Types that Paddle lacks or misinterprets, and wider ones to use instead."""


class Data(Loader):
    """``Data("train", "data/*.parquet", batch_size=64)``: batches are dicts of CPU tensors by column name. The
    arguments are those of ``Loader``."""

    def _make_context(self) -> WorkerContext:
        return SessionContext(FRAMEWORK)

    def _tensor(self, array: Any) -> Any:
        wider = _WIDER.get(str(array.dtype))
        return paddle.to_tensor(array if wider is None else array.astype(wider), place=paddle.CPUPlace())
