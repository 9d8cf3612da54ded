"""The session of this process: its link to the agent, its place in the world, its communicator."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from edl.arithmetic import hyper
from edl.errors import ProtocolError, StateError, UsageError
from edl.wire import local
from edl.wire.local import AGENT_VARIABLE, STATE, Seat
from edl.wire.rank_pace import UNKNOWN
from edl.wire.records import NO_SETTINGS, Settings
from edl.worker.boundary import BoundaryAction, RoundOver
from edl.worker.framework import Communicator, Framework
from edl.worker.link import Link
from edl.worker.step_times import StepMeter, Totals
from edl.worker.waits import now

WORKER_VARIABLE = "EDL_WORKER_PID"
"""Set by a worker once it is connected, so that its child processes do not act as the worker."""
AHEAD_VARIABLE = "EDL_AHEAD_LOCAL_RANK"
"""The local rank of a worker that was started ahead of its world, out of sight of trainers that would form a group."""
_ROUND = "EDL_ROUND"
_FRAMEWORKS = ("edl.torch", "edl.paddle")
_MOST_RETIRING = 2
"""Old communicators that wait for a quiet moment; more are freed without one."""


def note(text: str) -> None:
    """Write a line to stderr for the reader of the worker's log."""
    sys.stderr.write(f"edl: {text}\n")
    sys.stderr.flush()


class Session:
    """The session of one process; ``current()`` returns this process's."""

    def __init__(self, link: Link | None, environment: MutableMapping[str, str]) -> None:
        self.link = link
        """None without a launcher."""
        self.environment = environment
        self.framework: Framework | None = None
        self.seat: Seat | None = None
        """The place in the running world, or in the last one."""
        self.settings: Settings = NO_SETTINGS
        """Batch and LR of the next step."""
        self.state: object = None
        """The only ``State`` of this process, once ``run`` has seen it."""
        self.expected_bytes: Callable[[], int] = lambda: 0
        """About how large its snapshots will be; 0: not known."""
        self.trainer: int | None = None
        """The thread that is inside a function called by ``run``."""
        self.committing_s = self.waiting_s = 0.0
        """Seconds that training has waited for commits, and for data, since this process started."""
        self.samples = 0
        """Real samples that edl's loaders have delivered since then."""
        self._meter = StepMeter()
        self.rejoins = True
        self.underway = False
        """This round's state has been restored."""
        self._entered: bool | None = None
        self._left = True
        """``seat`` must be replaced."""
        self._group: Communicator | None = None
        self._connected = False
        self._retiring: list[Communicator] = []

    @property
    def training(self) -> bool:
        """Whether a function called by ``run`` is running."""
        return self.trainer is not None

    @training.setter
    def training(self, value: bool) -> None:
        self.trainer = threading.get_ident() if value else None

    @property
    def trains_here(self) -> bool:
        """Whether this thread is inside a function called by ``run``."""
        return self.trainer == threading.get_ident()

    # --- entering a world --------------------------------------------------------------------------------------------

    def enter(self, framework: Framework, why_not: str = "") -> None:
        """Introduce this worker to the agent. ``why_not``: why it cannot rejoin in process, apart from the framework's
        reasons. Does nothing when already done."""
        self.framework = framework
        if self.link is None:
            return
        why_not = framework.why_not_in_process() or why_not
        if self._entered is None or (self._entered and why_not):
            self.rejoins = self._entered = not why_not
            self.link.send(local.Enter(framework.name, self.rejoins, why_not))

    def enter_alone(self) -> None:
        """Introduce this worker as independent: the world may change around it."""
        if self.link is not None and self._entered is None:
            self.rejoins = self._entered = False
            self.link.send(local.Enter("", rejoins=False))

    def take_seat(self, seat: Seat) -> bool:
        """Update the place of an independent worker; False if it is outdated. The environment is not changed, since the
        script may be reading it."""
        if self.seat is None or seat.round <= self.seat.round:
            return False
        self.seat, self.settings = seat, seat.settings
        return True

    def place(self) -> Seat:
        """The current place if its round still runs; else park and wait for the next one. Raises ``SystemExit(0)`` when
        there will be none."""
        if self.seat is not None and not self._left:
            if self.link is None or not self.link.broken(self.seat.round):
                return self.seat
            self.leave()
        if self.link is None:
            seat = _alone(self.environment)
        else:
            if self.rejoins:
                if self.seat is None:
                    self._warm_up(self.link)
                self.link.send(local.Parked(self.seat.round if self.seat is not None else 0))
            elif self.seat is not None:
                # The agent starts another process for the next world.
                raise SystemExit(0)
            seat = self.link.wait_for_place()
        self._set_aside()
        self.environment.update(seat.environment)
        self.seat, self._left, self.underway = seat, False, False
        self.settings = seat.settings
        return seat

    def _warm_up(self, link: Link) -> None:
        """Before this worker reports that it waits: until then the others train on. A worker that was started together
        with its world knows its round, and is waited for already."""
        local_rank = self.environment.pop(AHEAD_VARIABLE, "") or self.environment.get("LOCAL_RANK", "")
        if self.framework is None or _ROUND in self.environment or not local_rank.isdigit():
            return
        if failed := self.framework.warm_up(int(local_rank), lambda: link.summoned):
            note(f"the device was not warmed up, so the first step will take longer: {failed}")
        link.accelerator = self.framework.accelerator
        size = self.expected_bytes() if int(local_rank) == 0 and not link.summoned else 0
        if size:
            link.prepare_to_join(STATE, size)

    def connect(self) -> Seat:
        """Form the communicator of the current place, unless that is done already. Raises the framework's error when a
        peer is lost meanwhile."""
        seat = self.place()
        if not self._connected:
            assert self.framework is not None, "enter comes first"  # noqa: S101
            self._group = group = self.framework.prepare(seat)
            if self.link is not None:
                self.link.register(seat.round, group)
            self.framework.connect(group, seat)
            self._connected = True
            if self.link is not None:
                self.link.accelerator = self.framework.accelerator
        return seat

    def leave(self) -> None:
        """Leave this round. The communicator is kept until the next place is known: by then all others have left it
        too, so none of them is disturbed in its last step."""
        self._left = True

    def _set_aside(self) -> None:
        group, self._group, self._connected = self._group, None, False
        if group is not None:
            group.abort()
            self._retiring.append(group)
        if len(self._retiring) > _MOST_RETIRING:
            self._retiring.pop(0).retire()

    # --- boundaries --------------------------------------------------------------------------------------------------

    def arrive(self, commit: int) -> BoundaryAction:
        """Wait at a boundary until it may be passed. Raises ``RoundOver``."""
        if self.link is None:
            return BoundaryAction.PASS
        turn = self.link.arrive(commit)
        self._take(self.link.settings)
        return turn

    def _take(self, settings: Settings) -> None:
        """Apply settings for the next step."""
        if settings is not self.settings and self.seat is not None:
            self.settings = settings
            self.environment.update(hyper.environment(settings, self.seat.world_size, self.seat.rank))

    def spoilt(self) -> str:
        """Why nothing that this worker holds may be kept in this round; empty if it may."""
        if self.link is None or self.seat is None:
            return ""
        return self.link.spoilt(self.seat.round)

    def check(self) -> None:
        """Raise ``RoundOver`` when this round was interrupted or one of its collectives has failed."""
        if why := self.spoilt():
            raise RoundOver(why)

    def settle(self) -> None:
        """Wait for this worker's collectives that the script has not waited for."""
        if self._group is not None and self._connected:
            self._group.settle()

    def finish(self) -> None:
        """Wait for all work that the script has begun, so that a check afterwards misses none of its failures."""
        self.settle()
        if self.framework is not None:
            self.framework.synchronize()

    def announce(self, messages: Sequence[local.Committed | local.WroteThrough]) -> None:
        """Announce what was kept of a commit; see ``Link.announce``."""
        assert self.link is not None and self.seat is not None, "only called with an agent"  # noqa: S101
        self.link.announce(self.seat.round, messages)

    def measure(self) -> None:
        """A step has ended: report the times of the last ones, from time to time."""
        if self.link is None or self.seat is None:
            return
        times = self._meter.passed(self.seat.round, time.monotonic(), self._totals)
        if times is not None:
            self.link.send(times)

    def _totals(self) -> Totals:
        waits = self._group.waits() if self._group is not None and self._connected else None
        now_s, cpu_s = now()
        idle_s = now_s - cpu_s - (waits.idle_s if waits is not None else 0.0)
        peers_s = waits.waited_s if waits is not None else UNKNOWN
        return Totals(peers_s, self.committing_s, self.waiting_s, idle_s, self.samples)

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Within the context the training waits for data; what loaders inside it count is part of the same wait."""
        before_s, began_s = self.waiting_s, time.monotonic()
        try:
            yield
        finally:
            self.waiting_s = before_s + time.monotonic() - began_s

    def passed(self) -> None:
        """A boundary has been passed: a quiet moment to free the communicators of earlier rounds."""
        if self._retiring:
            # References to an old group must be freed before it.
            gc.collect()
            while self._retiring:
                self._retiring.pop(0).retire()

    # --- queries ----------------------------------------------------------------------------------------------------

    def is_over(self, error: BaseException, timeout_s: float) -> bool:
        """Whether this exception means that the round is over, rather than a failure of the script."""
        if self.link is None or self.seat is None:
            return False
        if not self.link.broken(self.seat.round):
            spoilt = self.spoilt()
            if isinstance(error, RoundOver) and (self.link.left or not spoilt):
                return True
            if not (spoilt or isinstance(error, PeersLost) or self._lost_peers(error)):
                return False
            # Lets peers that wait for this worker notice, too, if they get an exception then. The rest has to wait
            # until they know that the round is over.
            if self._group is not None:
                self._group.disconnect()
            return self.link.wait_until_broken(self.seat.round, timeout_s)
        if not isinstance(error, RoundOver) and not self._lost_peers(error):
            note(f"in round {self.seat.round}, which is over: {type(error).__name__}: {error}")
        return True

    def _lost_peers(self, error: BaseException) -> bool:
        return self.framework is not None and self.framework.lost_peers(error)


class PeersLost(ProtocolError):
    """A part of the state could not be fetched from a peer; the loss of the peer should be reported soon."""


_current: Session | None = None
_introduced: Framework | None = None


def current() -> Session:
    """The session of this process. Connects to the agent on the first call."""
    global _current
    if _current is None:
        _current = _open(os.environ)
    return _current


def opened() -> Session | None:
    """The session of this process if it exists already."""
    return _current


def keeps_numbers() -> bool:
    """Whether the random numbers of this script must not depend on the fate of its workers."""
    state: Any = _current.state if _current is not None else None
    return state is not None and state.keeps_numbers


def introduce(framework: Framework) -> None:
    """Register the framework that this script uses."""
    global _introduced
    _introduced = framework


def introduced() -> Framework:
    """The framework that this script uses. Raises ``StateError`` when it uses none through edl."""
    if _introduced is None:
        # The packages load their parts lazily, and this part registers the framework. The launcher's own code may have
        # loaded both packages; the script has taken context() from its own.
        loaded = [name for name in _FRAMEWORKS if name in sys.modules]
        for name in sorted(loaded, key=lambda name: "context" not in vars(sys.modules[name]))[:1]:
            importlib.import_module(f"{name}.state")
    if _introduced is None:
        raise StateError("import edl.torch or edl.paddle before asking for a place in the world")
    return _introduced


def is_helper(environment: MutableMapping[str, str]) -> bool:
    """Whether this process was started by a worker, for instance to load data."""
    return environment.get(WORKER_VARIABLE, "") not in ("", str(os.getpid()))


def _open(environment: MutableMapping[str, str]) -> Session:
    address = environment.get(AGENT_VARIABLE, "")
    if is_helper(environment):
        raise StateError("this process was started by a worker; only the worker itself can take part in training")
    if not address:
        return Session(None, environment)
    try:
        link = Link.connect(address)
    except OSError as error:
        raise ProtocolError(f"cannot reach the launcher's socket @{address} ({AGENT_VARIABLE}): {error}") from error
    environment[WORKER_VARIABLE] = str(os.getpid())
    return Session(link, environment)


def _alone(environment: MutableMapping[str, Any]) -> Seat:
    """The only place in a world of one, for a script started without a launcher. Raises ``UsageError`` if another
    launcher's variables are set."""
    for variable in ("WORLD_SIZE", "PADDLE_TRAINERS_NUM"):
        if environment.get(variable, "1") not in ("", "1"):
            raise UsageError(
                f"{variable}={environment[variable]}, but {AGENT_VARIABLE} is not set: another launcher started this "
                "script, and edl would train alone in each of its processes. Start it with python -m edl.launch"
            )
    master, endpoint = (f"127.0.0.1:{port}" for port in _free_ports(2))
    for variable, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", master.rpartition(":")[2]),
    ):
        environment.setdefault(variable, value)
    return Seat(
        round=1,
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node=socket.gethostname(),
        nodes=1,
        position=0,
        endpoints=(endpoint,),
        master=master,
        era=0,
        restore_era=0,
        restore_commit=0,
        shards=1,
        stored=False,
        checkpoint_dir="",
        token="",
    )


def _free_ports(count: int) -> list[int]:
    """Ports that are free at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
