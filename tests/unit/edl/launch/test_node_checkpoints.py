"""What stores a node's commits gets its settings: each one is off its default here, so that one left out is noticed."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edl.checkpoint.directory.manifest import Retention
from edl.checkpoint.memory.copy_policy import Copying
from edl.launch import node_checkpoints
from edl.launch.node_checkpoints import CheckpointReports, open_checkpoints
from edl.launch.settings import LaunchSettings, StateSettings

WANTED = StateSettings(
    memory_bytes=123 << 20,
    checkpoint_dir="/checkpoints",
    keep_last=5,
    keep_every=7,
    adopt=True,
    save_timeout_s=11.0,
    copying=Copying.ALWAYS,
    copy_rate=1 << 20,
)
ELSEWHERE = {"checkpoint_dir", "save_timeout_s"}
"""Settings that are not for what is built here: the directory is opened before, and the agent waits for saves."""


class Built:
    """Stands for an object that was built."""

    def __init__(self, what: str, *arguments: Any, **named: Any) -> None:
        self.what = what
        self.arguments = arguments
        self.named = named
        self.checked = False

    def check(self) -> None:
        self.checked = True


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, Built]:
    """What is built, by the name of its class."""
    found: dict[str, Built] = {}

    def stand_in(name: str) -> Any:
        def build(*arguments: Any, **named: Any) -> Built:
            found[name] = Built(name, *arguments, **named)
            return found[name]

        return build

    for name in ("FileCheckpointStorage", "TcpCopies", "MemoryCheckpoints", "CheckpointManager"):
        monkeypatch.setattr(node_checkpoints, name, stand_in(name))
    return found


def opened(state: StateSettings, files: object, source: object = None) -> None:
    """Open the checkpoints of node ``a``."""
    settings = SimpleNamespace(state=state, spec=SimpleNamespace(job="job"), node=SimpleNamespace(name="a"))
    parts = (files, lambda: "token", "run", CheckpointReports(), list[str]().append, source)
    asyncio.run(open_checkpoints(cast(LaunchSettings, settings), *cast(Any, parts)))


def test_every_setting_here_is_off_its_default() -> None:
    same = [one.name for one in dataclasses.fields(StateSettings) if getattr(WANTED, one.name) == one.default]
    assert same == []


def test_every_setting_reaches_what_it_is_for(built: dict[str, Built]) -> None:
    files, source = object(), object()
    opened(WANTED, files, source)
    storage, copies, memory = (built[name] for name in ("FileCheckpointStorage", "TcpCopies", "MemoryCheckpoints"))
    assert storage.checked
    assert storage.arguments[0] is files
    assert storage.arguments[2] == Retention(WANTED.keep_last, WANTED.keep_every)
    assert storage.named["adopt"] is True
    assert (copies.named["rate_bytes_per_s"], copies.named["files"]) == (WANTED.copy_rate, source)
    assert (memory.named["limit_bytes"], memory.named["copying"]) == (WANTED.memory_bytes, WANTED.copying)
    assert (memory.named["copies"], memory.named["checkpoint_storage"]) == (copies, storage)
    assert built["CheckpointManager"].arguments[1:3] == (memory, storage)
    seen = {"keep_last", "keep_every", "adopt", "copy_rate", "memory_bytes", "copying"}
    assert seen | ELSEWHERE == {one.name for one in dataclasses.fields(StateSettings)}, "test the new setting, too"


def test_without_a_directory_there_is_no_storage(built: dict[str, Built]) -> None:
    opened(StateSettings(), None)
    assert "FileCheckpointStorage" not in built
    assert built["MemoryCheckpoints"].named["checkpoint_storage"] is None
