"""Nodes with real directories of ``--sync-dir``, and launchers' connections between them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edl.adapters.clock import SystemClock, wall_clock_ns
from edl.adapters.copies import TcpCopies
from edl.adapters.copy_connection import CopyLimits
from edl.adapters.file_copies import TcpFileCopies
from edl.errors import CheckpointError
from edl.sync_dir.service import DirectorySync, PeerAddress
from edl.sync_dir.tree import SyncedTree
from edl.types import NodeId
from tests.support.copies_fixture import snapshot_pool

HOST = "127.0.0.1"
TOKEN = "token"
LIMIT_S = 60.0
NEVER = threading.Event()


class SyncedNode:
    """One node: its directory and the two ends of its connections."""

    def __init__(self, folder: Path, name: str, token: str = TOKEN) -> None:
        self.name = NodeId(name)
        self.out = folder / name / "out"
        self.lines: list[str] = []
        clock, limits = SystemClock(), CopyLimits()
        self.tree = SyncedTree([str(self.out)], self.name, f"life-{name}", wall_clock_ns, self.lines.append)
        copies = TcpFileCopies(lambda: token, clock, limits)
        self.sync = DirectorySync(self.name, f"life-{name}", self.tree, copies, clock, self.lines.append)
        self.server = TcpCopies(self.name, lambda: token, clock, limits, files=self.sync)

    def open(self) -> SyncedNode:
        self.sync.open()
        self.address = PeerAddress(self.name, HOST, self.server.start(snapshot_pool(), HOST))
        return self

    def close(self) -> None:
        self.sync.close()
        self.server.stop()

    def write(self, name: str, content: str, *, mtime_s: int = 0) -> None:
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        if mtime_s:
            os.utime(path, (mtime_s, mtime_s))

    def files(self) -> dict[str, str]:
        """Contents by path, without what is edl's own."""
        found = (path for path in self.out.rglob("*") if path.is_file() and ".edl-sync" not in path.parts)
        return {str(path.relative_to(self.out)): path.read_text() for path in found}


Make = Callable[..., SyncedNode]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as cleanup:

        def one(name: str, **options: str) -> SyncedNode:
            node = SyncedNode(tmp_path, name, **options)
            cleanup.callback(node.close)
            return node

        yield one


def wait_until(node: SyncedNode, condition: Callable[[], bool]) -> None:
    """``condition`` is looked at whenever anything changes at the node."""
    with node.sync._changed:
        assert node.sync._changed.wait_for(condition, LIMIT_S)


def meet(*nodes: SyncedNode) -> None:
    for node in nodes:
        node.sync.meet([other.address for other in nodes])


def alike(number: int, *nodes: SyncedNode, limit_s: float = LIMIT_S, writing: bool = False) -> list[BaseException]:
    """All nodes wait for the same round; returns what they have raised. ``writing``: workers run on on the first."""
    errors: list[BaseException] = []

    def wait(node: SyncedNode) -> None:
        try:
            members = [one.name for one in nodes]
            node.sync.alike(number, members, limit_s, NEVER, writing=writing and node is nodes[0])
        except CheckpointError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def complaint(text: str, *nodes: SyncedNode) -> str:
    """What a node says of a round that cannot end, with ``text`` in it. A busy machine needs a while to find out."""
    for limit_s in (0.3, 1.0, 5.0, LIMIT_S):
        for error in alike(1, *nodes, limit_s=limit_s):
            if text in str(error):
                return str(error)
    raise AssertionError(f"no node has said {text!r}")
