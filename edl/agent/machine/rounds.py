"""Moves this node from one world to the next.

A plain worker is started and ended with its world. A worker that uses ``edl.run`` keeps its process: it parks at the
end of a round and gets its place in the next world. Once a job is known to do so, empty slots are filled ahead of the
next world, so that it need not wait for processes to start. If the in-process way fails for a slot, its worker is
restarted.
"""

from __future__ import annotations

import dataclasses

from edl.agent.machine.events import (
    DumpStacks,
    FlushSaves,
    GivePlace,
    SignalWorkers,
    Start,
    StartAhead,
    TellWorkers,
    WorkerUnderway,
)
from edl.agent.machine.state import HAS_PROCESS, AgentPhase, Leave, Worker, WorkerStatus
from edl.agent.machine.turn import LEAVES, SIGKILL, SIGTERM, AgentTurn
from edl.types import Rank, Round
from edl.wire import local
from edl.wire.messages import Preparing, StopRound, Underway, UseSlots, WorkersDone
from edl.wire.records import Member, World

IN_PROCESS = "in process"
UNUSED = "the next world does not use this worker"
NO_WORLD = "no world will form for a while"
"""Reasons for which waiting workers are ended, for their scripts."""


def start(turn: AgentTurn, world: World, reason: str) -> None:
    """Take part in a world: give places to the waiting workers and start the others."""
    member = admitted(turn, world)
    if member is None:
        return
    workers = tuple(_take_place(turn, world, member, index) for index in range(member.slots))
    fit = {worker.slot for worker in workers if not worker.being_replaced}
    waiting = tuple(w.slot for w in turn.state.workers if w.status is WorkerStatus.PARKED and w.slot in fit)
    begin(turn, world, member, workers, waiting, reason)


def admitted(turn: AgentTurn, world: World) -> Member | None:
    """This node's member entry, if it can take part in the world now; else None."""
    state = turn.state
    member = world.member(state.info.node)
    mine = state.registered and member is not None and member.incarnation == state.info.incarnation
    if member is None or not mine or world.round <= state.seen_round:
        return None
    turn.set(seen_round=world.round)
    if state.phase not in (AgentPhase.IDLE, AgentPhase.PREPARING):
        return None  # no longer ready; the Master learns it from the next Ready, which names the newest round seen
    if state.idling and any(worker.ending for worker in state.alive):
        return None  # its waiting workers are being ended
    return member


def begin(
    turn: AgentTurn, world: World, member: Member, workers: tuple[Worker, ...], placed: tuple[int, ...], reason: str
) -> None:
    """Begin the world with these workers: those in ``placed`` live and get their places, those new in it are started.
    Workers in other slots are ended."""
    missing = tuple(w.slot for w in workers if w.born == world.round)
    outside = tuple(worker for worker in turn.state.alive if worker.slot not in member.used)
    turn.set(phase=AgentPhase.RUNNING, world=world, workers=(*workers, *outside), unsent=())
    turn.unhold()
    turn.set(park_by_s=None, ahead_failed="", idling=False, use=member.places, kill_at_s=None)
    turn.set(flushed=False, unsaved="", killed=False, stopped_itself=False)
    turn.log(reason)
    shed(turn, outside)
    unfit = tuple(worker.slot for worker in workers if worker.being_replaced)
    if unfit:
        turn.do(SignalWorkers(SIGKILL, unfit))  # it only waits, and holds nothing that its agent does not have
    if placed:
        turn.do(GivePlace(world, placed))
    if missing:
        turn.do(Start(world, missing))


def _take_place(turn: AgentTurn, world: World, member: Member, local_rank: int) -> Worker:
    slot, rank = member.used[local_rank], Rank(member.first_rank + local_rank)
    old = turn.worker(slot)
    place = Worker(slot, rank, local_rank=local_rank, born=world.round, bound=local_rank)
    if old is None or old.status not in (WorkerStatus.PARKED, WorkerStatus.STARTING):
        return dataclasses.replace(place, how=restarted(old, "started with the world"))
    place = dataclasses.replace(place, born=old.born)
    if old.ending or _is_elsewhere(turn, old, local_rank):
        numbers = f"its device has another number: local rank {old.bound} became {local_rank}"
        how = "started again" if old.ending else f"restarted ({numbers})"
        return dataclasses.replace(place, how=how, being_replaced=True)
    return dataclasses.replace(
        place, rejoins=old.rejoins, frozen_since_s=old.frozen_since_s, how=old.how, bound=old.bound
    )


def _is_elsewhere(turn: AgentTurn, worker: Worker, local_rank: int) -> bool:
    """Whether a process with this local rank would look for its device in the wrong place."""
    return turn.state.by_device and worker.bound != local_rank


def look_whether_done(turn: AgentTurn) -> None:
    """Once all workers here have succeeded, have their saves written and tell the Master."""
    if turn.state.done:
        turn.do(FlushSaves(turn.state.running_round))


def flushed(turn: AgentTurn, pending: bool, unsaved: str) -> None:
    """The workers' saves are written or lost, or writing takes a while (``pending``). Tells the Master."""
    if turn.state.flushed:
        return
    if unsaved:
        turn.log(unsaved)
    turn.set(flushed=not pending, unsaved=unsaved)
    turn.say(WorkersDone(turn.state.running_round, pending, unsaved))


def start_replacement(turn: AgentTurn, worker: Worker) -> None:
    """Start a worker in a slot whose old process, which could not fill it, has ended."""
    state = turn.state
    if state.phase is AgentPhase.RUNNING and state.world is not None:
        new = dataclasses.replace(worker, being_replaced=False, born=state.world.round)
        turn.set(workers=tuple(new if one.slot == new.slot else one for one in state.workers))
        turn.do(Start(state.world, (new.slot,)))
        return
    turn.set_worker(worker.slot, status=WorkerStatus.STOPPED, being_replaced=False)
    rest_if_free(turn)


def shed(turn: AgentTurn, workers: tuple[Worker, ...]) -> None:
    """End workers in slots that are not used; they belong to no world from now on."""
    able = tuple(worker for worker in workers if not worker.ending)
    for worker in able:
        if worker.status is WorkerStatus.ALIVE:
            turn.set_worker(worker.slot, status=WorkerStatus.STARTING, local_rank=-1)
    if able:
        kill_at_s, killed, slots = turn.state.kill_at_s, turn.state.killed, {worker.slot for worker in able}
        turn.end_workers(tuple(worker for worker in turn.state.workers if worker.slot in slots), SIGTERM, UNUSED)
        turn.set(kill_at_s=kill_at_s, killed=killed, shed_by_s=turn.now_s + turn.state.timeouts.shutdown_s)


def use_slots(turn: AgentTurn, order: UseSlots) -> None:
    """Note the slots of the next world's workers, and let workers wait there only."""
    turn.set(use=() if order.slots == tuple(range(turn.state.info.slots)) else order.slots)
    if turn.state.phase in (AgentPhase.IDLE, AgentPhase.PREPARING):
        get_ready(turn)


def restarted(old: Worker | None, how: str) -> str:
    """How a new process came into its slot, including the end of its predecessor."""
    return f"restarted ({old.gone})" if old is not None and old.gone else how


def stop(turn: AgentTurn, order: StopRound) -> None:
    """Leave the round at once, even if it was to be left at a step boundary."""
    state = turn.state
    if state.phase is AgentPhase.IDLE:
        turn.announce()
    elif state.phase is AgentPhase.PREPARING:
        say_preparing(turn)
    elif order.round >= state.running_round and state.unbroken:
        turn.log(order.reason)
        if order.dump:
            turn.do(DumpStacks())
        break_off(turn)


def break_off(turn: AgentTurn) -> None:
    """Interrupt the round: workers that can rejoin abort their communicator and park; others get SIGTERM, and SIGKILL
    after the grace period; frozen ones are killed at once."""
    state = turn.state
    if not state.unbroken:
        return
    turn.set(phase=AgentPhase.STOPPING, leave=Leave.AT_ONCE, unsent=())
    turn.unhold()
    parking = tuple(w.slot for w in state.in_world if w.rejoins and w.frozen_since_s is None)
    ending = tuple(w for w in state.in_world if w.slot not in parking)
    if parking:
        turn.do(TellWorkers(local.Break(state.running_round, state.reason), parking))
        turn.set(park_by_s=turn.now_s + state.timeouts.rejoin_s)
    if ending:
        turn.end_workers(ending, SIGTERM, state.reason)
    rest_if_free(turn)


def rest_if_free(turn: AgentTurn) -> None:
    """Once no worker is left in the world, report ready or exit."""
    turn.exit_if_empty()
    if turn.state.phase is AgentPhase.STOPPING and not turn.state.in_world:
        turn.unhold()
        turn.set(kill_at_s=None, park_by_s=None)
        get_ready(turn)


def get_ready(turn: AgentTurn) -> None:
    """Report this node as ready, after filling the slots if this job's workers can wait for a world.

    While a worker is on its way to its waiting point, it is not ready: this is called again once the worker is there or
    has ended. Also a node that fills no slots may have one, from a fork server that has been lost.
    """
    state = turn.state
    if not state.warm and not state.parked:
        turn.set(phase=AgentPhase.WARMING)
        return
    if state.idling:
        _rest(turn)
        return
    shed(turn, tuple(worker for worker in state.alive if _is_useless(turn, worker)))
    state, filled = turn.state, {worker.slot for worker in turn.state.alive}
    missing = tuple(slot for slot in state.uses if slot not in filled)
    starting = _starting(turn)
    fills = state.rejoins and not state.ahead_failed and state.draining is None and not state.parked
    if not fills and not starting:
        turn.set(phase=AgentPhase.IDLE)
        turn.announce()
        return
    if starting and state.phase is AgentPhase.PREPARING:
        return
    turn.set(phase=AgentPhase.PREPARING)
    # Sent first: the others continue without this node and need not wait for its processes.
    say_preparing(turn)
    if missing and not starting:
        others = tuple(worker for worker in state.alive if worker.slot not in state.uses)
        turn.set(workers=(*(_filled(turn, slot) for slot in state.uses), *others))
        turn.do(StartAhead(missing, state.seen_round))


def _is_useless(turn: AgentTurn, worker: Worker) -> bool:
    """Whether a waiting worker could not be used in the next world."""
    if worker.status is WorkerStatus.ALIVE:
        return False
    uses = turn.state.uses
    return worker.slot not in uses or _is_elsewhere(turn, worker, uses.index(worker.slot))


def idle(turn: AgentTurn) -> None:
    """No world will form for a while: end all waiting workers, including independent ones."""
    turn.set(idling=True)
    if turn.state.between and turn.state.in_world:
        break_off(turn)
    elif turn.state.phase in (AgentPhase.IDLE, AgentPhase.PREPARING):
        get_ready(turn)


def _rest(turn: AgentTurn) -> None:
    """Report ready once no worker is left."""
    left = turn.state.alive
    turn.set(phase=AgentPhase.PREPARING if left else AgentPhase.IDLE)
    if left:
        turn.end_workers(tuple(worker for worker in left if not worker.ending), SIGTERM, NO_WORLD)
    else:
        turn.set(kill_at_s=None)
        turn.announce()


def say_preparing(turn: AgentTurn) -> None:
    """Tell the Master that this node is free but not ready yet."""
    reason = "starting workers ahead of the next world"
    turn.say(Preparing(turn.state.seen_round, reason, stopped_itself=turn.state.stopped_itself))


def _starting(turn: AgentTurn) -> bool:
    """Whether workers are still on their way to their waiting point."""
    return any(worker.status is WorkerStatus.STARTING and not worker.ending for worker in turn.state.workers)


def _filled(turn: AgentTurn, slot: int) -> Worker:
    old, state = turn.worker(slot), turn.state
    if old is not None and old.status in HAS_PROCESS:
        return old
    how, bound = restarted(old, "started ahead"), state.uses.index(slot)
    return Worker(slot, Rank(-1), WorkerStatus.STARTING, born=state.seen_round, bound=bound, how=how)


def prestart(turn: AgentTurn) -> None:
    """The Master announces that this job's workers can wait for their world."""
    turn.set(rejoins=True, idling=False)
    if turn.state.phase is AgentPhase.IDLE:
        get_ready(turn)


def entered(turn: AgentTurn, worker: Worker, rejoins: bool, why_not: str = "") -> None:
    """A worker uses edl. ``why_not``: the reason why it must be restarted to join the next world."""
    if why_not and not worker.how.endswith(f"[{why_not}]"):
        turn.set_worker(worker.slot, how=f"{worker.how} [{why_not}]")
    turn.set_worker(worker.slot, rejoins=rejoins)
    if rejoins:
        turn.set(rejoins=True)
    elif turn.state.world is not None and worker.status is WorkerStatus.ALIVE:
        if turn.state.phase is AgentPhase.RUNNING:
            turn.do(GivePlace(turn.state.world, (worker.slot,)))
    elif worker.status is WorkerStatus.STARTING:
        parked(turn, worker, Round(0))  # it waits for the place that it was started for


def parked(turn: AgentTurn, worker: Worker, left: Round) -> None:
    """A worker has parked: it is in no world and waits for a place."""
    state = turn.state
    if worker.status is WorkerStatus.STARTING and left:
        return  # sent by the process that was in this slot before: a new one has been in no world
    if state.phase is AgentPhase.LEAVING:
        turn.do(TellWorkers(local.Stop(LEAVES), (worker.slot,)))
    elif state.phase is AgentPhase.RUNNING and state.world is not None and worker.status is WorkerStatus.ALIVE:
        if left < state.world.round:
            turn.do(GivePlace(state.world, (worker.slot,)))
    elif worker.ending:
        return  # it is about to end
    elif state.phase is AgentPhase.STOPPING:
        turn.set_worker(worker.slot, status=WorkerStatus.PARKED, how=IN_PROCESS, underway=False, here=None)
        rest_if_free(turn)
    else:
        turn.set_worker(worker.slot, status=WorkerStatus.PARKED, underway=False, here=None)
        if state.phase is AgentPhase.PREPARING:
            get_ready(turn)  # another one may have died meanwhile


def ended_outside(turn: AgentTurn, worker: Worker, what: str) -> None:
    """A worker outside of any world has ended: replace it once, then leave its slot to the next world."""
    if worker in turn.state.shed and not turn.state.idling:
        turn.set(workers=tuple(other for other in turn.state.workers if other.slot != worker.slot))
        if turn.state.phase is AgentPhase.PREPARING:
            get_ready(turn)
        return
    turn.set_worker(worker.slot, status=WorkerStatus.FAILED, gone=what)
    if turn.state.phase not in (AgentPhase.IDLE, AgentPhase.PREPARING):
        return
    if turn.state.idling:
        get_ready(turn)
        return
    if worker.status is WorkerStatus.STARTING:
        turn.set(ahead_failed=f"a worker started ahead {what}")
        turn.log(f"a worker started ahead of its world {what}: its slot is filled with the next world")
    get_ready(turn)


def underway(turn: AgentTurn, worker: Worker, event: WorkerUnderway) -> None:
    """A worker trains; after the last one, tell the Master how each came into the world."""
    if worker.status is not WorkerStatus.ALIVE or event.joined != turn.state.running_round:
        return
    turn.set_worker(worker.slot, underway=True, connect_s=event.connect_s, restore_s=event.restore_s)
    if turn.state.underway:
        say_underway(turn)


def say_underway(turn: AgentTurn) -> None:
    """Tell the Master that all workers train."""
    here = turn.state.workers
    slowest = max((one.connect_s for one in here), default=0.0), max((one.restore_s for one in here), default=0.0)
    turn.say(Underway(turn.state.running_round, ways(turn), *slowest))


def ways(turn: AgentTurn) -> str:
    """How the workers here came into the world: ``in process``, or ``3 in process, 1 started ahead``."""
    counts: dict[str, int] = {}
    for worker in (one for one in turn.state.workers if one not in turn.state.shed):
        counts[worker.how] = counts.get(worker.how, 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{number} {how}" for how, number in counts.items())


def count_of(workers: tuple[Worker, ...]) -> str:
    """``worker 3``, or ``2 workers``."""
    return f"worker {workers[0].rank}" if len(workers) == 1 else f"{len(workers)} workers"
