"""Parameter servers under faults: the real placement machine and the real holdings over a simulated network.

Each row remembers the pushes that made it, in their order, so that what was lost or applied twice is seen at once.
``python -c "from tests.sim.ps_world import PsSim; PsSim(17).play()"`` plays one history again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from edl.job_records import Mode, Replication, Training
from edl.master.service import Caller
from ps.coordinator.machine import PlacementMachine
from ps.coordinator.state import Limits
from ps.spec import TableSpec
from tests.sim.ps_disk import Disk, Place
from tests.sim.ps_loss import Losses
from tests.sim.ps_master import Master
from tests.sim.ps_net import Net, Pipe, Violation
from tests.sim.ps_node import Node, Request, Stream
from tests.sim.ps_trainer import Trainer

LEASE_S = 3.0
KILL, ADD, DRAIN, FREEZE, APART, DEAF, STREAM, LINE, FLAP, MASTER, TRAINER, NEWCOMER, PLACE, LEAVE = (
    *("kill", "add", "drain", "freeze", "apart", "deaf", "stream", "line", "flap", "master"),
    *("trainer", "newcomer", "place", "leave"),
)
HARD = (KILL, FREEZE, APART, DEAF)
"""Faults that need time to heal before the next one, or else rows may be lost."""


class PsSim:
    """A random history of a job with parameter servers."""

    def __init__(self, seed: int, replication: str = "") -> None:
        self.seed = seed
        self.net = Net(seed)
        rng = self.net.rng
        self.buckets = rng.choice((4, 8, 12))
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
        motion = rng.choice((2, 8))
        gather_s = rng.choice((0.0, 0.02, 0.2))
        self.limits = Limits(
            0.5, 200.0, halt_s=8.0, mark_s=4.0, write_s=10.0, motion=(motion, motion), gather_s=gather_s
        )
        self.tables = (TableSpec("t", 4),)
        self.loss = rng.choice((0.0, 0.02, 0.1))
        self.wants_cuts = bool(every_s) or rng.random() < 0.3
        self.disk_faults = rng.choice((0.0, 0.0, 0.1))
        self._begin()

    def _begin(self) -> None:
        """Start with an empty job."""
        self.asks = 0
        self.nodes: list[Node] = []
        self.names = self.nonces = 0
        self.places: set[str] = set()
        self.round = 0
        self.people: dict[str, Trainer] = {}
        self.apart: set[frozenset[int]] = set()
        self.deaf: set[int] = set()
        """Pservers that the Master cannot reach; trainers can."""
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
        self.disk = Disk(self)
        self.master = Master(self)
        self.trace: list[str] = []
        self.pushes = 0

    # --- processes ---------------------------------------------------------------------------------------------------

    def run(self, process: Node | Trainer, action: Callable[..., None], *args: Any) -> None:
        """Unless it is dead; later, if it is frozen."""
        if not process.alive:
            return
        wait_s = process.frozen_s - self.net.now_s if isinstance(process, Node) else 0.0
        if wait_s > 0:
            self.net.at(wait_s + 1e-4, self.run, process, action, *args)
        else:
            action(*args)

    def run_later(
        self, process: Node | Trainer, action: Callable[..., None], *args: Any, after_s: float | None = None
    ) -> None:
        self.net.at(self.net.delay() if after_s is None else after_s, self.run, process, action, *args)

    def by_number(self, number: int) -> Node | None:
        return next((node for node in self.nodes if node.alive and node.bucket_machine.number == number), None)

    def trainers(self) -> list[Trainer]:
        return [one for one in self.people.values() if one.alive]

    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def linked(self, one: Node, other: Node | None, master: bool = False) -> bool:
        if other is None:
            return one.alive and not (master and id(one) in self.deaf)
        return one.alive and other.alive and frozenset((id(one), id(other))) not in self.apart

    def refuses(self, node: Node) -> bool:
        """True if the node's host is up, so that connections to a dead pserver are refused."""
        return node.machine != "lost"

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
        if trainer is not None and trainer.alive:
            trainer.hear(body)

    # --- what is seen ------------------------------------------------------------------------------------------------

    def acknowledged(self, node: Node, request: Request) -> None:
        """A pserver acknowledges a part: every pserver that may serve the bucket next must have it."""
        if request.history != self.history:
            return
        if self.training.replication is not Replication.SYNC:
            self.losses.acknowledged(node, request, self.net.now_s)
            return
        push = (request.trainer, request.seq)
        for bucket, rows in request.parts.items():
            for number in self.roles[bucket]:
                other = self.by_number(number) if number else None
                held = other.store.get(bucket) if other is not None else None
                if other is not None and any(held is None or push not in held.rows.get(row, ()) for row in rows):
                    raise Violation(f"{node.name} acknowledges {push} of bucket {bucket}, and {other.name} has it not")

    def was_acknowledged(self, trainer: Trainer, parts: dict[int, tuple[int, ...]]) -> None:
        self.pushes += 1
        if trainer.chart.history == self.history:
            push = (trainer.number, trainer.seq)
            self.expect |= {(bucket, row, push) for bucket, rows in parts.items() for row in rows}

    def stepped(self, machine: PlacementMachine) -> None:
        """The machine has taken an event, and what it decided is kept."""
        state, cuts = machine.state, machine.cuts
        self.losses.stepped(state.servers, self.roles)
        if state.version != self.version:
            self.version, self.roles = state.version, list(zip(state.grid.owner, state.grid.backup, strict=True))
        if cuts.phase == "mark" and cuts.top not in self.disk.expected:
            self.disk.expected[cuts.top] = frozenset(self.expect)
        if state.history != self.history:
            self.history, self.restored = state.history, 0
            self.expect = set()
            self.rollbacks += 1
            if self.gentle and self.training.replication is Replication.SYNC and not self.disk.bad:
                raise Violation(f"a single fault took rows along: {state.reason}")
        if state.stage == "placed" and state.found and self.restored != state.found[0].number:
            self.restored = state.found[0].number
            self.expect = set(self.disk.expected[self.restored])

    # --- faults ------------------------------------------------------------------------------------------------------

    def add_node(self) -> None:
        self.names += 1
        node = Node(self, f"servers/n{self.names}", self.net.rng.choice(("host-a", "host-b", "host-c")))
        self.nodes.append(node)
        self.master.key_put(node)

    def kill(self, node: Node) -> None:
        node.alive = False
        if self.net.rng.random() < 0.5:
            node.machine = "lost"
        for stream in [*node.streams.values(), *node.incoming]:
            stream.cut()
        line = self.master.lines.get(node.name)
        if line is not None:
            self.net.at(self.net.delay(), line.cut)
        self.net.at(LEASE_S, self.master.key_gone, node.name)

    def leave(self, node: Node) -> None:
        """The pserver owns and copies nothing any more, and ends."""
        if any(roles.count(node.bucket_machine.number) for roles in self.roles):
            raise Violation(f"{node.name} was sent away with buckets")
        self.kill(node)
        self.master.key_gone(node.name)

    def zombie(self, node: Node) -> None:
        """The pserver's lease expires while it lives; later it ends, or registers again."""
        if not node.alive:
            return
        self.master.key_gone(node.name)
        if self.net.rng.random() < 0.5:
            self.net.at(self.net.rng.uniform(0.1, 4.0), self._come_back, node)
        else:
            self.net.at(self.net.rng.uniform(0.1, 4.0), self._end, node)

    def _end(self, node: Node) -> None:
        if node.alive:
            self.kill(node)

    def _come_back(self, node: Node) -> None:
        self.deaf.discard(id(node))
        if node.alive:
            self.master.key_put(node)

    def add_trainer(self, place: str) -> None:
        if place in self.places and not (place in self.people and self.people[place].alive):
            self.nonces += 1
            self.people[place] = Trainer(self, place, self.nonces)

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
        weights |= {MASTER: 6, TRAINER: 3, NEWCOMER: 2, PLACE: 1, LEAVE: 1}
        kind = rng.choices(list(weights), list(weights.values()))[0]
        self.trace.append(f"{self.net.now_s:.2f} {kind}")
        node = rng.choice(living) if living else None
        if kind == ADD or (node is None and kind in (*HARD, DRAIN)):
            if len(living) < 6:
                self.add_node()
        elif kind == MASTER:
            self.master.dies = rng.choice(("before", "between"))
        elif kind in (TRAINER, PLACE, LEAVE, NEWCOMER):
            self._trainer_fault(kind)
        elif node is not None:
            self._pserver_fault(kind, node)

    def _pserver_fault(self, kind: str, node: Node) -> None:
        rng, living = self.net.rng, self.living()
        if self.gentle and kind in HARD and not all(backup for _, backup in self.roles):
            return
        if kind == KILL:
            if len(living) > 1 or not self.gentle:
                self.kill(node)
        elif kind == DRAIN:
            self.master.key_put(node, draining=rng.random() < 0.9)
        elif kind == FREEZE:
            long = rng.random() < 0.4 and len(living) > 1
            node.frozen_s = self.net.now_s + (LEASE_S + 1.5 if long else rng.uniform(0.05, 2.0))
            if long:
                self.net.at(LEASE_S, self.zombie, node)
        elif kind == DEAF:
            self._deafen(node, long=rng.random() < 0.4 and len(living) > 1)
        elif kind == LINE:
            line = self.master.lines.get(node.name)
            if line is not None:
                line.cut()
        elif kind == FLAP:
            for _ in range(rng.randint(2, 6)):
                self.net.at(rng.uniform(0.0, 1.5), self._cut_any)
        elif node.streams:
            self._part(node, rng.choice(list(node.streams.values())), lasting=kind == APART)

    def _part(self, node: Node, stream: Stream, lasting: bool) -> None:
        stream.cut()
        target = stream.target
        if lasting and target is not None:
            pair = frozenset((id(node), id(target)))
            self.apart.add(pair)
            for other in target.streams.values():
                if other.target is node:
                    other.cut()
            self.net.at(self.net.rng.uniform(0.5, 4.0), self.apart.discard, pair)

    def _cut_any(self) -> None:
        """A stream, or a line to the Master, breaks."""
        streams = [stream for node in self.living() for stream in node.streams.values()]
        cuts = [stream.cut for stream in streams] + [line.cut for line in self.master.lines.values()]
        if cuts:
            self.net.rng.choice(cuts)()

    def _deafen(self, node: Node, long: bool) -> None:
        self.deaf.add(id(node))
        line = self.master.lines.get(node.name)
        if line is not None:
            line.cut()
        if long:
            self.net.at(LEASE_S, self.zombie, node)
        else:
            self.net.at(self.net.rng.uniform(0.2, 2.5), self.deaf.discard, id(node))

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
            one = rng.choice(trainers)
            number = one.number
            one.end()
            living = self.living()
            if living and number:
                node = rng.choice(living)
                from ps.protocol import messages

                self.run_later(node, node.say, messages.TrainerLost(number), after_s=0.1)

    # --- one history -------------------------------------------------------------------------------------------------

    def play(self) -> PsSim:
        """Faults for a while, then none until all is well."""
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
            self.fault()
            self._pass(self.net.rng.choice((0.01, 0.1, 0.5, 3.0)))
        self._heal()
        return self

    def _heal(self) -> None:
        self.deaf.clear()
        self.apart.clear()
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
            self.wants_cuts = False
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
        if any(node.frozen_s > self.net.now_s for node in self.living()):
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
        deaf = any(id(node) in self.deaf for node in self.living())
        up = all(one.greeted for one in state.servers.values()) and len(state.servers) == len(self.living())
        counted = all(one.counts for one in self.trainers() if one.wants_in) and len(self.trainers()) == len(
            self.places
        )
        return copied and up and counted and not machine.cuts.freezes and not self.apart and not deaf

    def _pass(self, seconds: float) -> None:
        end_s = self.net.now_s + seconds
        over = [False]

        def stop() -> None:
            over[0] = True

        self.net.at(end_s - self.net.now_s, stop)
        while not over[0]:
            self.net.step()
            if self.net.events > 300_000:
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
        return f"stage {machine.state.stage}, roles {roles}, cut {machine.cuts.phase!r}, trainers {people}"

    def _check(self) -> None:
        """Everything that was acknowledged is there, once, and copies are equal."""
        machine = self.master.machine
        assert machine is not None
        grid = machine.state.grid
        for bucket in range(self.buckets):
            owner = self.by_number(grid.owner[bucket])
            if owner is None:
                raise Violation(f"the owner of bucket {bucket} is not there")
            held = owner.store.get(bucket)
            rows = held.rows if held is not None else {}
            for row, pushes in rows.items():
                if len(set(pushes)) != len(pushes):
                    raise Violation(f"bucket {bucket} row {row}: applied twice: {pushes}")
            wanted = {(row, push) for where, row, push in self.expect if where == bucket}
            missing = {(bucket, row, push) for row, push in wanted if push not in rows.get(row, ())}
            lost = self.losses.unexcused(missing)
            if lost:
                raise Violation(f"bucket {bucket} lost acknowledged pushes {lost[:3]}")
            backup = self.by_number(grid.backup[bucket]) if grid.backup[bucket] else None
            if backup is not None and owner.feeds.get(bucket, ((), ()))[1] and not any(owner.requests):
                copy = backup.store.get(bucket)
                lacking = {(row, push) for row, push in wanted if copy is None or push not in copy.rows.get(row, ())}
                if lacking and self.training.replication is Replication.SYNC:
                    raise Violation(f"the copy of bucket {bucket} lacks {sorted(lacking)[:3]}")
