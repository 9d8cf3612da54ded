"""Mode "steps" under faults: ranks that lease, announce to each other, commit, die and come back, and a Master that
is replaced at any moment. What the ranks have committed is compared record by record.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from data_service.file_list import FileList
from data_service.ledger import Ledger
from data_service.protocol.file_list_messages import NEXT_EPOCH, NOW, AddFiles, Grow, Grown
from data_service.protocol.messages import (
    FINISHED,
    MORE,
    DataRefused,
    DataSetOptions,
    FilesRegistered,
    Lease,
    LeasesGranted,
    NextEpoch,
    Open,
    Opened,
    ReaderList,
    ReadRate,
    RegisterFiles,
    Request,
    decode,
    encode,
    ranges,
)
from edl.master.service import Caller, WorldBegan, WorldEnded
from edl.types import Round
from edl.wire.messages import World
from tests.sim.lease_net import Shell, Violation, grown, made_up, world_of

NAME = "train"


@dataclass
class Hand:
    """A shard that a rank reads."""

    shard: int
    at: int
    """Read up to here; announced up to ``told``."""
    told: int
    read_out: bool = False
    announced: bool = False
    """All of it: to be reported as finished."""
    broken: str = ""


@dataclass
class Take:
    """Records of a shard that one step consumes."""

    shard: int
    begin: int
    upto: int
    complete: bool


@dataclass
class Offer:
    """What a rank contributes to an exchange."""

    takes: list[Take]
    over: bool
    dry: bool
    version: int = 0


@dataclass
class RankSide:
    """The loader of one rank, in one round."""

    rank: int
    caller: Caller
    ledger: Ledger | None = None
    step: int = 0
    """Exchanges whose result it has."""
    offered: int = 0
    ids: int = 0
    waiting: Request | None = None
    queue: list[Request] = field(default_factory=list)
    hands: dict[int, Hand] = field(default_factory=dict)
    granted: set[int] = field(default_factory=set)
    finished: dict[int, int] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    returned: dict[int, int] = field(default_factory=dict)
    state: str = MORE
    version: int = 0
    """Segments of the list that it knows its epoch to consist of."""
    opened: bool = False
    reset: bool = False
    """The stream was lost: ``Reattached`` is on its way."""


class StepsSim:
    """A random history of workers in step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.manifest = made_up(rng, rng.choice(("ipc", "jsonl")))
        self.sizes = [
            rng.choice((0, 1, 3, 6)) if ref < 0 else ref for ref in map(self.manifest.count, range(len(self.manifest)))
        ]
        self.options = DataSetOptions(rng.randrange(100), rng.random() < 0.7, failures=rng.randint(1, 3))
        self.poison: dict[int, tuple[int, set[int] | None]] = {}
        for shard, size in enumerate(self.sizes):
            if rng.random() < 0.12:
                ranks = None if rng.random() < 0.5 else {rng.randrange(3)}
                self.poison[shard] = (rng.randint(0, size), ranks)
        self.faults = rng.choice((0.0, 0.01, 0.03, 0.08))
        self.drop_rule = rng.random() < 0.15
        self.epochs = rng.randint(1, 3)
        self.flight: list[tuple[Caller, int, str]] = []
        self.answers: list[tuple[Caller, int, str]] = []
        self.shell = Shell(rng, self._told)
        self.round = 0
        self.speaking = 0
        """Round of the word that is being answered: streams keep words in order, so no worker hears of an older one."""
        self.world: World | None = None
        self.ranks: dict[Caller, RankSide] = {}
        self.offers: dict[int, dict[int, Offer]] = {}
        self.commits: list[Ledger] = [Ledger.of(self.manifest, seed=self.options.seed, shuffle=self.options.shuffle)]
        """Ledger of each commit in the present history."""
        self.history: list[list[tuple[int, Take]]] = [[]]
        """What each commit has added: epoch and take."""
        self.dropped: dict[int, bool] = {}
        self.trace: list[str] = []
        self.events = 0
        self.growing = rng.random() < 0.5
        self.added = 0

    # --- one history -------------------------------------------------------------------------------------------------

    def play(self, steps: int = 700) -> None:
        """Faults for a while, then none until all epochs are over."""
        self._begin_round(0)
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
            raise Violation(f"no end: {self._situation()}")
        self._check_history()

    def _over(self) -> bool:
        return bool(self.ranks) and all(
            side.ledger and side.ledger.epoch >= self.epochs for side in self.ranks.values()
        )

    def _act(self) -> None:
        self.events += 1
        kind = self.rng.random()
        if kind < 0.35 and (self.flight or self.answers):
            self._deliver()
        elif kind < 0.37:
            self.shell.pass_time(self.rng.choice((0.1, 1.0, 6.0)))
        elif self.ranks:
            self._move(self.rng.choice(list(self.ranks.values())))
        else:
            self._begin_round(self.rng.randrange(len(self.commits)))

    # --- rounds ------------------------------------------------------------------------------------------------------

    def _begin_round(self, commit: int) -> None:
        """A new world begins from this commit."""
        self.round += 1
        self.world = world_of(self.round, [self.rng.randint(1, 2) for _ in range(self.rng.randint(1, 3))])
        del self.commits[commit + 1 :], self.history[commit + 1 :]
        self.offers = {}
        last = {caller: side.ids for caller, side in self.ranks.items()}
        self.ranks = {}
        for member in self.world.members:
            for slot in range(member.slots):
                caller = Caller(member.node, slot)
                side = RankSide(member.first_rank + slot, caller, self.commits[commit].copy(), commit, commit)
                side.ids = last.get(caller, 0) if self.rng.random() < 0.7 else 0
                if side.rank == 0:
                    side.queue.append(RegisterFiles(0, NAME, self.manifest.encode(), self.options))
                side.queue.append(self._open(side))
                self.ranks[caller] = side
        self.shell.feed(WorldBegan(self.world))
        self.trace.append(f"round {self.round} from commit {commit}: {len(self.ranks)} ranks")

    def _fault(self) -> None:
        kind = self.rng.choice(("world", "master", "stream", "lose", "again", "stale", "nonsense", "pace", "grow"))
        self.trace.append(kind)
        if kind == "world":
            self.shell.feed(WorldEnded(Round(self.round), "a rank died"))
            if self.rng.random() < 0.3:
                self._lose_master(None)
            self._begin_round(self.rng.choice((len(self.commits) - 1, self.rng.randrange(len(self.commits)))))
        elif kind == "master":
            self._lose_master(self.world)
        elif kind == "stream" and self.ranks:
            side = self.rng.choice(list(self.ranks.values()))
            self._cut(side)
        elif kind == "lose":
            if self.flight:
                self.flight.pop(self.rng.randrange(len(self.flight)))
            if self.answers:
                self.answers.pop(self.rng.randrange(len(self.answers)))
        elif kind == "again":
            for side in self.ranks.values():
                if side.waiting is not None:
                    self._send(side, side.waiting)
        elif kind == "grow":
            self._grow()
        elif self.ranks:
            self._nonsense(self.rng.choice(list(self.ranks.values())), kind)

    def _grow(self) -> None:
        """Let a random rank find new files."""
        able = [side for side in self.ranks.values() if side.opened and not side.queue and side.ledger is not None]
        if not self.growing or not able or self.added >= 4:
            return
        side = self.rng.choice(able)
        assert side.ledger is not None
        self.added += 1
        more = grown(self.rng, self.manifest.format, self.added)
        when = self.rng.choice((NOW, NOW, NEXT_EPOCH))
        epoch = side.ledger.epoch + (side.ledger.done_shards == side.ledger.shards)
        side.queue.append(Grow(0, NAME, more.encode(), epoch, when))

    @property
    def files(self) -> FileList:
        """The list as the Master has it."""
        return self.shell.machine.sets[NAME].listed

    def size(self, shard: int) -> int:
        """Number of records in a shard."""
        while len(self.sizes) <= shard:
            known = self.files.manifest.count(len(self.sizes))
            self.sizes.append(known if known >= 0 else self.rng.choice((0, 1, 3)))
        return self.sizes[shard]

    def _nonsense(self, side: RankSide, kind: str) -> None:
        if kind == "stale":
            word: Request = Lease(10**6, NAME, 0, 5)
            self.shell.say(side.caller, self.round - 1, encode(word))
        elif kind == "pace":
            self.shell.say(side.caller, self.round, encode(ReadRate(0, NAME, 5.0)))
        else:
            self.shell.say(side.caller, self.round, self.rng.choice(("", "{}", "[1]", '{"word":"lease","id":"x"}')))

    def _lose_master(self, world: World | None) -> None:
        if self.flight and self.rng.random() < 0.7:
            caller, number, body = self.flight.pop(self.rng.randrange(len(self.flight)))
            self._say(caller, number, body, self.rng.choice(("before", "between")))
        for side in self.ranks.values():
            self._cut(side)
        self.shell.start(world)

    def _cut(self, side: RankSide) -> None:
        """Break the connection: messages in flight are lost, and the rank is notified."""
        self.flight = [one for one in self.flight if one[0] != side.caller]
        self.answers = [one for one in self.answers if one[0] != side.caller]
        side.reset = True

    # --- the network -------------------------------------------------------------------------------------------------

    def _told(self, caller: Caller, body: str) -> None:
        self.answers.append((caller, self.speaking, body))

    def _say(self, caller: Caller, number: int, body: str, dies: str = "") -> None:
        self.speaking = number
        self.shell.say(caller, number, body, dies)
        self.speaking = self.round

    def _send(self, side: RankSide, word: Request) -> None:
        if not side.reset:
            self.flight.append((side.caller, self.round, encode(word)))

    def _deliver(self) -> None:
        if self.flight and (not self.answers or self.rng.random() < 0.5):
            caller, number, body = self.flight.pop(self.rng.randrange(len(self.flight)))
            self._say(caller, number, body)
            return
        caller, number, body = self.answers.pop(self.rng.randrange(len(self.answers)))
        side = self.ranks.get(caller)
        if number == self.round and side is not None:
            self._heard(side, body)

    # --- a rank ------------------------------------------------------------------------------------------------------

    def _open(self, side: RankSide) -> Open:
        assert side.ledger is not None
        return Open(
            0,
            NAME,
            side.rank,
            side.ledger.epoch,
            side.ledger.encode() if side.rank == 0 else "",
            self.manifest.digest if self.rng.random() < 0.5 else "",
            ranges(side.granted),
            ranges(set(side.finished) & side.granted),
            tuple(side.returned.items()),
        )

    def _move(self, side: RankSide) -> None:
        if side.reset:
            self._reattached(side)
        elif side.waiting is None and side.queue:
            word = side.queue.pop(0)
            side.ids += self.rng.choice((1, 1, 2))
            if isinstance(word, Open):
                word = self._open(side)
            side.waiting = replace(word, id=side.ids)
            self._send(side, side.waiting)
        elif side.waiting is not None and self.rng.random() < 0.05:
            self._send(side, side.waiting)  # it has grown impatient
        elif side.opened:
            self._work(side)

    def _reattached(self, side: RankSide) -> None:
        side.reset = False
        pending = [word for word in (side.waiting, *side.queue) if word is not None]
        again: list[Request] = []
        if side.rank == 0:
            again.append(RegisterFiles(0, NAME, self.manifest.encode(), self.options))
        again.append(self._open(side))
        side.queue = again + [word for word in pending if not isinstance(word, RegisterFiles | Open)]
        side.waiting = None

    def _heard(self, side: RankSide, body: str) -> None:
        word = decode(body)
        if isinstance(word, AddFiles | ReaderList) or side.waiting is None or word.id != side.waiting.id:
            return
        asked, side.waiting = side.waiting, None
        if isinstance(word, DataRefused):
            if word.kind == "old":
                side.ids = max(side.ids, word.last)
                side.queue.insert(0, asked)
                return
            raise Violation(f"rank {side.rank}: {asked} was refused: {word.kind}: {word.text}")
        if isinstance(word, Opened):
            side.opened = True
        elif isinstance(word, LeasesGranted):
            self._given(side, asked, word)
        elif not isinstance(word, FilesRegistered | Grown) and not isinstance(asked, NextEpoch):
            raise Violation(f"{word} answers {asked}")

    def _given(self, side: RankSide, asked: Request, word: LeasesGranted) -> None:
        assert isinstance(asked, Lease) and side.ledger is not None
        side.reported.update(shard for shard, _ in asked.finished)
        if asked.epoch != side.ledger.epoch:
            return  # its epoch has ended meanwhile
        known = {shard for shard, _, _ in asked.failed}
        if any(shard not in known for shard, _ in word.refused):
            raise Violation(f"rank {side.rank}: refused {word.refused}")
        side.state = word.state
        side.version = max(side.version, word.version)
        for given in word.leases:
            shard = given.shard.index
            for other in self.ranks.values():
                if shard in other.hands and other.ledger and other.ledger.epoch == side.ledger.epoch:
                    raise Violation(f"shard {shard} is in the hands of ranks {other.rank} and {side.rank}")
            side.hands[shard] = Hand(shard, given.upto, given.upto)
            side.granted.add(shard)
            side.returned.pop(shard, None)

    def _work(self, side: RankSide) -> None:
        choice = self.rng.random()
        if choice < 0.4:
            self._read(side)
        elif choice < 0.6:
            self._ask(side)
        else:
            self._exchange(side)

    def _read(self, side: RankSide) -> None:
        for hand in side.hands.values():
            if hand.read_out or hand.broken:
                continue
            size = self.size(hand.shard)
            stop, ranks = self.poison.get(hand.shard, (size + 1, None))
            hand.at = min(size, hand.at + self.rng.randint(1, 4))
            if hand.at >= stop and (ranks is None or side.rank in ranks):
                hand.at = max(hand.told, stop)
                hand.broken = "cannot be read"
            elif hand.at == size:
                hand.read_out = True
            return

    def _ask(self, side: RankSide) -> None:
        assert side.ledger is not None
        if side.waiting is not None or side.queue:
            return
        finished = tuple((shard, n) for shard, n in side.finished.items() if shard not in side.reported)
        failed = [hand for hand in side.hands.values() if hand.broken and hand.told == hand.at]
        for hand in failed:
            del side.hands[hand.shard]
            side.granted.discard(hand.shard)
            side.returned[hand.shard] = hand.told
        words = tuple((hand.shard, hand.told, hand.broken) for hand in failed)
        side.queue.append(Lease(0, NAME, side.ledger.epoch, self.rng.choice((0, 1, 1, 2, 3)), finished, words))

    def _exchange(self, side: RankSide) -> None:
        if side.offered == side.step:
            self._offer(side)
            return
        offers = self.offers.get(side.offered, {})
        if len(offers) == len(self.ranks):
            self._learn(side, [offers[rank] for rank in sorted(offers)])

    def _offer(self, side: RankSide) -> None:
        takes = []
        for hand in side.hands.values():
            complete = hand.read_out and not hand.announced
            if (hand.at > hand.told or complete) and self.rng.random() < 0.8:
                takes.append(Take(hand.shard, hand.told, hand.at, complete))
        idle = not side.hands and side.waiting is None and not side.queue
        unsaid = set(side.finished) - side.reported
        over = idle and side.state == FINISHED and not unsaid
        side.offered += 1
        self.offers.setdefault(side.offered, {})[side.rank] = Offer(
            takes, over, idle and side.state != MORE, side.version
        )

    def _learn(self, side: RankSide, offers: list[Offer]) -> None:
        ledger = side.ledger
        assert ledger is not None
        side.step += 1
        epoch = ledger.epoch
        version = max(offer.version for offer in offers)
        if version:
            now = self.files.version(version)
            if now.digest != ledger.digest and now.shards >= ledger.shards:
                ledger.extend(now.shards, now.digest)
        for offer in offers:
            for take in offer.takes:
                ledger.take(take.shard, take.upto, take.complete, take.begin)
        for take in offers[side.rank].takes:
            hand = side.hands[take.shard]
            hand.told = take.upto
            if take.complete:
                side.finished[take.shard] = take.upto
                del side.hands[take.shard]
        dropped = self.drop_rule and any(offer.dry for offer in offers) and not all(offer.over for offer in offers)
        if all(offer.over for offer in offers) or dropped:
            self._turn(side, int(dropped or self.drop_rule))
        if len(self.commits) == side.step:
            self.commits.append(ledger.copy())
            self.history.append([(epoch, take) for offer in offers for take in offer.takes])
            if dropped:
                self.dropped[epoch] = True
        elif self.commits[side.step] != ledger:
            raise Violation(f"rank {side.rank} has another position at commit {side.step}")

    def _turn(self, side: RankSide, dropped: int) -> None:
        assert side.ledger is not None
        side.ledger.next_epoch()
        side.hands, side.granted, side.finished, side.returned, side.reported = {}, set(), {}, {}, set()
        side.state = MORE
        side.version = 0
        if side.rank == 0:
            side.queue.append(NextEpoch(0, NAME, side.ledger.epoch, dropped))

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _check_history(self) -> None:
        left_out = set(self.shell.machine.sets[NAME].quarantine)
        if left_out and f"data/{NAME}" not in self.shell.flaws:
            raise Violation("shards are left out and nobody is told")
        for epoch in range(self.epochs):
            counted: dict[tuple[int, int], int] = {}
            for entries in self.history:
                for at, take in entries:
                    if at == epoch:
                        for record in range(take.begin, take.upto):
                            counted[take.shard, record] = counted.get((take.shard, record), 0) + 1
            listed = self.files.at(epoch).shards
            if any(shard >= listed for shard, _ in counted):
                raise Violation(f"epoch {epoch}: records of files that join later")
            for shard in range(listed):
                size = self.size(shard)
                for record in range(size):
                    times = counted.get((shard, record), 0)
                    missing = times == 0 and (shard in left_out or self.dropped.get(epoch, False))
                    if times != 1 and not missing:
                        raise Violation(f"epoch {epoch}, shard {shard}, record {record}: {times} times")
        wrongly = {shard for shard in left_out if shard not in self.poison}
        if wrongly:
            raise Violation(f"shards {sorted(wrongly)} were left out and can be read")

    def _situation(self) -> str:
        return f"{self.shell.machine.report()}, {list(self.ranks.values())}"


class GrowingSim(StepsSim):
    """Histories in which files arrive after the end of an epoch was announced, while Masters fail."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.growing, self.faults = True, max(self.faults, 0.03)

    def _act(self) -> None:
        if any(side.state == FINISHED for side in self.ranks.values()) and self.rng.random() < self.faults:
            self._grow()
            if self.rng.random() < 0.5:
                self._lose_master(self.world)
        super()._act()
