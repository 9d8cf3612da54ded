"""The parameter servers' part of ``edl status``."""

from __future__ import annotations

from edl.job_records import Replication
from edl.master.service import Progress
from ps.coordinator.checkpoints import CheckpointCoordinator
from ps.coordinator.state import PlacementState, Pserver, listed


def report(state: PlacementState, checkpoints: CheckpointCoordinator) -> tuple[Progress, ...]:
    """Progress entries: all pservers together, each pserver, the trainers, the checkpoint."""
    owned: dict[int, int] = {}
    copied: dict[int, int] = {}
    for owner, backup in zip(state.grid.owner, state.grid.backup, strict=True):
        owned[owner] = owned.get(owner, 0) + 1
        copied[backup] = copied.get(backup, 0) + 1
    servers = sorted(state.servers.values(), key=lambda one: one.number)
    each = (_server(one, owned.get(one.number, 0), copied.get(one.number, 0)) for one in servers)
    return (_all(state, copied.get(0, 0)), *each, _trainers(state), *_checkpoint(checkpoints))


def _all(state: PlacementState, bare: int) -> Progress:
    moving = state.grid.in_motion()
    loads = [one.load for one in state.servers.values() if one.load is not None]
    counts: dict[str, float] = {
        "pservers": len(state.servers),
        "version": state.version,
        "history": state.history,
        "moving_buckets": moving,
        "rows": sum(load.rows for load in loads),
        "rows_bytes": sum(load.bytes for load in loads),
        "damaged": sum(load.damaged for load in loads),
    }
    parts = [f"{len(state.servers)} pserver{'' if len(state.servers) == 1 else 's'}"]
    if waits := waiting(state):
        parts.append(waits)
    else:
        counts["bare_buckets"] = bare
        if state.training.replication is Replication.NONE:
            parts.append("no copies (replication none)")
        elif len(state.servers) == 1:
            parts.append("no copies: there is only one pserver")
        elif bare:
            parts.append(f"{bare} of {state.grid.buckets} buckets have no copy in sync")
        else:
            parts.append("all copies in sync")
    if moving:
        parts.append(f"{moving} buckets moving")
    if state.reason and not state.opened:
        parts.append(state.reason)
    return Progress("pservers", ", ".join(parts), counts)


def waiting(state: PlacementState) -> str:
    """Reason why trainers cannot join yet; empty if every bucket has an owner."""
    if state.stage == "new":
        there = sum(1 for one in state.servers.values() if one.greeted and not one.draining)
        least = state.training.servers[0]
        many = f"at least {least} pserver{'' if least == 1 else 's'}"
        return f"waiting for {many}; {there} {'is' if there == 1 else 'are'} there"
    if state.stage == "finding":
        return f"looking for a checkpoint; {state.unread}" if state.unread else "looking for a checkpoint"
    if not state.whole:
        return f"restoring {state.found[0].run}" if state.found else "restoring"
    return ""


def _server(one: Pserver, owned: int, copied: int) -> Progress:
    counts: dict[str, float] = {"number": one.number, "owned_buckets": owned, "copied_buckets": copied}
    parts = [f"{one.label}: {owned} buckets, {copied} copies"]
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
        parts.append("not connected")
    return Progress(one.label, ", ".join(parts), counts)


def _trainers(state: PlacementState) -> Progress:
    members = state.members()
    counts = {"trainers": len(members), "epoch": state.people.epoch, "top_step": state.top_step}
    return Progress("trainers", f"{len(members)} trainers: {listed(one.name for one in members) or 'none'}", counts)


def _checkpoint(checkpoints: CheckpointCoordinator) -> tuple[Progress, ...]:
    if not checkpoints.phase and not checkpoints.last:
        return ()
    text = f"checkpoint {checkpoints.top}: {checkpoints.phase}" if checkpoints.phase else checkpoints.last
    return (Progress("checkpoint", text, {"number": checkpoints.top, "under_way": float(bool(checkpoints.phase))}),)
