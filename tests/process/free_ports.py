"""Ports for tests, none of which another run of the suite on this machine uses.

They lie below those that private store members choose from and those that the kernel hands out to connections, which
would take them at any moment. Each process has a block of its own: a test that kills a member wants to find its port
free afterwards.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from edl.adapters.etcd_cluster import can_bind

FIRST, BLOCKS, SIZE, STEP = 10_000, 20, 300, 4
"""20 blocks of 300 ports. An endpoint takes two of them, the second for the peers."""


def claim_block(first: int = FIRST, folder: Path | None = None) -> range:
    """A block that no other living process has claimed. The claim, a locked file, lasts as long as this process."""
    folder = folder or Path(tempfile.gettempdir()) / f"edl-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for block in range(first, first + BLOCKS * SIZE, SIZE):
        descriptor = os.open(folder / str(block), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        return range(block, block + SIZE, STEP)
    raise RuntimeError(f"{BLOCKS} processes already test with ports from {first}: wait until one of them has ended")


@functools.cache
def _block() -> Iterator[int]:
    return itertools.cycle(claim_block())


def free_endpoints(count: int) -> list[str]:
    """Addresses for embedded members: ports that are free, as is the next one of each, for the peers."""
    free = (port for port in _block() if all(can_bind("127.0.0.1", port + offset) for offset in (0, 1)))
    return [f"127.0.0.1:{port}" for port in itertools.islice(free, count)]
