"""The data set that a script iterates over. Base class of the frameworks' ``Data``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_service.filesystems import FilePaths, texts_of
from data_service.formats import FormatReader
from data_service.formats.options import FormatOptions
from data_service.ledger import Ledger
from data_service.loader.batching import Columns, StepSizes
from data_service.loader.current_step import CurrentStep
from data_service.loader.growing_files import GrowingFiles
from data_service.loader.independent import BatchWait, IndependentLoader, open_lasting
from data_service.loader.lease_client import LOOK_S, LeaseClient
from data_service.loader.loader_config import MODES, BatchConversion, LoaderConfig
from data_service.loader.loader_position import LoaderPosition
from data_service.loader.meter import Meter
from data_service.loader.padding import Padding
from data_service.loader.prefetcher import LeasedShards, Prefetcher, ReadOrder, ReadyStep
from data_service.loader.source import EPOCH, DataSettings, SettledData, checked_name
from data_service.loader.window import Offer, Supply, Tail, decode, encode, plan, tail_named
from data_service.loader.worker_context import RankAssignment, WorkerContext
from data_service.protocol.file_list_messages import NOW
from data_service.protocol.messages import DataSetOptions, Done, Opened
from edl.arithmetic.hyper import StepPlan
from edl.errors import DataError, StateError
from edl.tasks import Backoff
from edl.worker.session import note
from edl.worker.steps import Share

STATE_VERSION = 2
GONE_S = 2.0
"""Seconds that ``close`` waits for the Master to confirm that the worker leaves."""
RANK_0_LOOKS_S = 2.0
"""Independent mode: seconds that other workers leave the look for new files at the end of an epoch to rank 0, which may
be busy or gone."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.25
"""Seconds between two requests while there is no data for this worker but some may be returned: each pause is twice the
previous one, since at the end of an epoch many workers may wait for the slowest."""


@dataclass(frozen=True, slots=True)
class DataProgress:
    """Progress of training in a data set."""

    epoch: int
    records: int
    """Records of the epoch consumed by all workers together."""
    of_records: int
    """Number of records in the epoch; -1 if unknown before reading."""
    shards: int
    """Finished shards."""
    of_shards: int


class Loader(IndependentLoader):
    """One data set, iterated jointly by all workers of a world. Each record is used once per epoch, despite failures.

    It can be put into ``State``: its position is committed and rolled back with the model. A batch counts with the
    first commit after it was returned. ``for batch in data`` yields the rest of the epoch; then ``epoch`` increases.

    ``files``: paths, patterns or URLs; None: those of the launcher's option ``--data NAME=…``, which also sets whatever
    is None here.

    ``batch_size``: samples per batch of one worker, unless the job prescribes other batches. ``format``: by default
    derived from the file names. ``columns``: only these. ``shuffle`` (default True): a new order in each epoch, by
    ``seed`` (default 0). ``shuffle_shards``: number of shards that are open at once and whose records are mixed; by
    default 16, or 4 in independent mode, and fewer if they take more than 1 GiB.

    ``tail``: what a worker does that has run out of data while others have some. ``"pad"`` (default): it repeats
    samples, which count like others. ``"drop"``: the epoch ends for all with the last step for which every worker has a
    full batch. ``"join"``: it takes part with padding whose share has 0 samples.

    ``transform``: converts a dict of numpy arrays, on the reading thread, to the batch: any nesting of dicts, lists and
    tuples. ``fill``: replacements for nulls, by column. ``pad``: padding values for columns of lists of varying length;
    without one they become ``Ragged(values, offsets)``. ``prefetch``: number of steps kept ready.

    ``mode``: ``"steps"``, or ``"independent"`` (formerly ``"free"``) for workers that do not step together. A batch
    then counts when the next one is requested (``acknowledge="next"``) or when ``done`` is called (``"done"``); by
    default the former, but with parameter servers when its push is acknowledged. ``failures``: attempts to read a shard
    before it is skipped. ``shard_records`` and ``shard_bytes``: size of a shard in formats that count records or lines.
    ``options``: of the format. ``remote``: ``"prefer"`` or ``"only"`` for remote readers, see docs/remote-readers.md.
    ``decode``: ``"module:function"``, applied to each ``pyarrow.RecordBatch`` where it is read.

    ``rescan``: also use files that match the patterns later; scans every so many seconds, or at the end of each epoch
    (``"epoch"``). ``when``: new files join the current epoch (``"now"``, the default) or the next one
    (``"next-epoch"``). See also ``add``.
    """

    def __init__(
        self,
        name: str,
        files: FilePaths | None = None,
        *,
        batch_size: int,
        format: str | None = None,
        columns: str | Sequence[str] | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        tail: str | None = None,
        prefetch: int = 4,
        shuffle_shards: int | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        fill: Mapping[str, Any] | None = None,
        pad: Mapping[str, Any] | None = None,
        mode: str = "steps",
        acknowledge: str | None = None,
        failures: int = 3,
        shard_records: int | None = None,
        shard_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        options: FormatOptions | Mapping[str, Any] | None = None,
        remote: str | None = None,
        decode: str | None = None,
        rescan: str | float | None = None,
        when: str | None = None,
    ) -> None:
        """See the class for the arguments. Raises ``SettingError``."""
        context = self._make_context()
        config = LoaderConfig(batch_size, prefetch, shuffle_shards, failures, mode, acknowledge)
        super().__init__(checked_name(name), config, context)
        self._conversion = BatchConversion(transform, fill, pad)
        self._settings = DataSettings(
            files=None if files is None else texts_of(files),
            format=format,
            columns=(columns,) if isinstance(columns, str) else None if columns is None else tuple(columns),
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            shard_records=shard_records,
            shard_bytes=shard_bytes,
            storage_options=storage_options,
            options=options.given() if isinstance(options, FormatOptions) else FormatOptions.parsed(options or {}),
            remote=remote,
            decode=decode,
            rescan=None if rescan is None else str(rescan),
            when=when,
        )
        if tail is not None:
            tail_named(tail)
        self._begin()

    def _begin(self) -> None:
        """Initialise the state of an unused loader."""
        self._settled: SettledData | None = None
        self._padding = Padding(0, False)
        self._position = LoaderPosition(independent=self._independent)
        self._files = GrowingFiles(self._name, self._position, self._context, self._deps, independent=self._independent)
        self._restored = True
        self._generation = 0
        """Number of restored positions; an iterator is valid for one generation."""
        self._opened: Opened | None = None
        self._reader: FormatReader | None = None
        self._plan: StepPlan | None = None
        self._share: Share | None = None
        self._meter = Meter(self._deps.clock, self._context.waited)

    # --- for framework subclasses ------------------------------------------------------------------------------------

    def _make_context(self) -> WorkerContext:
        """The context of this worker."""
        raise NotImplementedError

    def _tensor(self, array: Any) -> Any:
        """Convert an array of numbers, which is not shared, to a tensor. Called on the reading thread."""
        raise NotImplementedError

    # --- for scripts -------------------------------------------------------------------------------------------------

    def add(self, files: FilePaths, *, when: str = NOW) -> str:
        """Add files to the data set: paths, patterns or URLs, of the same format and columns. Callable on any worker,
        inside the function that ``run`` calls.

        ``when="now"``: they join the current epoch, or the next one if all of its records are used; ``"next-epoch"``:
        the next one. Returns the outcome, which is in the store by then. Files that are already listed are not added
        again. Raises ``DataError`` if nothing is found, or a file is damaged, has other columns, is still being
        written, or has changed since it was listed; ``SettingError`` for another ``when``.
        """
        place, client = self._connect()
        names, source = texts_of(files), self._settle().source
        return self._files.add(client, source, names, when, lambda: self._context.check(place.round))

    @property
    def epoch(self) -> int:
        """The current epoch, from 0. Increases at the end of an iteration. In independent mode it may start higher."""
        if self._ledger is None and self._independent:
            self._connect()
        return 0 if self._ledger is None else self._ledger.epoch

    @property
    def share(self) -> Share | None:
        """The share of the last batch."""
        return self._share

    def progress(self) -> DataProgress:
        """The current progress, including batches that have been returned but not committed."""
        ledger, opened = self._ledger, self._opened
        known = self._files.known
        total = known.records if known is not None else opened.records if opened is not None else -1
        if ledger is None:
            return DataProgress(0, 0, total, 0, opened.shards if opened is not None else 0)
        return DataProgress(ledger.epoch, ledger.records, total, ledger.done_shards, ledger.shards)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, batch by batch. All workers iterate at the same time and get the same
        number of batches."""
        steps = self.shares()
        return (batch for batch, _ in steps)

    def shares(self) -> Iterator[tuple[Any, Share]]:
        """Iterate over the rest of the epoch: each micro-batch with its share in its step."""
        return self._iterate(self._generation)

    def close(self) -> None:
        """Stop reading. The loader can be used again in the next round, once its position has been restored: the Master
        grants nothing twice in a round, and prefetched data are dropped."""
        try:
            if self._client is not None and self._independent:
                (self._deps.trainers.land if self.held else self.done)()
            self._hand_back()  # not after an error: a part of the push may have been applied
        finally:
            self._detach(wait=True)
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    def _hand_back(self) -> None:
        """Let others do what this worker would have done: in independent mode, read the shards that it holds."""
        if self._client is None or self._place is None or self._context.over(self._place.round):
            return
        self._end_prefetcher(wait=True)  # a shard leased after this worker has left would never be read
        if self._independent:
            self._client.gone().done.wait(GONE_S)
            self._restored = True
        else:
            self._client.leave()

    # --- for State ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all workers at a commit."""
        ledger = self._ledger
        return {
            "version": STATE_VERSION,
            "dataset": self._name,
            "ledger": None if ledger is None or self._independent else ledger.state_dict(),
            "files": b"" if ledger is None or self._independent else self._files.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position. Prefetched data are dropped, and existing iterators become invalid.

        Raises ``DataError`` for a position in another data set or order, ``StateError`` if the data set is in use in
        this round.
        """
        if state.get("version") not in (1, STATE_VERSION):
            raise DataError(f"data set {self._name}: unsupported version of a position, {state.get('version')!r}")
        if state["dataset"] != self._name:
            raise DataError(f"the position belongs to the data set {state['dataset']!r}, this one is {self._name!r}")
        ledger = None if state["ledger"] is None else Ledger.load(state["ledger"])
        options = self._settle().options
        if self._context.restart_leases():
            self._opened = None
        elif self._place is not None and not self._context.over(self._place.round):
            where = f"in round {self._place.round}, in which it has been used already"
            raise StateError(
                f"data set {self._name}: its position cannot be restored {where}; restore it before iterating"
            )
        self._detach()
        self._generation += 1
        self._position.restore(ledger)
        self._restored = True
        self._files.restore(state, options)

    # --- iterating ---------------------------------------------------------------------------------------------------

    def _iterate(self, generation: int) -> Iterator[tuple[Any, Share]]:
        while True:
            if generation != self._generation:
                raise StateError(
                    f"data set {self._name}: its position was restored after this iterator was made; create a new "
                    "one with iter(data) inside the function that run calls"
                )
            if self._independent and not self.held:
                self.done()
            if self._step is None and not self._begin_step():
                return
            assert self._step is not None, "a step has begun"  # noqa: S101
            batch, share = self._step.pop()
            self._share = share
            self._meter.count(share.samples)
            self._context.delivered(share.samples)
            if self._step.is_over:
                self._end_step(self._step.ready)
            yield batch, share

    def _begin_step(self) -> bool:
        """Prepare the micro-batches of the next step. Returns False at the end of the epoch."""
        if self._independent and self._unacknowledged.redone:
            self._deps.trainers.push()
        while True:
            place, prefetcher = self._attach()
            if prefetcher.step_sizes.number != self._context.settings() and not self._independent:
                prefetcher = self._resize_steps(place, prefetcher)
            if self._position.next_step is not None or self._plan_steps(place, prefetcher):
                break
            if self._end_epoch(place):
                return False
        step = self._position.next_step
        assert step is not None and self._plan is not None, "planned, after attach"  # noqa: S101
        ready: ReadyStep | None = None
        if step.own[place.rank if not self._independent else 0]:
            if self._independent and self._unacknowledged.must_be_pushed(prefetcher.next_redo()):
                self._deps.trainers.push()
            ready = prefetcher.pop()
            self._padding.remember(self.epoch, ready)
            parts = ready.parts
        else:
            parts = self._padding_parts(step.samples[place.rank], prefetcher)
        logical = self._plan.logical(place.rank) if not self._independent else (-1,)
        self._step = CurrentStep(parts, max(1, sum(step.samples)), logical, self._plan.global_batch, ready)
        return True

    def _padding_parts(self, samples: int, prefetcher: Prefetcher) -> list[tuple[Any, int]]:
        assert self._reader is not None, "attach has opened it"  # noqa: S101
        made = self._padding.make(samples, prefetcher.step_sizes.sizes, self._reader, self._columns)
        return [(self._finish(part), count) for part, count in made]

    def _end_step(self, ready: ReadyStep | None) -> None:
        """The step's last micro-batch is returned: with the next commit all workers' records of it are consumed.
        ``ready``: the step that it came from; None for padding."""
        self._step = None
        self._position.consume()
        if self._independent and ready is not None:
            shards = tuple((one.shard, one.upto, one.complete) for one in ready.offer.taken)
            self._unacknowledged.add(self.epoch, shards, ready.pieces, ready.redo)
        self._meter.tell(self._client, self._name)

    def _plan_steps(self, place: RankAssignment, prefetcher: Prefetcher) -> bool:
        """Agree with all ranks on the next steps. Returns False if there are none."""
        single = place.world_size == 1 or self._independent
        wait = BatchWait(self._name, self._unacknowledged, self._deps)

        def check() -> None:
            self._context.check(place.round)
            if self._independent:
                wait.look()

        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            with self._meter.waiting():
                steps, supply = prefetcher.ready(check)
            offer = self._offer(prefetcher, steps, supply)
            offers = [offer] if single else [decode(data) for data in self._context.exchange(encode(offer))]
            window = plan(offers, self._settle().tail if not self._independent else Tail.JOIN)
            assert self._client is not None, "attached"  # noqa: S101
            self._files.grow_to(window.version, self._client, prefetcher.known, check)
            self._padding.pattern = self._padding.pattern or window.pattern
            if window.steps:
                self._position.plan(window.steps)
                if not self._independent:  # in independent mode, each batch is acknowledged
                    prefetcher.announce([one for step in steps[: len(window.steps)] for one in step.offer.taken])
                return True
            if self._independent and self.held and len(self._unacknowledged):
                self._deps.trainers.push()  # the script cannot know that these were the last; the epoch waits for them
            if window.over:
                return False
            with self._meter.waiting():
                self._pause(pauses.next(), check)

    def _pause(self, pause_s: float, check: Callable[[], None]) -> None:
        while pause_s > 0:
            self._deps.threads.sleep(min(pause_s, LOOK_S))
            check()
            pause_s -= LOOK_S

    def _offer(self, prefetcher: Prefetcher, steps: Sequence[ReadyStep], supply: Supply) -> Offer:
        spare, micros = self._padding.spare(prefetcher.step_sizes.total), len(prefetcher.step_sizes.sizes)
        pattern = self._padding.pattern_of(steps)
        return Offer(tuple(step.offer for step in steps), supply, spare, micros, pattern, prefetcher.known.version)

    def _end_epoch(self, place: RankAssignment) -> bool:
        """Switch to the next epoch. Returns False if this one goes on: a new Master lacks acknowledgements of lost
        workers that were not stored, so their shards have to be read again (independent mode)."""
        assert self._ledger is not None and self._client is not None, "attached"  # noqa: S101
        ledger, client, total = self._ledger, self._client, self.progress().of_records
        if not ledger.records and not ledger.done_shards and not self._independent:
            raise DataError(self._nothing())
        dropped = 0
        if self._settle().tail is Tail.DROP and not self._independent:
            dropped = max(1, total - ledger.records)  # at least 1, because files may have joined just now
            if place.rank == 0 and ledger.done_shards < ledger.shards:
                left = f"{dropped:,}" if total >= 0 else "some"
                note(f"data set {self._name}: {left} records of epoch {ledger.epoch} are skipped (tail=drop)")
        self._end_prefetcher()
        if self._independent:
            epoch = self._next_independent_epoch(place, client, ledger.epoch)
            if epoch == ledger.epoch:
                return False
            self._position.start_epoch(epoch)  # the other workers may be in a later one
            return True
        if place.rank == 0:
            self._files.rescan_at_epoch_end(place, client, self._settle().source)
        # First, so that a new Master gets the new epoch, of which others may already have shards.
        self._position.next_epoch()
        asked = client.next_epoch(ledger.epoch, dropped, tell=place.rank == 0)
        if asked is not None:
            client.wait(asked, lambda: self._context.check(place.round), Done)
        return True

    def _next_independent_epoch(self, place: RankAssignment, client: LeaseClient, epoch: int) -> int:
        """Independent mode: begin the next epoch, unless another worker has. Returns the one to read now."""

        def check() -> None:
            self._context.check(place.round)

        if self._settle().source.rescan == EPOCH:  # whoever begins the epoch must have looked for files before
            pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            until_s = self._deps.clock.now_s() + RANK_0_LOOKS_S
            while (now := client.epoch_after(client.begun_epoch(epoch), check)) == epoch:
                if self.rank == 0 or self._deps.clock.now_s() >= until_s:
                    break
                self._pause(pauses.next(), check)
            if now != epoch:
                return now
            self._files.rescan_at_epoch_end(place, client, self._settle().source)
        asked = client.next_epoch(epoch + 1, 0, tell=True)
        assert asked is not None, "it was sent"  # noqa: S101
        return client.epoch_after(asked, check)

    def _nothing(self) -> str:
        assert self._ledger is not None  # noqa: S101
        which = f"data set {self._name}: not a single record of epoch {self._ledger.epoch}"
        troubles = self._prefetcher.troubles if self._prefetcher is not None else []
        if self._settle().tail is Tail.DROP and not troubles:
            return f"{which} fills a whole step of all workers (tail=drop); use a smaller batch_size or fewer workers"
        reason = f", such as: {troubles[-1]}" if troubles else ""
        return f"{which} could be read: all {self._ledger.shards} shards were skipped{reason}"

    # --- attaching ---------------------------------------------------------------------------------------------------

    def _attach(self) -> tuple[RankAssignment, Prefetcher]:
        """Join the current round and start a prefetcher."""
        place, _ = self._connect()
        if self._prefetcher is None:
            self._prefetcher = self._new_prefetcher(place, LeasedShards())
        return place, self._prefetcher

    def _connect(self) -> tuple[RankAssignment, LeaseClient]:
        """Join the current round: open the data set there if that has not been done. Raises ``StateError``."""
        place = self._context.place()
        changed = self._place is None or place.round != self._place.round
        if self._client is None or (changed and not self._lasting):
            if not self._restored and self._place is not None and place.round == self._place.round:
                raise StateError(f"data set {self._name}: it was closed in this round; use it again in the next")
            if not self._restored:
                raise StateError(
                    f"data set {self._name}: the world has changed and its position was not restored; "
                    "put it into the state: State(data=data, ...)"
                )
            self._detach()
            self._open(place)
            self._restored = False
        client = self._client
        assert client is not None, "it has been opened"  # noqa: S101
        if not client.heard:
            raise StateError(
                f"this script uses two data sets named {self._name} at once; each would consume the other's records. "
                "Give them different names, or use one object"
            )
        return place, client

    def _open(self, place: RankAssignment) -> None:
        settled = self._settle()
        source, options = settled.source, settled.options
        where = self._context.where if self._lasting else None
        at = self._context.transport(), self._name, place.round, place.rank
        position, independent = self._position.announced, self._independent
        client = LeaseClient(*at, position, where, self._deps, independent=independent)  # type: ignore[arg-type]

        def check() -> None:
            self._context.check(place.round)

        def register() -> None:
            self._files.register(client, source, options, check)

        self._files.listen(place, client, source)
        try:
            if place.rank == 0 and self._opened is None:
                register()
            epoch, digest = (self._ledger.epoch, self._ledger.digest) if self._ledger is not None else (0, "")
            if self._lasting:
                opened = open_lasting(self, client, place.rank == 0, register, check)
            else:
                opened = client.wait(client.open(epoch, digest), check, Opened)
        except BaseException:
            client.close()
            raise
        if self._ledger is None:
            seed, shuffle = options.seed, options.shuffle
            ledger = Ledger(opened.digest, opened.shards, seed=seed, shuffle=shuffle, epoch=opened.epoch)
            self._position.restore(ledger)
        self._files.fit_position(client, opened, options, check)
        if self._independent and opened.epoch != self._position.known.epoch:
            self._position.known.start(opened.epoch)
        if self._reader is None:
            self._reader = source.typed(dict(opened.types)).reader(opened.format, place.rank)
        self._client, self._opened, self._place = client, opened, place
        self._files.rescan_periodically(place, client, source)
        self._padding.pattern = ""

    def _settle(self) -> SettledData:
        """Resolve the settings with those of the launcher."""
        if self._settled is None:
            settings = self._settings.settle(self._name, self._context.environment())
            mode, failures = MODES[self._config.mode], self._config.failures
            options = DataSetOptions(settings.seed or 0, bool(settings.shuffle), mode, failures)
            self._settled = SettledData(settings.source(self._name), options, tail_named(settings.tail or ""))
            self._padding = Padding(options.seed, options.shuffle)
        return self._settled

    @property
    def _ledger(self) -> Ledger | None:
        return self._position.ledger

    @property
    def _lasting(self) -> bool:
        """True if the loader outlives rounds."""
        return self._independent and self._context.where() is not None

    def _new_prefetcher(self, place: RankAssignment, held: LeasedShards) -> Prefetcher:
        assert self._client is not None and self._reader is not None  # noqa: S101
        independent, config, settled = self._independent, self._config, self._settle()
        step_sizes, self._plan = self._context.step_sizes(config.batch_size, place)
        order = ReadOrder(
            settled.options.seed,
            self.epoch,
            settled.options.shuffle,
            config.mixed_shards if settled.options.shuffle else 1,
            independent or settled.tail is not Tail.DROP,
            config.mixed_bytes,
        )
        prefetcher = Prefetcher(
            self._client,
            self._reader,
            order,
            StepSizes((config.batch_size,)) if independent else step_sizes,
            prefetch=config.prefetch,
            columns=self._columns,
            finish=self._finish,
            over=lambda: self._context.over(place.round),
            held=held,
        )
        prefetcher.start()
        return prefetcher

    def _resize_steps(self, place: RankAssignment, prefetcher: Prefetcher) -> Prefetcher:
        """New settings apply from this step on, on all ranks: prepared steps are made again with other sizes. All ranks
        have agreed on these steps and none has returned them, so all drop them."""
        prefetcher.stop(wait=True)
        self._position.drop_planned()
        self._prefetcher = self._new_prefetcher(place, prefetcher.held)
        return self._prefetcher

    def _end_prefetcher(self, wait: bool = False) -> None:
        prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher is not None:
            prefetcher.stop(wait)

    def _detach(self, wait: bool = False) -> None:
        """Drop everything that belongs to a round, except the position."""
        self._end_prefetcher(wait)
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._position.drop_planned()
        self._step = None
        self._unacknowledged.clear()

    # --- batches -----------------------------------------------------------------------------------------------------

    def _columns(self, table: Any) -> Columns:
        return self._conversion.columns(table)

    def _finish(self, columns: Columns) -> Any:
        """Convert a micro-batch to what the script gets. Called on the reading thread."""
        return self._conversion.finish(columns, self._tensor)
