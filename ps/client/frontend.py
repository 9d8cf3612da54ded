"""What ``edl.torch.ps`` and ``edl.paddle.ps`` have in common: the tables of a script, the gradients of a step, the
client. One for each process; numpy at the border.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_service.loader import trainers
from edl.errors import PsError, SettingError, StateError
from edl.job_records import Training
from edl.worker import session as sessions
from ps.client import dense
from ps.client.dense import Blocks
from ps.client.push_intents import Records
from ps.errors import RolledBack
from ps.spec import Admission, Damaged, Eviction, Initial, Optimizer, TableSpec

Array = NDArray[Any]
Keys = NDArray[np.int64]
Rows = NDArray[np.float32]

BLOCK = 256
"""Parameters in a row of a dense table: small models are spread over the pservers as well."""
LOOK_S = 0.02
SAY_S = 10.0
PS_VARIABLE = "EDL_PS"
"""``1`` for workers of a job with parameter servers."""
START = "python -m edl.launch --run-mode=ps --servers=1:4 --trainers=1:8 train.py"


class Client(Protocol):
    """What is used of ``ps.client.client.Client``, and what ``ps.client.local.Local`` offers as well."""

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """Those that are defined."""
        ...

    @property
    def step(self) -> int:
        """The step that the next push ends."""
        ...

    @property
    def training(self) -> Training:
        """How the job trains."""
        ...

    @property
    def restored(self) -> str:
        """The checkpoint that the parameters come from, and what it says of trainers, as JSON; empty: none."""
        ...

    def on_cut(self, *, value: Any = None, name_data: Any = None, settle: Any = None) -> None:
        """What a checkpoint needs of this trainer."""
        ...

    def boundary(self) -> None:
        """Between two steps: stops for a checkpoint."""
        ...

    def define(self, spec: TableSpec) -> None:
        """One more table."""
        ...

    @property
    def members(self) -> Sequence[object]:
        """Trainers that count."""
        ...

    def begin(self) -> None:
        """Take part in the steps from now on."""
        ...

    def rest(self) -> None:
        """Take no part in them until ``begin``: nobody waits for this trainer."""
        ...

    def pull(self, table: str, keys: Array, out: Array | None = None, *, insert: bool = True) -> Rows:
        """Rows of keys of any shape."""
        ...

    def prefetch(self, table: str, keys: Array) -> None:
        """These keys come next."""
        ...

    def push(
        self, grads: Mapping[str, tuple[Array, Array]], *, op: str = "grad", records: Records | None = None
    ) -> None:
        """End the step."""
        ...

    @property
    def number(self) -> int:
        """This trainer's, in the job; 0: there is no job."""
        ...

    def fence(self, trainer: int) -> tuple[int, str]:
        """Keep a trainer that is gone from pushing anything new."""
        ...

    def pull_many(self, wanted: Mapping[str, Array], *, insert: bool = True) -> dict[str, Rows]:
        """The same of several tables, in one trip."""
        ...

    def push_and_pull(
        self, values: Mapping[str, tuple[Array, Array]], tables: Sequence[str], *, records: Records | None = None
    ) -> dict[str, Rows]:
        """End the step, and get rows that were pushed to these tables, as they are then, in the same trip."""
        ...

    def first(self, table: str, keys: Array, values: Array) -> None:
        """Weights of rows that nobody has written yet."""
        ...

    def set_lr(self, factor: float, table: str = "", step: int = 0) -> None:
        """LR of a table, or of all, relative to what its optimizer says."""
        ...

    def save(self) -> str:
        """Write a checkpoint; its folder."""
        ...

    def leave(self) -> None:
        """No more to do."""
        ...


class Values(Protocol):
    """Parameters of a module, in one order that is the same in all trainers."""

    name: str
    every: int

    def read(self) -> dict[str, Array]:
        """The parameters by name, as float32 arrays; they may share the parameters' memory."""
        ...

    def write(self, values: Mapping[str, Array]) -> None:
        """Give the parameters these values, in place."""
        ...

    def take_gradients(self) -> dict[str, Array] | None:
        """Gradients as float32 arrays, of parameters that have one, which are then cleared; None if none has one."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``init`` was told."""

    local: bool = False
    tables: tuple[TableSpec, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of ``ps.client.client.Client.join``."""


class Part:
    """This process's part in a job with parameter servers."""

    def __init__(self, join: Callable[[Plan, Sequence[TableSpec]], Client] | None = None) -> None:
        """``join``: how to get a client, if not in the usual way."""
        self._join = join or _join
        self._begin()

    def _begin(self) -> None:
        self.plan = Plan()
        self._specs: dict[str, TableSpec] = {}
        self._dense: dict[str, tuple[Values, Blocks]] = {}
        self._filled: set[str] = set()
        self._client: Client | None = None
        self._left = False
        self._resting = self._inserting = True
        self._collected: dict[str, list[tuple[Keys, Rows]]] = {}
        self._early: dict[str, tuple[Keys, Rows]] = {}
        self._expecting = self._warned = False
        self.value: Callable[[], object] = dict
        """What the script wants to find in a checkpoint again."""

    # --- tables ------------------------------------------------------------------------------------------------------

    def init(self, plan: Plan) -> None:
        """Raises ``StateError`` when tables are in use already."""
        if self._client is not None:
            raise StateError("ps.init comes before the first forward pass: this process has joined already")
        self.plan = plan
        for spec in plan.tables:
            self.declare(spec)

    def declare(self, spec: TableSpec) -> None:
        """A table that this script uses. Several modules may share one, if they want it alike."""
        known = self._specs.get(spec.name)
        if known is not None:
            if known != spec:
                said = spec.difference(known) or f"optimizer.lr {spec.optimizer.lr:g}, before {known.optimizer.lr:g}"
                raise SettingError("table", spec.name, f"is in use with other settings: {said}", "Take another name")
            return
        if self._client is not None:
            self._client.define(spec)
        self._specs[spec.name] = spec
        # Where the data begin follows from where the parameters come from.
        trainers.on_opening(lambda: self.client)

    def declare_dense(self, values: Values, optimizer: Optimizer, damaged: Damaged) -> None:
        """Parameters of a module; their first values are those that they have when this trainer joins."""
        if values.name in self._specs:
            raise SettingError("table", values.name, "is in use already", "Give each Dense a name of its own")
        shapes = {name: array.shape for name, array in values.read().items()}
        if not shapes:
            raise SettingError("module", values.name, "has no parameters that are trained")
        blocks = Blocks(shapes, BLOCK)
        self.declare(replace(blocks.spec(values.name, optimizer), damaged=damaged))
        self._dense[values.name] = values, blocks

    @property
    def client(self) -> Client:
        """Joins when it is asked for the first time."""
        if self._left:
            raise StateError("ps.leave() has been called: this process takes no more part")
        if self._client is None:
            self._client = self._join(self.plan, list(self._specs.values()))
            self._joined(self._client)
        if len(self._filled) < len(self._dense):
            self._fill_first(self._client)
        return self._client

    def _joined(self, client: Client) -> None:
        atexit.register(self._leave_at_exit)
        trainers.hold()
        trainers.on_idle(self.rest)
        trainers.joined(client.number, self.step, client.fence)
        client.on_cut(value=lambda: self.value(), name_data=trainers.name_positions, settle=trainers.settle)
        restored = self.restored
        if restored:
            trainers.begin_from(f"cut-{restored['cut']}", restored["ledgers"], restored["history"])

    @property
    def restored(self) -> dict[str, Any]:
        """What the checkpoint says that the parameters come from; empty: they come from none."""
        text = self.client.restored
        found = json.loads(text) if text else {}
        return found if isinstance(found, dict) else {}

    def _fill_first(self, client: Client) -> None:
        for name, (values, blocks) in self._dense.items():
            if name not in self._filled:
                values.write(dense.first(client, name, blocks, values.read()))
                self._filled.add(name)

    def _fill(self, client: Client, values: Values, blocks: Blocks) -> None:
        values.write(dense.pull_dense(client, values.name, blocks))

    # --- a step ------------------------------------------------------------------------------------------------------

    def pull(self, table: str, keys: Keys, *, insert: bool) -> Rows:
        """Rows of these keys, in new memory. A pull that may insert is training: the trainer counts from then on."""
        client = self.client
        insert = insert and self._inserting
        if insert:
            self._count(client)
        return client.pull(table, keys, insert=insert)

    def lookup(self, wanted: Sequence[tuple[str, Keys, bool]]) -> list[Rows]:
        """Rows of several tables, each with its keys and whether those may insert: one trip, or two, if not all may. A
        table may be named several times."""
        client = self.client
        found: list[Rows] = [np.empty(0, np.float32)] * len(wanted)
        for insert in (True, False):
            mine = [at for at, one in enumerate(wanted) if (one[2] and self._inserting) is insert]
            if not mine:
                continue
            if insert:
                self._count(client)
            together: dict[str, list[int]] = {}
            for at in mine:
                together.setdefault(wanted[at][0], []).append(at)
            flat = {table: [wanted[at][1].reshape(-1) for at in places] for table, places in together.items()}
            keys = {table: some[0] if len(some) == 1 else np.concatenate(some) for table, some in flat.items()}
            rows = client.pull_many(keys, insert=insert)
            for table, places in together.items():
                edges = np.cumsum([wanted[at][1].size for at in places])[:-1]
                for at, some in zip(places, np.split(rows[table], edges), strict=True):
                    found[at] = some.reshape(*wanted[at][1].shape, some.shape[-1])
        return found

    def collect(self, table: str, keys: Keys, grads: Rows) -> None:
        """Gradients of rows, for the end of this step; the arrays must stay as they are until then."""
        self._expecting = False
        dim = self._specs[table].dim
        self._collected.setdefault(table, []).append((keys.reshape(-1), grads.reshape(-1, dim)))

    def expect(self) -> None:
        """Gradients are to come, when ``backward`` is called."""
        self._expecting = True

    def step(self) -> None:
        """One push with all gradients since the last one; its answer has the new dense values."""
        client = self.client
        self._count(client)
        if trainers.redoing():
            self._keep_early()
            return  # the data set calls this again when the script has all batches of that push
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
            sessions.note("ps.step() found no gradients: call loss.backward() before it")
        self._collected = {}
        due = [name for name, (values, _) in self._dense.items() if (client.step + 1) % values.every == 0]
        rows = client.push_and_pull(
            parts, [name for name in due if name in parts], records=Records(*trainers.records())
        )
        trainers.pushed()
        client.boundary()
        for name, (values, blocks) in self._dense.items():
            if name in rows:
                values.write(blocks.unpack(rows[name]))
            elif client.step % values.every == 0:
                self._fill(client, values, blocks)

    def _keep_early(self) -> None:
        """Dense gradients of a step that is not pushed yet: scripts count on it to clear them."""
        for name, (values, blocks) in self._dense.items():
            own = values.take_gradients()
            if own is not None:
                keys, grads = dense.part(blocks, own)
                self._early[name] = keys, grads + self._early[name][1] if name in self._early else grads

    def refresh(self) -> None:
        """The newest dense values, for those that take them every few steps."""
        for values, blocks in self._dense.values():
            self._fill(self.client, values, blocks)

    def _count(self, client: Client) -> None:
        if self._resting:
            client.begin()
            self._resting = False

    def begin(self, trainers: int) -> None:
        """See ``begin`` below."""
        client = self.client
        self._count(client)
        if sessions.current().link is not None or self._join is not _join:
            self._wait(client, lambda: len(client.members) >= trainers, f"{trainers} trainers to begin")

    def _wait(self, client: Client, come: Callable[[], bool], what: str) -> None:
        waited_s = 0.0
        while not come():
            client.boundary()  # others may stop for a checkpoint, or the parameters go back, meanwhile
            threading.Event().wait(LOOK_S)
            waited_s += LOOK_S
            if waited_s >= SAY_S:
                waited_s = 0.0
                sessions.note(f"waiting for {what}; {len(client.members)} take part now")

    @contextlib.contextmanager
    def no_insert(self) -> Iterator[None]:
        """Inside, keys that have no row are answered with their first weights, and get none."""
        before, self._inserting = self._inserting, False
        try:
            yield
        finally:
            self._inserting = before

    def rest(self, everybody: bool = False) -> None:
        """See ``rest`` below."""
        client = self._client
        if client is not None and not self._resting:
            self._resting = True
            client.rest()
        if client is not None and everybody:
            self._wait(client, lambda: not client.members, "the other trainers to rest")

    def leave(self) -> None:
        """See ``leave`` below."""
        client, self._client = self._client, None
        self._left = True
        trainers.on_opening(None)
        trainers.on_idle(None)
        if client is not None:
            atexit.unregister(self._leave_at_exit)
            client.leave()

    def _leave_at_exit(self) -> None:
        """A process that ends because it has to begin anew has said so already."""
        try:
            self.leave()
        except RolledBack:
            return
        except PsError as error:
            sessions.note(f"leaving the parameter servers: {error}")

    def forget(self) -> None:
        """Leave, and be as at the beginning of the process: without tables."""
        self.leave()
        self._begin()


def _join(plan: Plan, specs: Sequence[TableSpec]) -> Client:
    session = sessions.current()
    if session.link is None:
        if not plan.local:
            raise PsError(
                f"no parameter servers: there is no launcher. Start with {START}, or call ps.init(local=True)"
            )
        from ps.client.local import Local

        return Local(specs)
    if session.environment.get(PS_VARIABLE) != "1":
        raise PsError(f"this job has no parameter servers. Start it with {START}")
    return _over_the_launcher(plan, specs)


def _over_the_launcher(plan: Plan, specs: Sequence[TableSpec]) -> Client:
    from edl.worker import trainer
    from ps.client.client import Client as RemoteClient

    one = trainer.attach()
    assert one.link is not None, "there is a launcher"  # noqa: S101
    return RemoteClient.join(one.link, one.round, tables=specs, name=one.name, **plan.options)


part = Part()
"""The one of this process."""


# --- the same in both frameworks --------------------------------------------------------------------------------------


def init(*tables: TableSpec, local: bool = False, **options: Any) -> None:
    """Optional, before the first forward pass: how this process joins, which it does when it needs rows for the first
    time.

    ``tables``: further ones, for use through ``client()``. ``local``: where there is no launcher, the tables are in
    this process; for development, and to compare with. ``options``: those of ``ps.client.client.Client.join``:
    ``deadline_s``, ``wire`` (``"f4"``, ``"f2"``, ``"bf16"``), ``cache_rows``, ``cache_steps``.
    """
    part.init(Plan(local, tables, options))


def client() -> Client:
    """The client itself: tables as numpy arrays. Joins."""
    return part.client


def step() -> None:
    """End a step, after ``backward``: one push with all gradients since the last one, acknowledged when this returns;
    then the dense parameters get their new values. Gradients of dense parameters are cleared.

    In sync mode it waits for the others. Raises ``PsError``, naming table, key or server, and what to do.
    """
    part.step()


def begin(trainers: int = 1) -> None:
    """Count from now on, and wait until so many trainers do: for runs that are to be compared. Without it a trainer
    counts from its first pull for training on, and the first ones train while others are still starting."""
    part.begin(trainers)


def no_insert() -> contextlib.AbstractContextManager[None]:
    """``with ps.no_insert():`` keys without a row get none. Embeddings in eval mode do so anyway."""
    return part.no_insert()


def rest(*, everybody: bool = False) -> None:
    """Nobody waits for this trainer until it pulls rows for training again: call it before a pause, such as an
    evaluation. Data sets of mode "free" do so when they have to wait for other trainers. ``everybody``: and wait until
    all others rest as well, or have left: then the tables stay as they are."""
    part.rest(everybody)


def refresh() -> None:
    """Give the dense parameters their newest values: before evaluating, after others have trained on."""
    part.refresh()


def prefetch(table: Any, keys: Any) -> None:
    """Keys of the next batch, as an array: their rows are fetched while this one is trained on."""
    part.client.prefetch(table_name(table), keys)


def set_lr(factor: float, table: Any = "", step: int = 0) -> None:
    """From ``step`` on (0: as soon as possible) the LR of a table, or of all, is its optimizer's times ``factor``, for
    all trainers."""
    part.client.set_lr(factor, table_name(table), step)


def save() -> str:
    """Write a checkpoint of all tables and data positions; returns its folder."""
    return part.client.save()


def leave() -> None:
    """This trainer has no more to do; done at the end of the process as well."""
    part.leave()


def on_save(value: Callable[[], object]) -> None:
    """``value()`` goes into each checkpoint, as JSON, for this trainer; ``restored()`` gives it back."""
    part.value = value


def restored() -> dict[str, Any]:
    """Of a job that has begun from a checkpoint: ``run``, its folder; ``cut``, its number; ``step``; ``values``, by
    trainer (``node/slot``), what ``on_save`` gave. Else empty. Joins."""
    return part.restored


def table_name(table: Any) -> str:
    """Of a name, or of a module that has a table."""
    return str(getattr(table, "table", table))


def sparse(
    name: str,
    dim: int,
    optimizer: Optimizer | None,
    initial: Initial | None,
    admission: Admission | None,
    eviction: Eviction | None,
    damaged: Damaged,
) -> str:
    """Declare the table of an embedding; its name."""
    spec = TableSpec(
        name,
        dim,
        optimizer if optimizer is not None else Optimizer(),
        initial if initial is not None else Initial(),
        admission if admission is not None else Admission(),
        eviction if eviction is not None else Eviction(),
        damaged,
    )
    part.declare(spec)
    return name


COMBINERS = (None, "sum", "mean")


def checked_combiner(combiner: str | None) -> str | None:
    """Raises ``SettingError``."""
    if combiner not in COMBINERS:
        raise SettingError("combiner", combiner, "must be None, sum or mean")
    return combiner


def checked_every(every: int) -> int:
    """Raises ``SettingError``."""
    if every < 1:
        raise SettingError("every", every, "must be at least 1")
    return every


def integer_keys(keys: Array, table: str = "") -> Keys:
    """As int64. Raises ``SettingError``, which names the table, for what are no whole numbers and what does not fit."""
    name = f"keys of table {table}" if table else "keys"
    if keys.dtype == np.int64:
        return keys
    if keys.dtype.kind not in "iu":
        raise SettingError(name, keys.dtype, "must be whole numbers (int64)")
    if keys.dtype == np.uint64 and keys.size and int(keys.max()) >= 1 << 63:
        raise SettingError(name, int(keys.max()), "must be below 2**63 (int64)", "Hash them, or view them as int64")
    return keys.astype(np.int64)
