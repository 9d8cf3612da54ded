"""Parameter servers under faults: the pservers that ship, and the Master's service and lines, in virtual time.

Each row remembers the pushes that made it, in their order, so that what was lost or applied twice is seen at once.
``python -c "from tests.sim.ps_world import PsSim; PsSim(17).play()"`` plays one history again.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edl.job_records import Mode, Replication, Training
from edl.master.service import Caller
from ps.coordinator.machine import PlacementMachine
from ps.coordinator.state import CoordinatorLimits
from tests.sim.ps_checkpoints import Checkpoints, Place
from tests.sim.ps_loss import Losses
from tests.sim.ps_master import HOST, LEASE_S, Master
from tests.sim.ps_net import Net, Pipe, Violation, both
from tests.sim.ps_rows import TABLE, Id, Ledger
from tests.sim.ps_server import Pserver
from tests.sim.ps_trainer import Trainer

KILL, ADD, DRAIN, FREEZE, APART, ONE_WAY, DEAF, STREAM, LINE, FLAP, MASTER, TRAINER, NEWCOMER, PLACE, LEAVE, DISK = (
    *("kill", "add", "drain", "freeze", "apart", "one way", "deaf", "stream", "line", "flap", "master"),
    *("trainer", "newcomer", "place", "leave", "disk"),
)
BACK_S = 3.0
"""Most seconds until a launcher whose lease the store has ended has registered again."""
STUCK_S = 5.0
"""A request that waits longer for others than its sender does never ends."""
HARD = (KILL, FREEZE, APART, ONE_WAY, DEAF)
"""Faults that need time to heal before the next one, or else rows may be lost."""


class PsSim:
    """A random history of a job with parameter servers."""

    def __init__(self, seed: int, replication: str = "", buckets: int = 0) -> None:
        self.seed = seed
        self.net = Net(seed)
        rng = self.net.rng
        drawn_buckets = rng.choice((4, 8, 12))
        self.buckets = buckets or drawn_buckets
        drawn = rng.choice((Replication.SYNC,) * 6 + (Replication.ASYNC, Replication.NONE))
        mode = rng.choice((Mode.ASYNC, Mode.ASYNC, Mode.SYNC))
        least = rng.choice((1, 2))
        every_s = rng.choice((0.0, 0.0, 8.0))
        self.training = Training(
            mode,
            replication=Replication(replication or drawn),
            lag_s=random.Random(seed).choice((0.05, 0.5, 100.0)),  # of its own: earlier seeds play as they did
            servers=(least, rng.randint(3, 5)),
            save_every_s=every_s,
        )
        self.gentle = rng.random() < 0.5
        """Single faults, with time to heal: nothing may be lost."""
        self.faults = rng.choice((3, 6, 10))
        self.lease_rng = random.Random(-1 - seed)  # of its own: earlier seeds play as they did
        self.ends_leases = self.lease_rng.random() < 0.2
        """Once, the store ends all leases although everybody lives."""
        self.back_by_s = 0.0
        """When all have registered again."""
        motion = rng.choice((2, 8))
        gather_s = rng.choice((0.0, 0.02, 0.2))
        self.limits = CoordinatorLimits(
            0.5, 200.0, halt_s=8.0, mark_s=4.0, write_s=10.0, motion=(motion, motion), gather_s=gather_s
        )
        self.tables = (TABLE,)
        self.loss = rng.choice((0.0, 0.02, 0.1))
        self.wants_checkpoints = bool(every_s) or rng.random() < 0.3
        self.disk_faults = rng.choice((0.0, 0.0, 0.1))
        self._begin()

    def _begin(self) -> None:
        """Start with an empty job."""
        self.asks = 0
        self.nodes: list[Pserver] = []
        self.everyone: list[Trainer] = []
        self.names = self.nonces = 0
        self.places: set[str] = set()
        self.round = 0
        self.people: dict[str, Trainer] = {}
        self.pipes: dict[Caller, Pipe] = {}
        self.pipes_life = 0
        self.roles: list[tuple[int, int]] = [(0, 0)] * self.buckets
        """Owner and backup of each bucket, as of the newest version that was kept."""
        self.expect: set[Place] = set()
        self.losses = Losses(self.training.lag_s)
        self.history = 1
        self.restored = 0
        self.version = 0
        self.rollbacks = 0
        self.ledger = Ledger(self.buckets)
        self.disk = Checkpoints(self)
        self.master = Master(self)
        self.trace: list[str] = []
        self.pushes = 0

    # --- processes ---------------------------------------------------------------------------------------------------

    def run_later(
        self, owner: Pserver | Trainer, action: Callable[..., None], *args: Any, after_s: float | None = None
    ) -> None:
        """Unless its process is dead by then; later, if it is frozen."""
        self.net.at(self.net.delay() if after_s is None else after_s, owner.process.run, action, *args)

    def by_number(self, number: int) -> Pserver | None:
        return next((node for node in self.nodes if node.alive and node.number == number), None)

    def trainers(self) -> list[Trainer]:
        return [one for one in self.people.values() if one.alive]

    def living(self) -> list[Pserver]:
        return [node for node in self.nodes if node.alive]

    def tell(self, caller: Caller, body: str, life: int) -> None:
        """Deliver a message of the Master to the trainer in a slot."""
        if life != self.pipes_life:
            for pipe in self.pipes.values():
                pipe.close()
            self.pipes, self.pipes_life = {}, life
        if caller not in self.pipes:
            self.pipes[caller] = Pipe(self.net, lambda text: self._told(caller, text))
        self.pipes[caller].send(body)

    def _told(self, caller: Caller, body: str) -> None:
        trainer = self.people.get(str(caller.node))
        if trainer is not None:
            trainer.process.run(trainer.hear, body)

    # --- what is seen ------------------------------------------------------------------------------------------------

    def acknowledged(self, node: Pserver, push: Id, history: int, parts: dict[int, tuple[int, ...]]) -> None:
        """A pserver acknowledges a part: every pserver that may serve the bucket next must have it."""
        if history != self.history:
            return
        if self.training.replication is not Replication.SYNC:
            self.losses.acknowledged(node, push, parts, self.net.now_s)
            return
        for bucket, rows in parts.items():
            for number in self.roles[bucket]:
                other = self.by_number(number) if number else None
                if other is None:
                    continue
                for row in rows:
                    count = self.ledger.row(other.server.store, bucket, row).get(push, 0)
                    if count != 1:
                        text = f"{node.name} acknowledges {push} of bucket {bucket}"
                        self.net.fail(f"{text}, and {other.name} has applied it {count} times")

    def was_acknowledged(self, trainer: Trainer, parts: dict[int, tuple[int, ...]]) -> None:
        self.pushes += 1
        if trainer.placement.history == self.history:
            push = (trainer.number, trainer.seq)
            self.expect |= {(bucket, row, push) for bucket, rows in parts.items() for row in rows}

    def stepped(self, machine: PlacementMachine) -> None:
        """The machine has taken an event, and what it decided is kept."""
        state, checkpoints = machine.state, machine.checkpoints
        self.losses.stepped(state.servers, self.roles)
        if state.version != self.version:
            self.version, self.roles = state.version, list(zip(state.grid.owner, state.grid.backup, strict=True))
        if checkpoints.phase == "mark" and checkpoints.top not in self.disk.expected:
            self.disk.expected[checkpoints.top] = frozenset(self.expect)
            self.disk.stopped[checkpoints.top] = frozenset(state.people.trainers)
        if state.history != self.history:
            self.history, self.restored = state.history, 0
            self.expect = set()
            self.rollbacks += 1
            if self.gentle and self.training.replication is Replication.SYNC and not self.disk.bad:
                self.net.fail(f"a single fault took rows along: {state.reason}")
        if state.stage == "placed" and state.found and self.restored != state.found[0].number:
            self.restored = state.found[0].number
            self.expect = set(self.disk.expected[self.restored])

    # --- faults ------------------------------------------------------------------------------------------------------

    def add_node(self) -> None:
        self.names += 1
        node = Pserver(self, f"servers/n{self.names}", self.net.rng.choice(("host-a", "host-b", "host-c")))
        self.nodes.append(node)
        self.master.key_put(node)

    def kill(self, node: Pserver) -> None:
        if node.alive:
            node.end(host_lost=self.net.rng.random() < 0.5)
            self.net.at(LEASE_S, self.master.key_gone, node.name)

    def leave(self, node: Pserver) -> None:
        """The pserver owns and copies nothing any more, and ends."""
        if any(roles.count(node.number) for roles in self.roles):
            self.net.fail(f"{node.name} was sent away with buckets")
        if node.alive:
            node.end(host_lost=False)
            self.master.key_gone(node.name)

    def zombie(self, node: Pserver) -> None:
        """The pserver's lease expires while it lives; later it ends, or registers again."""
        if not node.alive:
            return
        self.master.key_gone(node.name)
        if self.net.rng.random() < 0.5:
            self.net.at(self.net.rng.uniform(0.1, 4.0), self._come_back, node)
        else:
            self.net.at(self.net.rng.uniform(0.1, 4.0), self.kill, node)

    def _come_back(self, node: Pserver) -> None:
        if node.alive:
            self.master.key_put(node)

    def end_leases(self) -> None:
        """As an etcd does whose leader was frozen (etcd#15247): launchers and the Master's node register again."""
        rng, self.ends_leases, self.back_by_s = self.lease_rng, False, self.net.now_s + BACK_S
        self.trace.append(f"{self.net.now_s:.2f} all leases end")
        for node in [one for one in self.living() if one.name in self.master.keys]:
            self.master.key_gone(node.name)
            self.net.at(rng.uniform(0.1, BACK_S), self._come_back_as, node, node.draining)
        if rng.random() < 0.5:
            self.master.die()

    def _come_back_as(self, node: Pserver, draining: bool) -> None:
        if node.alive:
            self.master.key_put(node, draining)

    def add_trainer(self, place: str) -> None:
        if place in self.places and not (place in self.people and self.people[place].alive):
            self.nonces += 1
            self.people[place] = trainer = Trainer(self, place, self.nonces)
            self.everyone.append(trainer)

    def trainer_ended(self, trainer: Trainer) -> None:
        self.net.at(self.net.rng.uniform(0.2, 2.0), self.add_trainer, trainer.node)

    def change_world(self) -> None:
        self.round += 1
        self.master.new_world()

    def new_place(self) -> None:
        place = f"t{self.round}-{len(self.places)}"
        self.places.add(place)
        self.change_world()
        self.net.at(self.net.delay(), self.add_trainer, place)

    def fault(self) -> None:
        rng = self.net.rng
        living = self.living()
        weights = {KILL: 5, ADD: 4, DRAIN: 3, FREEZE: 3, APART: 3, DEAF: 3, STREAM: 4, LINE: 3, FLAP: 4}
        weights |= {MASTER: 6, TRAINER: 3, NEWCOMER: 2, PLACE: 1, LEAVE: 1, ONE_WAY: 2, DISK: 2}
        kind = rng.choices(list(weights), list(weights.values()))[0]
        self.trace.append(f"{self.net.now_s:.2f} {kind}")
        node = rng.choice(living) if living else None
        if kind == ADD or (node is None and kind in (*HARD, DRAIN)):
            if len(living) < 6:
                self.add_node()
        elif kind == MASTER:
            self.master.dies = rng.choice(("before", "between"))
        elif kind == DISK:
            self._disk_fault()
        elif kind in (TRAINER, PLACE, LEAVE, NEWCOMER):
            self._trainer_fault(kind)
        elif node is not None:
            self._pserver_fault(kind, node)

    def _disk_fault(self) -> None:
        rng, storage = self.net.rng, self.disk.storage
        for_s = rng.uniform(0.5, 6.0)
        kind = rng.choice(("slow", "full", "frozen"))
        if kind == "slow":
            storage.slowness = 100.0
        elif kind == "full":
            storage.full = True
        else:
            storage.frozen_until_s = self.net.now_s + for_s
        self.net.at(for_s, self._repair_disk)

    def _repair_disk(self) -> None:
        self.disk.storage.slowness, self.disk.storage.full = 1.0, False

    def _pserver_fault(self, kind: str, node: Pserver) -> None:
        rng, living = self.net.rng, self.living()
        if self.gentle and kind in HARD and not all(backup for _, backup in self.roles):
            return
        others = [one for one in living if one is not node]
        if kind == KILL:
            if len(living) > 1 or not self.gentle:
                self.kill(node)
        elif kind == DRAIN:
            self.master.key_put(node, draining=rng.random() < 0.9)
        elif kind == FREEZE:
            long = rng.random() < 0.4 and len(living) > 1
            node.process.pause()
            self.net.at(LEASE_S + 1.5 if long else rng.uniform(0.05, 2.0), self._thaw, node)
            if long:
                self.net.at(LEASE_S, self.zombie, node)
        elif kind == DEAF:
            long = rng.random() < 0.4 and len(living) > 1
            self.net.cut(both(HOST, node.host), LEASE_S + 1.0 if long else rng.uniform(0.2, 2.5))
            if long:
                self.net.at(LEASE_S, self.zombie, node)
        elif kind == FLAP:
            for _ in range(rng.randint(2, 6)):
                self.net.at(rng.uniform(0.0, 1.5), self._cut_any)
        elif kind == LINE:
            self._break(node.host, HOST)
        elif others:
            host = rng.choice(others).host
            if kind == STREAM:
                self._break(node.host, host)
            else:
                pairs = both(node.host, host)
                self.net.cut(pairs if kind == APART else pairs[:1], rng.uniform(0.5, 6.0))

    def _thaw(self, node: Pserver) -> None:
        if node.alive:
            node.process.resume()

    def _break(self, one: str, other: str) -> None:
        """Connections between two hosts break."""
        for node in self.living():
            for stream in node.sockets.opened.streams():
                if {end.owner.host for end in stream.ends} == {one, other}:
                    for end in stream.ends:
                        stream.abort(end)

    def _cut_any(self) -> None:
        """A stream, or a line to the Master, breaks."""
        hosts = [node.host for node in self.living()]
        if hosts:
            one = self.net.rng.choice(hosts)
            self._break(one, self.net.rng.choice([host for host in [*hosts, HOST] if host != one]))

    def _trainer_fault(self, kind: str) -> None:
        rng = self.net.rng
        trainers = self.trainers()
        if kind == NEWCOMER:
            if len(self.places) < 4:
                self.new_place()
        elif not trainers:
            return
        elif kind == LEAVE:
            one = rng.choice(trainers)
            if one.number and one.counts and not one.busy and not one.halt:
                one.leave()
        elif kind == PLACE:
            if len(self.places) > 1:
                one = rng.choice(trainers)
                self.places.discard(one.node)
                one.end()
                self.net.at(0.2, self.change_world)
        else:
            rng.choice(trainers).end()

    # --- one history -------------------------------------------------------------------------------------------------

    def play(self) -> PsSim:
        """Faults for a while, then none until all is well."""
        with self.watched():
            self._play()
        return self

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it is played: an exception that is only logged is a violation, too; afterwards all threads end."""
        loggers = [logging.getLogger(name) for name in ("ps", "asyncio")]
        before = [(one, one.level, one.propagate) for one in loggers]
        handler = _Errors(self.net)
        for one in loggers:
            one.setLevel(logging.ERROR)
            one.propagate = False
            one.addHandler(handler)
        try:
            yield
        finally:
            for one, level, propagate in before:
                one.setLevel(level)
                one.propagate = propagate
                one.removeHandler(handler)
            owners: list[Pserver | Trainer] = [*self.nodes, *self.everyone]
            for owner in owners:
                owner.process.loop.finish()
                owner.threads.end()
            self.master.close()

    def _play(self) -> None:
        for _ in range(self.net.rng.randint(self.training.servers[0], 3)):
            self.add_node()
        self.master.start()
        for _ in range(self.net.rng.randint(1, 3)):
            self.new_place()
        self._pass(2.0)
        for _ in range(self.faults):
            if self.gentle:
                self._pass(1.0)
                self._until(self.calm, 80.0, "to be calm before the next fault")
            if self.master.failed:
                break
            if self.ends_leases and self.lease_rng.random() < 0.5:
                self.end_leases()
            else:
                self.fault()
            self._pass(self.net.rng.choice((0.01, 0.1, 0.5, 3.0)))
        self._heal()

    def _heal(self) -> None:
        self._pass(max(0.0, self.back_by_s - self.net.now_s))
        self.net.heal()
        self._repair_disk()
        self.disk.storage.frozen_until_s = 0.0
        self.loss = 0.0
        for node in self.living():
            if node.name not in self.master.keys:
                self.kill(node)
        self._pass(LEASE_S + 2.0)
        if not self.master.failed:
            while sum(not node.draining for node in self.living()) < self.training.servers[0] + 1:
                self.add_node()
            for node in [one for one in self.living() if one.name not in self.master.keys]:
                self.master.key_put(node)
            if not self.places:
                self.new_place()
            self.wants_checkpoints = False
            self._until(self.calm, 60.0, "to be calm")
            goals = {place: one.acked + 3 for place, one in self.people.items() if one.alive and one.wants_in}
            self._until(lambda: self._trained(goals), 60.0, "to train on")
            self._until(self.calm, 60.0, "to be calm in the end")
        if self.master.failed and self.gentle and self.training.replication is Replication.SYNC:
            raise Violation(f"the job failed: {self.master.failed}")
        if not self.master.failed:
            self._check()

    def _trained(self, goals: dict[str, int]) -> bool:
        there = (one for one in goals.items() if self.people[one[0]].alive)
        return bool(self.master.failed) or all(self.people[place].acked >= goal for place, goal in there)

    def calm(self) -> bool:
        """True if nothing is in flight."""
        machine = self.master.machine
        if self.master.failed:
            return True
        if any(node.process.paused or not node.copied() for node in self.living()):
            return False
        if (
            machine is None
            or machine.state.stage != "placed"
            or not machine.state.whole
            or machine.state.grid.in_motion()
        ):
            return False
        state = machine.state
        able = [one for one in state.servers.values() if not one.draining]
        copied = not state.copies or len(state.servers) < 2 or len(able) < 1 or all(state.grid.backup) or len(able) == 1
        storage = self.disk.storage
        disk = not storage.full and storage.slowness == 1.0 and storage.frozen_until_s <= self.net.now_s
        up = all(one.greeted for one in state.servers.values()) and len(state.servers) == len(self.living())
        counted = all(one.counts for one in self.trainers() if one.wants_in) and len(self.trainers()) == len(
            self.places
        )
        return copied and up and counted and not machine.checkpoints.freezes and self.net.whole and disk

    def _pass(self, seconds: float) -> None:
        self.net.timeline.run(self.net.now_s + seconds)
        if self.net.events > 3_000_000:
            raise Violation("it does not come to rest: too much happens")

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        end_s = self.net.now_s + seconds
        while not condition():
            if self.net.now_s > end_s:
                raise Violation(f"waited {seconds:g} s {what}; {self.situation()}")
            self._pass(0.25)

    def situation(self) -> str:
        """The state of the job, for debugging a failing history."""
        machine = self.master.machine
        if machine is None:
            return "no Master"
        grid = machine.state.grid
        roles = [grid.roles(bucket) for bucket in range(self.buckets)]
        people = [(one.node, one.number, one.counts, one.busy, one.halt, sorted(one.parts)) for one in self.trainers()]
        return (
            f"stage {machine.state.stage}, roles {roles}, checkpoint {machine.checkpoints.phase!r}, trainers {people}"
        )

    def _check(self) -> None:
        """Everything that was acknowledged is there, once, and copies are equal."""
        machine = self.master.machine
        assert machine is not None
        grid = machine.state.grid
        for node in self.living():
            for peer in node.server.endpoint.peers:
                if peer.gone and node.process.now_s() - peer.heard_s > STUCK_S:
                    raise Violation(f"{node.name} still handles a request of {peer}, which is gone")
        for bucket in range(self.buckets):
            owner = self.by_number(grid.owner[bucket])
            if owner is None:
                raise Violation(f"the owner of bucket {bucket} is not there")
            rows = owner.rows(bucket)
            for row, pushes in rows.items():
                if any(count > 1 for count in pushes.values()):
                    raise Violation(f"bucket {bucket} row {row}: applied twice: {pushes}")
            wanted = {(row, push) for where, row, push in self.expect if where == bucket}
            missing = {(bucket, row, push) for row, push in wanted if push not in rows[row]}
            lost = self.losses.unexcused(missing)
            if lost:
                raise Violation(f"bucket {bucket} lost acknowledged pushes {lost[:3]}")
            backup = self.by_number(grid.backup[bucket]) if grid.backup[bucket] else None
            if backup is not None and owner.followers(bucket)[1] and self.training.replication is Replication.SYNC:
                copy = backup.rows(bucket)
                lacking = {(row, push) for row, push in wanted if push not in copy[row]}
                if lacking:
                    raise Violation(f"the copy of bucket {bucket} lacks {sorted(lacking)[:3]}")


class _Errors(logging.Handler):
    """Exceptions that the product logs and survives."""

    def __init__(self, net: Net) -> None:
        super().__init__(logging.ERROR)
        self._net = net

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        if record.exc_info:
            self._net.note(f"{record.getMessage()}: {record.exc_info[1]!r}")
