"""Independent mode: trainers that do not step together. The Master's ledger is authoritative and is written to the
store within a second.

Clients repeat what was acknowledged after the last write, so a new Master grants nothing before all clients that took
part have opened again, or a timeout has passed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from data_service.file_list import with_files
from data_service.leases.consumption import opened, take, unopened
from data_service.leases.lease_table import BACK, DONE, LeaseTable, who
from data_service.leases.shard_order import FRESH
from data_service.leases.state import ClientState, DataSet, IndependentState, LeaseTurn
from data_service.ledger import Ledger
from data_service.manifest import counted
from data_service.protocol.messages import (
    Ack,
    Answer,
    Commit,
    DataRefused,
    Done,
    Gone,
    Open,
    Opened,
    Rollback,
    shards_of,
)
from edl.errors import DataError
from edl.master.service import Caller
from edl.types import NodeId

KEEP_EVERY_S = 1.0
COMMITS = 8
"""Number of named positions that are kept; the oldest is dropped first."""
TAKE_OVER_WAIT_S = 10.0
REMEMBERED_SHARDS = 4096
"""Number of recent shards for which the worker that continued them is known."""
MOST_ENDED = 256
"""Most lost trainers whose numbers are sent to others (more if more were alive at once); pservers keep as many."""
STORED_SHARDS = 256
"""Number of those shards that are stored."""
LEAST_SILENCE_S = 30.0
SILENCE_FACTOR = 8.0
"""A worker's leases are revoked when it is silent for this multiple of the time that 95 % of shards take."""

Refusals = tuple[tuple[int, str], ...]


def begin(data: DataSet, turn: LeaseTurn) -> None:
    """Start with nothing consumed and no named position, for a newly registered data set."""
    data.begin(data.fresh(0))
    data.independent = IndependentState()
    turn.effects += data.values.drop(f"commits/{data.name}")
    keep(data, turn)


def open_(data: DataSet, turn: LeaseTurn, caller: Caller, client: ClientState, message: Open) -> Opened:
    """A worker joins, possibly with leased shards and acknowledgements that may have been lost."""
    table, now = data.position, data.independent
    replaced = now.trainers.get(caller, 0) != message.trainer
    if replaced:
        lost(data, caller)
        if message.trainer:
            now.trainers[caller] = message.trainer
            now.most_trainers = max(now.most_trainers, len(now.trainers))
    if message.fence == now.fence and message.epoch == table.epoch:
        refused = _claims(data, turn, table, caller, message)
        if refused and message.trainer:
            _ended(now, message.trainer)  # others may get these shards and must know its unfinished push
    else:
        table.release(caller, turn.now_s)
        since = "the position was rolled back" if message.fence != now.fence else f"it is epoch {table.epoch}"
        shards = {*shards_of(message.granted), *(shard for shard, _, _ in message.acks)}
        refused = tuple((shard, f"{since}: earlier leases are void") for shard in sorted(shards))
    now.awaited.discard(caller)
    client.heard_s = client.completed_s = turn.now_s
    if caller not in now.callers or replaced:
        now.callers.add(caller)
        keep(data, turn)
    return opened(data, message.id, table.epoch, refused)


def ack(data: DataSet, turn: LeaseTurn, caller: Caller, shard: int, upto: int, complete: bool) -> str:
    """Count records of a shard as consumed. Returns the reason if they do not count, else ""."""
    table, client = data.position, data.clients[caller]
    since_s = table.leases.get(caller, {}).get(shard, turn.now_s)
    problem = take(data, turn, caller, shard, upto, complete)
    if problem:
        return problem
    data.independent.number += 1
    client.heard_s = turn.now_s
    _continues(data.independent, caller, shard)
    if complete:
        data.independent.times_s.append(turn.now_s - max(since_s, client.completed_s))
        client.completed_s = turn.now_s
    return ""


def granted(
    data: DataSet, turn: LeaseTurn, caller: Caller, client: ClientState, leases: Sequence[tuple[int, int]]
) -> None:
    """A worker gets leases, given with the numbers of consumed records. From now on others' late acknowledgements for
    these shards do not count."""
    client.heard_s = turn.now_s
    for shard, begun in leases:
        _takes_over(data.independent, caller, shard, begun)


def acks(data: DataSet, turn: LeaseTurn, caller: Caller, client: ClientState, message: Ack) -> Answer | None:
    """Process a list of acknowledgements."""
    table, now = data.table, data.independent
    if not client.opened:
        return unopened(data, client, message.id)
    if table is None or now.awaited:
        return None
    refused: list[tuple[int, str]] = []
    for shard, upto, complete in message.shards:
        if message.epoch == table.epoch:
            problem = ack(data, turn, caller, shard, upto, complete)
        else:
            problem = f"shard {shard} was leased in epoch {message.epoch}; {data.name} is in epoch {table.epoch}"
        if problem:
            refused.append((shard, problem))
    return Done(message.id, data.name, table.epoch, tuple(refused), now.number, now.kept)


def commit(data: DataSet, turn: LeaseTurn, client: ClientState, message: Commit) -> Answer | None:
    """Store the present position under a name. The worker may have closed the data set."""
    table, now = data.table, data.independent
    if client.conflict:
        return unopened(data, client, message.id)
    if table is None or now.awaited:
        return None
    now.commits.pop(message.name, None)
    now.commits[message.name] = table.ledger.encode()
    while len(now.commits) > COMMITS:
        del now.commits[next(iter(now.commits))]
    _keep_commits(data, turn)
    keep(data, turn)
    position = with_files(now.commits[message.name], data.listed)
    return Done(message.id, data.name, table.epoch, number=now.number, kept=now.kept, ledger=position)


def rollback(data: DataSet, turn: LeaseTurn, client: ClientState, message: Rollback) -> Answer | None:
    """Return to a named position; all leases become void."""
    table, now = data.table, data.independent
    if not client.opened:
        return unopened(data, client, message.id)
    if table is None or now.awaited:
        return None
    if message.history and message.history <= now.history:
        return Done(message.id, data.name, table.epoch, number=now.number, kept=now.kept)
    if message.ledger:
        try:
            ledger = data.fit(Ledger.decode(message.ledger))
        except DataError as error:
            return DataRefused(message.id, data.name, "ledger", f"{data.name}: {error}")
    elif message.name in now.commits:
        ledger = data.fit(Ledger.decode(now.commits[message.name]))
    else:
        known = ", ".join(now.commits) or "none"
        text = f"{data.name} has no position named {message.name}; it has {known} (the last {COMMITS} are kept)"
        return DataRefused(message.id, data.name, "commit", text)
    data.begin(ledger)
    now.history = max(now.history, message.history)
    data.failures = {}
    now.fence += 1
    now.continued_by.clear()
    now.trainers.clear()
    now.ended.clear()
    for one in data.clients.values():
        data.set_open(one, False)
    keep(data, turn)
    turn.note(f"data {data.name}: rolled back to position {message.name}")
    return Done(message.id, data.name, data.position.epoch, number=now.number, kept=now.kept)


def gone(data: DataSet, turn: LeaseTurn, caller: Caller, client: ClientState, message: Gone) -> Answer:
    """A worker leaves: release its leases, and forget it as a client that takes part. In mode "steps" it only gets no
    more orders."""
    epoch, client.closed = 0, True
    if data.table is not None:
        epoch = data.table.epoch
        if data.is_independent:
            data.table.release(caller, turn.now_s)
            data.set_open(client, False)
            data.independent.callers.discard(caller)
            data.independent.trainers.pop(caller, None)
            data.independent.awaited.discard(caller)
            keep(data, turn)
    return Done(message.id, data.name, epoch, number=data.independent.number, kept=data.independent.kept)


def world_began(data: DataSet, turn: LeaseTurn) -> None:
    """Release leases of workers that are not in the new world; the others have to open again."""
    now, table = data.independent, data.table
    if table is None:
        return
    for caller in [one for one, leased in table.leases.items() if one not in turn.ranks]:
        if table.release(caller, turn.now_s):
            now.dirty = True
        del table.leases[caller]
    for caller in [one for one in now.trainers if one not in turn.ranks]:
        lost(data, caller)
        now.dirty = True
    now.callers = {one for one in now.callers if one in turn.ranks}
    now.awaited &= now.callers
    if now.awaited:
        now.until_s = turn.now_s + TAKE_OVER_WAIT_S
        turn.wake(now.until_s)


def tick(data: DataSet, turn: LeaseTurn) -> None:
    """Process expired deadlines: clients that have not opened again, and silent workers."""
    now, table = data.independent, data.table
    if table is None:
        return
    if now.awaited and turn.world is not None and turn.now_s >= now.until_s:
        names = ", ".join(who(one) for one in sorted(now.awaited))
        turn.note(
            f"data {data.name}: granting leases without {names}, which did not report within {TAKE_OVER_WAIT_S:g} s"
        )
        for caller in sorted(now.awaited):
            lost(data, caller)
        now.dirty = True
        now.awaited.clear()
    if now.check_s and turn.now_s >= now.check_s:
        now.check_s = 0.0
        limit_s = silence_s(data)
        for caller, leased in table.leases.items():
            client = data.clients.get(caller)
            if leased and (client is None or turn.now_s >= client.heard_s + limit_s):
                shards = table.release(caller, turn.now_s)
                lost(data, caller)
                turn.note(
                    f"data {data.name}: {who(caller)} has not reported on its leases for {limit_s:.0f} s; "
                    f"{counted(shards, 'shard')} returned to the queue"
                )


def lost(data: DataSet, caller: Caller) -> None:
    """The trainer in this slot is lost: its unfinished records returned to the queue."""
    _ended(data.independent, data.independent.trainers.pop(caller, 0))


def _ended(now: IndependentState, trainer: int) -> None:
    if trainer and trainer not in now.ended:
        now.ended.append(trainer)
        del now.ended[: -max(MOST_ENDED, now.most_trainers)]
        now.dirty = True


def settle(data: DataSet, turn: LeaseTurn) -> None:
    """End of a step: write what is due, and request the next timer."""
    now, table = data.independent, data.table
    if table is None:
        return
    if now.dirty:
        if turn.now_s >= now.kept_s + KEEP_EVERY_S:
            keep(data, turn)
        else:
            turn.wake(now.kept_s + KEEP_EVERY_S)
    if now.awaited and turn.world is not None:
        turn.wake(now.until_s)
    if table.holders:
        if not now.check_s:
            heard = [
                data.clients[one].heard_s for one, leased in table.leases.items() if leased and one in data.clients
            ]
            now.check_s = min(heard, default=turn.now_s) + silence_s(data)
        turn.wake(now.check_s)


def silence_s(data: DataSet) -> float:
    """Seconds that a worker may be silent about its leases."""
    times = sorted(data.independent.times_s)
    usual_s = times[min(len(times) - 1, int(0.95 * len(times)))] if times else 0.0
    return max(LEAST_SILENCE_S, SILENCE_FACTOR * usual_s)


def keep(data: DataSet, turn: LeaseTurn) -> None:
    """Write the position to the store."""
    now, table = data.independent, data.position
    last = list(now.continued_by.items())[-STORED_SHARDS:]
    head = {
        "number": now.number,
        "fence": now.fence,
        "history": now.history,
        "callers": [[one.node, one.slot] for one in sorted(now.callers)],
        "doers": [[shard, one.node, one.slot] for shard, one in last],
        "trainers": [[one.node, one.slot, trainer] for one, trainer in sorted(now.trainers.items())],
        "ended": now.ended,
    }
    value = json.dumps(head).encode("ascii") + b"\n" + table.ledger.encode().encode("ascii")
    turn.effects += data.values.put(f"free/{data.name}", value)
    now.kept, now.kept_s, now.dirty = now.number, turn.now_s, False


def load(data: DataSet, kept: Mapping[str, bytes]) -> None:
    """The inverse of ``keep``. Raises ``DataError``."""
    name = f"free/{data.name}"
    if name not in kept:
        raise DataError(f"{name} is missing in the store")
    head_text, _, ledger_text = data.values.get(kept, name).partition(b"\n")
    now = data.independent = IndependentState()
    try:
        head = json.loads(head_text)
        now.number = now.kept = int(head["number"])
        now.fence = int(head["fence"])
        now.history = int(head.get("history", 0))
        now.callers = {Caller(NodeId(str(node)), int(slot)) for node, slot in head["callers"]}
        now.trainers = {Caller(NodeId(str(n)), int(slot)): int(one) for n, slot, one in head.get("trainers", ())}
        now.ended = [int(one) for one in head.get("ended", ())]
        now.most_trainers = max(len(now.trainers), len(now.ended))
        doers = {int(shard): Caller(NodeId(str(node)), int(slot)) for shard, node, slot in head["doers"]}
        if f"commits/{data.name}" in kept:
            now.commits = dict(json.loads(data.values.get(kept, f"commits/{data.name}")))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{name} in the store is damaged: {error}") from None
    data.begin(data.fit(Ledger.decode(ledger_text.decode("ascii", "replace"))))
    now.continued_by = doers
    now.awaited = set(now.callers)


def _continues(now: IndependentState, caller: Caller, shard: int) -> None:
    now.continued_by.pop(shard, None)
    now.continued_by[shard] = caller
    now.dirty = True
    if len(now.continued_by) > REMEMBERED_SHARDS:
        del now.continued_by[next(iter(now.continued_by))]


def _takes_over(now: IndependentState, caller: Caller, shard: int, begun: int) -> None:
    """A caller now holds a shard of which ``begun`` records are consumed, perhaps those of another worker."""
    if begun or shard in now.continued_by:
        _continues(now, caller, shard)


def _keep_commits(data: DataSet, turn: LeaseTurn) -> None:
    value = json.dumps(list(data.independent.commits.items())).encode("ascii")
    turn.effects += data.values.put(f"commits/{data.name}", value)


def _claims(data: DataSet, turn: LeaseTurn, table: LeaseTable, caller: Caller, message: Open) -> Refusals:
    """Process what a returning worker reports as done and as leased.

    It may have been silent for so long that others continued. Then the count of a shard that it holds differs from its
    own, or a shard that it has finished was finished by another worker.
    """
    refused: dict[int, str] = {}
    continued_by = data.independent.continued_by
    may = (FRESH, BACK) if data.independent.awaited else (FRESH,)
    counts = {shard: upto for shard, upto, complete in message.acks if not complete}
    for shard, upto, complete in message.acks:
        done, by = table.ledger.is_done(shard), continued_by.get(shard, caller)
        if not complete and (done or upto <= table.ledger.count(shard)):
            continue  # already counted, perhaps for another worker from which the caller has taken over
        if by != caller:
            refused[shard] = f"{table.whose(shard, caller)}; {who(by)} has continued it"
        if by != caller or done:
            continue
        if table.state(shard) in may:
            table.hold(caller, shard, turn.now_s)
        problem = ack(data, turn, caller, shard, upto, complete)
        if problem:
            refused[shard] = problem
    granted = set(shards_of(message.granted))
    table.release(caller, turn.now_s, but=granted)
    for shard in sorted(granted):
        begun, mine = table.ledger.count(shard), counts.get(shard, 0)
        if shard in refused:
            if table.holders.get(shard) == caller:
                table.put_back(shard, turn.now_s)
        elif table.state(shard) in may and begun == mine:
            table.hold(caller, shard, turn.now_s)
            _takes_over(data.independent, caller, shard, begun)
        elif table.state(shard) == DONE and continued_by.get(shard) == caller:
            continue  # the caller itself has reported its end
        elif table.holders.get(shard) != caller:
            refused.setdefault(shard, f"{table.whose(shard, caller)}; {begun} of its records are consumed, not {mine}")
    return tuple(sorted(refused.items()))
