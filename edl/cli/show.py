"""Formats job status and history as text."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from edl.agent.failure_report import failure_text
from edl.arithmetic.hyper import describe
from edl.master.alarms import described
from edl.wire.messages import Version
from edl.wire.scale_requests import ScaleView
from edl.wire.status import DroppedSlot, HistoryEntry, JobStatus, NodeView

SCREEN = 24
"""Up to this many nodes are all listed; of more nodes only the unusual ones, and at most this many."""
UNWRAPPED = 10_000
"""Characters of a line off a terminal."""


def screen() -> Console:
    """A console on stdout. Off a terminal it wraps no line, because files and programs have no width."""
    console = Console()
    if not console.is_terminal:
        console.width = UNWRAPPED
    return console


def show_status(
    console: Console, status: JobStatus, http: str = "", door: str = "", *, everything: bool = False
) -> None:
    """Print the job on one screen: summary, nodes, the Master's last events, errors. ``everything``: list all nodes."""
    workers = f"{status.world_size} worker{'' if status.world_size == 1 else 's'}"
    console.print(
        f"[bold]{status.job}[/]  {status.phase}  round {status.round}, {workers}  "
        f"nodes {status.nnodes} ({status.fault_tolerance})  "
        f"restarts {status.restarts_used} of {status.restarts_allowed}  Master {status.master}",
        soft_wrap=True,
    )
    console.print(status.reason, style="italic", markup=False, soft_wrap=True)
    access = [f"Access: {door}"] if door else []
    for line in [*access, *_lines(status), *([f"HTTP: {http}/v1/jobs/{status.job}"] if http else [])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    listed = status.nodes if everything or len(status.nodes) <= SCREEN else _unusual(status)
    if len(listed) < len(status.nodes):
        console.print(_summary(status, len(listed)), markup=False, highlight=False, soft_wrap=True)
    if listed:
        console.print(_table(status, listed))
    if status.history:
        console.print("Last events:")
    for entry in status.history:
        console.print(f"  {entry_line(entry)}", markup=False, highlight=False, soft_wrap=True)
    if status.failures:
        causes = sorted(status.failures, key=lambda failure: failure.peer_loss)
        console.print("Last incident:")
        console.print(failure_text(causes), markup=False, highlight=False, soft_wrap=True)


def _lines(status: JobStatus) -> list[str]:
    """Lines about the state and the services, as far as the job has any."""
    lines = scale_lines(status.scale)
    if any(node.underway for node in status.nodes):
        began = f"from {_commit(status.restored)}" if status.restored.commit else "without a checkpoint"
        lines.append(f"State: era {status.era}, began {began}")
    if status.saved.commit:
        where = f" in {status.saved_in}" if status.saved_in else ""
        lines.append(f"Last checkpoint: {_commit(status.saved)}{where}")
    lines += [f"Warning: {text}" for text in status.warnings]
    lines += [f"Alarm ({alarm.severity}): {described(alarm, alarm.text)}" for alarm in status.alarms]
    if status.settings.number:
        lines.append(f"Settings {status.settings.number}: {describe(status.settings)}")
    if status.boundary:
        lines.append(f"Agreeing on a step boundary to {status.boundary}")
    lines += [f"{one.service}: {one.text}" for one in status.services]
    lines += [_dropped(one) for one in status.dropped]
    lines += [f"Incomplete: {text}" for text in status.flaws]
    if status.kill:
        lines.append(f"Ending: stop requested by {status.kill}")
    return lines


def _dropped(one: DroppedSlot) -> str:
    """One dropped slot: why it is not used, and how to use it again."""
    what = f"slot {one.slot} of {one.node}" + (f" ({one.device})" if one.device else "")
    again = f"edl uncordon {one.node} --device={one.slot}"
    return f"Dropped: {what} after round {one.round}: {one.why}. To use it again: {again}"


def scale_lines(scale: ScaleView) -> list[str]:
    """The size: what is wanted and why, and what is pending. Empty if the Master reports no size."""
    if not scale.maximum:
        return []
    unit = f", in units of {scale.unit}" if scale.unit > 1 else ""
    training = "1 node trains" if scale.nodes == 1 else f"{scale.nodes} nodes train"
    wanted = f"{scale.nodes} of {scale.desired} wanted nodes train" if scale.asked else training
    line = f"Size: {wanted} ({scale.minimum} to {scale.maximum} allowed{unit})"
    if scale.by:
        line += f", changed by {scale.by}{f': {scale.reason}' if scale.reason else ''}"
    lines = [line]
    if scale.generation:
        held = "" if scale.observed >= scale.generation else f", {scale.observed} in effect"
        lines.append(f"Request {scale.generation}{held}, revision {scale.revision}")
    if scale.suspended:
        lines.append("Suspended: no training until edl resume")
    if scale.waiting:
        lines.append(f"Pending: {scale.waiting}")
    if scale.cordoned:
        lines.append(f"Cordoned: {', '.join(scale.cordoned)}")
    if scale.owner:
        lines.append(f"Scheduler: {scale.owner}")
    if scale.need_s:
        lines.append(f"A node needs about {scale.need_s:.1f} s to leave gracefully (one step and two checkpoints)")
    if scale.proposal:
        lines.append(f"Proposed: {scale.proposal} nodes ({scale.proposal_reason})")
    elif scale.proposal_reason:
        lines.append(f"Nothing proposed: {scale.proposal_reason}")
    return lines


def _commit(version: Version) -> str:
    return f"commit {version.commit} of era {version.era}"


def _kind(node: NodeView) -> str:
    """The kind by which nodes are counted: state, draining, attached."""
    leaving = ", draining" if node.draining else ""
    return f"{node.state}{leaving}" if node.attached else f"{node.state}{leaving}, not attached"


def _unusual(status: JobStatus) -> tuple[NodeView, ...]:
    """Nodes of all kinds but the most frequent one, the rarest kind first."""
    sizes = collections.Counter(_kind(node) for node in status.nodes)
    usual = sizes.most_common(1)[0][0]
    others = [node for node in status.nodes if _kind(node) != usual]
    return tuple(sorted(others, key=lambda node: sizes[_kind(node)])[:SCREEN])


def _summary(status: JobStatus, listed: int) -> str:
    sizes = collections.Counter(_kind(node) for node in status.nodes)
    kinds = ", ".join(f"{number} {kind}" for kind, number in sizes.most_common())
    rest = "the others below; " if listed == len(status.nodes) - sizes.most_common(1)[0][1] else "some below; "
    return f"{len(status.nodes)} nodes: {kinds} ({rest if listed else ''}--all lists them)"


def _table(status: JobStatus, nodes: Sequence[NodeView]) -> Table:
    names = ["NODE", "STATE", "RANKS", "SLOTS", "HOST", "ATTACHED"]
    ways = any(node.underway for node in status.nodes)
    table = Table(*names, *(("UNDERWAY",) if ways else ()), box=None, pad_edge=False)
    for node in nodes:
        ranks = _ranks(node.first_rank, len(node.places) or node.slots) if node.first_rank >= 0 else "-"
        state = f"{node.state}, draining" if node.draining else node.state
        row = [node.node, state, ranks, _slots(node), node.host, "yes" if node.attached else "no"]
        table.add_row(*row, *((node.how or ("yes" if node.underway else "no"),) if ways else ()))
    return table


def _slots(node: NodeView) -> str:
    """The number of slots, spare ones included; where not all are in use their numbers: ``slots 0,2,3 of 4``."""
    everything = node.slots + node.spare_slots
    if not node.places or node.places == tuple(range(everything)):
        return str(everything)
    numbers = ",".join(str(slot) for slot in node.places)
    return f"{'slot' if len(node.places) == 1 else 'slots'} {numbers} of {everything}"


def _ranks(first: int, slots: int) -> str:
    """``0-3``, or ``4`` for a single rank."""
    return str(first) if slots == 1 else f"{first}-{first + slots - 1}"


def entry_line(entry: HistoryEntry) -> str:
    """One line of history."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at_s))
    return f"{stamp} round {entry.round} {entry.kind:<14} {entry.text}"
