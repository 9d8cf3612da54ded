"""Runs the Master's machine with a simulated fleet on virtual time. Quiet time costs nothing: only events do."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence

from edl.config import JobSpec, Replicas, SlotRules, Timeouts
from edl.master import events as ev
from edl.master.goodput.slot_times import NS, SlotTimes, follow
from edl.master.machine import step_all, take_over
from edl.master.state import MasterState, Phase
from edl.simulate.agenda import Agenda
from edl.simulate.faults import FaultType, TimedFault, affected, check
from edl.simulate.fleet import STORED, Fleet, FleetNode
from edl.simulate.history import RestoredFrom, SimulatedHistory, SlowWindow, TrainingSpell
from edl.simulate.shape import ClusterShape, JobShape, PhaseTimes
from edl.types import JobId

Step = Callable[[MasterState, Sequence[ev.Event], float], ev.Decision]
FOREVER_S = 1e9
UNLIMITED = 1_000_000_000


def simulate(
    cluster: ClusterShape,
    job: JobShape,
    times: PhaseTimes,
    faults: Sequence[TimedFault],
    horizon_s: float,
    step: Step = step_all,
) -> SimulatedHistory:
    """What happens in ``horizon_s`` seconds from the start of the job's launchers.

    The job has no restart budget and waits for nodes as long as it must, so that it ends by itself only for reasons
    that the Master gives. ``step``: the machine's, for tests that check each decision.
    """
    check(faults, cluster)
    slow = tuple(
        SlowWindow(round(one.at_s * NS), round((one.at_s + one.lasts_s) * NS), one.factor)
        for one in faults
        if one.kind is FaultType.SLOW_STORAGE
    )
    return _VirtualJob(cluster, job, times, slow, step).run(faults, horizon_s)


def spec_of(job: JobShape, times: PhaseTimes) -> JobSpec:
    """The settings with which the Master runs."""
    lease_s = min(3600.0, max(1.0, times.noticed_node_s))
    limit_s = 60.0 + 2 * (times.stop_s + times.start_s + times.boot_s + times.hold_s)
    timeouts = Timeouts(
        recover_s=FOREVER_S,
        lease_ttl_s=lease_s,
        warming_s=limit_s,
        boundary_s=limit_s,
        rejoin_s=limit_s,
        loading_s=FOREVER_S,
        restart_s=0.0,
    )
    replicas = Replicas(job.replica_nodes, 1 if job.replica_nodes > 1 else 0)
    name, slots = JobId("simulated"), SlotRules(strikes=0)
    return JobSpec(name, job.bounds, UNLIMITED, timeouts=timeouts, replicas=replicas, slots=slots)


class _VirtualJob:
    """One run."""

    def __init__(
        self, cluster: ClusterShape, job: JobShape, times: PhaseTimes, slow: tuple[SlowWindow, ...], step: Step
    ) -> None:
        self._cluster, self._times, self._slow, self._step = cluster, times, slow, step
        self._agenda = Agenda()
        self._fleet = Fleet(cluster, job, times, self._agenda, slow)
        self._slot_times = SlotTimes()
        decision = take_over(spec_of(job, times), None, (), 0.0)
        self._state = decision.state
        self._slot_times, _ = follow(self._slot_times, None, (), self._state, 0.0)
        self._wake_s = _wake_s(decision)
        self._spells: list[TrainingSpell] = []
        self._begun_ns = 0
        self._halted_ns: int | None = None
        self._paces: list[tuple[int, float]] = []
        self._slowed: Counter[tuple[int, float]] = Counter()
        """Stragglers: node and factor, for each such fault that lasts."""
        self._waiting_since_ns: int | None = None
        self._waits: list[int] = []
        self._hits: Counter[str] = Counter()
        self._worlds = self._decisions = 0

    def run(self, faults: Sequence[TimedFault], horizon_s: float) -> SimulatedHistory:
        self._agenda.add(0.0, self._fleet.join_all)
        for fault in faults:
            self._agenda.add(fault.at_s, functools.partial(self._strike, fault), heard=fault.kind is FaultType.DRAIN)
        while not self._ended:
            now_s = self._agenda.next_s(self._wake_s)
            if now_s > horizon_s:
                break
            events = self._agenda.events(now_s)
            if events or now_s >= max(self._wake_s, self._agenda.silent_until_s):
                self._decide(events or [ev.Tick()], now_s)
            horizon_s = now_s if self._ended else horizon_s
        return self._result(horizon_s)

    @property
    def _ended(self) -> bool:
        return self._state.record.phase is Phase.ENDED

    def _decide(self, events: Sequence[ev.Event], now_s: float) -> None:
        before, trained = self._state, self._slot_times.trains
        decision = self._step(before, events, now_s)
        self._decisions += 1
        self._state = decision.state
        self._wake_s = _wake_s(decision)
        self._slot_times, _ = follow(self._slot_times, before, events, self._state, now_s)
        now_ns = round(now_s * NS)
        if trained and not self._slot_times.trains:
            self._end_spell(before, now_ns, planned=self._state.record.switch is not None)
            self._fleet.cut(before)
        elif not trained and self._slot_times.trains:
            self._begun_ns, self._halted_ns, self._paces = now_ns, None, []
            self._set_pace(now_ns)
        self._follow_waits(decision, now_ns)
        self._fleet.follow_orders(decision.effects, now_s)

    def _follow_waits(self, decision: ev.Decision, now_ns: int) -> None:
        notes = [effect.kind for effect in decision.effects if isinstance(effect, ev.HistoryNote)]
        self._worlds += notes.count(ev.Kind.WORLD_FORMED)
        if ev.Kind.WORLD_FORMED in notes and self._waiting_since_ns is not None:
            self._waits.append(now_ns - self._waiting_since_ns)
            self._waiting_since_ns = None
        elif ev.Kind.WAITING in notes and self._waiting_since_ns is None and self._worlds:
            self._waiting_since_ns = now_ns

    def _end_spell(self, before: MasterState, now_ns: int, *, planned: bool) -> None:
        world = before.record.world
        if world is None:
            return
        spoilt = 0
        for member in world.members:
            node = self._fleet.by_id[member.node]
            if node.silent_s is not None and not node.up:
                spoilt += max(0, now_ns - max(self._begun_ns, round(node.silent_s * NS)))
        restored = RestoredFrom.MEMORY
        if not world.restore.commit:
            restored = RestoredFrom.SCRATCH
        elif world.restore == STORED:
            restored = RestoredFrom.STORAGE
        halted_ns = now_ns if self._halted_ns is None else self._halted_ns
        planned = planned and self._halted_ns is None
        self._spells.append(
            TrainingSpell(self._begun_ns, now_ns, halted_ns, world.size, restored, planned, spoilt, tuple(self._paces))
        )

    # --- faults ------------------------------------------------------------------------------------------------------

    def _strike(self, fault: TimedFault, now_s: float) -> Sequence[ev.Event]:
        nodes = [self._fleet.nodes[number] for number in affected(fault, self._cluster)]
        hit, said = True, list[ev.Event]()
        match fault.kind:
            case FaultType.WORKER:
                hit = self._fleet.fail_worker(nodes[0], now_s)
                self._halt(nodes[:1] if hit else [], now_s)
            case FaultType.NODE | FaultType.RACK | FaultType.SWITCH:
                down = [node for node in nodes if self._fleet.fail_node(node, now_s, fault.lasts_s)]
                hit = bool(down)
                self._halt(down, now_s)
            case FaultType.DRAIN:
                said = self._fleet.drain(nodes[0], fault.lasts_s)
                hit = bool(said)
            case FaultType.MASTER:
                self._be_silent(now_s + self._times.master_s)
            case FaultType.STORE:
                self._be_silent(now_s + fault.lasts_s)
            case FaultType.STRAGGLER:
                self._slow_down(fault, now_s)
            case FaultType.SLOW_STORAGE:
                pass  # its windows are known from the beginning
        self._hits[fault.kind.value] += hit
        return said

    def _halt(self, nodes: Sequence[FleetNode], now_s: float) -> None:
        """No step is completed without a member."""
        world = self._state.record.world
        if not self._slot_times.trains or self._halted_ns is not None or world is None:
            return
        if any(world.member(node.info.node) is not None for node in nodes):
            self._halted_ns = round(now_s * NS)

    def _be_silent(self, until_s: float) -> None:
        self._agenda.silent_until_s = max(self._agenda.silent_until_s, until_s)

    def _slow_down(self, fault: TimedFault, now_s: float) -> None:
        straggler = (fault.unit, fault.factor)
        self._slowed[straggler] += 1
        self._set_pace(round(now_s * NS))
        over = functools.partial(self._speed_up, straggler)
        self._agenda.add(now_s + fault.lasts_s, over, heard=False)

    def _speed_up(self, straggler: tuple[int, float], now_s: float) -> Sequence[ev.Event]:
        self._slowed[straggler] -= 1
        self._set_pace(round(now_s * NS))
        return []

    def _set_pace(self, now_ns: int) -> None:
        """The world that trains steps as fast as its slowest member."""
        world = self._state.record.world
        if not self._slot_times.trains or world is None:
            return
        members = {
            factor
            for (number, factor), times in self._slowed.items()
            if times and world.member(self._fleet.nodes[number].info.node) is not None
        }
        pace = max(members, default=1.0)
        if pace != (self._paces[-1][1] if self._paces else 1.0):
            self._paces.append((now_ns, pace))

    # --- the result --------------------------------------------------------------------------------------------------

    def _result(self, horizon_s: float) -> SimulatedHistory:
        end_ns = round(horizon_s * NS)
        slots = dataclasses.replace(self._slot_times, at_ns=max(self._slot_times.at_ns, end_ns))
        if self._slot_times.trains:
            self._end_spell(self._state, end_ns, planned=True)
        if self._waiting_since_ns is not None:
            self._waits.append(end_ns - self._waiting_since_ns)
        gone = [node.gone_s for node in self._fleet.nodes if node.gone_s is not None]
        outcome = self._state.record.outcome
        return SimulatedHistory(
            duration_ns=end_ns,
            nodes=self._cluster.nodes,
            uses=slots.amounts(),
            repair_ns=self._fleet.repair_ns + sum(end_ns - round(at_s * NS) for at_s in gone),
            spells=tuple(self._spells),
            slow_storage=self._slow,
            faults=dict(sorted(self._hits.items())),
            waiting_ns=sum(self._waits),
            longest_wait_ns=max(self._waits, default=0),
            waits=len(self._waits),
            worlds=self._worlds,
            decisions=self._decisions,
            ended=outcome.reason if outcome is not None else "",
        )


def _wake_s(decision: ev.Decision) -> float:
    return min((one.at_s for one in decision.effects if isinstance(one, ev.WakeAt)), default=math.inf)
