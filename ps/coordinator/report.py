"""What ``edl status`` shows of the parameter servers."""

from __future__ import annotations

from edl.master.service import Progress
from ps.coordinator.checkpoints import Cuts
from ps.coordinator.state import Book, Pserver, listed
from ps.spec import Replication


def report(book: Book, cuts: Cuts) -> tuple[Progress, ...]:
    """All pservers together, each one, the trainers, the checkpoint."""
    owned: dict[int, int] = {}
    copied: dict[int, int] = {}
    for owner, backup in zip(book.grid.owner, book.grid.backup, strict=True):
        owned[owner] = owned.get(owner, 0) + 1
        copied[backup] = copied.get(backup, 0) + 1
    servers = sorted(book.servers.values(), key=lambda one: one.number)
    each = (_server(one, owned.get(one.number, 0), copied.get(one.number, 0)) for one in servers)
    return (_all(book, copied.get(0, 0)), *each, _trainers(book), *_cut(cuts))


def _all(book: Book, bare: int) -> Progress:
    moving = book.grid.in_motion()
    loads = [one.load for one in book.servers.values() if one.load is not None]
    counts: dict[str, float] = {
        "pservers": len(book.servers),
        "version": book.version,
        "history": book.history,
        "moving_buckets": moving,
        "rows": sum(load.rows for load in loads),
        "rows_bytes": sum(load.bytes for load in loads),
        "damaged": sum(load.damaged for load in loads),
    }
    parts = [f"{len(book.servers)} pserver{'' if len(book.servers) == 1 else 's'}"]
    if waits := waiting(book):
        parts.append(waits)
    else:
        counts["bare_buckets"] = bare
        if book.training.replication is Replication.NONE:
            parts.append("no copies (replication none)")
        elif len(book.servers) == 1:
            parts.append("no copies: there is one pserver only")
        elif bare:
            parts.append(f"{bare} of {book.grid.buckets} buckets have no copy in step")
        else:
            parts.append("all copies in step")
    if moving:
        parts.append(f"{moving} buckets on the move")
    if book.reason and not book.opened:
        parts.append(book.reason)
    return Progress("pservers", ", ".join(parts), counts)


def waiting(book: Book) -> str:
    """Why trainers are not let in; empty when every bucket has an owner."""
    if book.stage == "new":
        there = sum(1 for one in book.servers.values() if one.greeted and not one.draining)
        least = book.training.servers[0]
        many = f"at least {least} pserver{'' if least == 1 else 's'}"
        return f"waiting for {many}; {there} {'is' if there == 1 else 'are'} there"
    if book.stage == "finding":
        return "looking for a checkpoint"
    if not book.whole:
        return f"restoring {book.found[0].run}" if book.found else "restoring"
    return ""


def _server(one: Pserver, owned: int, copied: int) -> Progress:
    counts: dict[str, float] = {"number": one.number, "owned_buckets": owned, "copied_buckets": copied}
    parts = [f"{one.name}: {owned} buckets, {copied} copies"]
    load = one.load
    if load is not None:
        counts |= {"rows": load.rows, "rows_bytes": load.bytes, "most_bytes": load.most_bytes, "lag_s": load.lag_s}
        counts |= {"pulls": load.pulls, "pushes": load.pushes, "keys": load.keys}
        parts.append(f"{load.rows:,} rows, {load.bytes / 2**20:,.0f} MiB")
        if load.lag_s > 0.1:
            parts.append(f"copies {load.lag_s:.1f} s behind")
        if load.text:
            parts.append(load.text)
    if one.draining:
        parts.append("leaving")
    if not one.greeted:
        parts.append("no line to it")
    return Progress(one.name, ", ".join(parts), counts)


def _trainers(book: Book) -> Progress:
    members = book.members()
    counts = {"trainers": len(members), "epoch": book.people.epoch, "top_step": book.top_step}
    return Progress("trainers", f"{len(members)} trainers: {listed(one.name for one in members) or 'none'}", counts)


def _cut(cuts: Cuts) -> tuple[Progress, ...]:
    if not cuts.phase and not cuts.last:
        return ()
    text = f"checkpoint {cuts.top}: {cuts.phase}" if cuts.phase else cuts.last
    return (Progress("checkpoint", text, {"number": cuts.top, "under_way": float(bool(cuts.phase))}),)
