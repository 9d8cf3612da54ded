"""Reads a checkpoint outside of a job, as nested dicts."""

from __future__ import annotations

import importlib
import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from edl.checkpoint.directory.manifest import MANIFEST_FILE, folder_version
from edl.checkpoint.reading.assembly import NAMES, Spread, StoredArray, Whole, holds_tensor_parts, merged
from edl.checkpoint.reading.reader import Folder
from edl.checkpoint.reading.saved_parts import ReadRequest
from edl.errors import CheckpointError
from edl.worker import tree
from edl.worker.contents import HIDDEN, NUMPY_KINDS
from edl.worker.framework import ArrayInfo, Arrays
from edl.worker.state import BaseState


def load_checkpoint(
    path: str | os.PathLike[str],
    arrays: Arrays,
    state: Callable[..., BaseState],
    into: Mapping[str, Any] | None,
    worker: int | None,
) -> dict[str, Any]:
    """Read a checkpoint; see ``edl.torch.load_checkpoint``. ``state`` creates the ``State`` that loads saved values
    into objects."""
    where = os.fspath(path)
    folders = [where] if os.path.exists(os.path.join(where, MANIFEST_FILE)) else _folders(where)
    refused = []
    for folder in folders:
        try:
            found = _Whole(Folder(folder), arrays, worker).read()
        except CheckpointError as error:
            refused.append(str(error))
            continue
        for reason in refused:
            warnings.warn(f"reading an older checkpoint: {reason}", RuntimeWarning, stacklevel=3)
        return _given(found, folder, state, into or {})
    reasons = "".join(f"\n  {reason}" for reason in refused) or " it holds none"
    raise CheckpointError(f"no checkpoint in {where} can be read:{reasons}")


def _folders(path: str) -> list[str]:
    """The complete checkpoints in a job's directory, newest first."""
    try:
        names = os.listdir(path)
    except OSError as error:
        raise CheckpointError(f"no checkpoint in {path} can be read: {error.strerror}") from error
    versions = {version: name for name in names if (version := folder_version(name)) is not None}
    found = [os.path.join(path, versions[version]) for version in sorted(versions, reverse=True)]
    return [folder for folder in found if os.path.exists(os.path.join(folder, MANIFEST_FILE))]


def _given(
    found: dict[str, Any], folder: str, state: Callable[..., BaseState], into: Mapping[str, Any]
) -> dict[str, Any]:
    unknown = sorted(into.keys() - found.keys())
    if unknown:
        raise CheckpointError(f"{folder} does not contain {', '.join(unknown)}; it has {', '.join(sorted(found))}")
    taking = state(**into)
    plain = sorted(into.keys() - taking._objects.keys())
    if plain:
        raise CheckpointError(
            f"into: nothing can be loaded into {', '.join(plain)}, which has no load_state_dict(): leave it out; the "
            "result holds the saved value"
        )
    for name, obj in into.items():
        try:
            taking._load_object(name, obj, found.pop(name))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{name} does not fit {folder}: {error}") from error
    return found


class _Whole:
    """One reading of a checkpoint."""

    def __init__(self, folder: Folder, arrays: Arrays, worker: int | None) -> None:
        if worker is not None and not 0 <= worker < folder.shards:
            raise CheckpointError(f"worker={worker}: {folder.path} was written by {folder.shards} workers")
        self._folder = folder
        self._arrays = arrays
        self._worker = worker
        self._wants: list[ReadRequest] = []
        self._alike: list[tuple[str, list[tuple[StoredArray, bytearray]]]] = []

    def read(self) -> dict[str, Any]:
        """Objects and values by their names in ``State``."""
        home = self._worker or 0
        shards = [home, *(shard for shard in range(self._folder.shards) if shard != home)]
        first = self._folder.parts(shards[:1])[0]
        found: dict[str, Any] = {}
        for name in first.objects:
            found[name] = self._made(self._object(name, shards), f".{name}")
        for name, value in first.values.items():
            if name not in HIDDEN:
                found[name] = self._made(merged([value], union=False), f".{name}")
        self._folder.fetch(self._wants)
        for where, copies in self._alike:
            for stored, memory in copies[1:]:
                if memory != copies[0][1]:
                    raise CheckpointError(
                        f"{self._folder.path}: {where[1:]} differs between workers {copies[0][0].shard} and "
                        f"{stored.shard}, and is not sharded: choose a worker, such as worker=0"
                    )
        return found

    def _object(self, name: str, shards: list[int]) -> Any:
        parts = [part.objects[name] for part in self._folder.parts(shards) if name in part.objects]
        sharded = any(holds_tensor_parts(part) for part in parts)
        names = [part.get(NAMES) if isinstance(part, dict) else None for part in parts]
        if any(other != names[0] for other in names) and self._worker is None:
            raise CheckpointError(
                f"{self._folder.path}: the workers' {name} have different parameters (pipeline stages?): choose "
                "a worker, such as worker=0"
            )
        if names[0] is not None:
            parts = [part for part, other in zip(parts, names, strict=True) if other == names[0]]
            parts = [{key: value for key, value in part.items() if key != NAMES} for part in parts]
        return merged(parts, union=sharded and self._worker is None, where=f".{name}")

    def _made(self, value: Any, where: str) -> Any:
        if isinstance(value, Spread):
            want, memory = ReadRequest.part_of(value, value.box)
            self._wants.append(want)
            return self._arrays.view(ArrayInfo(value.dtype, value.shape, len(memory)), memoryview(memory))
        if isinstance(value, Whole):
            return self._whole(value, where)
        return tree.map_entries(value, lambda key, part: self._made(part, f"{where}.{key}"))

    def _whole(self, value: Whole, where: str) -> Any:
        copies = value.copies if self._worker is None else value.copies[:1]
        memories = []
        for copy in copies:
            want, memory = ReadRequest.all_of(copy)
            self._wants.append(want)
            memories.append((copy, memory))
        self._alike.append((where, memories))
        first, memory = memories[0]
        entry = first.entry
        if first.numpy and entry.dtype in NUMPY_KINDS:
            numpy = importlib.import_module("numpy")
            return numpy.frombuffer(memory, NUMPY_KINDS[entry.dtype], math.prod(entry.shape)).reshape(entry.shape)
        return self._arrays.view(ArrayInfo(entry.dtype, entry.shape, entry.size), memoryview(memory))
