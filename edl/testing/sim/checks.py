"""What must hold in every simulated moment, beyond what one machine can see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from edl.agent import events as ag
from edl.agent.state import AgentPhase, AgentState
from edl.config import FaultTolerance, JobSpec
from edl.master import events as ev
from edl.master.invariants import step_violations, world_violations
from edl.master.state import MasterState, Phase, Record
from edl.testing.sim.workers import Worker
from edl.types import Incarnation, Round, Token
from edl.wire.messages import World


class Violation(AssertionError):
    """Something that must never happen did."""


def succession_violations(before: World, after: World, level: FaultTolerance) -> Iterator[str]:
    """Rules that one world owes to the one before it."""
    old, new = len(before.members), len(after.members)
    if after.round != before.round + 1:
        yield f"round {before.round} is followed by {after.round}"
    if level is FaultTolerance.RECOVER and new != old:
        yield f"round {after.round} has {new} nodes after {old} with --fault-tolerance=recover"
    if level is FaultTolerance.SHRINK and new > old:
        yield f"round {after.round} has {new} nodes after {old} with --fault-tolerance=shrink"
    if before.members and before.master_port == after.master_port and before.master_host == after.master_host:
        yield f"round {after.round} has the master address of the one before"


class Checks:
    """Watches everything; raises ``Violation`` at the first wrong."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.record: Record | None = None
        """What the store holds."""
        self.worlds: dict[Round, World] = {}
        """Every world ever recorded."""
        self.worker_failures = 0
        """Worker failures caused by the fault plan."""
        self.steps = 0
        self._started: dict[Incarnation, Round] = defaultdict(lambda: Round(0))
        self._next_port = 20_000

    def fail(self, text: str) -> None:
        """Report a violation."""
        raise Violation(text)

    def demand(self, violations: Iterable[str]) -> None:
        """Fail on the first of these."""
        for violation in violations:
            self.fail(violation)

    def fresh_ports(self, count: int) -> tuple[int, ...]:
        """Ports nobody has had yet."""
        first = self._next_port
        self._next_port += count
        return tuple(range(first, first + count))

    # --- told by the shells ------------------------------------------------------------------------------------------

    def master_stepped(self, before: MasterState, decision: ev.Decision, where: str) -> None:
        """A Master has decided; nothing is written or sent yet."""
        self.steps += 1
        for violation in step_violations(before, decision):
            self.fail(f"Master on {where}: {violation}")

    def record_written(self, record: Record, token: Token, real: Token) -> None:
        """The store has taken a record."""
        if token != real:
            self.fail(f"a Master of token {token} wrote although {real} rules")
        before = self.record
        self.record = record
        if before is not None:
            if record.round < before.round:
                self.fail(f"the stored round went back from {before.round} to {record.round}")
            if before.phase is Phase.ENDED and record != before:
                self.fail("the stored record changed after the end")
        if record.world is not None:
            known = self.worlds.setdefault(record.round, record.world)
            if known != record.world:
                self.fail(f"round {record.round} got a second world")
            self.demand(world_violations(record.world, self.spec.nodes))
            if before is not None and before.world is not None and before.round < record.round:
                self.demand(succession_violations(before.world, record.world, self.spec.fault_tolerance))
        self._check_budget(record)

    def _check_budget(self, record: Record) -> None:
        settled = record.phase is not Phase.FORMING
        if settled and record.restarts > self.worker_failures:
            self.fail(f"{record.restarts} restarts charged for {self.worker_failures} worker failures: {record.reason}")

    def agent_stepped(self, before: AgentState, decision: ag.Decision) -> None:
        """An agent has decided."""
        self.steps += 1
        after = decision.state
        if after.phase is AgentPhase.IDLE and after.alive:
            self.fail(f"{after.info.node} is idle with living workers")
        starts = [effect for effect in decision.effects if isinstance(effect, ag.Start)]
        if starts and (before.alive or not before.registered):
            self.fail(f"{after.info.node} starts workers while old ones live, or without a lease")

    def worker_started(self, worker: Worker, world: World) -> None:
        """An agent has created a worker process."""
        if self.worlds.get(world.round) != world:
            self.fail(f"{worker.node} started a worker for a world of round {world.round} that nobody recorded")
        if worker.local_rank == 0:
            if worker.round <= self._started[worker.incarnation]:
                self.fail(f"{worker.node} started round {worker.round} after {self._started[worker.incarnation]}")
            self._started[worker.incarnation] = worker.round
