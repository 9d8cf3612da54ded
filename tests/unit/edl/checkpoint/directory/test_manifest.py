"""The text files of a checkpoint directory: what was written is read, and anything else is refused with the reason."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from edl.checkpoint.directory.manifest import (
    BLOCK_BYTES,
    FORMAT,
    PARTS_FORMAT,
    RUNS_REMEMBERED,
    DirectoryOwner,
    Retention,
    StateManifest,
    Sum,
    check_header,
    folder_name,
    folder_version,
    manifest_text,
    owner_text,
    parse_manifest,
    parse_owner,
    state_file,
    why_old_parts,
    why_sizes_differ,
)
from edl.errors import CheckpointError
from edl.wire.records import Version
from edl.wire.snapshot import Meta

WHOLE = StateManifest("job", "run", Version(2, 70), 1, {"state": Sum(12, 0xAB)}, "2026-01-01T00:00:00Z")
BLOCKS = (0, 1, 0xFFFFFFFF)
"""The last of these blocks is shorter."""
PARTS = dataclasses.replace(WHOLE, shards=2, files={"a": Sum(2 * BLOCK_BYTES + 1, 7, BLOCKS), "b": Sum(0, 0)})


@pytest.mark.parametrize(("manifest", "format"), [(WHOLE, FORMAT), (PARTS, PARTS_FORMAT)])
def test_a_manifest_is_read_as_it_was_written(manifest: StateManifest, format: int) -> None:
    found = parse_manifest(manifest_text(manifest))
    assert found == dataclasses.replace(manifest, format=format)
    assert [one.blocks for one in found.files.values()] == [one.blocks for one in manifest.files.values()]


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_file_has_a_checksum_for_each_block(blocks: int) -> None:
    for size in ((blocks - 1) * BLOCK_BYTES + 1, blocks * BLOCK_BYTES):
        manifest = dataclasses.replace(PARTS, files={"a": Sum(size, 7, tuple(range(blocks)))})
        assert parse_manifest(manifest_text(manifest)).files["a"].blocks == tuple(range(blocks))


def changed(manifest: StateManifest, *path: str, value: Any) -> bytes:
    values = json.loads(manifest_text(manifest))
    place = values
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    ("manifest", "path", "value", "why"),
    [
        (WHOLE, ("files",), {}, "the manifest names no file"),
        (WHOLE, ("files",), ["state"], "the manifest names no file"),
        (WHOLE, ("files", "state"), 12, "the manifest has no entry for state"),
        (WHOLE, ("files", "state", "crc32"), "xyz", "the manifest has no checksum for state"),
        (WHOLE, ("files", "state", "bytes"), -1, "bytes is -1, which edl never writes"),
        (WHOLE, ("files", "state", "bytes"), True, "bytes is True, which edl never writes"),
        (WHOLE, ("commit",), "70", "commit is '70', which edl never writes"),
        (WHOLE, ("format",), 0, "not written by edl: its format is 0"),
        (WHOLE, ("format",), PARTS_FORMAT, "has format 2, newer than this edl knows"),
        (PARTS, ("format",), PARTS_FORMAT + 1, "has format 3, newer than this edl knows"),
        (PARTS, ("files", "a", "bytes"), 3 * BLOCK_BYTES + 1, "block checksums of a do not match its 25165825 bytes"),
        (PARTS, ("files", "a", "block_bytes"), 2 * BLOCK_BYTES, "block checksums of a do not match"),
        (PARTS, ("files", "a", "blocks"), "0" * 16 + "not-hex!", "block checksums of a are not numbers"),
    ],
)
def test_anything_else_is_refused(manifest: StateManifest, path: tuple[str, ...], value: Any, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        parse_manifest(changed(manifest, *path, value=value))


@pytest.mark.parametrize("version", [Version(0, 0), Version(3, 10**10), Version(10**11, 5)])
def test_a_folder_is_named_after_its_version(version: Version) -> None:
    assert folder_version(folder_name(version)) == version


@pytest.mark.parametrize(
    "name", ["", "commit-1.era-1", "commit-00000000001.era-0000000001", "commit-0000000001.era-0000000001.old"]
)
def test_other_folders_stand_for_no_version(name: str) -> None:
    assert folder_version(name) is None


def test_each_part_has_a_file_of_its_own() -> None:
    names = [state_file(0, 1), *(state_file(shard, shards) for shards in (2, 3) for shard in range(shards))]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"state": 12, "more": 1}, ""),
        ({}, "state is missing"),
        ({"state": 11}, "state is truncated: 11 of 12 bytes"),
        ({"state": 13}, "state has 13 bytes instead of 12"),
    ],
)
def test_files_have_the_sizes_of_the_manifest(sizes: dict[str, int], why: str) -> None:
    assert why_sizes_differ(WHOLE, sizes) == why


def test_parts_of_an_older_edl_are_not_used() -> None:
    for shards, format, how in (
        (2, 1, "in bare parts"),
        (0, 1, "torch.distributed.checkpoint"),
        (1, 1, ""),
        (2, 2, ""),
    ):
        why = why_old_parts(dataclasses.replace(WHOLE, shards=shards, format=format))
        assert how in why and bool(why) is bool(how)


HEADER = Meta("job", 2, 70, 9, 1, 2, "torch")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"job": "other"}, "its header says job other, its manifest job"),
        ({"era": 3}, "its header says commit-0000000070.era-0000000003"),
        ({"commit": 71}, "its header says commit-0000000071.era-0000000002"),
        ({"shard": 0}, "its header says part 0 of 2, its manifest 1 of 2"),
        ({"shards": 3}, "its header says part 1 of 3, its manifest 1 of 2"),
    ],
)
def test_a_file_belongs_to_its_manifest(changes: dict[str, Any], why: str) -> None:
    check_header(HEADER, PARTS, 1)
    with pytest.raises(CheckpointError, match=why):
        check_header(dataclasses.replace(HEADER, **changes), PARTS, 1)


def test_an_owner_remembers_who_wrote_before() -> None:
    owner = DirectoryOwner("job", "run-0")
    for number in range(1, RUNS_REMEMBERED + 2):
        owner = owner.succeeded_by("job", f"run-{number}")
    assert (owner.run, owner.before[-1]) == (f"run-{RUNS_REMEMBERED + 1}", f"run-{RUNS_REMEMBERED}")
    assert len(owner.before) == RUNS_REMEMBERED
    assert parse_owner(owner_text(owner)) == owner
    assert parse_owner(owner_text(owner)[:-2]) is None, "it was not written to its end"


def test_unfinished_checkpoints_go_once_they_would_be_surplus() -> None:
    rule = Retention(2)
    unfinished = [Version(1, 30), Version(1, 10), Version(1, 25), Version(1, 20)]
    assert rule.overtaken(unfinished, [Version(1, 40), Version(1, 25), Version(1, 5)]) == [
        Version(1, 10),
        Version(1, 20),
    ]
    assert rule.overtaken(unfinished, [Version(1, 40)]) == [], "all that is complete is kept"
