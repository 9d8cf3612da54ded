"""A trainer's client of the parameter servers: pulling rows, pushing gradients, taking checkpoints. Needs only numpy.

One client per process, usable from any of its threads, but not from forked processes. Requests go to all pservers in
parallel and are retried where that helps (``ps/client/fanout.py``). Calls block; a slow call logs to stderr what it is
waiting for. Errors are ``PsError``; ``RolledBack`` means that this process must restart.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import PsError
from edl.job_records import Mode, Training
from edl.worker.session import note
from ps.client import push_intents, routing
from ps.client.arguments import as_keys, as_out, as_step
from ps.client.checkpoint_stop import CheckpointStop, NameData, Settle, Value
from ps.client.core import DEADLINE_S, PULL, PUSH, ClientOptions, Core
from ps.client.dedup import DistinctKeys
from ps.client.geo import Geo
from ps.client.master_session import FixedMasterSession, Line, LiveMasterSession
from ps.client.member_count import MemberCount
from ps.client.pool import ConnectionPool
from ps.client.push_intents import Records
from ps.client.read import RowReader
from ps.client.write import RowWriter
from ps.protocol import messages
from ps.protocol.handshake import TOOL, TRAINER, CallerHello
from ps.rows import RowOp, Rows
from ps.spec import TableSpec
from ps.wait import BoundedWait

Weights = NDArray[np.float32]
LEAVE_S = 5.0
"""Most seconds that ``leave`` waits for the Master's confirmation."""


class PsClient:
    """Pulls and pushes rows. Create it with ``join`` or ``direct``."""

    def __init__(self, core: Core) -> None:
        """Use ``join`` or ``direct`` instead."""
        joined = core.session.joined
        core.step, core.stand = joined.step, self._stand
        self._core, self._session = core, core.session
        self._pid = os.getpid()
        self._checkpoint_stop = CheckpointStop()
        self._reader = RowReader(core)
        self._writer = RowWriter(core, self._reader.written, self._reader.stepped)
        self._geo: Geo | None = None
        if joined.training.mode is Mode.GEO:
            self._geo = Geo(core, self._reader, self._writer, joined.training.geo_steps)
        self._resting = False
        self._open = True
        self._stop_listening = self._session.listen(self._follow)
        self._follow()

    @classmethod
    def join(
        cls, line: Line, round_: Callable[[], int], *, tables: Sequence[TableSpec], name: str = "",
        deadline_s: float = DEADLINE_S, wire: str = "f4", cache_rows: int = 0, cache_steps: int = 0, secret: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> PsClient:  # fmt: skip
        """Join the job as a trainer, through the connection to the launcher (``one.link, one.round`` of
        ``edl.worker.trainer``).

        Blocks until the job has its pservers. Raises ``PsError`` if another trainer has defined a table of the same
        name differently. See ``ps.client.core.ClientOptions`` for the options. ``secret`` overrides the one that
        the Master provides.
        """
        options = ClientOptions(deadline_s, wire, cache_rows, cache_steps)
        session = LiveMasterSession(line, round_, tables)
        joined = session.join()
        return cls(
            Core(
                session,
                ConnectionPool(CallerHello(TRAINER, joined.number, name), secret or joined.secret, tls),
                options,
            )
        )

    @classmethod
    def direct(
        cls, servers: Sequence[messages.PserverAddress | tuple[str, int]], *, tables: Sequence[TableSpec], secret: str,
        number: int = 1, name: str = "", training: Training | None = None,
        members: Sequence[messages.TrainerMember] = (),
        placement: messages.PlacementMap | None = None, deadline_s: float = DEADLINE_S, wire: str = "f4",
        cache_rows: int = 0, cache_steps: int = 0, tls: ssl.SSLContext | None = None,
    ) -> PsClient:  # fmt: skip
        """Connect without a Master, for tests and tools. Buckets are distributed evenly (or as in ``placement``) and
        never move. ``number`` 0: connect as a read-only tool instead of a trainer."""
        options = ClientOptions(deadline_s, wire, cache_rows, cache_steps)
        placement = placement or routing.fixed_placement(servers)
        joined = messages.Joined(number, 0, placement, 1, tuple(members), training or Training(), tuple(tables), 0)
        return cls(
            Core(
                FixedMasterSession(joined),
                ConnectionPool(CallerHello(TRAINER if number else TOOL, number, name), secret, tls),
                options,
            )
        )

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """The job's tables by name. The first trainer to define a table decides its definition."""
        return self._core.tables

    @property
    def step(self) -> int:
        """Number of completed steps; the index of the current one."""
        return self._core.step

    @property
    def number(self) -> int:
        """This trainer's number in the job."""
        return self._session.number

    @property
    def epoch(self) -> int:
        """Number of the membership epoch, as last received here."""
        return self._session.joined.epoch

    @property
    def members(self) -> tuple[messages.TrainerMember, ...]:
        """The trainers of the membership epoch, as last received here."""
        return self._session.joined.members

    def watch_members(self) -> MemberCount:
        """Count members from now on, or from this trainer's next ``begin`` or ``rest`` on; until the next call."""
        return self._session.watch_members()

    @property
    def training(self) -> Training:
        """How the job trains: synchronisation mode, replication and so on."""
        return self._session.joined.training

    @property
    def restored(self) -> str:
        """The checkpoint that the parameters were restored from and its trainers' state, as JSON; empty if there is
        none."""
        return self._session.joined.restored

    @property
    def statistics(self) -> dict[str, int]:
        """Counters since the start, by name; see ``ps.client.core.Tally``."""
        return self._core.tally.shown()

    # --- taking part -------------------------------------------------------------------------------------------------

    def define(self, spec: TableSpec) -> None:
        """Define another table. Raises ``PsError`` if a table of this name exists and differs."""
        self._check()
        known = self.tables.get(spec.name)
        difference = spec.difference(known) if known is not None else ""
        if difference:
            raise PsError(
                f"table {spec.name} is already defined differently: {difference}. Use another name or the same settings"
            )
        if known is None:
            self._master(f"table {spec.name} is not among those given to Client.direct").join(spec)

    def begin(self) -> None:
        """Become a member: others wait for this trainer's pushes (sync) or steps (bounded staleness) from now on."""
        self._check()
        self._resting = False
        if isinstance(self._session, LiveMasterSession):
            member = self._session.begin(self._core.options.deadline_s)
            self._core.step = max(self._core.step, member.step)
        if self._geo is not None:
            self._geo.exchange()  # its copies of rows are from before, and others may have changed them

    def rest(self) -> None:
        """Stop being a member until ``begin``: other trainers no longer wait for this one. It may still read
        (``insert=False``)."""
        self._check()
        self._finish()
        self._resting = True
        if isinstance(self._session, LiveMasterSession):
            self._session.leave(self._core.options.deadline_s)

    def leave(self) -> None:
        """Finish pending work and leave the job. The client cannot be used afterwards."""
        if not self._open or os.getpid() != self._pid:
            return
        confirmed = False
        try:
            self._check()
            if not self._resting:
                self._finish()
            # After a farewell the pservers do not report this trainer as lost. If the Master did not get the message,
            # they must report it to the next Master.
            with contextlib.suppress(PsError):
                if isinstance(self._session, LiveMasterSession):
                    self._session.leave(LEAVE_S)
                confirmed = True
        finally:
            self.close(farewell=confirmed)

    def close(self, *, farewell: bool = False) -> None:
        """Close the connections. Without ``farewell`` the pservers consider this trainer dead."""
        if self._open and os.getpid() == self._pid:
            self._open = False
            self._stop_listening()
            self._reader.close()
            self._writer.close()
            self._core.pool.close(farewell=farewell)

    def __enter__(self) -> PsClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.leave()
        else:
            self.close()

    # --- rows --------------------------------------------------------------------------------------------------------

    def pull(self, table: str, keys: Any, out: Weights | None = None, *, insert: bool = True) -> Weights:
        """Pull rows: float32 of shape ``(*keys.shape, dim)``, into ``out`` if given.

        With ``insert`` a key without a row gets one, if the table's admission allows it. A repeated key is fetched
        once, but each occurrence is counted.
        """
        return self._pull({table: keys}, {table: out}, insert)[table]

    def pull_many(self, wanted: Mapping[str, Any], *, insert: bool = True) -> dict[str, Weights]:
        """Pull rows of several tables, with one request to each pserver."""
        return self._pull(wanted, {}, insert)

    def pull_distinct(
        self, wanted: Mapping[str, Any], *, insert: bool = True
    ) -> dict[str, tuple[DistinctKeys, Weights]]:
        """Pull rows of several tables, with one request to each pserver: the distinct keys of each, with their rows
        ``(distinct, dim)``, and ``inverse``, the row of each key of the flat batch."""
        self._check()
        self._flush_if_sync()
        if self._geo is None or self._resting:
            return self._reader.pull_distinct(wanted, insert)
        found = {}
        for table, given in wanted.items():
            united = self._core.session.route.unite(as_keys(table, given).reshape(-1))
            found[table] = united, self._pull({table: united.keys}, {}, insert)[table]
        return found

    def read(self, table: str, keys: Any) -> Weights:
        """Read rows without side effects; a key without a row yields its initial weights."""
        self._check()
        return self._reader.pull({table: keys}, {}, False)[table]

    def prefetch(self, table: str, keys: Any) -> None:
        """Fetch the rows of these keys in the background, for a following pull of exactly the same keys.

        The rows are at most one step old: a push in between may be missing. In mode sync they are never stale; there
        they are fetched after the push of the step in between. Key occurrences are counted when the rows are fetched.
        """
        self._check()
        self._core.spec(table)
        if self._geo is None:  # geo keeps its own copies of rows
            self._reader.prefetch(table, keys)

    def scan(self, table: str) -> Iterator[Rows]:
        """Iterate over all rows with their state, a few buckets at a time. Not a consistent snapshot: training
        continues meanwhile."""
        self._check()
        return self._reader.scan(table)

    def push(
        self, values: Mapping[str, tuple[Any, Any]], *, op: str = RowOp.GRAD, wait: bool = True,
        records: Records | None = None,
    ) -> None:  # fmt: skip
        """Push, per table, keys and one row for each key (``(*keys.shape, dim)``). Rows of equal keys are summed.

        ``op="grad"`` applies the tables' optimizers and ends the step; when the call returns, it has been applied. With
        ``wait=False`` it is applied in the background (except in mode sync): the next push waits for it, and its error
        is raised by one of the next calls. ``add``, ``assign`` and ``first`` (only keys without a row) do not end the
        step. ``records``: the data records behind the gradients, so that other trainers can continue if this one dies
        during the push.
        """
        self._check()
        if self._geo is not None and op == RowOp.GRAD:
            self._geo.push(values)
            return
        self._check_member(op)
        if self._geo is not None:
            self._geo.exchange(values)  # what is fetched afterwards replaces the changes of these rows
        self._writer.push(values, op, wait=wait, records=records)
        if self._geo is not None:
            self._geo.forget(values)

    def push_and_pull(
        self, values: Mapping[str, tuple[Any, Any]], tables: Sequence[str], *, records: Records | None = None
    ) -> dict[str, Weights]:
        """Push gradients, which ends the step, and return the updated rows of those of these tables that were pushed,
        ``(keys, dim)`` in the order of their keys, in a single request to each pserver. A key without a row does not
        get one. ``records``: see ``push``."""
        self._check()
        self._check_member(RowOp.GRAD)
        if self._geo is None:
            return self._writer.push(values, RowOp.GRAD, records=records, back=[one for one in tables if one in values])
        self._geo.push(values)
        wanted = {table: as_keys(table, values[table][0]).reshape(-1) for table in tables if table in values}
        return self._pull(wanted, {}, not self._resting) if wanted else {}  # this trainer's own rows are updated

    def begin_push(
        self, values: Mapping[str, tuple[Any, Any]], tables: Sequence[str], *, records: Records | None = None
    ) -> Callable[[], dict[str, Weights]]:
        """``push_and_pull`` in the background, where ``push(wait=False)`` is: the step ends at once, and the returned
        function waits for the rows. The next push waits for this one, and its error is raised by one of the next
        calls."""
        self._check()
        if self._geo is not None:
            rows = self.push_and_pull(values, tables, records=records)
            return lambda: rows
        self._check_member(RowOp.GRAD)
        back = [one for one in tables if one in values]
        return self._writer.begin(values, RowOp.GRAD, wait=False, records=records, back=back)

    def first(self, table: str, keys: Any, values: Any) -> None:
        """Set the weights of keys that have no row yet; existing rows are left alone."""
        self.push({table: (keys, values)}, op=RowOp.FIRST)

    def assign(self, table: str, keys: Any, values: Any) -> None:
        """Overwrite the weights of rows; the optimizer's state is kept, but ``Ftrl``'s follows the weights."""
        self.push({table: (keys, values)}, op=RowOp.ASSIGN)

    def flush(self) -> None:
        """Wait for the push in the background, if there is one. Raises its error."""
        self._check()
        self._writer.flush()

    def _pull(self, wanted: Mapping[str, Any], outs: Mapping[str, Weights | None], insert: bool) -> dict[str, Weights]:
        self._check()
        self._flush_if_sync()
        if self._geo is None or self._resting:
            return self._reader.pull(wanted, outs, insert)
        found = {}
        for table, given in wanted.items():
            spec, keys = self._core.spec(table), as_keys(table, given)
            out = as_out(spec, keys.shape, outs.get(table))
            if insert or spec.dense:
                self._geo.pull(table, keys.reshape(-1), out.reshape(-1, spec.dim))
            else:
                self._reader.pull({table: keys}, {table: out}, False)
            found[table] = out
        return found

    def _flush_if_sync(self) -> None:
        if self.training.mode is Mode.SYNC:
            self._writer.flush()

    def fence(self, trainer: int) -> tuple[int, str]:
        """Stop a lost trainer from pushing anything new; return the number and the records of its last push.
        Thread-safe."""
        self._check()
        return push_intents.fence(self._core, trainer)

    # --- learning rate, checkpoints ----------------------------------------------------------------------------------

    def set_lr(self, factor: float, table: str = "", step: int = 0) -> None:
        """Scale the LR of a table, or of all tables, by ``factor`` from ``step`` on (0: as soon as all pservers can).

        In mode geo each trainer must call it, and it applies at once. Raises ``PsError`` unless ``factor`` is finite
        and at least 0, and ``step`` an integer.
        """
        self._check()
        at = as_step(step)
        if not (factor >= 0 and np.isfinite(factor)):
            raise PsError(f"factor={factor}: an LR factor must be 0 or more, and finite")
        if table:
            self._core.spec(table)
        if self._geo is not None:
            self._geo.set_lr(factor, table)
            return
        master = self._master("set_lr needs a Master, which sends the LR to the pservers")
        master.set_lr(messages.LrHold(at, float(factor), table))

    def on_checkpoint(
        self, value: Value | None = None, name_data: NameData | None = None, settle: Settle | None = None
    ) -> None:
        """Set the hooks for checkpoints; those not given stay as they are.

        ``value()`` returns the value to get back after a restore (JSON). ``settle()`` returns once everything consumed
        is accounted for. ``name_data(name)`` names the current data positions and returns them by data set. The last
        two default to those of the data service.
        """
        checkpoint_stop = self._checkpoint_stop
        self._checkpoint_stop = CheckpointStop(
            value or checkpoint_stop.value, name_data or checkpoint_stop.name_data, settle or checkpoint_stop.settle
        )

    on_cut = on_checkpoint
    """Former name of ``on_checkpoint``."""

    def boundary(self) -> None:
        """Mark a step boundary. If a checkpoint is due, blocks until all trainers have stopped and the pservers have
        marked their rows. Raises the error of a background push."""
        self._check()
        self._writer.look()
        while self._session.halted:
            if self._geo is not None and not self._resting:
                self._geo.exchange()
            self._stand()

    def save(self) -> str:
        """Request a checkpoint, wait until it is written, and return its folder. Call it between two steps."""
        master = self._master("save needs a Master, which coordinates checkpoints")
        self._check()
        wait = BoundedWait("the checkpoint", deadline_s=None)
        master.ask_save()
        while (saved := master.saved()) is None:
            self._check()
            self.boundary()
            master.wait()
            wait.look(lambda: "the pservers are writing their rows, or have not received the request yet")
        wait.over()
        return saved.run

    def _stand(self) -> None:
        """Stop for a checkpoint. Nothing of this trainer is in flight except requests that wait for trainers which have
        stopped."""
        if not isinstance(self._session, LiveMasterSession) or not self._session.halted:
            return
        self._writer.flush()
        number = self._session.halted  # the Master may have given up the checkpoint during the flush
        if number:
            self._core.tally.add(checkpoints=1)
            self._checkpoint_stop.stand(self._session, number, self._core.step)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._writer.flush()
        if self._geo is not None:
            self._geo.exchange()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise PsError(
                "this process was forked from the one that owns the parameter-server client. Only the owner "
                "may use it: pull rows in the training process, not in a data-loading process"
            )
        if not self._open:
            raise PsError("this parameter-server client is closed: it has left the job, or failed")
        self._session.check()
        self._writer.look()

    def _check_member(self, op: str) -> None:
        """Pservers apply a synchronous step when all members have pushed it: another's gradients would wait for
        ever."""
        if self.training.mode is not Mode.SYNC or op != RowOp.GRAD:
            return
        if not self._session.begun:
            raise PsError(
                f"trainer {self.number} is not a member, and in mode sync only gradients of members are applied; "
                "call begin() first"
            )

    def _master(self, why_not: str) -> LiveMasterSession:
        if isinstance(self._session, LiveMasterSession):
            return self._session
        raise PsError(why_not)

    def _follow(self) -> None:
        """Connect to the pservers of a new placement map; called on any thread."""
        try:
            servers = self._session.route.servers
            self._core.pool.follow(servers)
            if self._geo is not None:  # its last exchange may take place while the interpreter exits
                self._core.pool.prepare((PULL, PUSH), servers.values())
        except PsError as error:
            note(str(error))
