"""Mode "free" under faults: trainers that read at their own pace, acknowledge, fall silent, die and roll back.

For every record that the Master counts, the simulation looks whether the trainer that acknowledged it has processed it
since the position was last rolled back; and what a trainer is told to count must be what the Master counts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from data_service.leases.lease_table import LeaseTable
from data_service.protocol.file_list_messages import AddFiles
from data_service.protocol.messages import (
    INDEPENDENT,
    MORE,
    Ack,
    Commit,
    DataRefused,
    DataSetOptions,
    Done,
    Gone,
    Lease,
    LeasesGranted,
    NextEpoch,
    Open,
    Opened,
    ReaderList,
    RegisterFiles,
    Request,
    Rollback,
    decode,
    encode,
    ranges,
)
from edl.master.service import Caller, WorldBegan, WorldEnded
from edl.types import Round
from edl.wire.messages import World
from tests.sim.lease_net import Shell, Violation, made_up, world_of

NAME = "clicks"
Record = tuple[int, int]


@dataclass
class Trainer:
    """A trainer process."""

    caller: Caller
    rank: int
    round: int
    ids: int
    epoch: int = 0
    fence: int = 0
    hands: dict[int, int] = field(default_factory=dict)
    """Shard, read up to."""
    told: dict[int, int] = field(default_factory=dict)
    """Acknowledged up to, answered or not."""
    processed: set[Record] = field(default_factory=set)
    """Since the fence and in the epoch of its present leases."""
    said: dict[int, int] = field(default_factory=dict)
    """Ever acknowledged, or reported with a failure, up to."""
    unkept: list[tuple[int, tuple[tuple[int, int, bool], ...]]] = field(default_factory=list)
    waiting: Request | None = None
    queue: list[Request] = field(default_factory=list)
    opened: bool = False
    reset: bool = False
    silent_until_s: float = 0.0
    state: str = MORE


class FreeSim:
    """A random history of independent trainers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.manifest = made_up(rng, rng.choice(("ipc", "text")))
        counts = map(self.manifest.count, range(len(self.manifest)))
        self.sizes = [rng.choice((0, 1, 3, 6)) if count < 0 else count for count in counts]
        self.options = DataSetOptions(rng.randrange(100), rng.random() < 0.7, INDEPENDENT, failures=rng.randint(1, 3))
        self.poison = {shard: rng.randint(0, size) for shard, size in enumerate(self.sizes) if rng.random() < 0.1}
        self.faults = rng.choice((0.0, 0.01, 0.03, 0.08))
        self.epochs = rng.randint(1, 3)
        self.flight: list[tuple[Caller, int, str]] = []
        self.answers: list[tuple[Caller, int, str]] = []
        self.speaking = 0
        self.shell = Shell(rng, self._told)
        self.round = 0
        self.world: World | None = None
        self.trainers: dict[Caller, Trainer] = {}
        self.former: list[Trainer] = []
        self.owner: dict[Record, Trainer] = {}
        """Of the present epoch: who has processed what the Master counts."""
        self.table: LeaseTable | None = None
        self.life = 0
        """Which Master it is the table of."""
        self.now = (0, 0)
        """Epoch and fence."""
        self.whole: list[int] = []
        """Records counted in each epoch that is over."""
        self.names: list[str] = []
        self.history = 1
        self.lost = False
        """The position has gone back to what was kept: what trainers believe may be wrong until they open again."""
        self.events = 0

    def play(self, steps: int = 600) -> None:
        """Faults for a while, then none until all epochs are over."""
        self._begin_round()
        for _ in range(steps):
            if self.rng.random() < self.faults:
                self._fault()
            self._act()
            if self._over():
                break
        self.faults = 0.0
        for _ in range(20000):
            if self._over():
                break
            self._act()
        else:
            raise Violation(f"no end: {self.shell.machine.report()}, {list(self.trainers.values())}")
        self._check_epochs()

    def _over(self) -> bool:
        data = self.shell.machine.sets.get(NAME)
        return data is not None and data.table is not None and data.table.epoch >= self.epochs

    def _act(self) -> None:
        self.events += 1
        kind = self.rng.random()
        if kind < 0.35 and (self.flight or self.answers):
            self._deliver()
        elif kind < 0.4:
            self.shell.pass_time(self.rng.choice((0.01, 0.1, 1.0, 3.0)))
            self._watch(None)
        else:
            trainer = self.rng.choice(list(self.trainers.values()))
            if trainer.silent_until_s <= self.shell.now_s:
                self._move(trainer)

    # --- faults ------------------------------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self.round += 1
        self.world = world_of(self.round, [self.rng.randint(1, 2) for _ in range(self.rng.randint(1, 3))])
        before, self.trainers = self.trainers, {}
        for member in self.world.members:
            for slot in range(member.slots):
                caller = Caller(member.node, slot)
                trainer = before.get(caller)
                if trainer is None or self.rng.random() < 0.3:
                    self.former += [trainer] if trainer else []
                    trainer = Trainer(caller, 0, 0, self.rng.choice((0, 5)))
                trainer.rank, trainer.round = member.first_rank + slot, self.round
                trainer.reset, trainer.opened = True, False
                self.trainers[caller] = trainer
        self.former += [one for caller, one in before.items() if caller not in self.trainers]
        self.shell.feed(WorldBegan(self.world))
        self._watch(None)

    def _fault(self) -> None:
        kinds = "world master cut lose again silent die commit commit rollback gone restore"
        kind = self.rng.choice(kinds.split())
        trainer = self.rng.choice(list(self.trainers.values()))
        if kind == "world":
            self.shell.feed(WorldEnded(Round(self.round), "a node left"))
            if self.rng.random() < 0.3:
                self._lose_master(None)
            self._begin_round()
        elif kind == "master":
            self._lose_master(self.world)
        elif kind == "cut":
            self._cut(trainer)
        elif kind == "lose":
            for box in (self.flight, self.answers):
                if box:
                    box.pop(self.rng.randrange(len(box)))
        elif kind == "again" and trainer.waiting is not None:
            self._send(trainer, trainer.waiting)
        elif kind == "silent":
            trainer.silent_until_s = self.shell.now_s + self.rng.choice((5.0, 40.0, 100.0))
        elif kind == "die":
            self._cut(trainer)
            self.former.append(trainer)
            fresh = Trainer(trainer.caller, trainer.rank, trainer.round, self.rng.choice((0, trainer.ids)), reset=True)
            self.trainers[trainer.caller] = fresh
        elif trainer.opened:
            self._ask_rarely(trainer, kind)

    def _ask_rarely(self, trainer: Trainer, kind: str) -> None:
        if kind == "commit":
            name = f"c{len(self.names)}"
            trainer.queue.append(Commit(0, NAME, name))
        elif kind == "rollback" and self.names:
            trainer.queue.append(Rollback(0, NAME, self.rng.choice(self.names[-4:])))
        elif kind == "restore" and self.names:
            # Several trainers begin from one checkpoint of the parameters: it is done once.
            self.history += self.rng.random() < 0.4
            trainer.queue.append(Rollback(0, NAME, self.rng.choice(self.names[-4:]), history=self.history))
        elif kind == "gone" and not trainer.queue and trainer.waiting is None and not trainer.unkept:
            trainer.queue += [Gone(0, NAME), self._open(trainer)]
            trainer.hands, trainer.told = {}, {}

    def _lose_master(self, world: World | None) -> None:
        if self.flight and self.rng.random() < 0.7:
            self._say(*self.flight.pop(), dies=self.rng.choice(("before", "between")))
        for trainer in self.trainers.values():
            self._cut(trainer)
        self.shell.start(world)
        self.lost = True
        self._watch(None)

    def _cut(self, trainer: Trainer) -> None:
        self.flight = [one for one in self.flight if one[0] != trainer.caller]
        self.answers = [one for one in self.answers if one[0] != trainer.caller]
        trainer.reset = True

    # --- the network -------------------------------------------------------------------------------------------------

    def _told(self, caller: Caller, body: str) -> None:
        self.answers.append((caller, self.speaking, body))

    def _send(self, trainer: Trainer, word: Request) -> None:
        if not trainer.reset:
            self.flight.append((trainer.caller, trainer.round, encode(word)))

    def _say(self, caller: Caller, number: int, body: str, dies: str = "") -> None:
        self.speaking = number
        self.shell.say(caller, number, body, dies)
        if dies != "before":
            self._watch(self.trainers.get(caller) if number == self.round else None)
        self.speaking = self.round

    def _deliver(self) -> None:
        if self.flight and (not self.answers or self.rng.random() < 0.5):
            self._say(*self.flight.pop(self.rng.randrange(len(self.flight))))
            return
        caller, number, body = self.answers.pop(self.rng.randrange(len(self.answers)))
        trainer = self.trainers.get(caller)
        if trainer is not None and number == trainer.round:
            self._heard(trainer, body)

    # --- the Master's account ----------------------------------------------------------------------------------------

    def _counts(self, table: LeaseTable) -> dict[int, int]:
        ledger = table.ledger
        return {shard: size if ledger.is_done(shard) else ledger.count(shard) for shard, size in enumerate(self.sizes)}

    def _watch(self, speaker: Trainer | None) -> None:
        """Compare what the Master counts now with what was processed."""
        data = self.shell.machine.sets.get(NAME)
        if data is None or data.table is None:
            return
        now = (data.table.epoch, data.independent.fence)
        if now != self.now:
            if self.table is not None and self.life == self.shell.lives and now[1] == self.now[1]:
                self._compare(self._counts(self.table), speaker)  # the last word of an epoch may also have ended it
            if now[0] > self.now[0] and now[1] == self.now[1]:
                self.whole.append(len(self.owner))
            elif now[1] != self.now[1]:
                del self.whole[now[0] :]
            self.owner = {} if now[0] != self.now[0] else self.owner
            if now[1] != self.now[1]:
                self._rolled_back(now)
            self.now = now
        self.table, self.life = data.table, self.shell.lives
        self._compare(self._counts(data.table), speaker)

    def _compare(self, counts: dict[int, int], speaker: Trainer | None) -> None:
        for record in [record for record in self.owner if record[1] >= counts[record[0]]]:
            del self.owner[record]
        for shard, count in counts.items():
            for place in range(count):
                if (shard, place) not in self.owner:
                    self._counted(speaker, (shard, place))

    def _rolled_back(self, now: tuple[int, int]) -> None:
        """Records that count now were processed before the rollback; later ones must be processed again."""
        ghost = Trainer(Caller(self.world.members[0].node, 99), 99, 0, 0) if self.world else None
        counts = self._counts(self.shell.machine.sets[NAME].position)
        assert ghost is not None
        self.owner = {(shard, place): ghost for shard, count in counts.items() for place in range(count)}
        for trainer in (*self.trainers.values(), *self.former):
            trainer.processed.clear()

    def _counted(self, speaker: Trainer | None, record: Record) -> None:
        """Somebody has said it; perhaps long ago, when its word had to wait, and perhaps it is dead."""
        data = self.shell.machine.sets[NAME]
        by = data.independent.acknowledged_by.get(record[0]) or data.position.holders.get(record[0])
        likely = self.trainers.get(by) if by else None
        for one in (likely, speaker, *self.trainers.values(), *self.former):
            said = one.said.get(record[0], 0) if one and (one.epoch, one.fence) == self.now else 0
            if one is not None and record in one.processed and said > record[1]:
                self.owner[record] = one
                return
        who = None if speaker is None else speaker.caller
        raise Violation(f"record {record} is counted for {who}, who has not processed it ({self.now})")

    def _believed(self, trainer: Trainer, shards: tuple[tuple[int, int, bool], ...], refused: set[int]) -> None:
        """The trainer has been told that this counts."""
        for shard, upto, _ in shards:
            for place in range(upto):
                owner = self.owner.get((shard, place))
                if shard not in refused and (shard, place) in trainer.processed and owner is not trainer:
                    raise Violation(f"{trainer.caller} believes in record {(shard, place)}, the Master does not")

    # --- a trainer ---------------------------------------------------------------------------------------------------

    def _open(self, trainer: Trainer) -> Open:
        acks = tuple((shard, upto, False) for shard, upto in trainer.told.items())
        acks += tuple(ack for _, one in trainer.unkept for ack in one if ack[2])
        granted = ranges(trainer.hands)
        return Open(0, NAME, trainer.rank, trainer.epoch, granted=granted, acks=acks, fence=trainer.fence)

    def _move(self, trainer: Trainer) -> None:
        if trainer.reset:
            self._reattached(trainer)
        elif trainer.waiting is None and trainer.queue:
            word = trainer.queue.pop(0)
            trainer.ids += 1
            if isinstance(word, Open):
                word = self._open(trainer)
            trainer.waiting = replace(word, id=trainer.ids)
            self._send(trainer, trainer.waiting)
        elif trainer.waiting is not None:
            if self.rng.random() < 0.05:
                self._send(trainer, trainer.waiting)
        elif trainer.opened:
            self._work(trainer)

    def _reattached(self, trainer: Trainer) -> None:
        trainer.reset = False
        pending = [word for word in (trainer.waiting, *trainer.queue) if word is not None]
        for word in pending:
            if isinstance(word, Ack):
                trainer.unkept.append((1 << 60, word.shards))
            elif isinstance(word, Lease) and word.finished:
                trainer.unkept.append((1 << 60, tuple((shard, count, True) for shard, count in word.finished)))
        again: list[Request] = [self._open(trainer)]
        if trainer.rank == 0:
            again.insert(0, RegisterFiles(0, NAME, self.manifest.encode(), self.options))
        trainer.queue = again + [word for word in pending if isinstance(word, Commit | NextEpoch)]
        trainer.waiting = None

    def _heard(self, trainer: Trainer, body: str) -> None:
        word = decode(body)
        if isinstance(word, AddFiles | ReaderList) or trainer.waiting is None or word.id != trainer.waiting.id:
            return
        asked, trainer.waiting = trainer.waiting, None
        if isinstance(word, DataRefused):
            self._refused(trainer, asked, word)
            return
        if isinstance(word, LeasesGranted | Done | Opened):
            self._account(trainer, asked, word)
        if isinstance(word, Opened):
            self._opened(trainer, word)
        elif isinstance(word, LeasesGranted) and word.epoch == trainer.epoch:
            trainer.state = word.state
            for given in word.leases:
                shard = given.shard.index
                self._discard(trainer, shard, min(given.upto, trainer.said.get(shard, 0)))
                trainer.hands[given.shard.index] = trainer.told[given.shard.index] = given.upto
        elif isinstance(asked, Commit):
            self.names.append(asked.name)
        elif isinstance(asked, NextEpoch):
            self._turn(trainer, asked.epoch, trainer.fence)
        elif isinstance(asked, Rollback):
            trainer.queue.insert(0, self._open(trainer))
        elif not isinstance(asked, RegisterFiles | Ack | Lease | Gone):
            raise Violation(f"{word} answers {asked}")
        if isinstance(asked, Gone):
            trainer.opened = False

    def _account(self, trainer: Trainer, asked: Request, word: LeasesGranted | Done | Opened) -> None:
        """Check which acknowledgements count and which need not be repeated."""
        gone = {shard for shard, _ in word.refused}
        if isinstance(asked, Ack):
            kept = tuple(one for one in asked.shards if one[0] not in gone)
            trainer.unkept.append((word.number, kept))
            if asked.epoch == self.now[0] and trainer.fence == self.now[1] and not self.lost:
                self._believed(trainer, asked.shards, gone)
        trainer.unkept = [(number, one) for number, one in trainer.unkept if number > word.kept]
        trainer.unkept = [(at, tuple(one for one in acks if one[0] not in gone)) for at, acks in trainer.unkept]
        for shard in gone:
            trainer.hands.pop(shard, None)
            trainer.told.pop(shard, None)
            self._discard(trainer, shard)

    def _discard(self, trainer: Trainer, shard: int, but: int = 0) -> None:
        """The trainer lost this shard: drop what it processed beyond the first ``but`` records."""
        trainer.processed -= {(shard, place) for place in range(but, self.sizes[shard])}

    def _refused(self, trainer: Trainer, asked: Request, word: DataRefused) -> None:
        if word.kind == "old":
            trainer.ids = max(trainer.ids, word.last)
            trainer.queue.insert(0, asked)
        elif word.kind in ("unopened", "stale"):
            trainer.queue = [self._open(trainer)]
        elif not (isinstance(asked, NextEpoch) and word.kind in ("epoch", "unfinished")) and word.kind != "commit":
            raise Violation(f"{trainer.caller}: {asked} was refused: {word.kind}: {word.text}")

    def _opened(self, trainer: Trainer, word: Opened) -> None:
        trainer.opened = True
        if (trainer.epoch, trainer.fence) != (word.epoch, word.fence):
            self._turn(trainer, word.epoch, word.fence)
        if all(trainer.opened for trainer in self.trainers.values()):
            self.lost = False

    def _turn(self, trainer: Trainer, epoch: int, fence: int) -> None:
        trainer.epoch, trainer.fence, trainer.state = epoch, fence, MORE
        trainer.hands, trainer.told, trainer.unkept = {}, {}, []
        trainer.processed, trainer.said = set(), {}

    def _work(self, trainer: Trainer) -> None:
        shard = self.rng.choice(list(trainer.hands)) if trainer.hands else -1
        if shard < 0 or self.rng.random() < 0.2:
            self._lease(trainer)
            return
        stop = min(self.sizes[shard], self.poison.get(shard, 1 << 30))
        upto = min(stop, trainer.hands[shard] + self.rng.randint(1, 4))
        trainer.processed |= {(shard, place) for place in range(trainer.hands[shard], upto)}
        trainer.hands[shard] = upto
        if upto == self.poison.get(shard):
            del trainer.hands[shard], trainer.told[shard]
            trainer.said[shard] = upto
            trainer.queue.append(Lease(0, NAME, trainer.epoch, 0, (), ((shard, upto, "damaged"),)))
        elif self.rng.random() < 0.6 or upto == self.sizes[shard]:
            complete = upto == self.sizes[shard]
            trainer.told[shard] = trainer.said[shard] = upto
            if complete:
                del trainer.hands[shard], trainer.told[shard]
            trainer.queue.append(Ack(0, NAME, trainer.epoch, ((shard, upto, complete),)))

    def _lease(self, trainer: Trainer) -> None:
        if trainer.state == "finished" and not trainer.hands:
            trainer.queue.append(NextEpoch(0, NAME, trainer.epoch + 1))
            trainer.state = MORE
        else:
            trainer.queue.append(Lease(0, NAME, trainer.epoch, self.rng.randint(1, 3)))

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _check_epochs(self) -> None:
        left_out = self.shell.machine.sets[NAME].quarantine
        if set(left_out) - set(self.poison):
            raise Violation(f"shards {sorted(set(left_out) - set(self.poison))} were left out and can be read")
        if left_out and f"data/{NAME}" not in self.shell.flaws:
            raise Violation("shards are left out and nobody is told")
        most = sum(self.sizes)
        least = most - sum(self.sizes[shard] for shard in left_out)
        for epoch, counted in enumerate(self.whole):
            if not least <= counted <= most:
                raise Violation(f"epoch {epoch} ended with {counted} records of {least} to {most}")
