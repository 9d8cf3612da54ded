"""The fork server: one process per node that imports the framework ahead of time and creates all workers.

It exists so that the agent, which has threads and network connections, never forks. It has one thread and one loop that
waits for the agent, its children and its standbys. When the agent is gone, for whatever reason, the socket closes and
the fork server kills everything that it has created. When the agent is silent beyond the announced deadline, other
nodes may have formed a world without this one, so the fork server kills the workers.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field, replace

from edl.config import Standby
from edl.wire.datagrams import receive
from edl.wire.fork_server import (
    PROBE,
    Dump,
    Entitled,
    Forward,
    Heard,
    LogLine,
    Signal,
    Spawn,
    Spawned,
    SpawnFailed,
    ToAgent,
    Warmed,
    WarmFailed,
    decode,
    encode,
    helper_command,
    read_order,
    write_order,
)
from edl.wire.process_events import WorkerExited, WorkersStopped
from edl.worker import bootstrap, linux
from edl.worker.child_processes import ChildProcesses
from edl.worker.frameworks import why_unsafe
from edl.worker.learning import Learning, LearntScript, standard_folders
from edl.worker.learnt_file import LearntFile
from edl.worker.script_kind import script_folder
from edl.worker.spawn import become, command_line, start
from edl.worker.standby import failed
from edl.worker.template import ForkedWorker
from edl.worker.warm import Image, ImportFailed, warm


@dataclass(frozen=True, slots=True)
class ForkServerArguments:
    """The fork server's command line, in this order."""

    agent: int
    """Descriptor of the socket to the agent."""
    standby: Standby
    slots: int
    preload: tuple[str, ...]
    learn_bytes: int
    """Most memory of templates; 0: nothing is learnt."""
    remark: str
    """Why the standby is not the requested one; empty when it is."""
    kind: str
    target: str
    arguments: tuple[str, ...]

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> ForkServerArguments:
        """Parse the command line."""
        agent, standby, slots, preload, learn_bytes, remark, kind, target, *rest = arguments
        modules = tuple(filter(None, preload.split(",")))
        head = (int(agent), Standby(standby), int(slots), modules, int(learn_bytes))
        return cls(*head, remark, kind, target, tuple(rest))

    def spawning_instead(self, remark: str) -> list[str]:
        """Arguments for the same fork server with spawned standbys."""
        preload = ",".join(self.preload)
        head = [str(self.agent), Standby.SPAWN.value, str(self.slots), preload, "0", remark]
        return [*head, self.kind, self.target, *self.arguments]


@dataclass(slots=True)
class _Standby:
    """A process spawned ahead, which waits for an order to run a worker."""

    pid: int
    socket: socket.socket
    ready: str = ""
    """Description of its imports; empty while it is still importing."""


@dataclass(slots=True)
class _ForkServer:
    settings: ForkServerArguments
    agent: socket.socket
    child_processes: ChildProcesses = field(default_factory=ChildProcesses)
    poller: select.poll = field(default_factory=select.poll)
    standbys: dict[int, _Standby] = field(default_factory=dict)
    """By the descriptor of their sockets."""
    image: Image | None = None
    learning: Learning | None = None
    warmed: bool = False
    refilling: bool = True
    wakeup: int = -1
    until_s: float = math.inf
    """Deadline for the workers; the agent's messages extend it."""
    heard_s: float = 0.0
    """Time of the last such message."""

    def serve(self) -> ForkedWorker | None:
        """Serve until the agent is gone (returns None), or return in a forked child."""
        self.wakeup, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        _take_signals()
        self.poller.register(self.wakeup, select.POLLIN)
        self.poller.register(self.agent, select.POLLIN)
        if not self._warm():
            return None
        forked = self._begin_learning()
        while forked is None:
            self._refill()
            ready = dict(self.poller.poll(self._timeout_ms()))
            # Before any message is read: the agent may have been frozen together with this process.
            self._stop_if_silent()
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
            for change in self.child_processes.watch():
                if self.learning is not None and isinstance(change, WorkerExited):
                    self.learning.forget(change.pid)
                self._tell(change)
            for descriptor in ready.keys() & self.standbys.keys():
                if not self._hear_standby(self.standbys[descriptor]):
                    return None
            if self.agent.fileno() in ready:
                forked = self._hear_agent()
                if self.agent.fileno() < 0:
                    return forked
            forked = forked or self._learn(ready)
        return forked

    def _timeout_ms(self) -> float | None:
        timeout_s = self.child_processes.timeout_s()
        if self.child_processes.has_workers and self.until_s < math.inf:
            left_s = max(0.0, self.until_s - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(left_s, timeout_s)
        learning_s = self.learning.timeout_s() if self.learning is not None else None
        if learning_s is not None:
            timeout_s = learning_s if timeout_s is None else min(learning_s, timeout_s)
        return None if timeout_s is None else timeout_s * 1000 + 1

    def _stop_if_silent(self) -> None:
        """Kill the workers when the agent's deadline has passed."""
        now_s = time.monotonic()
        if now_s < self.until_s or not self.child_processes.has_workers:
            return
        silent = f"the launcher was silent for {now_s - self.heard_s:.1f} s"
        self._tell(WorkersStopped(f"{silent}, others may continue without this node: its workers have been killed"))
        self.child_processes.kill_workers()

    def _warm(self) -> bool:
        """Import what workers will need, if this process is to do so; False after a failure, which has been reported to
        the agent."""
        settings = self.settings
        if settings.standby is Standby.NONE or settings.kind == "program":
            self.refilling = False
            self._warmed("workers are started cold")
        elif settings.standby is Standby.FORK:
            try:
                # Nobody reads the socket meanwhile, whose end tells of the agent's.
                with linux.dying_with_parent():
                    self.image = warm(settings.kind, settings.target, settings.preload)
            except ImportFailed as failure:
                self._tell(failed(failure))
                return False
            reason = why_unsafe()
            if reason:
                # Start a new program in this process: the imports, and whatever makes them unsafe to fork, are gone
                # with the old one.
                os.set_inheritable(self.agent.fileno(), True)
                arguments = settings.spawning_instead(reason)
                os.execv(sys.executable, helper_command(sys.executable, "edl.worker.fork_server", *arguments))
            # Imports may have replaced our signal handlers.
            _take_signals()
            gc.collect()
            # Exclude existing objects from the children's garbage collection, so that their pages stay shared.
            gc.freeze()
        return True

    def _begin_learning(self) -> ForkedWorker | None:
        """Prepare for learning what the script imports, and report that workers can be started: at once, or when a
        template with what is known already is made. Returns in a forked worker only."""
        settings, image = self.settings, self.image
        forked = None
        if image is not None and settings.learn_bytes and settings.kind in ("script", "module"):
            # The command line may decide which variables the script sets.
            changes = (*image.changes, *settings.arguments) if image.changes else ()
            file = LearntFile.of(settings.kind, settings.target, image.found, changes, sys.modules, image.environment)
            folder = os.getcwd() if settings.kind == "module" else script_folder(settings.target)
            self.learning = Learning(
                LearntScript(settings.kind, settings.target, settings.arguments, folder, frozenset(standard_folders())),
                *(file, settings.slots, settings.learn_bytes, image.environment, self.child_processes, self.poller),
                log=lambda text: self._tell(LogLine(text)),
                in_template=self._in_template,
            )
            forked = self.learning.prepare_from_file()
        self._report_forking()
        return forked

    def _in_template(self) -> frozenset[int]:
        self.agent.detach()
        return self.image.descriptors if self.image is not None else frozenset()

    def _report_forking(self) -> None:
        if self.image is not None and not self.warmed and (self.learning is None or not self.learning.preparing):
            self._warmed(f"workers are forked from one process: {self.image.text}")

    def _learn(self, ready: dict[int, int]) -> ForkedWorker | None:
        """Give the templates their turn. Returns in a forked worker only."""
        if self.learning is None:
            return None
        forked = self.learning.hear(ready) or self.learning.look(time.monotonic())
        if forked is None:
            self._report_forking()
        return forked

    def _warmed(self, text: str) -> None:
        self.warmed = True
        self._tell(Warmed(f"{text} (not forked: {self.settings.remark})" if self.settings.remark else text))

    def _tell(self, message: ToAgent) -> None:
        # A lost agent is noticed where its messages are read.
        with contextlib.suppress(OSError):
            self.agent.send(encode(message))

    def _hear_agent(self) -> ForkedWorker | None:
        """Handle one message. Closes the socket when the agent is gone and everything has been killed."""
        data, descriptors = receive(self.agent, 4)
        if not data:
            self.child_processes.destroy()
            self.agent.close()
            return None
        message = decode(data)
        if isinstance(message, Entitled):
            self.until_s, self.heard_s = message.until_s, time.monotonic()
            self._tell(Heard())
        elif isinstance(message, Signal):
            self.child_processes.signal(message.pid, message.number)
        elif isinstance(message, Dump):
            problem = self.child_processes.dump(message.pid, bootstrap.DUMP_SIGNAL)
            if problem:
                self._tell(LogLine(problem))
        elif isinstance(message, Forward):
            if not self.child_processes.forward(message.pid, message.number):
                name = signal.Signals(message.number).name
                self._tell(LogLine(f"{name} is not passed to process {message.pid}: it has no handler, and would die"))
        elif isinstance(message, Spawn):
            return self._spawn(message, descriptors)
        return None

    def _spawn(self, request: Spawn, descriptors: list[int]) -> ForkedWorker | None:
        try:
            memory, stdin, stdout, stderr = descriptors
            order = read_order(memory)
            streams = (0 if order.kind == PROBE else stdin, stdout, stderr)  # 0 is the null device here
            not_gone = self.child_processes.not_gone()
            if not_gone:
                order = replace(order, after=not_gone)
                descriptors[0] = write_order(order)
                os.close(memory)
            learning = self.learning if order.kind != PROBE else None
            if self.image is not None and order.kind != "program":
                pid, record, number = learning.fork(order, descriptors) if learning else (0, None, -1)
                pid = pid or linux.fork()
                if pid == 0:
                    # Detached, so that no object closes a descriptor number that has been reused.
                    self.agent.detach()
                    return ForkedWorker(order, streams, record)
                if learning is not None:
                    learning.watch(pid, order, number)
            else:
                pid = self._hand_over(descriptors) if order.kind not in ("program", PROBE) else 0
                pid = pid or start(
                    *(command_line(order), order.environment, order.directory, streams),
                    cores=order.cores,
                    after=order.after,
                )
            self.child_processes.add(pid)
            self._tell(Spawned(request.id, pid))
        except (OSError, ValueError) as error:
            self._tell(SpawnFailed(request.id, f"{error}"))
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _refill(self) -> None:
        if self.settings.standby is not Standby.SPAWN or not self.refilling:
            return
        settings = self.settings
        while len(self.standbys) < settings.slots:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            words = [str(theirs.fileno()), ",".join(settings.preload), settings.kind, settings.target]
            command = helper_command(sys.executable, "edl.worker.standby", *words, *settings.arguments)
            try:
                pid = start(command, os.environ, keep=(theirs.fileno(),))
            except OSError as error:
                self.refilling = False
                self._tell(LogLine(f"no standby could be started, so workers are started cold: {error}"))
                return
            finally:
                theirs.close()
            self.child_processes.add_helper(pid)
            self.standbys[ours.fileno()] = _Standby(pid, ours)
            self.poller.register(ours, select.POLLIN)

    def _hear_standby(self, waiting: _Standby) -> bool:
        """Handle a message of a standby: it is ready, or it failed. False when that ends the fork server."""
        data, _ = receive(waiting.socket)
        message = decode(data) if data else WarmFailed(self.settings.target, "the process ended during its imports", "")
        if isinstance(message, LogLine):
            waiting.ready = message.text
            if not self.warmed and all(other.ready for other in self.standbys.values()):
                self._warmed(f"{len(self.standbys)} spawned processes wait: {message.text}")
            return True
        self._forget(waiting)
        waiting.socket.close()
        if not self.warmed and isinstance(message, WarmFailed):
            self._tell(message)
            self.child_processes.destroy()
            return False
        if not waiting.ready:
            # An immediate retry would most likely fail again, endlessly.
            self.refilling = False
            self._tell(LogLine("a standby failed, so workers are started cold from now on"))
        return True

    def _forget(self, waiting: _Standby) -> None:
        self.poller.unregister(waiting.socket)
        del self.standbys[waiting.socket.fileno()]

    def _hand_over(self, descriptors: list[int]) -> int:
        """Give an order to a standby, preferably a ready one; returns its pid, 0 when there is none."""
        for waiting in sorted(self.standbys.values(), key=lambda standby: not standby.ready):
            self._forget(waiting)
            with waiting.socket, contextlib.suppress(OSError):
                socket.send_fds(waiting.socket, [b"order"], descriptors)
                return waiting.pid
        return 0


def _take_signals() -> None:
    """Ignore signals meant for the agent, which decides when workers end. SIGCHLD only has to wake the loop."""
    for number in linux.FORK_SERVER_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def main() -> None:
    """Run a fork server; see ``ForkServerArguments``. Returns, in a forked child, when the user's script has ended."""
    settings = ForkServerArguments.from_arguments(sys.argv[1:])
    linux.adopt_orphans()
    linux.set_title([sys.executable, "-m", "edl.worker.fork_server"])
    fork_server = _ForkServer(settings, socket.socket(fileno=settings.agent))
    forked = fork_server.serve()
    image = fork_server.image
    if forked is None or image is None:
        os._exit(0)
    del fork_server
    become(forked.order, forked.streams, image.descriptors)
    bootstrap.run(forked.order, image.environment, forked.record)
