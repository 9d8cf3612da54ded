"""Independent workers: the trainers of a job with parameter servers.

The world changes around them. When a round is stopped, its workers are not: the node immediately reports ready, and
they train on. In the next world, living workers get their new places, successful ones stay ended, and failed ones are
restarted. They are only stopped where other nodes must be sure that they are gone: the node has left the world, its
lease or all contact is lost, or the launcher leaves.
"""

from __future__ import annotations

import dataclasses

from edl.agent.machine import rounds
from edl.agent.machine.events import Start
from edl.agent.machine.state import AgentPhase, Worker, WorkerStatus
from edl.agent.machine.turn import AgentTurn
from edl.types import Rank
from edl.wire.messages import StopRound
from edl.wire.records import Member, World

STARTED_OVER = "started over"
MOST_RENEWALS = 50
"""Maximum number of consecutive renewals of one slot without another failure."""
LIVED_S = 600.0
"""A worker that lived this long (seconds) resets the count of renewals."""


def start(turn: AgentTurn, world: World, reason: str) -> None:
    """Take part in a world, or stop the workers if this node is not in it."""
    state = turn.state
    if state.registered and world.member(state.info.node) is None and world.round > state.seen_round:
        if state.unbroken:
            turn.log(f"{reason}: this node is not in the new world, so its workers end")
            rounds.break_off(turn)
        return
    member = rounds.admitted(turn, world)
    if member is None:
        return
    workers = tuple(_take_place(turn, world, member, index) for index in range(member.slots))
    placed = tuple(worker.slot for worker in state.in_world if worker.slot in member.used)
    rounds.begin(turn, world, member, workers, placed, reason)
    rounds.look_whether_done(turn)


def _take_place(turn: AgentTurn, world: World, member: Member, local_rank: int) -> Worker:
    slot, rank = member.used[local_rank], Rank(member.first_rank + local_rank)
    old = turn.worker(slot)
    if old is not None and old.status in (WorkerStatus.ALIVE, WorkerStatus.DONE):
        return dataclasses.replace(old, rank=rank, local_rank=local_rank)
    how = rounds.restarted(old, "started with the world")
    new = Worker(slot, rank, local_rank=local_rank, born=world.round, how=how, bound=local_rank)
    if old is not None and old in turn.state.shed:
        return dataclasses.replace(new, born=old.born, being_replaced=True)  # the old process is still there
    if old is not None and old.gone == STARTED_OVER:
        return dataclasses.replace(new, renewals=old.renewals, renewed_s=turn.now_s)
    return new


def stop(turn: AgentTurn, order: StopRound) -> None:
    """The round is over, which does not stop independent workers."""
    state = turn.state
    if state.phase is AgentPhase.RUNNING and order.round >= state.running_round:
        turn.log(order.reason)
        rounds.get_ready(turn)
    elif state.phase is AgentPhase.IDLE:
        turn.announce()


def may_renew(turn: AgentTurn, worker: Worker) -> bool:
    """Whether a worker's request to be restarted is granted. A worker that keeps asking has failed."""
    return not worker.ending and _renewals(turn, worker) < MOST_RENEWALS


def _renewals(turn: AgentTurn, worker: Worker) -> int:
    """Consecutive renewals up to this process."""
    return worker.renewals if turn.now_s - worker.renewed_s < LIVED_S else 0


def renew(turn: AgentTurn, worker: Worker) -> None:
    """Restart a worker that asked for it, which is not a failure."""
    world, renewals = turn.state.world, _renewals(turn, worker) + 1
    turn.set_worker(worker.slot, status=WorkerStatus.FAILED, gone=STARTED_OVER, renewals=renewals)
    if turn.state.phase is AgentPhase.RUNNING and world is not None:
        turn.log(f"worker {worker.rank} (local rank {worker.local_rank}) restarts at its own request")
        how = f"restarted ({STARTED_OVER})"
        new = Worker(worker.slot, worker.rank, born=world.round, how=how, renewals=renewals, renewed_s=turn.now_s)
        new = dataclasses.replace(new, local_rank=worker.local_rank, bound=worker.local_rank)
        turn.set(workers=tuple(new if one.slot == new.slot else one for one in turn.state.workers))
        turn.do(Start(world, (worker.slot,)))
