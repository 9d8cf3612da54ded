"""Which folders are set aside when a node is lost: those that appeared after the last moment known of it.

Several nodes may write one folder, such as a checkpoint with a file of each rank. When one of them is lost before its
newest files have been copied, the others hold a folder that is not whole, and a script that takes the newest one fails
at each start. The files of the job must be a consistent cut: what the lost node had done until some moment, and nothing
that appeared after that moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from edl.sync_dir.index import FileRecord, folders_above, parent_of
from edl.types import NodeId


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node that took part in the last world, and will not bring its files."""

    node: NodeId
    until_ns: int
    """All that it finished until then is here. By this host's clock."""
    shared: frozenset[int] = frozenset()
    """Numbers of the directories that it shared with this node: nothing in them is lost."""


@dataclass(slots=True)
class _Contents:
    """What is known of a folder with all that is in it."""

    late: bool = True
    """All files in it were written by nodes that are still there, after the lost node's last moment."""
    newest_ns: int = -1
    """Time of its last change; negative: all that was in it has been removed."""
    writers: set[NodeId] = field(default_factory=set)
    """Nodes that wrote its files. Not known of files that are older than their node's launcher."""


def incomplete(records: Iterable[FileRecord], lost: LostNode, ahead_ns: Mapping[NodeId, int]) -> list[str]:
    """The outermost folders that may lack files of the lost node, in order.

    ``ahead_ns``: of each node that is still there, by how much its clock is ahead of this host's.

    A folder stays where it is if the one before it, beside it, has nothing of the lost node: that node does not take
    part. It stays too if none would be left, since others have been removed for it.
    """
    folders = _folders(records, lost, ahead_ns)
    beside: dict[str, list[str]] = {}
    for path in folders:
        beside.setdefault(parent_of(path), []).append(path)
    return [
        path
        for path, folder in sorted(folders.items())
        if folder.late and folder.newest_ns >= 0 and not folders.get(parent_of(path), _Contents(late=False)).late
        if _whole_before(lost.node, [folders[one] for one in beside[parent_of(path)]])
    ]


def _folders(records: Iterable[FileRecord], lost: LostNode, ahead_ns: Mapping[NodeId, int]) -> dict[str, _Contents]:
    found: dict[str, _Contents] = {}
    for record in records:
        if record.folder or int(record.path.partition("/")[0]) in lost.shared:
            continue
        version = record.version
        writer = version.node if version.mtime_ns == 0 else None
        changed_ns = record.mtime_ns - (ahead_ns.get(writer, 0) if writer else 0)
        for path in folders_above(record.path):
            folder = found.setdefault(path, _Contents())
            if record.removed:
                continue
            folder.late = folder.late and writer in ahead_ns and changed_ns > lost.until_ns
            folder.newest_ns = max(folder.newest_ns, changed_ns, 0)
            if writer:
                folder.writers.add(writer)
    return found


def _whole_before(lost: NodeId, beside: Collection[_Contents]) -> bool:
    """Whether the job can go back to what was there before the late ones of these folders."""
    kept = [one for one in beside if not one.late]
    known = [one for one in kept if one.writers]
    if known:
        return lost in max(known, key=lambda one: one.newest_ns).writers
    return bool(kept) or all(one.newest_ns >= 0 for one in beside)
