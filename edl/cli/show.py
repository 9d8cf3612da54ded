"""Job status and history as text for people."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from edl.agent.report import failure_text
from edl.wire.status import JobStatus, JournalEntry


def show_status(console: Console, status: JobStatus) -> None:
    """The job on one screen: head line, nodes, what the Master did last, errors."""
    console.print(
        f"[bold]{status.job}[/]  {status.phase}  round {status.round}, {status.world_size} workers  "
        f"nodes {status.nnodes} ({status.fault_tolerance})  "
        f"restarts {status.restarts_used} of {status.restarts_allowed}  Master {status.master}",
        soft_wrap=True,
    )
    console.print(status.reason, style="italic", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("NODE", "STATE", "RANKS", "SLOTS", "HOST", "ATTACHED"):
        table.add_column(name)
    for node in status.nodes:
        ranks = f"{node.first_rank}-{node.first_rank + node.slots - 1}" if node.first_rank >= 0 else "-"
        table.add_row(node.node, node.state, ranks, str(node.slots), node.host, "yes" if node.attached else "no")
    console.print(table)
    if status.journal:
        console.print("Last events:")
    for entry in status.journal:
        console.print(f"  {entry_line(entry)}", markup=False, highlight=False, soft_wrap=True)
    if status.failures:
        causes = sorted(status.failures, key=lambda failure: failure.peer_loss)
        console.print("Last incident:")
        console.print(failure_text(causes), markup=False, highlight=False, soft_wrap=True)


def entry_line(entry: JournalEntry) -> str:
    """One line of history."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at_s))
    return f"{stamp} round {entry.round} {entry.kind:<14} {entry.text}"
