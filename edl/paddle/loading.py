"""Loads batches when they are requested.

Without loading processes Paddle's loader prefetches on a thread. A data set that draws random numbers there would share
the generators with the script, in an order that differs between runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle
from paddle.io.dataloader.collate import default_collate_fn, default_convert_fn
from paddle.io.dataloader.dataloader_iter import _DatasetKind
from paddle.io.dataloader.flat import _flatten_batch, _restore_batch


def on_demand(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Yields the batches that ``paddle.io.DataLoader`` with ``num_workers=0`` yields for these batches of indices."""
    collate = loader.collate_fn or (default_collate_fn if loader.auto_collate_batch else default_convert_fn)
    fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
        loader.dataset_kind, loader.dataset, loader.auto_collate_batch, collate, loader.drop_last
    )
    return _fetched(fetcher, batches)


def _fetched(fetcher: Any, batches: Iterator[Any]) -> Iterator[Any]:
    for indices in batches:
        try:
            batch = fetcher.fetch(indices)
        except StopIteration:
            return
        arrays, structure = _flatten_batch(batch)  # type: ignore[no-untyped-call]
        tensors = [one if paddle.is_tensor(one) else paddle.to_tensor(one) for one in arrays]
        yield _restore_batch(tensors, structure)  # type: ignore[no-untyped-call]
