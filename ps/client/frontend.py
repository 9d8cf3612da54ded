"""The common part of ``edl.torch.ps`` and ``edl.paddle.ps``: a script's tables, a step's gradients, and the client. One
instance per process; framework tensors are numpy arrays here."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from data_service.loader import trainers
from edl.errors import PsError, SettingError, StateError
from edl.job_records import Mode
from edl.worker import session as sessions
from ps.client import dense, lookups
from ps.client.dense import DenseLayout
from ps.client.late_push import LatePush
from ps.client.layer_arguments import table_name
from ps.client.lookups import FoundRows
from ps.client.ports import Array, ClientProtocol, Keys, Rows, Values
from ps.client.push_intents import Records
from ps.errors import RolledBack
from ps.spec import Admission, Damaged, Eviction, Initial, Optimizer, TableSpec, WeightFormat

BLOCK = 256
"""Parameters per row of a dense table; small enough to distribute small models over the pservers too."""
LOOK_S = 0.02
SAY_S = 10.0
PS_VARIABLE = "EDL_PS"
"""``1`` in the environment of workers of a job with parameter servers."""
START = "python -m edl.launch --run-mode=ps --servers=1:4 --trainers=1:8 train.py"


@dataclass(frozen=True, slots=True)
class InitOptions:
    """The arguments of ``init``."""

    local: bool = False
    tables: tuple[TableSpec, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for ``ps.client.client.PsClient.join``."""


class PsContext:
    """This process's membership in a job with parameter servers."""

    def __init__(self, join: Callable[[InitOptions, Sequence[TableSpec]], ClientProtocol] | None = None) -> None:
        """``join``: creates the client; for tests."""
        self._join = join or _join
        self._begin()

    def _begin(self) -> None:
        self.plan = InitOptions()
        self._specs: dict[str, TableSpec] = {}
        self.results: set[str] = set()
        """Names of the tables that hold results of this job, which are nothing to the next one."""
        self._dense: dict[str, tuple[Values, DenseLayout]] = {}
        self._filled: set[str] = set()
        self._client: ClientProtocol | None = None
        self._left = False
        self._pid = os.getpid()
        self._resting = self._inserting = True
        self._collected: dict[str, list[tuple[Keys, Rows]]] = {}
        self._early: dict[str, tuple[Keys, Rows]] = {}
        self._expecting = self._warned = False
        self._late: LatePush | None = None
        self.value: Callable[[], object] = dict
        """Returns the script's value for a checkpoint."""

    # --- tables ------------------------------------------------------------------------------------------------------

    def init(self, plan: InitOptions) -> None:
        """Set how to join. Raises ``StateError`` if this process has already joined."""
        if self._client is not None:
            raise StateError("this process has already joined. Call ps.init before the first forward pass")
        self.plan = plan
        for spec in plan.tables:
            self.declare(spec)

    def declare(self, spec: TableSpec) -> None:
        """Declare a table that the script uses. Modules may share one. Raises ``SettingError`` if its settings
        differ."""
        known = self._specs.get(spec.name)
        if known is not None:
            if known != spec:
                said = spec.difference(known) or f"optimizer.lr {spec.optimizer.lr:g}, before {known.optimizer.lr:g}"
                raise SettingError(
                    "table", spec.name, f"is already in use with other settings: {said}", "Take another name"
                )
            return
        if self._client is not None:
            self._client.define(spec)
        self._specs[spec.name] = spec
        # The start position of the data depends on the checkpoint that the parameters come from.
        trainers.on_opening(lambda: self.client)

    def declare_dense(self, values: Values, optimizer: Optimizer, damaged: Damaged) -> None:
        """Declare a module's parameters as a dense table; their current values are the initial ones. Raises
        ``SettingError``."""
        if values.name in self._specs:
            raise SettingError("table", values.name, "is already in use", "Give each Dense a name of its own")
        shapes = {name: array.shape for name, array in values.read().items()}
        if not shapes:
            raise SettingError("module", values.name, "has no trainable parameters")
        blocks = DenseLayout(shapes, BLOCK)
        self.declare(replace(blocks.spec(values.name, optimizer), damaged=damaged))
        self._dense[values.name] = values, blocks

    @property
    def client(self) -> ClientProtocol:
        """The client; the first access joins the job. Raises ``StateError`` after ``leave``."""
        if self._left:
            raise StateError("this process has left the parameter servers: ps.leave() was called")
        if self._client is None:
            self._client = self._join(self.plan, list(self._specs.values()))
            self._joined(self._client)
        if len(self._filled) < len(self._dense):
            self._fill_first(self._client)
        return self._client

    def _joined(self, client: ClientProtocol) -> None:
        self._pid = os.getpid()
        atexit.register(self._leave_at_exit)
        trainers.hold()
        trainers.on_idle(self.rest)
        trainers.joined(client.number, self._push_received, client.fence, self._land)
        client.on_checkpoint(value=lambda: self.value(), name_data=trainers.name_positions, settle=self._settle)
        restored = self.restored
        if restored:
            trainers.begin_from(f"checkpoint-{restored['checkpoint']}", restored["ledgers"], restored["history"])

    @property
    def restored(self) -> dict[str, Any]:
        """State of the checkpoint that the parameters were restored from; empty if there is none."""
        text = self.client.restored
        found = json.loads(text) if text else {}
        return found if isinstance(found, dict) else {}

    def _fill_first(self, client: ClientProtocol) -> None:
        for name, (values, blocks) in self._dense.items():
            if name not in self._filled:
                values.write(dense.first(client, name, blocks, values.read()))
                self._filled.add(name)

    def _fill(self, client: ClientProtocol, values: Values, blocks: DenseLayout) -> None:
        values.write(dense.pull_dense(client, values.name, blocks))

    # --- a step ------------------------------------------------------------------------------------------------------

    def pull(self, table: str, keys: Keys, *, insert: bool) -> Rows:
        """Pull rows into new memory. With ``insert`` this is training, and the trainer becomes a member."""
        client = self.client
        insert = insert and self._inserting
        if insert:
            self._count(client)
        return client.pull(table, keys, insert=insert)

    def lookup(self, wanted: Sequence[tuple[str, Keys, bool]]) -> list[FoundRows]:
        """Pull rows of several tables; each entry has a table, keys, and whether these may insert. One request to each
        pserver, or two if only some may insert. A table may occur several times."""
        client = self.client
        found: dict[int, FoundRows] = {}
        for insert in (True, False):
            mine = [at for at, one in enumerate(wanted) if (one[2] and self._inserting) is insert]
            if mine and insert:
                self._count(client)
            if mine:
                found |= zip(mine, lookups.lookup(client, [wanted[at][:2] for at in mine], insert=insert), strict=True)
        return [found[at] for at in range(len(wanted))]

    def collect(self, table: str, keys: Keys, grads: Rows) -> None:
        """Add gradients of rows to this step. The arrays must not be modified until ``step``."""
        self._expecting = False
        dim = self._specs[table].dim
        self._collected.setdefault(table, []).append((keys.reshape(-1), grads.reshape(-1, dim)))

    def expect(self) -> None:
        """Note that gradients will follow from ``backward``."""
        self._expecting = True

    def step(self, wait: bool = True) -> None:
        """Push all gradients since the last push, and update the dense parameters that are due. Without ``wait``, the
        latter is done by the next call."""
        client = self.client
        self._count(client)
        self._finish()
        if trainers.redoing():
            self._keep_early()
            return  # the data set calls this again once the script has all batches of that push
        parts: dict[str, tuple[Array, Array]] = {}
        for name, pairs in self._collected.items():
            keys, grads = zip(*pairs, strict=True)
            parts[name] = pairs[0] if len(pairs) == 1 else (np.concatenate(keys), np.concatenate(grads))
        for name, (values, blocks) in self._dense.items():
            own = values.take_gradients()
            if own is not None:
                parts[name] = dense.part(blocks, own)
            if name in self._early:
                early = self._early.pop(name)
                parts[name] = (early[0], early[1] + parts[name][1]) if name in parts else early
        if not parts and self._expecting and not self._warned:
            self._warned = True
            sessions.note("ps.step() found no gradients; call loss.backward() before it")
        self._collected = {}
        due = [name for name, (values, _) in self._dense.items() if (client.step + 1) % values.every == 0]
        back, records = [name for name in due if name in parts], Records(*trainers.records())
        training = client.training
        if wait or records.redo is not None or training.mode is not Mode.ASYNC or training.staleness:
            rows = client.push_and_pull(parts, back, records=records)
            trainers.pushed()
            client.boundary()
            self._update_dense(client, rows, client.step)
        else:
            self._late = LatePush(client.begin_push(parts, back, records=records), client.step)
            client.boundary()

    def _update_dense(self, client: ClientProtocol, rows: Mapping[str, Rows], step: int) -> None:
        for name, (values, blocks) in self._dense.items():
            if name in rows:
                values.write(blocks.unpack(rows[name]))
            elif step % values.every == 0:
                self._fill(client, values, blocks)

    def _finish(self) -> None:
        """Wait for the push that is on its way, and update the dense parameters: between forward and backward they must
        not change."""
        late, self._late = self._late, None
        if late is not None:
            late.acknowledge()
            self._update_dense(self.client, late.result(), late.step)

    def _settle(self) -> None:
        """Wait until everything that was pushed is acknowledged and counted; between two batches or in a pull."""
        self._land()
        trainers.settle()

    def _land(self) -> None:
        """Wait for the push that is on its way, and count its batches as used."""
        if self._late is not None:
            self._late.acknowledge()

    def _push_received(self) -> None:
        """End a step with the batches received so far, unless they are on their way. A trainer that rests takes part
        for this step only: it still waits for data, and the others would wait for its next step."""
        if self._late is not None and self._late.has_all:
            self._late.acknowledge()
            return
        rested = self._resting
        self.step()
        if rested:
            self._stop_counting(self.client)

    def _keep_early(self) -> None:
        """Keep the dense gradients of a step that is pushed later: scripts expect ``step`` to clear them."""
        for name, (values, blocks) in self._dense.items():
            own = values.take_gradients()
            if own is not None:
                keys, grads = dense.part(blocks, own)
                self._early[name] = keys, grads + self._early[name][1] if name in self._early else grads

    def prefetch(self, table: Any, keys: Keys) -> None:
        """Implements the module function ``prefetch``."""
        client = self.client
        # Prefetching inserts and counts, which an evaluation must not do; its pulls use no prefetched rows anyway.
        if self._inserting and getattr(table, "training", True):
            client.prefetch(table_name(table), keys)

    def refresh(self) -> None:
        """Update all dense parameters, including those that are only updated every few steps."""
        self._finish()
        for values, blocks in self._dense.values():
            self._fill(self.client, values, blocks)

    def _count(self, client: ClientProtocol) -> None:
        if self._resting:
            client.begin()
            self._resting = False

    def _stop_counting(self, client: ClientProtocol) -> None:
        if not self._resting:
            self._resting = True
            client.rest()

    def begin(self, trainers: int) -> None:
        """Implements the module function ``begin``."""
        client = self.client
        seen = client.watch_members()
        self._count(client)
        if sessions.current().link is not None or self._join is not _join:
            self._wait(client, lambda: seen.most >= trainers, f"{trainers} trainers to join")
        self.refresh()  # one of them may have set the weights before it joined the others

    def _wait(self, client: ClientProtocol, come: Callable[[], bool], what: str) -> None:
        waited_s = 0.0
        while not come():
            client.boundary()  # meanwhile others may stop for a checkpoint, or the parameters may be rolled back
            threading.Event().wait(LOOK_S)
            waited_s += LOOK_S
            if waited_s >= SAY_S:
                waited_s = 0.0
                sessions.note(f"waiting for {what}; members now: {len(client.members)}")

    @contextlib.contextmanager
    def no_insert(self) -> Iterator[None]:
        """While active, keys without a row yield their initial weights and are not inserted."""
        before, self._inserting = self._inserting, False
        try:
            yield
        finally:
            self._inserting = before

    def rest(self, wait_for_all: bool = False) -> None:
        """Implements the module function ``rest``."""
        client = self._client
        self._land()
        if client is None:
            return
        seen = client.watch_members()
        self._stop_counting(client)
        if wait_for_all:
            self._wait(client, lambda: not seen.fewest, "the other trainers to rest")

    def leave(self) -> None:
        """Implements the module function ``leave``. Nothing is left in a forked process, which has none of the threads
        that the client needs."""
        client, self._client = self._client, None
        late, self._late = self._late, None
        self._left = True
        trainers.on_opening(None)
        trainers.on_idle(None)
        if client is not None:
            atexit.unregister(self._leave_at_exit)
            try:
                if late is not None and os.getpid() == self._pid:
                    late.acknowledge()
            finally:
                client.leave()

    def _leave_at_exit(self) -> None:
        """Leave when the process exits. ``RolledBack`` was already reported by whatever ended the process."""
        try:
            self.leave()
        except RolledBack:
            return
        except PsError as error:
            sessions.note(f"cannot leave the parameter servers cleanly: {error}")

    def forget(self) -> None:
        """Leave and reset to the initial state, without tables."""
        self.leave()
        self._begin()


def _join(plan: InitOptions, specs: Sequence[TableSpec]) -> ClientProtocol:
    session = sessions.current()
    if session.link is None:
        if not plan.local:
            raise PsError(
                f"no parameter servers: this process has no launcher. Start with {START}, or call ps.init(local=True)"
            )
        from ps.client.local import LocalClient

        return LocalClient(specs)
    if session.environment.get(PS_VARIABLE) != "1":
        raise PsError(f"this job has no parameter servers. Start it with {START}")
    return _over_the_launcher(plan, specs)


def _over_the_launcher(plan: InitOptions, specs: Sequence[TableSpec]) -> ClientProtocol:
    from edl.worker import trainer
    from ps.client.client import PsClient as RemoteClient

    one = trainer.attach()
    assert one.link is not None, "there is a launcher"  # noqa: S101
    return RemoteClient.join(one.link, one.round, tables=specs, name=one.name, **plan.options)


part = PsContext()
"""The instance of this process."""


# --- the same in both frameworks --------------------------------------------------------------------------------------


def init(*tables: TableSpec, local: bool = False, **options: Any) -> None:
    """Configure how this process joins. Optional; call it before the first forward pass. The process joins when it
    first needs rows.

    ``tables``: additional ones, for use through ``client()``. ``local``: without a launcher, keep the tables in this
    process, for development and comparison. ``options``: those of ``ps.client.client.PsClient.join``: ``deadline_s``,
    ``wire`` (``"f4"``, ``"f2"``, ``"bf16"``), ``cache_rows``, ``cache_steps``. Raises ``StateError`` if the process has
    already joined.
    """
    part.init(InitOptions(local, tables, options))


def client() -> ClientProtocol:
    """The client, with tables as numpy arrays. Joins if necessary."""
    return part.client


def step(wait: bool = True) -> None:
    """End a step, after ``backward``: push all gradients since the last step, wait for the acknowledgement, and update
    the dense parameters. Gradients of dense parameters are cleared.

    With ``wait=False``, in mode async without a limit of staleness, the push is on its way while the script goes on:
    rows pulled meanwhile may lack it, and the dense parameters are updated by the next call. In mode sync it waits for
    the other trainers. Raises ``PsError`` that names the table, key or server and the next action.
    """
    part.step(wait)


def lookup(*wanted: tuple[Any, ...]) -> list[Any]:
    """The results of several embeddings, fetched in one request to the servers instead of one each. Each entry is an
    embedding, followed by its arguments: ``lookup((users, batch["user"]), (words, keys, offsets))``."""
    asked = [layer._ask(*arguments) for layer, *arguments in wanted]
    found = part.lookup([(one[0].table, keys, one[0].training) for one, (keys, _) in zip(wanted, asked, strict=True)])
    return [one[0]._answer(ask, rows) for one, (_, ask), rows in zip(wanted, asked, found, strict=True)]


def lookup_by_name(layers: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """``lookup`` in a framework's dict of embeddings; an argument of ``batch`` is keys, or a tuple of arguments. Raises
    ``SettingError`` for an unknown name."""
    for name in batch:
        if name not in layers:
            known = ", ".join(layers.keys())
            raise SettingError("embedding", repr(name), f"is not in this collection, which has {known}")
    arguments = (given if isinstance(given, tuple) else (given,) for given in batch.values())
    found = lookup(*((layers[name], *given) for name, given in zip(batch, arguments, strict=True)))
    return dict(zip(batch, found, strict=True))


def begin(trainers: int = 1) -> None:
    """Become a member and wait until ``trainers`` trainers are members: for runs that are to be compared. Without this
    call a trainer becomes a member with its first training pull, and the first ones train while others are still
    starting. Updates the dense parameters, which another trainer may have set before, as ``warm_start`` does."""
    part.begin(trainers)


def no_insert() -> contextlib.AbstractContextManager[None]:
    """Context manager in which keys without a row do not get one. Embeddings in eval mode do the same."""
    return part.no_insert()


def rest(*, wait_for_all: bool = False, everybody: bool = False) -> None:
    """Stop being a member until the next training pull, so that other trainers do not wait: call it before a pause,
    such as an evaluation. Independent data sets (mode "free") do so when they must wait for other trainers.
    ``wait_for_all``: also wait until all other trainers rest or have left, so that the tables no longer change.
    ``everybody`` is its older name."""
    part.rest(wait_for_all or everybody)


def refresh() -> None:
    """Update the dense parameters, for example before an evaluation after other trainers have trained on."""
    part.refresh()


def prefetch(table: Any, keys: Any) -> None:
    """Fetch the rows of the next batch's keys, given as an array, while the current batch is trained on. Does nothing
    for an embedding in eval mode and in ``no_insert``."""
    part.prefetch(table, keys)


def set_lr(factor: float, table: Any = "", step: int = 0) -> None:
    """Scale the LR of a table, or of all, by ``factor`` from ``step`` on (0: as soon as possible), for all trainers.

    In mode geo each trainer must call it. Raises ``PsError`` unless ``factor`` is finite and at least 0, for an unknown
    table, and without a Master.
    """
    part.client.set_lr(factor, table_name(table), step)


def save() -> str:
    """Write a checkpoint of all tables and data positions, and wait until it is complete; return its folder. Call it
    between two steps. Raises ``PsError`` without a Master."""
    return part.client.save()


def leave() -> None:
    """Leave the job; done automatically at the end of the process."""
    part.leave()


def on_save(value: Callable[[], object]) -> None:
    """Save ``value()``, as JSON, for this trainer in each checkpoint; ``restored()`` returns it."""
    part.value = value


def restored() -> dict[str, Any]:
    """State of the checkpoint that the job started from: ``run``, its folder; ``checkpoint``, its number (also as
    ``cut``, its former name); ``step``;
    ``values``, the values from ``on_save`` by trainer (``node/slot``). Empty if there is none. Joins if necessary."""
    return part.restored


def sparse(
    name: str,
    dim: int,
    optimizer: Optimizer | None,
    initial: Initial | None,
    admission: Admission | None,
    eviction: Eviction | None,
    damaged: Damaged,
    weights: WeightFormat,
) -> str:
    """Declare the table of an embedding; return its name."""
    spec = TableSpec(
        name,
        dim,
        optimizer if optimizer is not None else Optimizer(),
        initial if initial is not None else Initial(),
        admission if admission is not None else Admission(),
        eviction if eviction is not None else Eviction(),
        damaged,
        weights=weights,
    )
    part.declare(spec)
    return name
