"""What a training script has of the parameter servers: rows of keys, gradients for them, checkpoints. numpy only.

One object a process, for any of its threads; not for processes forked from it. Everything is asked of all pservers at
once and repeated where that is of use (``ps/client/fanout.py``). Whoever calls waits, and hears on stderr for what if
it takes long. Errors are ``PsError``; ``RolledBack`` means that this process has to begin anew.
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
from ps.client.arguments import as_keys, as_out
from ps.client.checkpoint_stop import CheckpointStop, NameData, Settle, Value
from ps.client.core import DEADLINE_S, Core, Options
from ps.client.geo import Geo
from ps.client.master_session import FixedMasterSession, Line, LiveMasterSession
from ps.client.pool import ConnectionPool
from ps.client.push_intents import Records
from ps.client.read import Reader
from ps.client.write import Writer
from ps.protocol import messages
from ps.protocol.handshake import TOOL, TRAINER, Hello
from ps.rows import Op, Rows
from ps.spec import TableSpec
from ps.wait import BoundedWait

Weights = NDArray[np.float32]
LEAVE_S = 5.0
"""So long a trainer that leaves waits for the Master to have heard of it."""


class Client:
    """Made by ``join`` or ``direct``."""

    def __init__(self, core: Core) -> None:
        """Use ``join`` or ``direct``."""
        joined = core.session.joined
        core.step, core.stand = joined.step, self._stand
        self._core, self._session = core, core.session
        self._pid = os.getpid()
        self._checkpoint_stop = CheckpointStop()
        self._reader = Reader(core)
        self._writer = Writer(core, self._reader.written, self._reader.stepped)
        self._geo: Geo | None = None
        if joined.training.mode is Mode.GEO:
            self._geo = Geo(core, self._reader, self._writer, joined.training.geo_steps)
        self._resting = False
        self._open = True
        self._end_news = self._session.listen(self._follow)

    @classmethod
    def join(
        cls, line: Line, round_: Callable[[], int], *, tables: Sequence[TableSpec], name: str = "",
        deadline_s: float = DEADLINE_S, wire: str = "f4", cache_rows: int = 0, cache_steps: int = 0, secret: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> Client:  # fmt: skip
        """As a trainer of the job, over its link to the launcher: ``one.link, one.round`` of ``edl.worker.trainer``.

        Blocks until the job has its pservers. Raises ``PsError`` when a table is another one elsewhere. The options:
        see ``ps.client.core.Options``. ``secret``: if not the one that the Master gives.
        """
        options = Options(deadline_s, wire, cache_rows, cache_steps)
        session = LiveMasterSession(line, round_, tables)
        joined = session.join()
        return cls(
            Core(session, ConnectionPool(Hello(TRAINER, joined.number, name), secret or joined.secret, tls), options)
        )

    @classmethod
    def direct(
        cls, servers: Sequence[messages.Server | tuple[str, int]], *, tables: Sequence[TableSpec], secret: str,
        number: int = 1, name: str = "", training: Training | None = None, members: Sequence[messages.Member] = (),
        chart: messages.PlacementMap | None = None, deadline_s: float = DEADLINE_S, wire: str = "f4",
        cache_rows: int = 0, cache_steps: int = 0, tls: ssl.SSLContext | None = None,
    ) -> Client:  # fmt: skip
        """Without a Master, for tests and tools: buckets dealt out evenly (or as in ``chart``), for ever. ``number`` 0:
        not as a trainer, only to read."""
        options = Options(deadline_s, wire, cache_rows, cache_steps)
        chart = chart or routing.fixed_chart(servers)
        joined = messages.Joined(number, 0, chart, 1, tuple(members), training or Training(), tuple(tables), 0)
        return cls(
            Core(
                FixedMasterSession(joined),
                ConnectionPool(Hello(TRAINER if number else TOOL, number, name), secret, tls),
                options,
            )
        )

    # --- what is so --------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """As the job knows them: whoever defined one first has decided."""
        return self._core.tables

    @property
    def step(self) -> int:
        """Steps that have ended; the index of the one under way."""
        return self._core.step

    @property
    def number(self) -> int:
        """This trainer's, in the job."""
        return self._session.number

    @property
    def epoch(self) -> int:
        """Of the membership, as far as it is known here."""
        return self._session.joined.epoch

    @property
    def members(self) -> tuple[messages.Member, ...]:
        """Trainers that count, as far as it is known here."""
        return self._session.joined.members

    @property
    def training(self) -> Training:
        """How the job trains."""
        return self._session.joined.training

    @property
    def restored(self) -> str:
        """The checkpoint that the parameters come from, and what it says of trainers, as JSON; empty: none."""
        return self._session.joined.restored

    @property
    def statistics(self) -> dict[str, int]:
        """See ``ps.client.core.Tally``."""
        return self._core.tally.shown()

    # --- taking part -------------------------------------------------------------------------------------------------

    def define(self, spec: TableSpec) -> None:
        """One more table. Raises ``PsError`` when there is another one of that name."""
        self._check()
        known = self.tables.get(spec.name)
        difference = spec.difference(known) if known is not None else ""
        if difference:
            raise PsError(f"there is another table {spec.name}: {difference}. Use another name, or the same numbers")
        if known is None:
            self._master(f"table {spec.name} is not among those given to Client.direct").join(spec)

    def begin(self) -> None:
        """Count from now on: others wait for this trainer's pushes (sync), or at least for its steps (staleness)."""
        self._check()
        self._resting = False
        if isinstance(self._session, LiveMasterSession):
            member = self._session.begin(self._core.options.deadline_s)
            self._core.step = max(self._core.step, member.step)

    def rest(self) -> None:
        """Count no more until ``begin``: nobody waits for this trainer. It may go on reading (``insert=False``)."""
        self._check()
        self._finish()
        self._resting = True
        if isinstance(self._session, LiveMasterSession):
            self._session.leave(self._core.options.deadline_s)

    def leave(self) -> None:
        """No more to do. What is under way is finished; then this client is of no more use."""
        if not self._open or os.getpid() != self._pid:
            return
        self._check()
        told = False
        try:
            if not self._resting:
                self._finish()
            # Who says farewell is not missed by pservers. Where no Master hears of it, they have to tell the next one.
            with contextlib.suppress(PsError):
                if isinstance(self._session, LiveMasterSession):
                    self._session.leave(LEAVE_S)
                told = True
        finally:
            self.close(farewell=told)

    def close(self, *, farewell: bool = False) -> None:
        """Hang up; without a farewell as if this process had died."""
        if self._open and os.getpid() == self._pid:
            self._open = False
            self._end_news()
            self._reader.close()
            self._writer.close()
            self._core.pool.close(farewell=farewell)

    def __enter__(self) -> Client:
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
        """Rows, float32 of shape ``(*keys.shape, dim)``, in ``out`` if given. Keys without a row get one, if the table
        admits them (``insert``). A key that is there several times is fetched once, and counted each time."""
        return self._pull({table: keys}, {table: out}, insert)[table]

    def pull_many(self, wanted: Mapping[str, Any], *, insert: bool = True) -> dict[str, Weights]:
        """The same of several tables, in one request to each pserver."""
        return self._pull(wanted, {}, insert)

    def read(self, table: str, keys: Any) -> Weights:
        """Rows as they are on the pservers, without leaving a trace; first weights for keys that have none."""
        self._check()
        return self._reader.pull({table: keys}, {}, False)[table]

    def prefetch(self, table: str, keys: Any) -> None:
        """These keys come next: they are fetched in the background, and the pull of exactly the same keys takes them.

        Their rows are at most one step old: what is pushed in between may be missing. Not in mode sync: there they are
        fetched after the push of the step in between. Occurrences are counted when they are fetched.
        """
        self._check()
        self._core.spec(table)
        if self._geo is None:  # it has its own rows anyway
            self._reader.prefetch(table, keys)

    def scan(self, table: str) -> Iterator[Rows]:
        """All rows with their state, a few buckets at a time. Not as of one moment: training goes on meanwhile."""
        self._check()
        return self._reader.scan(table)

    def push(
        self, values: Mapping[str, tuple[Any, Any]], *, op: str = Op.GRAD, wait: bool = True,
        records: Records | None = None,
    ) -> None:  # fmt: skip
        """By table: keys, and for each key a row (``(*keys.shape, dim)``). Those of equal keys are summed.

        ``grad`` gives them to the tables' optimizers and ends the step; it has been applied when this returns. With
        ``wait=False`` that goes on in the background (not in mode sync): the next push waits for it, and an error comes
        with one of the next calls. ``add``, ``assign`` and ``first`` (only where there is no row yet) end no step.
        ``records``: what the gradients are made of, so that others can go on when this trainer dies in mid-push.
        """
        self._check()
        if self._geo is not None and op == Op.GRAD:
            self._geo.push(values)
            return
        self._writer.push(values, op, wait=wait, records=records)
        if self._geo is not None:
            self._geo.forget(values)

    def push_and_pull(
        self, values: Mapping[str, tuple[Any, Any]], tables: Sequence[str], *, records: Records | None = None
    ) -> dict[str, Weights]:
        """Push gradients, which ends the step, and get the rows of these tables whose gradients were pushed, as they
        are then, in the order of their keys, ``(keys, dim)``: all in one trip. A key without a row gets none.
        ``records``: as of ``push``."""
        self._check()
        if self._geo is None:
            return self._writer.push(values, Op.GRAD, records=records, back=[one for one in tables if one in values])
        self._geo.push(values)
        wanted = {table: as_keys(table, values[table][0]).reshape(-1) for table in tables if table in values}
        return self._pull(wanted, {}, False) if wanted else {}

    def first(self, table: str, keys: Any, values: Any) -> None:
        """Weights of rows that nobody has written yet; others keep theirs."""
        self.push({table: (keys, values)}, op=Op.FIRST)

    def assign(self, table: str, keys: Any, values: Any) -> None:
        """Weights of rows, whatever they were; the optimizer's state stays."""
        self.push({table: (keys, values)}, op=Op.ASSIGN)

    def flush(self) -> None:
        """Wait for a push in the background. Raises what went wrong with it."""
        self._check()
        self._writer.flush()

    def _pull(self, wanted: Mapping[str, Any], outs: Mapping[str, Weights | None], insert: bool) -> dict[str, Weights]:
        self._check()
        if self.training.mode is Mode.SYNC:
            self._writer.flush()
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

    def fence(self, trainer: int) -> tuple[int, str]:
        """Keep a trainer that is gone from pushing anything new; the number and the records of its last push. Any
        thread."""
        self._check()
        return push_intents.fence(self._core, trainer)

    # --- learning rate, checkpoints ----------------------------------------------------------------------------------

    def set_lr(self, factor: float, table: str = "", step: int = 0) -> None:
        """From ``step`` on (0: as soon as everybody can) the LR of a table, or of all, is its optimizer's times
        ``factor``. In mode geo trainers apply it themselves: each has to say it, and it holds at once."""
        self._check()
        if not (factor >= 0 and np.isfinite(factor)):
            raise PsError(f"factor={factor}: an LR factor must be 0 or more, and finite")
        if table:
            self._core.spec(table)
        if self._geo is not None:
            self._geo.set_lr(factor, table)
            return
        master = self._master("without a Master nobody tells the pservers about an LR")
        master.set_lr(messages.LrHold(step, float(factor), table))

    def on_cut(
        self, value: Value | None = None, name_data: NameData | None = None, settle: Settle | None = None
    ) -> None:
        """What is asked of the script when a checkpoint is taken: ``value()`` gives what it wants back after a restore
        (JSON); ``settle()`` returns when all it has consumed is counted; ``name_data(name)`` names its data positions,
        and returns them by data set. The last two are those of the data service if they are not given."""
        checkpoint_stop = self._checkpoint_stop
        self._checkpoint_stop = CheckpointStop(
            value or checkpoint_stop.value, name_data or checkpoint_stop.name_data, settle or checkpoint_stop.settle
        )

    def boundary(self) -> None:
        """Between two steps: stops here if a checkpoint is to be taken, until all have stopped and rows are marked."""
        self._check()
        self._writer.look()
        while self._session.halted:
            if self._geo is not None and not self._resting:
                self._geo.exchange()
            self._stand()

    def save(self) -> str:
        """Have a checkpoint written, and wait for it; its folder. To be called between two steps."""
        master = self._master("there is no checkpoint without a Master")
        self._check()
        patience = BoundedWait("the checkpoint to be written", deadline_s=None)
        master.ask_save()
        while (saved := master.saved()) is None:
            self._check()
            self.boundary()
            master.wait()
            patience.look(lambda: "pservers write their rows, or have not been told to yet")
        patience.over()
        return saved.run

    def _stand(self) -> None:
        """Nothing of this trainer's is under way but what waits for others that have stopped."""
        if isinstance(self._session, LiveMasterSession) and self._session.halted:
            self._writer.flush()
            self._core.tally.add(cuts=1)
            self._checkpoint_stop.stand(self._session, self._session.halted, self._core.step)

    # --- how ---------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._writer.flush()
        if self._geo is not None:
            self._geo.exchange()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise PsError(
                "this process was forked from the one that the client of the parameter servers belongs to. Only that "
                "one may use it: pull rows in the training process, not in one that loads data"
            )
        if not self._open:
            raise PsError("this client of the parameter servers has been closed: it has left, or failed")
        self._session.check()
        self._writer.look()

    def _master(self, why_not: str) -> LiveMasterSession:
        if isinstance(self._session, LiveMasterSession):
            return self._session
        raise PsError(why_not)

    def _follow(self) -> None:
        """On any thread: something is new."""
        try:
            self._core.pool.follow(self._session.route.servers)
        except PsError as error:
            note(str(error))
