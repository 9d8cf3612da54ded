"""Granting leases on shards, processing reports of finished and unreadable shards, starting the next epoch."""

from __future__ import annotations

import json
from collections.abc import Mapping

from data_service.leases import independent
from data_service.leases.consumption import take, unopened
from data_service.leases.lease_table import PENDING, LeaseTable, who
from data_service.leases.registration import is_open
from data_service.leases.state import RANK_0, ClientState, DataSet, LeaseTurn, QuarantinedShard, ReadAttempt, printable
from data_service.ledger import Ledger
from data_service.manifest import RECORD_FORMATS, counted, named
from data_service.protocol.messages import (
    DRY,
    FINISHED,
    MORE,
    Answer,
    DataRefused,
    Done,
    Lease,
    LeasesGranted,
    NextEpoch,
    encode_granted,
    shards_of,
)
from edl.errors import DataError
from edl.master.service import Caller, Fail, ReportFlaw

REASON_LETTERS = 300
"""Most characters of a failure reason that are kept."""


def lease(data: DataSet, turn: LeaseTurn, caller: Caller, client: ClientState, message: Lease) -> Answer | str | None:
    """Process reports of earlier shards and grant more. Long answers are returned already encoded."""
    if not client.opened or client.conflict:
        return unopened(data, client, message.id)
    table = data.table
    if table is None or not is_open(data, turn):
        return None
    if message.epoch > table.epoch + 1:
        text = f"{data.name} is in epoch {table.epoch}; there are no leases for epoch {message.epoch} yet"
        return DataRefused(message.id, data.name, "epoch", text)
    if message.epoch > table.epoch:
        return None
    if message.epoch < table.epoch:
        over = f"epoch {message.epoch} of {data.name} is over; it is in epoch {table.epoch}"
        late = (
            [*(shard for shard, _ in message.finished), *(shard for shard, _, _ in message.failed)]
            if data.is_independent
            else []
        )
        return _granted(data, message, FINISHED, tuple((shard, over) for shard in late))
    refused = _report(data, turn, table, caller, message)
    most = min(message.want, max(1, -(-table.pending // (2 * _takers(data, turn)))))
    given: list[tuple[int, int]] = []
    if most:
        others = data.others(caller) if table.back else ()
        given = table.grant(caller, most, turn.now_s, others)
        if given and data.is_independent:
            independent.granted(data, turn, caller, client, given)
    state = MORE if given or (not message.want and table.pending) else FINISHED if table.finished else DRY
    return encode_granted(_granted(data, message, state, refused), *table.manifest.rows(given))


def next_epoch(
    data: DataSet, turn: LeaseTurn, caller: Caller, client: ClientState, message: NextEpoch
) -> Answer | None:
    """Start the next epoch once the current one is over."""
    if not client.opened or client.conflict:
        return unopened(data, client, message.id)
    rank = turn.ranks[caller]
    if not data.is_independent and rank != RANK_0:
        return DataRefused(
            message.id, data.name, "rank", f"only rank 0 begins an epoch of {data.name}, not rank {rank}"
        )
    table = data.table
    if table is None or not is_open(data, turn):
        return None
    if data.is_independent and message.epoch <= table.epoch:
        # other workers are ahead: this one joins their epoch
        return Done(message.id, data.name, table.epoch, number=data.independent.number, kept=data.independent.kept)
    if message.epoch not in (table.epoch, table.epoch + 1):
        text = f"{data.name} is in epoch {table.epoch}; epoch {message.epoch} cannot begin now"
        return DataRefused(message.id, data.name, "epoch", text)
    if message.epoch == table.epoch + 1:
        if not table.finished and not message.dropped:
            return DataRefused(message.id, data.name, "unfinished", _left(data, table))
        if not table.finished:
            turn.note(
                f"data {data.name}: epoch {table.epoch} ends, dropping {counted(message.dropped, 'record')} by its "
                f"rule ({counted(table.pending + len(table.holders), 'shard')} not finished)"
            )
        ledger = table.ledger.copy()
        ledger.next_epoch()
        data.fit(ledger)
        _begin_epoch(data, turn, ledger)
    return Done(message.id, data.name, message.epoch, number=data.independent.number, kept=data.independent.kept)


def _granted(data: DataSet, message: Lease, state: str, refused: tuple[tuple[int, str], ...]) -> LeasesGranted:
    now = data.independent
    version = data.listed.at(message.epoch)
    return LeasesGranted(
        *(message.id, data.name, message.epoch, (), state, refused, now.number, now.kept),
        ended=tuple(now.ended),
        version=version.number,
        shards=version.shards,
        digest=version.digest,
        records=data.records(version),
    )


def _takers(data: DataSet, turn: LeaseTurn) -> int:
    return max(1, data.opened if data.is_independent else len(turn.ranks))


def _report(
    data: DataSet, turn: LeaseTurn, table: LeaseTable, caller: Caller, message: Lease
) -> tuple[tuple[int, str], ...]:
    """Count what a lease request reports. Returns what does not count, with reasons."""
    refused: list[tuple[int, str]] = []
    finished = message.finished
    if not data.is_independent:
        exact = table.manifest.format in RECORD_FORMATS
        records, shards, rest = table.finish_many(caller, message.finished, exact)
        if shards:
            data.counts(caller, records, shards, turn.now_s)
            if data.failures:
                _forget_failures(data, table)
        finished = tuple(rest)
    for shard, records in finished:
        if data.is_independent:
            problem = independent.ack(data, turn, caller, shard, records, True)
        elif _is_done(table, shard):
            problem = ""  # a repeated report
        else:
            problem = take(data, turn, caller, shard, records, True)
        if problem:
            refused.append((shard, problem))
    unreached = frozenset(shards_of(message.unreached))
    for shard, upto, reason in message.failed:
        attempt = ReadAttempt(caller, printable(reason[:REASON_LETTERS]), shard in unreached)
        problem = _failed(data, turn, table, shard, upto, attempt)
        if problem:
            refused.append((shard, problem))
    return tuple(refused)


def _forget_failures(data: DataSet, table: LeaseTable) -> None:
    for shard in [shard for shard in data.failures if table.ledger.is_done(shard)]:
        del data.failures[shard]


def _failed(data: DataSet, turn: LeaseTurn, table: LeaseTable, shard: int, upto: int, attempt: ReadAttempt) -> str:
    caller = attempt.by
    held = table.holders.get(shard) == caller
    if not held and not _returned(data, table, caller, shard):
        return table.whose(shard, caller)
    problem = ""
    if held:
        count = independent.ack if data.is_independent else take
        problem = count(data, turn, caller, shard, upto, False)
    attempts = data.failures.setdefault(shard, [])
    attempts.append(attempt)
    failed = tuple(attempt.by for attempt in attempts)
    table.put_back(shard, turn.now_s, failed, unreached=attempt.unreached)
    if len(attempts) < data.options.failures:
        ref = table.manifest.ref(shard)
        turn.note(
            f"data {data.name}: {who(caller)} could not read {ref.file}, {ref.begin} to {ref.end} "
            f"(attempt {len(attempts)} of {data.options.failures}): {attempts[-1].reason}"
        )
    elif any(not one.unreached for one in attempts):
        _quarantine(data, turn, table, shard, attempts)
    else:
        ref = table.manifest.ref(shard)
        reasons = "; ".join(dict.fromkeys(f"{who(one.by)}: {one.reason}" for one in attempts))
        text = f"data {data.name}: no worker can access {ref.file} ({len(attempts)} attempts: {reasons})"
        turn.effects.append(Fail(f"{text}. It may be intact, so it is not skipped: fix the access and restart the job"))
    return problem


def _returned(data: DataSet, table: LeaseTable, caller: Caller, shard: int) -> bool:
    """True if the shard is pending again because the report was in flight when the Master or a stream was lost."""
    if data.clients[caller].returned.pop(shard, None) is None or table.state(shard) not in PENDING:
        return False
    return all(attempt.by != caller for attempt in data.failures.get(shard, ()))


def _quarantine(data: DataSet, turn: LeaseTurn, table: LeaseTable, shard: int, attempts: list[ReadAttempt]) -> None:
    ref, upto = table.manifest.ref(shard), table.ledger.count(shard)
    reasons = tuple(dict.fromkeys(f"{who(attempt.by)}: {attempt.reason}" for attempt in attempts))
    data.quarantine[shard] = QuarantinedShard(shard, ref.file, ref.begin, ref.end, upto, table.epoch, reasons)
    data.failures.pop(shard, None)
    table.quarantine(shard)
    turn.note(
        f"data {data.name}: {ref.file}, {ref.begin} to {ref.end}, is skipped from now on: {len(attempts)} attempts to "
        f"read it failed ({'; '.join(reasons)})"
    )
    turn.effects += data.values.put(f"quarantine/{data.name}", encode_quarantine(data.quarantine))
    turn.effects.append(flaw(data))


def flaw(data: DataSet) -> ReportFlaw:
    """The message about skipped shards at the end of the job."""
    listed = [
        f"{one.file} {one.begin}-{one.end}" + (f" after {counted(one.upto, 'record')}" if one.upto else "")
        for one in sorted(data.quarantine.values(), key=lambda one: one.shard)
    ]
    reason = next(iter(data.quarantine.values())).reasons[0]
    text = f"data {data.name}: {named('skipped as unreadable', listed).replace('file', 'shard', 1)}. {reason}"
    return ReportFlaw(f"data/{data.name}", printable(text))


def encode_quarantine(quarantine: Mapping[int, QuarantinedShard]) -> bytes:
    """Encode the quarantined shards for the store."""
    rows = [[one.shard, one.file, one.begin, one.end, one.upto, one.epoch, *one.reasons] for one in quarantine.values()]
    return json.dumps(rows).encode("ascii")


def decode_quarantine(value: bytes) -> dict[int, QuarantinedShard]:
    """The inverse of ``encode_quarantine``. Raises ``DataError``."""
    try:
        rows = [
            QuarantinedShard(shard, str(file), begin, end, upto, epoch, tuple(reasons))
            for shard, file, begin, end, upto, epoch, *reasons in json.loads(value)
        ]
    except (ValueError, TypeError) as error:
        raise DataError(f"the list of skipped shards is damaged: {error}") from None
    return {one.shard: one for one in rows}


def _begin_epoch(data: DataSet, turn: LeaseTurn, ledger: Ledger) -> None:
    data.begin(ledger)
    data.failures = {}
    if data.is_independent:
        data.independent.ended.clear()
        independent.keep(data, turn)


def _is_done(table: LeaseTable, shard: int) -> bool:
    return 0 <= shard < table.ledger.shards and table.ledger.is_done(shard)


def _left(data: DataSet, table: LeaseTable) -> str:
    held = sorted(caller for caller, leased in table.leases.items() if leased)
    by = f" ({', '.join(who(caller) for caller in held[:5])}{' and others' if len(held) > 5 else ''})" if held else ""
    return (
        f"epoch {table.epoch} of {data.name} is not finished: {counted(table.pending, 'shard')} pending, "
        f"{len(table.holders)} leased{by}. Finish it, or state how many records are dropped"
    )
