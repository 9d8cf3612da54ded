"""Describes workers that hang, from their stacks and from the collectives that they wait for. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from edl.agent.machine.diagnosis import LONGEST_TRACEBACK
from edl.agent.workers.hang import HangVerdict
from edl.wire.alarm import Alarm
from edl.wire.collective_wait import CollectiveWait
from edl.wire.node_requests import OutputLine
from edl.wire.severity import Severity

ALARM = "hang"
"""Name of the alarm."""
MOST_WORKERS = 8
"""Most workers of a node with their stacks in a report; the report of an incident keeps twelve."""
_FRAME = re.compile(r'\s*File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.+)')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[.\d]*/|^<frozen |/edl/worker/")


def stacks_by_rank(lines: Iterable[OutputLine]) -> dict[int, str]:
    """The stacks of each rank as one text, which ends with the main thread's."""
    found: dict[int, list[str]] = {}
    for line in lines:
        found.setdefault(line.rank, []).append(line.text.rstrip())
    return {rank: "\n".join(text)[-LONGEST_TRACEBACK:] for rank, text in found.items()}


def innermost(stacks: str) -> str:
    """Where the user's code of the main thread is: ``train.py:31 in step``; of a library if there is no other; empty
    if the stacks have no frame."""
    frames: list[re.Match[str]] = []
    for line in stacks.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            frames = []
        elif match := _FRAME.match(line):
            frames.append(match)
    own = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
    for frame in (*own, *frames)[:1]:
        return f"{frame['file'].rpartition('/')[2]}:{frame['line']} in {frame['name']}"
    return ""


def waits_for(wait: CollectiveWait | None) -> str:
    """The oldest collective that a worker waits for; empty if none is known."""
    return f"waits for {wait.pending[0].text}" if wait is not None and wait.pending else ""


def summary(ranks: Sequence[int], stacks: Mapping[int, str], waits: Mapping[int, CollectiveWait]) -> str:
    """Each rank's place in its code and its collective, for one line. Both mappings are by rank."""
    parts = []
    for rank in ranks[:MOST_WORKERS]:
        place, wait = innermost(stacks.get(rank, "")), waits_for(waits.get(rank))
        what = ", ".join(part for part in (f"at {place}" if place else "", wait) if part)
        if what:
            parts.append(f"rank {rank} {what}")
    return "; ".join(parts)


def alarm(node: str, verdict: HangVerdict, where: str, dumps: Sequence[str], *, restarts: bool) -> Alarm:
    """The alarm for a suspicion. Usually all nodes have it at once, so it is shared. ``where``: see ``summary``.
    ``dumps``: files of the flight recorder. ``restarts``: this node shows no sign of life, so the round is restarted if
    the same is true of all others."""
    learnt = f", learnt from {verdict.learnt.pauses} pauses" if verdict.learnt is not None else ""
    text = f"{verdict.what} on {node} (limit {verdict.limit_s:.0f} s{learnt})"
    if where:
        text += f": {where}"
    files = f"; flight recorder: {', '.join(dumps)}" if dumps else ""
    then = (
        "restarted if no other node shows a sign of life" if restarts else "not restarted, because workers are active"
    )
    text += f". Stacks: in the workers' stderr{files}. The round is {then}"
    return Alarm(ALARM, "", Severity.WARNING.value, text, shared=True)
