"""One schedule: a worker of a world trains, and at some instruction between a step's backward pass and the announcement
of its commit a fault strikes. Every announced commit, and every state that a new world restores from it, is compared
with the same steps computed separately.

Each survivor is played alone; the schedule decides what its peers have contributed by then.
"""

from __future__ import annotations

import contextlib
import random  # noqa: TID251 - everything is drawn from one seeded generator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any, NamedTuple

from edl.errors import StateError
from edl.testing.commits.agent import Agent, Key, Stuck
from edl.testing.commits.device import AsynchronousFramework, Device, PeerGone
from edl.testing.commits.models import FrameworkModel, PlainFramework, PlainModel, step
from edl.testing.commits.moments import moments
from edl.wire import local
from edl.wire.local import OWN, STATE, Seat
from edl.wire.purpose import Purpose
from edl.worker import loop
from edl.worker.framework import Framework
from edl.worker.link import Link
from edl.worker.loop import make_run
from edl.worker.session import Session
from edl.worker.state import BaseState

STEPS = 4
_WATCHED = ("edl/worker/", "edl/wire/snapshot", "edl/testing/commits/schedule")
"""Faults may strike at any instruction of these files."""
_KINDS = ("peer", "peer", "break", "watchdog", "swallowed", "alone", "error")
"""The fault: a peer dies; the round is broken for another reason; the backend aborts by itself; a synchronous
backend raises what the script swallows; the same, and no peer is ever reported missing; the script of a peer fails as
if it had lost one."""
_JOB = "job"


@dataclass(frozen=True)
class SurvivorSchedule:
    """The faults of one survivor, in instructions since the start of its faulty step."""

    rank: int
    world_size: int
    kind: str
    fault_step: int
    """``STEPS``: the evaluation after the last step."""
    broken_at: float
    """Fraction of the step's instructions after which the fault strikes."""
    completes: bool
    """Whether the collective of the faulty step completes on this survivor nevertheless."""
    pace: float
    """Probability per instruction that the device executes an operation."""
    planned: str = ""
    """Purpose of a planned boundary at the faulty step."""
    votes: bool = False
    seed: int = 0

    @classmethod
    def draw(cls, rng: random.Random, rank: int, world_size: int, kind: str, fault_step: int) -> SurvivorSchedule:
        """Draw the schedule of one survivor."""
        return cls(
            rank,
            world_size,
            kind,
            fault_step,
            broken_at=rng.random() * 1.05,
            completes=rng.random() < 0.5,
            pace=rng.choice((0.0, 0.001, 0.01, 0.1)),
            planned=rng.choice(("", "", "switch", "kill", "save")),
            votes=rng.random() < 0.3,
            seed=rng.randrange(1 << 30),
        )


@dataclass
class SurvivorResult:
    """Final state of one survivor."""

    kept: dict[Key, bytes] = field(default_factory=dict)
    result: Any = None
    failed: str = ""
    moments: int = 0


class Wrong(AssertionError):
    """A number differs from its expected value."""


class Own:
    """A value that belongs to each rank individually."""

    edl_per_rank = True

    def __init__(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, Any]:
        """The value, for ``State``."""
        return {"drawn": self.drawn}

    def load_state_dict(self, plain: dict[str, Any]) -> None:
        """Restore the value, for ``State``."""
        self.drawn = plain["drawn"]


class Survivor:
    """Runs the recovery of one worker that survived the loss of a peer."""

    def __init__(
        self,
        schedule: SurvivorSchedule,
        make: Callable[[], FrameworkModel],
        real: Framework,
        length: int,
        right: Callable[[int], bytes],
        peer_aborted: Callable[[], bool] = lambda: False,
    ) -> None:
        """``length``: instructions of a step without faults. ``right``: the expected content after this many steps.
        ``peer_aborted``: whether a peer's group has been aborted."""
        self.right = right
        self.schedule, self.make = schedule, make
        self.model = make()
        self.rng = random.Random(schedule.seed)  # noqa: S311
        self.agent = Agent(self._idle)
        self.device = Device(self._blocked)
        self.framework = AsynchronousFramework(real, lambda: self.device, self._come, peer_aborted)
        self.session = Session(self.agent.link, {"EDL_JOB_ID": _JOB})
        self.state: BaseState = self.model.state(self.framework, step=0, own=Own())
        self.moment = 0
        self.event_at = int(schedule.broken_at * length) if schedule.kind != "none" else sys.maxsize
        self.works_at = self._next_work()
        self.counting = self.hearing = self.has_heard = False
        self.refuses = schedule.votes and schedule.seed % 2 == 0
        self.events = list(_EVENTS[schedule.kind])

    def play(self) -> SurvivorResult:
        """Train until the worker parks or ends."""
        outcome = SurvivorResult()
        self.agent.place(a_seat(1, self.schedule.rank, self.schedule.world_size))
        run: Any = make_run(self.framework, lambda: self.session)
        try:
            returned = run(self._train)(self.state)
            self.device.synchronize()  # the script reads the value
            outcome.result = returned[0]
        except SystemExit:
            pass
        except StateError as error:
            outcome.failed = str(error)
        finally:
            _moments.end()
            outcome.kept, outcome.moments = self.agent.kept, self.moment
            self.agent.close()
        return outcome

    # --- the script --------------------------------------------------------------------------------------------------

    def _train(self, state: BaseState) -> list[bytes]:
        schedule = self.schedule
        while state.step < STEPS:
            self._count(sys._getframe(), state.step == schedule.fault_step)
            if self.counting and self.schedule.planned:
                self._plan(state.commits)
            self._step(state.step)
            state.step += 1
            state.own.drawn += 1
            if not schedule.votes:
                state.save() if state.step % 2 else state.commit()
            elif state.commit(ok=not (self.refuses and self.counting)):
                self.refuses = self.refuses and not self.counting
            else:
                self.refuses = False
                if (state.step, self.model.content()) != (state.commits, self.right(state.commits)):
                    raise Wrong(f"a vote against commit {state.commits + 1} put back wrong numbers")
        self._count(sys._getframe(), schedule.fault_step == STEPS)
        return self._evaluation()

    def _evaluation(self) -> list[bytes]:
        """What a last collective gives; the host has not waited for it."""
        result = [b"garbage"]

        def evaluated() -> None:
            result[0] = self.model.content()

        self._collective(STEPS, evaluated)
        return result

    def _step(self, number: int) -> None:
        schedule, model = self.schedule, self.model
        mine = model.gradient(number, schedule.rank)
        there: list[Any] = [mine]

        def combined() -> None:
            there[0] = model.combine([model.gradient(number, rank) for rank in range(schedule.world_size)])

        self._collective(number, combined)  # an abort leaves the rank's own gradient
        self.device.do(lambda: model.apply(there[0]))

    def _collective(self, number: int, combined: Callable[[], None]) -> None:
        group = self.framework.group
        assert group is not None, "prepared"  # noqa: S101
        group.step = number
        if self.schedule.kind in ("swallowed", "alone"):
            with contextlib.suppress(PeerGone):  # as scripts do that want to survive a bad batch
                group.blocking(combined, lambda: None)
        else:
            group.collective(combined, lambda: None)

    def _plan(self, commits: int) -> None:
        self.agent.tell(local.HoldAtBoundary(1, 1))
        self.agent.tell(local.Target(1, commits + 1, Purpose(self.schedule.planned).value, "planned"))

    # --- what happens to it ------------------------------------------------------------------------------------------

    def _count(self, frame: FrameType, counting: bool) -> None:
        """Start or stop tracing instructions."""
        self.counting = counting
        if counting:
            _moments.begin(frame, self._instruction)
        else:
            _moments.end()

    def _instruction(self) -> None:
        self.moment += 1
        if self.moment >= self.works_at:
            self.device.advance()
            self.works_at = self._next_work()
        if self.moment >= self.event_at and not self.agent.link.busy and not self.hearing:
            self._hear()

    def _next_work(self) -> int:
        pace = self.schedule.pace
        return self.moment + 1 + int(self.rng.expovariate(pace)) if pace else sys.maxsize

    def _come(self, number: int) -> bool:
        schedule = self.schedule
        if schedule.kind in ("none", "break") or number < schedule.fault_step:
            return True
        return number == schedule.fault_step and schedule.completes

    def _hear(self) -> bool:
        """Deliver the next sign of the fault to the survivor; False if there are no more."""
        if not self.events:
            return False
        self.event_at = self.moment + self.rng.randrange(200)
        if len(self.events) == 1:
            self.counting = False  # what follows is the same at every moment
            _moments.end()
        self.hearing = self.has_heard = True
        try:
            self._happen(self.events.pop(0))
        finally:
            self.hearing = False
        return True

    def _happen(self, what: str) -> None:
        group = self.framework.group
        if what == "break":
            self.agent.tell(local.Break(1, "node b is gone"))  # which disconnects the group
        elif what == "abort":
            self.agent.link.end_grace()
        elif group is not None:
            group.end("the watchdog found a peer gone" if what == "watchdog" else "")

    def _blocked(self) -> None:
        if not self._hear() and not self.has_heard:  # something may have happened while the device tried in vain
            raise Stuck("the device waits for a lost peer, whose loss is not reported")
        self.has_heard = False

    def _idle(self) -> bool:
        if self._hear():
            return True
        if self.session.link is None or self.session.link._stop is not None:
            return False
        if any(isinstance(one, local.Parked) and one.round == 1 for one in self.agent.said):
            self.agent.tell(local.Stop("this is all"))
            return True
        return False


class _FailingPeer(Survivor):
    """Fails after its part of a step, as if it had lost a peer, and waits for the order to end the round. The survivor
    is played meanwhile: before that order has come, or when the peer, but not the survivor, has it."""

    def __init__(
        self,
        schedule: SurvivorSchedule,
        make: Callable[[], FrameworkModel],
        real: Framework,
        right: Callable[[int], bytes],
    ) -> None:
        rank = (schedule.rank + 1) % schedule.world_size
        super().__init__(replace(schedule, rank=rank, kind="none", planned="", votes=False), make, real, 0, right)
        self.events = list(_EVENTS["error"])
        self._informed_first = schedule.seed % 3 == 0
        self._survivor: Survivor | None = None
        self._outcome = SurvivorResult()

    def has_aborted(self) -> bool:
        """Whether it has aborted its group."""
        return self.framework.group is not None and self.framework.group.aborted

    def play_before(self, survivor: Survivor) -> SurvivorResult:
        """Play both; returns the survivor's result."""
        self._survivor = survivor
        self.play()
        return self._outcome

    def _collective(self, number: int, combined: Callable[[], None]) -> None:
        super()._collective(number, combined)
        if number == self.schedule.fault_step:
            raise PeerGone("a collective failed: connection closed by peer")

    def _count(self, frame: FrameType, counting: bool) -> None:
        """Its instructions are not traced."""

    def _idle(self) -> bool:
        survivor, self._survivor = self._survivor, None
        if survivor is not None:
            if self._informed_first:
                self._hear()
            self._outcome = survivor.play()
        return super()._idle()


_HARNESS = frozenset(name for name in vars(Survivor) if name not in ("_train", "_step", "_evaluation"))


def _watched(code: CodeType) -> bool:
    return any(part in code.co_filename for part in _WATCHED) and code.co_name not in _HARNESS


_moments = moments(_watched)
_EVENTS = {
    "none": (),
    "peer": ("break", "abort"),
    "break": ("break", "abort"),
    "watchdog": ("watchdog", "break", "abort"),
    "swallowed": ("disconnect", "break", "abort"),
    "alone": ("disconnect",),
    "error": ("break", "abort"),
}


def a_seat(number: int, rank: int, world_size: int, restore: tuple[int, int] = (0, 0)) -> Seat:
    """A place on a node of its own."""
    return Seat(
        round=number, rank=rank, local_rank=0, world_size=world_size, local_world_size=1, node=f"n{rank}",
        nodes=world_size, position=rank, endpoints=("127.0.0.1:1",) * world_size, master="127.0.0.1:2", era=number,
        restore_era=restore[0], restore_commit=restore[1], shards=1, stored=False, checkpoint_dir="", token="",
    )  # fmt: skip


class Player:
    """Plays schedules with one kind of model."""

    def __init__(
        self, make: Callable[[], FrameworkModel] = PlainModel, real: Callable[[], Framework] = PlainFramework
    ) -> None:
        self.make, self.real = make, real
        self._expected: dict[tuple[int, int], bytes] = {}
        self._lengths: dict[int, int] = {}

    def play(self, seed: int) -> int:
        """Play one schedule; returns the number of traced instructions. Raises ``Wrong``."""
        rng = random.Random(seed)  # noqa: S311
        world_size = rng.choice((2, 3, 4))
        kind, fault_step = rng.choice(_KINDS), rng.randrange(STEPS + 1)
        length = self._length(world_size)
        moments = 0
        for rank in rng.sample(range(world_size), min(2, world_size - 1)):
            schedule = SurvivorSchedule.draw(rng, rank, world_size, kind, fault_step)
            try:
                moments += self._survive(schedule, length)
            except Wrong as error:
                raise Wrong(f"seed {seed}: {error}: {schedule}") from None
        return moments

    def _survive(self, schedule: SurvivorSchedule, length: int) -> int:
        world_size = schedule.world_size
        outcome = self._play(schedule, length)
        if outcome.result is not None and outcome.result != self._after(STEPS, world_size):
            raise Wrong("train returned a wrong result")
        if outcome.failed and schedule.kind != "alone":
            raise Wrong(f"it ended with: {outcome.failed}")
        commits = {stream: {key[2] for key in outcome.kept if key[0] == stream} for stream in (STATE, OWN)}
        if commits[STATE] != commits[OWN]:
            raise Wrong(f"of some commits only half was announced: {commits}")
        # The Master may take any of them, for any rank: it depends on what the other nodes have.
        # Those before the faulty step have been looked at in other schedules.
        for commit in sorted(commits[STATE])[-2:]:
            self._restore(schedule, outcome.kept, commit)
        return outcome.moments

    def _play(self, schedule: SurvivorSchedule, length: int) -> SurvivorResult:
        def right(steps: int) -> bytes:
            return self._after(steps, schedule.world_size)

        if schedule.kind != "error":
            return Survivor(schedule, self.make, self.real(), length, right).play()
        peer = _FailingPeer(schedule, self.make, self.real(), right)
        survivor = Survivor(schedule, self.make, self.real(), length, right, peer.has_aborted)
        return peer.play_before(survivor)

    def _restore(self, schedule: SurvivorSchedule, kept: dict[Key, bytes], commit: int) -> None:
        """Start another world from a commit, in a new process."""
        agent, device, model = Agent(lambda: False), Device(lambda: None), self.make()
        try:
            agent.kept.update(kept)
            framework = AsynchronousFramework(self.real(), lambda: device, lambda number: True)
            session = Session(agent.link, {"EDL_JOB_ID": _JOB})
            session.enter(framework)
            state = model.state(framework, step=0, own=Own())
            agent.place(a_seat(2, schedule.rank, schedule.world_size, (1, commit)))
            loop._join(session, state)
            if (state.step, state.commits, state.own.drawn) != (commit, commit, commit):
                raise Wrong(f"commit {commit} holds step {state.step} and, of the rank's own, {state.own.drawn}")
            if model.content() != self._after(commit, schedule.world_size):
                raise Wrong(f"commit {commit} holds wrong numbers")
        finally:
            agent.close()

    def _after(self, steps: int, world_size: int) -> bytes:
        """The content after this many steps, computed without commits."""
        known = self._expected.get((steps, world_size))
        if known is None:
            model = self.make()
            for number in range(steps):
                step(model, number, world_size)
            known = self._expected[steps, world_size] = model.content()
        return known

    def _length(self, world_size: int) -> int:
        """Number of instructions of a step without faults."""
        known = self._lengths.get(world_size)
        if known is None:
            nothing = SurvivorSchedule(0, world_size, "none", 1, 0.0, completes=True, pace=0.0)
            outcome = self._play(nothing, 0)
            if outcome.result != self._after(STEPS, world_size):
                raise Wrong("training without any fault ends with wrong numbers")
            known = self._lengths[world_size] = outcome.moments
        return known


class Played(NamedTuple):
    """Results of several schedules."""

    schedules: int
    moments: int
    """Number of traced instructions."""
    wrong: str = ""
    """The defect found by the last of them; empty if there is none."""


def play(seeds: range, checked: bool) -> Played:
    """Play schedules until one finds a defect. ``checked``: False removes the check before the announcement."""
    if not checked:
        Link._spoilt = lambda self, number: ""  # type: ignore[method-assign]
    player = Player()
    moments = 0
    for played, seed in enumerate(seeds, 1):
        try:
            moments += player.play(seed)
        except Wrong as error:
            return Played(played, moments, str(error))
        except Exception as error:  # noqa: BLE001 - a worker that waits for ever or fails is a finding, too
            return Played(played, moments, f"seed {seed}: {type(error).__name__}: {error}")
    return Played(len(seeds), moments)
