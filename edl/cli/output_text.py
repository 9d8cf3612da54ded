"""Lines of workers for people, and which nodes have them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from edl.cli.node_text import ranks_of
from edl.errors import UsageError
from edl.rendezvous.phrases import count, listed
from edl.wire.node_requests import OutputLine
from edl.wire.records import NodeInfo
from edl.wire.status import JobStatus

MOST_NODES = 64
"""Most nodes that a command asks at once."""
_SEQUENCE = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*(?:[@-~]|$)"  # CSI: colours, movements of the cursor
    r"|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)"  # OSC and other strings: titles, links, the clipboard
    r"|[ -/]*[0-~]"  # the others
    r"|$)"
)


def printable(text: str) -> str:
    """A worker's line made safe for a terminal: without escape sequences and control characters. Of a line that was
    drawn over with carriage returns, such as a progress bar, the last state remains."""
    text = _SEQUENCE.sub("", text).expandtabs().rstrip("\r").rpartition("\r")[2]
    return "".join(letter for letter in text if letter.isprintable()).rstrip()


def line_text(node: str, line: OutputLine, raw: bool) -> str:
    """One line with rank and node in front, as workers' lines look on a launcher's console."""
    rank = "-" if line.rank < 0 else str(line.rank)
    return f"[{rank}@{node}]: {line.text}" if raw else f"[{rank}@{node}]: {printable(line.text)}".rstrip()


def no_lines_text(nodes: Sequence[str], ranks: Sequence[int]) -> str:
    """Says that the launchers keep nothing of what was asked for."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    which = f" of {noun} {listed([str(rank) for rank in ranks])}" if ranks else ""
    place = f" on {listed(nodes)}" if nodes else ""
    advice = f". Without --node, the node that has the {noun} now is asked" if nodes and ranks else ""
    return f"no line{which} is kept{place}{advice}"


def nodes_to_ask(
    launchers: Sequence[NodeInfo], status: JobStatus, nodes: Sequence[str], ranks: Iterable[int]
) -> list[NodeInfo]:
    """The launchers that have output of these nodes or ranks, in the order of their ranks; of all nodes if both are
    empty. Raises ``UsageError`` for an unknown node, a rank outside the world, or too many nodes."""
    known: dict[str, NodeInfo] = {info.node: info for info in launchers}
    order = [view.node for view in status.nodes if view.node in known]
    order += [name for name in known if name not in order]
    wanted = set(nodes)
    unknown = [name for name in nodes if name not in known]
    if unknown:
        raise UsageError(f"no launcher of node {unknown[0]} is registered; there are {listed(order)}")
    for rank in ranks:
        holder = next((view.node for view in status.nodes if _holds(view.first_rank, ranks_of(view), rank)), None)
        if holder is None or holder not in known:
            if not status.world_size:
                raise UsageError(
                    f"no world runs at this moment, and no node that is left had rank {rank} in the last one"
                )
            raise UsageError(
                f"no node of the current world has rank {rank}; its ranks are 0 to {status.world_size - 1}"
            )
        if not nodes:
            wanted.add(holder)
    found = [known[name] for name in order if name in wanted or not wanted]
    if len(found) > MOST_NODES:
        raise UsageError(f"{count(len(found))} are too many to ask at once; name some with --node or --rank")
    return found


def _holds(first: int, ranks: str, rank: int) -> bool:
    last = int(ranks.rpartition("-")[2]) if first >= 0 else -1
    return first >= 0 and first <= rank <= last
