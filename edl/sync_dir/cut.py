"""Which folders are set aside when a node is lost: those that appeared after the last moment known of it.

Several nodes may write one folder, such as a checkpoint with a file of each rank. When one of them is lost before its
newest files have been copied, the others hold a folder that is not whole, and a script that takes the newest one fails
at each start. The files of the job must be a consistent cut: what the lost node had done until some moment, and nothing
that appeared after that moment.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from edl.sync_dir.index import FileRecord, folders_above, parent_of
from edl.types import NodeId


@dataclass(frozen=True, slots=True)
class LastMoment:
    """The last moment of another node that is here as a whole."""

    until_ns: int
    """All that the node had finished until then is here. By this host's clock."""
    ahead_ns: int = 0
    """By how much the node's clock is ahead of this host's."""
    shared: frozenset[int] = frozenset()
    """Numbers of the directories that it shares with this node: nothing in them gets lost."""


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node that took part in the last world, and will not bring its files."""

    node: NodeId
    last: LastMoment
    since_ns: int = 0
    """Since when it and this node were in the same worlds. By this host's clock."""


@dataclass(slots=True)
class _Contents:
    """What is known of a folder with all that is in it."""

    new: bool = True
    """All that is or was in it appeared after the lost node's last moment, on nodes whose clocks are known."""
    empty: bool = True
    """All that was in it has been removed."""
    writers: set[NodeId] = field(default_factory=set)
    """Nodes that wrote what is not new in it. Not known of files that are older than their node's launcher."""
    newest_ns: int = 0
    """When the newest of these files appeared, as far as that is known."""


def incomplete(records: Iterable[FileRecord], lost: LostNode, ahead_ns: Mapping[NodeId, int]) -> list[str]:
    """The outermost folders that may lack files of the lost node, in order.

    ``ahead_ns``: of each node, this one included, by how much its clock is ahead of this host's. Nodes that were lost
    earlier are not in it: their files are older than the moment.
    """
    folders = _folders(records, lost, ahead_ns)
    series: dict[str, list[_Contents]] = {}
    for path, folder in folders.items():
        series.setdefault(_series_of(path), []).append(folder)
    affected = {name for name, alike in series.items() if _takes_part(lost, alike)}
    return [
        path
        for path, folder in sorted(folders.items())
        if folder.new and not folder.empty and _series_of(path) in affected
        if not ((above := folders.get(parent_of(path))) and above.new)
    ]


def _folders(records: Iterable[FileRecord], lost: LostNode, ahead_ns: Mapping[NodeId, int]) -> dict[str, _Contents]:
    found: dict[str, _Contents] = {}
    for record in records:
        if record.folder or int(record.path.partition("/")[0]) in lost.last.shared:
            continue
        writer = record.writer
        clock_ns = ahead_ns.get(writer) if writer else None
        appeared_ns = record.appeared_ns - clock_ns if clock_ns is not None else 0
        new = appeared_ns > lost.last.until_ns and writer != lost.node
        for path in folders_above(record.path):
            folder = found.setdefault(path, _Contents())
            folder.new = folder.new and new
            folder.empty = folder.empty and record.removed
            if writer and not (new or record.removed):
                folder.writers.add(writer)
                folder.newest_ns = max(folder.newest_ns, appeared_ns)
    return found


def _series_of(path: str) -> str:
    """Folders beside one another whose names differ only in numbers, such as ``checkpoint-250`` and ``checkpoint-260``,
    are written alike."""
    return f"{parent_of(path)}/{re.sub('[0-9]+', '0', path.rpartition('/')[2])}"


def _takes_part(lost: LostNode, series: Collection[_Contents]) -> bool:
    """Whether the new folders of a series may lack files of the lost node, and the job can go back to older ones."""
    last = max((one for one in series if one.writers), key=lambda one: one.newest_ns, default=None)
    if last is None:  # if there was nothing, the job can start without the first one
        old = [one for one in series if not one.new]
        return not old or not all(one.empty for one in old)
    return lost.node in last.writers or last.newest_ns < lost.since_ns
