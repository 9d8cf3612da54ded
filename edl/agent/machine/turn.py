"""One step of the agent in progress: the changing state and the effects collected so far.

Mutable on purpose; never visible outside one ``step``.
"""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

from edl.agent.machine.events import Announce, Decision, Effect, Exit, Log, Say, SignalWorkers, TellWorkers
from edl.agent.machine.state import AgentPhase, AgentState, Outcome, Worker, WorkerStatus
from edl.wire.local import Stop
from edl.wire.messages import AgentMessage

SIGTERM, SIGKILL, SIGINT, SIGABRT = (
    int(number) for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGABRT)
)


BURY_S = 60.0
"""Seconds that killed workers get to end. One that waits for a broken driver or file system may never do."""
LEAVES = "the launcher leaves"
"""Why the workers of a launcher that leaves the job are ended, for their scripts."""


class AgentTurn:
    """Working copy of an ``AgentState`` during one step."""

    def __init__(self, state: AgentState, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    def decision(self) -> Decision:
        """The result of this step."""
        return Decision(self.state, tuple(self.effects), self.state.reason)

    def set(self, **changes: Any) -> None:
        """Replace fields of the state."""
        self.state = dataclasses.replace(self.state, **changes)

    def do(self, effect: Effect) -> None:
        """Add an effect for the shell."""
        self.effects.append(effect)

    def log(self, text: str) -> None:
        """Log a line for the user, which also becomes the reason of this step."""
        self.set(reason=text)
        self.do(Log(text))

    def say(self, message: AgentMessage) -> None:
        """Send a message to the Master if the stream is open; attaching repeats what matters."""
        if self.state.connected:
            self.do(Say(message))

    def announce(self) -> None:
        """Report this node as ready for the next round."""
        if self.state.connected and self.state.registered:
            self.do(Announce())

    def worker(self, slot: int) -> Worker | None:
        """The occupant of a slot."""
        return next((worker for worker in self.state.workers if worker.slot == slot), None)

    def set_worker(self, slot: int, **changes: Any) -> None:
        """Replace fields of one worker."""
        self.set(
            workers=tuple(
                dataclasses.replace(worker, **changes) if worker.slot == slot else worker
                for worker in self.state.workers
            )
        )

    def unhold(self) -> None:
        """Wait for no agreement on a step boundary any more."""
        self.set(hold=0, binding=False, doubt_by_s=None)

    def end_workers(self, workers: tuple[Worker, ...], number: int, why: str) -> None:
        """End these workers: waiting ones get a stop message with the reason, frozen ones SIGKILL, the others the
        signal. Those left after the grace period are killed."""
        for worker in workers:
            self.set_worker(worker.slot, ending=True)
        frozen = tuple(worker.slot for worker in workers if worker.frozen_since_s is not None)
        able = [worker for worker in workers if worker.frozen_since_s is None]
        waiting = tuple(worker.slot for worker in able if worker.status is WorkerStatus.PARKED)
        others = tuple(worker.slot for worker in able if worker.status is not WorkerStatus.PARKED)
        if frozen:
            self.do(SignalWorkers(SIGKILL, frozen))
        if waiting:
            self.do(TellWorkers(Stop(why), waiting))
        if others:
            self.do(SignalWorkers(number, others))
        if able:
            self.set(kill_at_s=self.now_s + self.state.timeouts.shutdown_s, killed=False)

    def leave(self, outcome: Outcome, number: int) -> None:
        """Stop the workers, then exit."""
        stopping = self.state.phase is AgentPhase.STOPPING and self.state.kill_at_s is not None
        leaving = self.state.phase is AgentPhase.LEAVING
        running = tuple(w for w in self.state.alive if not (stopping and w.status is WorkerStatus.ALIVE))
        # A second signal could make them give up what they save.
        self.end_workers(() if leaving else running, number, LEAVES)
        if self.state.outcome is not None and self.state.outcome.job_over:  # it stays so after an error
            outcome = dataclasses.replace(outcome, job_over=True)
        self.set(phase=AgentPhase.LEAVING, outcome=outcome, reason=outcome.reason)
        self.set(bury_by_s=self.now_s + self.state.timeouts.shutdown_s + BURY_S)
        self.exit_if_empty()

    def exit_if_empty(self) -> None:
        """Exit when no worker is left and no answer of the Master is awaited."""
        if (
            self.state.word_by_s is None
            and self.state.phase is AgentPhase.LEAVING
            and self.state.outcome is not None
            and not self.state.alive
        ):
            self.set(phase=AgentPhase.OVER)
            self.do(Exit(self.state.outcome))
