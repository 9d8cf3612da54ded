"""Invariants of a lease table after each event."""

from __future__ import annotations

from data_service.leases.lease_table import BACK, DONE, LEASED, QUARANTINED, LeaseTable
from data_service.leases.shard_order import FRESH


def table_violations(table: LeaseTable) -> list[str]:
    """Violations of a lease table's invariants."""
    states = [table.state(shard) for shard in range(table.ledger.shards)]
    held = {shard for hand in table.leases.values() for shard in hand}
    found = []
    if held != set(table.holders) or held != {shard for shard, state in enumerate(states) if state == LEASED}:
        found.append(f"in hand {sorted(held)}, holders {sorted(table.holders)}, states {states}")
    if any(shard not in table.leases[holder] for shard, holder in table.holders.items()):
        found.append("a shard is in another hand than its holder's")
    if {shard for shard, state in enumerate(states) if state == BACK} != set(table.back):
        found.append(f"back {sorted(table.back)}, states {states}")
    if table.pending != sum(state in (FRESH, BACK) for state in states):
        found.append(f"{table.pending} pending, states {states}")
    if {shard for shard, state in enumerate(states) if state == DONE} != {
        shard for shard in range(len(states)) if table.ledger.is_done(shard)
    }:
        found.append("done ones are not those of the ledger")
    if table.quarantined != sum(state == QUARANTINED for state in states):
        found.append("quarantined ones are miscounted")
    return found
