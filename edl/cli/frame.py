"""One frame of ``edl top``: the lines that show a status on a screen of some size. Pure.

A frame never has more lines than the screen, nor a wider one. The summary comes first, then the nodes, then the last
events. If not all nodes fit, the worst ones are listed and the others counted. Names and texts come from other hosts
and from scripts, so control characters are removed from all of them.
"""

from __future__ import annotations

import collections
import enum
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from edl.cli.node_text import (
    JobPace,
    is_slow,
    kind_of,
    pace_of,
    pending,
    ranks_of,
    rate_text,
    samples_text,
    step_text,
)
from edl.master.alarms import described
from edl.rendezvous.phrases import count, goodput, one_line
from edl.wire.status import HistoryEntry, JobStatus, NodeView

SMALLEST = (20, 6)
"""Columns and lines to which a smaller screen is rounded up."""
WIDE = 64
"""Columns from which on hosts are shown."""
_NOTICES = 3
"""Most lines of each kind in the summary: warnings, data sets."""
_REASON = 4
"""Most lines of the reason why a job does not train."""
_EVENTS = 3
"""Lines for events that nodes do not take."""
_SETTLED = {"running": 4, "ready": 4, "done": 5, "spare": 5, "cordoned": 3}
"""States in which a node stays, and how bad they are; see ``_badness``."""


class LineLook(enum.Enum):
    """How a line is shown."""

    PLAIN = ""
    TITLE = "bold"
    HEADING = "reverse"
    CHANGED = "bold cyan"
    """A node or an event that the previous frame did not show like this."""
    BAD = "red"
    WARNING = "yellow"
    DIM = "dim"


@dataclass(frozen=True, slots=True)
class FrameLine:
    """One line of a frame: printable characters only, and no trailing spaces."""

    text: str
    look: LineLook = LineLook.PLAIN


@dataclass(frozen=True, slots=True)
class ScreenSize:
    """The size of a terminal in character cells."""

    width: int
    height: int


def frame(status: JobStatus, before: JobStatus | None, screen: ScreenSize, problem: str = "") -> list[FrameLine]:
    """The lines of one frame.

    ``before``: the status of the previous frame; nodes and events that are new or different stand out. ``problem``: why
    ``status`` is old, such as "looking for the Master"; empty: it is current.
    """
    width, height = max(screen.width, SMALLEST[0]), max(screen.height, SMALLEST[1])
    head = _summary(status, width, problem)[: max(2, height // 2)]
    left = height - len(head)
    events = list(reversed(status.history))
    for_events = min(len(events), max(_EVENTS, left - len(status.nodes) - 3))
    for_nodes = max(0, left - (for_events + 2 if for_events else 1))
    nodes = _nodes(status, before, width, for_nodes)
    lines = [*head, FrameLine(""), *nodes]
    if for_events:
        lines += [FrameLine("Last events:", LineLook.TITLE)]
        lines += [_event(entry, before, width) for entry in events[:for_events]]
    return [FrameLine(_cut(line.text, width), line.look) for line in lines[:height]]


def _summary(status: JobStatus, width: int, problem: str) -> list[FrameLine]:
    """The job in a few lines, the most important first."""
    workers = f"{count(status.world_size, 'worker')} on {count(status.scale.nodes)}"
    title = [status.job, status.phase, f"round {status.round}", workers, f"Master {status.master or '-'}"]
    lines = [FrameLine(text, LineLook.TITLE) for text in _flow(title, width)]
    if problem:
        lines.insert(0, FrameLine(one_line(problem), LineLook.BAD))
    lines += [FrameLine(text) for text in _flow([*_pace(status, pace_of(status)), *_budget(status)], width)]
    if status.goodput:
        lines.append(FrameLine(f"goodput: {goodput({one.name: one.value for one in status.goodput})}"))
    lines += _reason(status, width)
    raised = (f"alarm: {described(alarm, alarm.text)}" for alarm in status.alarms)
    notices = [*raised, *status.warnings, *(f"incomplete: {text}" for text in status.flaws)]
    lines += [FrameLine(one_line(text), LineLook.WARNING) for text in _folded(notices, "warning")]
    lines += [FrameLine(one_line(text)) for text in _plans(status)]
    lines += [
        FrameLine(one_line(text)) for text in _folded([f"{one.service}: {one.text}" for one in status.services], "")
    ]
    return lines


def _reason(status: JobStatus, width: int) -> list[FrameLine]:
    """Why the job does what it does: one line while it trains, and otherwise what it waits for, whole."""
    reason = one_line(status.reason)
    if status.phase == "running":
        return [FrameLine(reason, LineLook.DIM)]
    lines = textwrap.wrap(reason, width, max_lines=_REASON, placeholder=" …", break_on_hyphens=False)
    return [FrameLine(text) for text in lines]


def _pace(status: JobStatus, pace: JobPace) -> list[str]:
    """Step rate, step times and commits, as far as they are known."""
    found = [rate_text(pace.steps_per_s), f"step {step_text(pace.median_s)}"] if pace.nodes else []
    if pace.samples_per_s:
        found.append(samples_text(pace.samples_per_s))
    if pace.ranks is not None:
        own = pace.ranks
        found.append(f"own {step_text(own.median_s)}, most rank {own.slowest} {step_text(own.slowest_s)}")
    if pace.slowest:
        found.append(f"slowest {pace.slowest} {step_text(pace.slowest_s)}")
    if status.commit:
        found.append(f"commit {status.commit}")
    if status.saved.commit:
        found.append(f"saved {status.saved.commit}")
    return found


def _budget(status: JobStatus) -> list[str]:
    left = status.restarts_allowed - status.restarts_used
    return [f"{left} of {count(status.restarts_allowed, 'restart')} left", f"nodes {status.nnodes}"]


def _plans(status: JobStatus) -> list[str]:
    """What is about to happen."""
    return [
        *([f"stop requested by {status.kill}"] if status.kill else []),
        *([f"agreeing on a step boundary to {status.boundary}"] if status.boundary else []),
        *([f"pending: {missing}"] if (missing := pending(status)) else []),
    ]


def _folded(texts: Sequence[str], noun: str) -> list[str]:
    """The first texts, and a line that counts the others."""
    if len(texts) <= _NOTICES:
        return list(texts)
    more = len(texts) - _NOTICES + 1
    return [*texts[: _NOTICES - 1], f"and {count(more, noun) if noun else more} more"]


def _flow(items: Sequence[str], width: int) -> list[str]:
    """Items side by side, on as many lines as they need."""
    lines: list[str] = []
    for item in map(one_line, items):
        if lines and cell_len(lines[-1]) + 2 + cell_len(item) <= width:
            lines[-1] += f"  {item}"
        else:
            lines.append(item)
    return lines


# --- nodes -----------------------------------------------------------------------------------------------------------


def _nodes(status: JobStatus, before: JobStatus | None, width: int, height: int) -> list[FrameLine]:
    """The table of nodes in at most ``height`` lines: all of them by rank, or the worst and the number of the rest."""
    if not status.nodes or height < 2:
        return []
    pace = pace_of(status)
    shown, rest = list(status.nodes), list[NodeView]()
    if len(shown) > height - 1:
        worst = sorted(shown, key=lambda node: _badness(node, pace))
        shown, rest = worst[: height - 2], worst[height - 2 :]
    old = {node.node: _key(node) for node in before.nodes} if before is not None else {}
    rows = [_row(node, pace, " slowest" if width >= WIDE else " !") for node in shown]
    names = ["NODE", "STATE", "RANKS", "STEP", "HOST"] if width >= WIDE else ["NODE", "STATE", "RANKS", "STEP"]
    widths = _widths([names, *(row[: len(names)] for row in rows)], width)
    lines = [FrameLine(_joined(names, widths), LineLook.HEADING)]
    for node, row in zip(shown, rows, strict=True):
        changed = before is not None and old.get(node.node) != _key(node)
        lines.append(FrameLine(_joined(row[: len(names)], widths), _look(node, pace, changed)))
    if rest:
        kinds = collections.Counter(kind_of(node) for node in rest)
        sizes = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        lines.append(FrameLine(one_line(f"and {len(rest)} more: {sizes}"), LineLook.DIM))
    return lines


def _badness(node: NodeView, pace: JobPace) -> tuple[int, float, int]:
    """Sorts the worst node first: broken streams, nodes that come or go, slow ones, then the others."""
    if not node.attached:
        return 0, 0.0, node.position
    if node.draining or node.state not in _SETTLED:
        return 1, 0.0, node.position
    if is_slow(node.step_s, pace.median_s):
        return 2, -node.step_s, node.position
    return _SETTLED[node.state], 0.0, node.position


def _key(node: NodeView) -> tuple[str, str]:
    return kind_of(node), ranks_of(node)


def _row(node: NodeView, pace: JobPace, mark: str) -> list[str]:
    """The cells of one node. ``mark``: follows the step time of the slowest one."""
    step = step_text(node.step_s) + (mark if node.node == pace.slowest else "")
    return [one_line(cell) for cell in (node.node, kind_of(node), ranks_of(node), step, node.host)]


def _look(node: NodeView, pace: JobPace, changed: bool) -> LineLook:
    if not node.attached:
        return LineLook.BAD
    if changed:
        return LineLook.CHANGED
    return LineLook.WARNING if node.node == pace.slowest or node.draining else LineLook.PLAIN


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The widths of columns that two spaces separate; the widest ones are narrowed until all of them fit."""
    widths = [max(cell_len(cell) for cell in column) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(range(len(widths)), key=lambda index: widths[index])
        widths[widest] -= 1
    return widths


def _joined(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (_cut(cell, room) for cell, room in zip(row, widths, strict=True))
    return "  ".join(set_cell_size(cell, room) for cell, room in zip(cells, widths, strict=True)).rstrip()


def _cut(text: str, width: int) -> str:
    """Shorten a text to a number of cells; an ellipsis stands for what is missing."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


# --- events ----------------------------------------------------------------------------------------------------------


def _event(entry: HistoryEntry, before: JobStatus | None, width: int) -> FrameLine:
    last = before.history[-1].number if before is not None and before.history else 0
    stamp = time.strftime("%H:%M:%S", time.localtime(entry.at_s))
    kind = f" {one_line(entry.kind):<14}" if width >= WIDE else ""
    return FrameLine(
        f"{stamp}{kind} {one_line(entry.text)}", LineLook.CHANGED if before and entry.number > last else LineLook.PLAIN
    )
