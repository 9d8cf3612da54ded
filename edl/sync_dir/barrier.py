"""When the workers of a round may start: all members have the same files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from edl.sync_dir.messages import PeerReport
from edl.types import NodeId


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """What this node knows of another one."""

    settled: int = 0
    """Newest round for which all that the node's earlier workers wrote is known to have a number."""
    alike: int = 0
    """Newest round for which the node has the files of all members."""
    head: int = 0
    """Number of its newest change, of the same report."""
    entered: int = 0
    """Number of its newest change that has been entered here."""
    writing: bool = False
    """Workers of earlier rounds than ``settled`` may still write there."""
    alike_head: int = 0
    """The newest change of the first report with this ``alike``."""
    failure: str = ""
    """Why its files could not be fetched in the last attempt; empty: they could, or nothing has failed yet."""

    def after(self, report: PeerReport, entered: int) -> PeerProgress:
        """What is known with its next report. ``failure`` holds until its files have been asked for."""
        alike_head = self.alike_head if report.alike == self.alike else report.head
        rounds = (report.settled, report.alike, report.head, entered)
        return PeerProgress(*rounds, report.writing, alike_head, self.failure)


def lacking(number: int, members: Collection[NodeId], peers: Mapping[NodeId, PeerProgress]) -> list[NodeId]:
    """Other members of round ``number`` whose files are not all here, or not known to be."""
    known = {node: peers.get(node, PeerProgress()) for node in sorted(members)}
    return [node for node, peer in known.items() if peer.settled < number or peer.entered < peer.head]


def behind(number: int, members: Collection[NodeId], peers: Mapping[NodeId, PeerProgress]) -> list[NodeId]:
    """Other members that do not have the files of all members yet, or have set some aside that are still here, as far
    as is known."""
    known = {node: peers.get(node, PeerProgress()) for node in sorted(members)}
    return [node for node, peer in known.items() if peer.alike < number or peer.entered < peer.alike_head]
