"""Faults and the times at which they strike, drawn from a seed."""

from __future__ import annotations

import enum
import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from dataclasses import dataclass


class FaultKind(enum.Enum):
    """What can go wrong in a schedule, and what users may request."""

    CRASH = "crash"
    """A launcher is killed with its workers; connections to its host are refused."""
    CRASH_MASTER = "crash-master"
    CRASH_ON_WRITE = "crash-on-write"
    """The Master is killed after its next write, before it sends anything."""
    RESTART = "restart"
    """A node that is down starts again under its old name."""
    NEW_NODE = "new-node"
    KILL_WORKER = "kill-worker"
    FAIL_WORKER = "fail-worker"
    FREEZE_WORKER = "freeze-worker"
    PARTITION = "partition"
    """The network splits in two; the store is on one side."""
    ISOLATE = "isolate"
    """One node loses its connections to all others."""
    ONE_WAY = "one-way"
    """Messages from some nodes to the others are lost; those in the other direction arrive."""
    PARTITION_STORE = "partition-store"
    """One node loses its connection to the store only."""
    STORE_AWAY = "store-away"
    SLOW_NETWORK = "slow-network"
    PAUSE = "pause"
    """A launcher is stopped by SIGSTOP and continues later without noticing."""
    PAUSE_MASTER = "pause-master"
    LOSE_LEASE = "lose-lease"
    """A launcher's lease is revoked while it is alive, or those of all, as by an etcd whose leader was frozen
    (etcd#15247)."""
    DRAIN = "drain"
    """A launcher gets SIGTERM."""
    KILL_FORK_SERVER = "kill-fork-server"
    """The fork server of a node is killed, and its workers with it."""
    KILL_WAITING = "kill-waiting"
    """A worker without a round is killed: it waits for its world or is being given a place."""
    STUCK_WORKER = "stuck-worker"
    """A worker does not react to the end of its round."""
    HANG = "hang"
    """The round's collectives hang, and agents detect it."""
    SAVE = "save"
    """Request a checkpoint."""
    SET = "set"
    """Change settings."""
    KILL = "kill"
    """Use the kill switch: write a checkpoint and end the job."""
    CRASH_ON_HOLD = "crash-on-hold"
    """The Master is killed while workers are held at a step boundary."""
    CRASH_ON_SWITCH = "crash-on-switch"
    """The Master is killed after it recorded a change, before it tells the workers where to stop."""
    CRASH_SOURCE = "crash-source"
    """The next node that is asked for a piece of state is killed."""
    SPOIL = "spoil"
    """The newest checkpoint is corrupted."""
    RESIZE = "resize"
    """Request another size: sometimes an impossible one, one based on an old revision, or a repeated one."""
    SET_BOUNDS = "set-bounds"
    """Change the smallest and largest size."""
    EVICT = "evict"
    """Drain nodes."""
    CORDON = "cordon"
    """Cordon or uncordon a node."""
    SUSPEND = "suspend"
    """Suspend the job for a while."""
    BAD_SLOT = "bad-slot"
    """A device fails: for a while every worker in that slot fails."""
    DROP_SLOT = "drop-slot"
    """Cordon or uncordon a slot."""
    UNFIT = "unfit"
    """A health check reports a slot as unfit."""
    NOTICE = "notice"
    """The cloud announces that it will take a node away, and does."""
    NO_ROOM = "no-room"
    """A node has no memory for commits for a while."""
    NO_LOGS = "no-logs"
    """A node's disk accepts no worker output for a while."""
    GIVE_UP = "give-up"
    """A worker reports that the job cannot continue (``edl.fail``) and exits."""
    SERVICE_FLAW = "service-flaw"
    """A service of the Master reports a flaw at the end of the job."""
    SERVICE_FAILS = "service-fails"
    """A service of the Master reports that it cannot continue, which ends the job."""


SIZES = (FaultKind.RESIZE, FaultKind.SET_BOUNDS, FaultKind.EVICT, FaultKind.CORDON, FaultKind.SUSPEND)
"""Requests that change the size. None of them is a failure."""
SIGNS = (FaultKind.NOTICE, FaultKind.NO_ROOM, FaultKind.NO_LOGS, FaultKind.GIVE_UP)
"""What nodes and workers report about themselves."""
SLOTS = (FaultKind.BAD_SLOT, FaultKind.DROP_SLOT, FaultKind.UNFIT)
"""Faults of single slots. They need nodes of several slots and have their own schedules; only BAD_SLOT is a failure."""


SERVICES = (FaultKind.SERVICE_FLAW, FaultKind.SERVICE_FAILS)
"""Reports of the Master's services. The simulated jobs have no services, so these events are posted directly."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its time. ``pick`` and ``pick2`` (0 to 1) select its target among those present when it strikes."""

    at_s: float
    kind: FaultKind
    for_s: float = 0.0
    pick: float = 0.0
    pick2: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:6.2f} {self.kind.value} for {self.for_s:.2f} s, pick {self.pick:.2f} {self.pick2:.2f}"


_WEIGHTS: dict[FaultKind, int] = {
    FaultKind.CRASH: 6,
    FaultKind.CRASH_MASTER: 4,
    FaultKind.CRASH_ON_WRITE: 4,
    FaultKind.RESTART: 9,
    FaultKind.NEW_NODE: 4,
    FaultKind.KILL_WORKER: 6,
    FaultKind.FAIL_WORKER: 5,
    FaultKind.FREEZE_WORKER: 2,
    FaultKind.PARTITION: 4,
    FaultKind.ISOLATE: 4,
    FaultKind.ONE_WAY: 3,
    FaultKind.PARTITION_STORE: 3,
    FaultKind.STORE_AWAY: 3,
    FaultKind.SLOW_NETWORK: 2,
    FaultKind.PAUSE: 4,
    FaultKind.PAUSE_MASTER: 3,
    FaultKind.LOSE_LEASE: 4,
    FaultKind.DRAIN: 3,
    FaultKind.KILL_FORK_SERVER: 3,
    FaultKind.KILL_WAITING: 4,
    FaultKind.STUCK_WORKER: 2,
    FaultKind.HANG: 3,
    FaultKind.SAVE: 4,
    FaultKind.KILL: 1,
    FaultKind.CRASH_ON_HOLD: 3,
    FaultKind.CRASH_ON_SWITCH: 3,
    FaultKind.CRASH_SOURCE: 2,
    FaultKind.SPOIL: 2,
}


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a schedule. After ``quiet_s`` all of them are healed and no new one strikes."""

    faults: tuple[Fault, ...] = ()
    quiet_s: float = 0.0

    @classmethod
    def draw(cls, rng: random.Random, span_s: float = 40.0) -> FaultPlan:
        """A plan of up to 18 faults, at intervals from a fraction of a millisecond to several seconds."""
        count = rng.choice((1, 3, 5, 8, 12, 18))
        kinds, weights = list(_WEIGHTS), list(_WEIGHTS.values())
        swarm = rng.random() < 0.4
        chosen = rng.sample(kinds, k=rng.randint(2, 5)) if swarm else kinds
        chances = [_WEIGHTS[kind] for kind in chosen] if swarm else weights
        at_s = rng.uniform(0.0, 8.0)
        faults = []
        for _ in range(count):
            kind = rng.choices(chosen, chances)[0]
            for_s = rng.choice((0.1, 1.0, 3.0, 4.0, 8.0, 12.0)) * rng.uniform(0.5, 1.5)
            faults.append(Fault(at_s, kind, for_s, rng.random(), rng.random()))
            at_s += rng.choice((0.001, 0.01, 0.1, 1.0, 3.0, 5.0)) * rng.uniform(0.2, 2.0)
            if at_s > span_s:
                break
        longest_s = max(fault.at_s + fault.for_s for fault in faults)
        return cls(tuple(faults), longest_s + 0.1)

    def with_signs(self, rng: random.Random, span_s: float = 40.0) -> FaultPlan:
        """The plan with up to two reports of nodes or workers about themselves."""
        kinds = rng.choices(SIGNS, (4, 3, 3, 1), k=rng.choice((0, 0, 0, 1, 2)))
        more = [
            Fault(rng.uniform(1.0, span_s), kind, rng.choice((0.5, 3.0, 12.0)), rng.random(), rng.random())
            for kind in kinds
        ]
        return FaultPlan((*self.faults, *more), max([self.quiet_s, *(one.at_s + one.for_s + 0.1 for one in more)]))

    def with_requests(self, rng: random.Random, span_s: float = 40.0) -> FaultPlan:
        """The plan with changes of settings at random times and close to its faults."""
        moments = [fault.at_s + rng.choice((-0.3, -0.05, 0.0, 0.05, 0.3)) for fault in self.faults]
        chosen = [at_s for at_s in moments if at_s > 0 and rng.random() < 0.3]
        chosen += [rng.uniform(1.0, span_s) for _ in range(rng.randint(1, 4))]
        chosen += [at_s + rng.uniform(0.1, 0.5) for at_s in chosen if rng.random() < 0.5]
        requests = [Fault(at_s, FaultKind.SET, 0.0, rng.random(), rng.random()) for at_s in chosen]
        return FaultPlan((*self.faults, *requests), max(self.quiet_s, *chosen) + 0.1)

    def with_sizes(self, rng: random.Random, span_s: float = 40.0) -> FaultPlan:
        """The plan with requests for other sizes at random times and close to its faults."""
        moments = [fault.at_s + rng.choice((-0.3, -0.05, 0.0, 0.05, 0.3)) for fault in self.faults]
        chosen = [at_s for at_s in moments if at_s > 0 and rng.random() < 0.4]
        chosen += [rng.uniform(1.0, span_s) for _ in range(rng.randint(1, 5))]
        chosen += [at_s + rng.uniform(0.001, 0.5) for at_s in chosen if rng.random() < 0.5]
        kinds = rng.choices(SIZES, (8, 2, 4, 4, 2), k=len(chosen))
        requests = [
            Fault(at_s, kind, rng.choice((0.5, 3.0, 12.0)), rng.random(), rng.random())
            for at_s, kind in zip(chosen, kinds, strict=True)
        ]
        return FaultPlan((*self.faults, *requests), max(self.quiet_s, *chosen) + 0.1)

    def with_slots(self, rng: random.Random, span_s: float = 40.0) -> FaultPlan:
        """The plan with faults of single slots at random times and close to its faults."""
        moments = [fault.at_s + rng.choice((-0.3, -0.05, 0.0, 0.05, 0.3)) for fault in self.faults]
        chosen = [at_s for at_s in moments if at_s > 0 and rng.random() < 0.3]
        chosen += [rng.uniform(1.0, span_s) for _ in range(rng.randint(2, 6))]
        kinds = rng.choices(SLOTS, (6, 4, 1), k=len(chosen))
        named = [
            Fault(at_s, kind, rng.choice((0.5, 3.0, 12.0)), rng.random(), rng.random())
            for at_s, kind in zip(chosen, kinds, strict=True)
        ]
        longest_s = max(one.at_s + one.for_s for one in named)
        return FaultPlan((*self.faults, *named), max(self.quiet_s, longest_s) + 0.1)

    @classmethod
    def draw_bursts(cls, rng: random.Random) -> FaultPlan:
        """A plan of all kinds of faults in bursts of up to half a second, so that several strike within one state."""
        moments = [rng.uniform(0.0, 30.0) for _ in range(rng.randint(1, 5))]
        kinds = [kind for kind in FaultKind if kind is not FaultKind.SERVICE_FAILS or rng.random() < 0.2]
        chosen = rng.sample(kinds, k=rng.randint(3, 12))
        faults = tuple(
            Fault(
                at_s + rng.uniform(0.0, rng.choice((0.01, 0.1, 0.5))),
                rng.choice(chosen),
                rng.choice((0.1, 0.5, 3.0, 8.0)) * rng.uniform(0.5, 1.5),
                rng.random(),
                rng.random(),
            )
            for at_s in moments
            for _ in range(rng.randint(2, 8))
        )
        return cls(faults, max(fault.at_s + fault.for_s for fault in faults) + 0.1)

    def without(self, index: int) -> FaultPlan:
        """The plan without one fault; for shrinking."""
        return FaultPlan(self.faults[:index] + self.faults[index + 1 :], self.quiet_s)
