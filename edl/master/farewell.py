"""What an ended job leaves in the store."""

from __future__ import annotations

from edl.errors import FencedOut
from edl.master.guarded import GuardedStore
from edl.master.state import Phase, Record
from edl.master.stored import MOST_OPERATIONS, whole_job
from edl.ports import Condition, Guard, ModifiedAt, Operation, Put, Store
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Finish

FAREWELL_TTL_S = 10.0
"""Lease time in seconds of the outcome that an ended job leaves."""


async def say_farewell(store: Store, keys: JobKeys, guard: Guard, outcome: Finish) -> None:
    """Leave the outcome for late launchers, and delete the job's other keys. Raises ``StoreError``, such as
    ``FencedOut`` if another Master does that."""
    lease = await store.grant_lease(FAREWELL_TTL_S)
    operations: list[Operation] = [Put(keys.farewell, plain.dumps(outcome), lease), *whole_job(keys)]
    revision = await store.write(operations, [guard.condition()])
    if revision is None:
        raise FencedOut("another Master has been elected")
    await _leave_names(store, keys, lease, ModifiedAt(keys.farewell, revision))


async def _leave_names(store: Store, keys: JobKeys, lease: int, still_over: Condition) -> None:
    """Keep the names of launchers that do not know of the end as long as the outcome, so that a new launcher of such a
    name learns of it. Launchers leave meanwhile, so a deleted name must not be written again."""
    while left := [one for one in (await store.read(keys.launchers)).entries if one.lease != lease]:
        batch = left[:MOST_OPERATIONS]
        conditions = [still_over, *(ModifiedAt(entry.key, entry.mod_revision) for entry in batch)]
        await store.write([Put(entry.key, b"", lease) for entry in batch], conditions)
        farewell = (await store.read(keys.farewell)).entries
        if not any(entry.key == keys.farewell for entry in farewell):
            return  # a new job of this name has begun


async def just_ended(store: GuardedStore, keys: JobKeys) -> Record | None:
    """A record with the outcome that the last Master left; None: there is none."""
    for entry in (await store.read(keys.farewell)).entries:
        if entry.key == keys.farewell:
            outcome = plain.loads(Finish, entry.value)
            return Record(Phase.ENDED, reason=outcome.reason, outcome=outcome)
    return None
