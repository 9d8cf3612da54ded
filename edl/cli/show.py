"""Formats job status and history as text."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from edl.agent.failure_report import failure_text
from edl.arithmetic.hyper import describe
from edl.cli.node_text import kind_of, pace_of, pending, ranks_of, rate_text, samples_text, step_text
from edl.master.alarms import described
from edl.rendezvous.phrases import count, duration, goodput, lines_of, listed, one_line
from edl.wire.health import HealthView
from edl.wire.records import Version
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
        f"[bold]{escape(one_line(status.job))}[/]  {status.phase}  round {status.round}, {workers}  "
        f"nodes {status.nnodes} ({status.fault_tolerance})  "
        f"restarts {status.restarts_used} of {status.restarts_allowed}  Master {escape(one_line(status.master))}",
        soft_wrap=True,
    )
    console.print(one_line(status.reason), style="italic", markup=False, soft_wrap=True)
    access = [f"Access: {door}"] if door else []
    served = [f"Dashboard: {http}/ (edl token prints a token for it)", f"HTTP: {http}/v1/jobs/{status.job}"]
    for line in [*access, *_lines(status), *(served if http else [])]:
        console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)
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
        console.print("\n".join(lines_of(failure_text(causes))), markup=False, highlight=False, soft_wrap=True)


def _lines(status: JobStatus) -> list[str]:
    """Lines about the state and the services, as far as the job has any."""
    lines = scale_lines(dataclasses.replace(status.scale, waiting=pending(status)))
    if any(node.underway for node in status.nodes):
        began = f"from {_commit(status.restored)}" if status.restored.commit else "without a checkpoint"
        lines.append(f"State: era {status.era}, began {began}")
    lines += pace_lines(status)
    if status.holders:
        lines.append(f"Commits in memory: {holders_text(status.holders)}")
    if status.saved.commit:
        where = f" in {status.saved_in}" if status.saved_in else ""
        lines.append(f"Last checkpoint: {_commit(status.saved)}{where}")
    if status.goodput:
        lines.append(f"Goodput: {goodput({one.name: one.value for one in status.goodput})}")
    lines += [f"Warning: {text}" for text in status.warnings]
    lines += [f"Alarm ({alarm.severity}): {described(alarm, alarm.text)}" for alarm in status.alarms]
    lines += hang_lines(status)
    lines += health_lines(status.health)
    if status.settings.number:
        lines.append(f"Settings {status.settings.number}: {describe(status.settings)}")
    if status.boundary:
        lines.append(f"Agreeing on a step boundary to {status.boundary}")
    lines += [f"{one.service}: {one.text}" for one in status.services]
    lines += [dropped_line(one) for one in status.dropped]
    lines += [f"Incomplete: {text}" for text in status.flaws]
    if status.kill:
        lines.append(f"Ending: stop requested by {status.kill}")
    return lines


def pace_lines(status: JobStatus) -> list[str]:
    """How fast the job trains; empty if no node has reported it."""
    pace = pace_of(status)
    if not pace.nodes:
        return []
    slowest = f"; slowest {pace.slowest} (ranks {pace.slowest_ranks}) {step_text(pace.slowest_s)}"
    samples = f", {samples_text(pace.samples_per_s)}" if pace.samples_per_s else ""
    line = f"Pace: {rate_text(pace.steps_per_s)}{samples}, a step takes {step_text(pace.median_s)}"
    lines = [f"{line}{slowest if pace.slowest else ''}; newest commit {status.commit}"]
    if pace.ranks is not None:
        own = pace.ranks
        most = f"most on rank {own.slowest} ({own.node}): {step_text(own.slowest_s)}"
        lines.append(f"Own time of a step: median {step_text(own.median_s)}, {most}")
    return lines


def holders_text(holders: int) -> str:
    """On how many nodes each commit is, and what that means if it is one."""
    if holders == 1:
        return "on one node only; if it is lost, training continues from the last checkpoint"
    return f"each on {holders} nodes or more"


def hang_lines(status: JobStatus) -> list[str]:
    """How hangs are looked for; empty if the limit is given, or if no world runs."""
    nodes = [node for node in status.nodes if node.position >= 0]
    if not nodes or not status.hang_timeout.startswith("auto"):
        return []
    learning = [node for node in nodes if not node.hang_limit_s]
    if learning:
        slowest = min(learning, key=lambda node: node.hang_pauses)
        seen = f"{slowest.hang_pauses} of {slowest.hang_needed} pauses seen on {slowest.node}; "
        known = seen if slowest.hang_needed else ""  # a launcher reports its pauses from the fifth one on
        return [f"Hang detection: off until a limit is learnt ({known}--hang-timeout=SECONDS sets one)"]
    limits = sorted(node.hang_limit_s for node in nodes)
    span = f"{limits[0]:.0f} s" if limits[0] == limits[-1] else f"{limits[0]:.0f} to {limits[-1]:.0f} s"
    return [f"Hang detection: after {span} without progress, as learnt from this job (--hang-timeout=auto)"]


def health_lines(health: Sequence[HealthView]) -> list[str]:
    """What is to be known about the nodes' health. A check that runs is one line: it may be about a thousand nodes."""
    lines = [health_line(one) for one in health if one.state not in ("good", "checking") or one.why]
    checked = [one.node for one in health if one.state == "checking" and not one.why]
    return [*lines, f"Health check of {count(len(checked))} runs: {listed(checked)}"] if checked else lines


def health_line(one: HealthView) -> str:
    """The health of one node: what is known, and until when."""
    why = f": {one.why}" if one.why else ""
    out = "kept out, " if one.excluded and one.state not in ("checking", "due") else ""
    until = f" (checked again in {duration(one.expires_s)})" if one.excluded and one.expires_s else ""
    return f"Health of {one.node}: {out}{one.state}{why}{until}"


def dropped_line(one: DroppedSlot) -> str:
    """One dropped slot: why it is not used, and how to use it again."""
    what = f"slot {one.slot} of {one.node}" + (f" ({one.device})" if one.device else "")
    denied = one.by == "denylist"
    again = "edl denylist" if denied else f"edl uncordon {one.node} --device={one.slot}"
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


def _unusual(status: JobStatus) -> tuple[NodeView, ...]:
    """Nodes of all kinds but the most frequent one, the rarest kind first."""
    sizes = collections.Counter(kind_of(node) for node in status.nodes)
    usual = sizes.most_common(1)[0][0]
    others = [node for node in status.nodes if kind_of(node) != usual]
    return tuple(sorted(others, key=lambda node: sizes[kind_of(node)])[:SCREEN])


def _summary(status: JobStatus, listed: int) -> str:
    sizes = collections.Counter(kind_of(node) for node in status.nodes)
    kinds = ", ".join(f"{number} {kind}" for kind, number in sizes.most_common())
    rest = "the others below; " if listed == len(status.nodes) - sizes.most_common(1)[0][1] else "some below; "
    return f"{len(status.nodes)} nodes: {kinds} ({rest if listed else ''}--all lists them)"


def _table(status: JobStatus, nodes: Sequence[NodeView]) -> Table:
    names = ["NODE", "STATE", "RANKS", "SLOTS", "HOST", "ATTACHED"]
    ways, paced = any(node.underway for node in status.nodes), any(node.step_s for node in status.nodes)
    names += ["STEP"] if paced else []
    names += ["UNDERWAY"] if ways else []
    table = Table(*names, box=None, pad_edge=False)
    for node in nodes:
        state = f"{node.state}, draining" if node.draining else node.state
        row = [node.node, state, ranks_of(node), _slots(node), node.host, "yes" if node.attached else "no"]
        row += [step_text(node.step_s)] if paced else []
        row += [node.how or ("yes" if node.underway else "no")] if ways else []
        table.add_row(*(Text(cell) for cell in map(one_line, row)))
    return table


def _slots(node: NodeView) -> str:
    """The number of slots, spare ones included; where not all are in use their numbers: ``slots 0,2,3 of 4``."""
    everything = node.slots + node.spare_slots
    if not node.places or node.places == tuple(range(everything)):
        return str(everything)
    numbers = ",".join(str(slot) for slot in node.places)
    return f"{'slot' if len(node.places) == 1 else 'slots'} {numbers} of {everything}"


def moment(at_s: float) -> str:
    """A point in time, in seconds since 1970, by this host's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def entry_line(entry: HistoryEntry) -> str:
    """One line of history."""
    return f"{moment(entry.at_s)} round {entry.round} {entry.kind:<14} {one_line(entry.text)}"
