"""Invariants of the placement machine, checked by tests after every step."""

from __future__ import annotations

from ps.coordinator.state import PlacementState
from ps.protocol.messages import MOST_NUMBER, NO_PSERVER, RESTORE


def violations(state: PlacementState) -> list[str]:
    """The violated invariants, as text; empty if all hold."""
    found = []
    grid, living = state.grid, set(state.servers)
    if state.stage != "placed":
        held = grid.holders()
        return [f"stage {state.stage}, and pservers {sorted(held)} hold buckets"] if held else []
    for bucket in range(grid.buckets):
        owner, backup, joining, giver = grid.roles(bucket)
        where = f"bucket {bucket}: owner {owner}, backup {backup}, joining {joining}, giver {giver}"
        catches_up = state.lagging and bool(grid.heir[bucket]) and joining == backup
        roles = [role for role in (owner, backup, NO_PSERVER if catches_up else joining) if role != NO_PSERVER]
        if owner == NO_PSERVER:
            found.append(f"{where}: it has no owner")
        if len(set(roles)) != len(roles):
            found.append(f"{where}: one pserver has two roles")
        if not set(roles) <= living or (giver > NO_PSERVER and giver not in living):
            found.append(f"{where}: only {sorted(living)} are alive")
        if giver != NO_PSERVER and giver in (owner, joining):
            found.append(f"{where}: the giver already has it")
        if giver != NO_PSERVER and giver != RESTORE and giver != backup:
            found.append(f"{where}: the giver is not the backup")
        if giver == RESTORE and not state.found:
            found.append(f"{where}: there is nothing to restore")
        if grid.heir[bucket] and not joining:
            found.append(f"{where}: it has an heir but none is joining")
        if grid.since[bucket] > state.version:
            found.append(f"{where}: changed in version {grid.since[bucket]} of {state.version}")
    if len({one.name for one in state.servers.values()}) != len(state.servers):
        found.append("two pservers of one name")
    if max(state.servers, default=0) > MOST_NUMBER:
        found.append("a pserver's number does not fit into placement maps")
    return found
