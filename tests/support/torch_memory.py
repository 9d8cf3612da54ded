"""A commit of ``edl.torch``'s state in memory that can be overwritten, and comparison to the bit."""

from __future__ import annotations

import mmap
from collections import deque
from typing import Any

import numpy as np
import torch

from edl.torch.state import State
from edl.wire import snapshot
from edl.wire.snapshot import Meta

GARBAGE = 0xA5


class Memory:
    """A commit, as an agent holds it."""

    def __init__(self, state: State) -> None:
        self._maps: list[mmap.mmap] = []
        state._write("state", Meta("job", 1, 1, 1, 0, 1, "torch"), self._room)
        self.view = memoryview(self._maps[0])

    def _room(self, size: int) -> memoryview:
        self._maps.append(mmap.mmap(-1, size))
        return memoryview(self._maps[-1])

    def restore(self, state: State) -> None:
        state._load(snapshot.parse(self.view), self.view, frozenset(state._objects))

    def use_again(self) -> None:
        """Another commit is written there."""
        self.view[:] = bytes([GARBAGE]) * len(self.view)

    def let_go(self) -> None:
        """Raises ``BufferError`` if an array over it is left."""
        self.view.release()
        self._maps[0].close()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return bool(bytes_of(a) == bytes_of(b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def bytes_of(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return "numpy", array.dtype, array.shape, array.tobytes()
    raw = array.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return "torch", array.dtype, tuple(array.shape), raw.tobytes()
