"""Worker processes made by a fork server: the agent's end of ``edl.worker.fork_server``.

The agent never forks: it has threads, and gRPC does not survive a fork. It starts one helper process, which forks the
workers; their messages are in ``edl.wire.fork_server``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from string import Template

from edl.adapters import family
from edl.adapters.stacks import stacks_of_program
from edl.config import Standby
from edl.errors import ProtocolError, StarterLost, WorkerStartError
from edl.ports import CommandKind, WorkerCommand
from edl.wire.datagrams import receive
from edl.wire.fork_server import (
    PROBE,
    Dump,
    Entitled,
    Forward,
    LogLine,
    Message,
    Signal,
    Spawn,
    Spawned,
    SpawnFailed,
    Warmed,
    WarmFailed,
    WorkerOrder,
    decode,
    encode,
    helper_command,
    write_order,
)
from edl.wire.local import AGENT_VARIABLE
from edl.wire.process_events import (
    ForkServerLost,
    ProcessEvent,
    WorkerExited,
    WorkerResumed,
    WorkersStopped,
    WorkerSuspended,
)

_MODULE = "edl.worker.fork_server"
_PROBE_MODULE = "edl.worker.probe.main"
_EXIT_TIMEOUT_S = 12.0
"""Seconds that the fork server gets to kill and reap its children before it is killed itself."""
_SHORT_EXIT_TIMEOUT_S = 1.0
ANSWER_S = 10.0
"""Seconds that a fork server may leave a request unanswered before it is killed."""
_REAP_S = 2.0
"""Seconds to wait for a killed fork server. A process that is blocked on I/O to a broken disk never ends."""
_STDIN = 0
"""Workers share this process's standard input, as under torchrun and Paddle's launcher."""
WorkerEvent = WorkerExited | WorkerSuspended | WorkerResumed
_PACKAGES = {"paddle": "paddlepaddle", "sklearn": "scikit-learn", "PIL": "pillow", "yaml": "pyyaml"}


def with_macros(arguments: Sequence[str], local_rank: int) -> tuple[str, ...]:
    """Expand ``${local_rank}`` in a worker's arguments as torchrun does: ``$local_rank`` means the same, ``$$`` is one
    ``$``, and other names are kept."""
    return tuple(Template(argument).safe_substitute(local_rank=local_rank) for argument in arguments)


class ForkServerProcesses:
    """``edl.ports.Processes`` on Linux.

    ``environment`` is that of the fork server, in which frameworks are imported: the agent's, with the workers' values
    for variables that libraries read at import (``OMP_*``, ``MKL_*``, ``OPENBLAS_*``, ``KMP_*``, ``FLAGS_*``).
    ``preload``: modules to import besides those found in the script; they must exist. ``python``: the interpreter of
    Python workers. ``log`` gets whole sentences. ``answer_s``: seconds the fork server may take to answer before it is
    replaced. ``files``: soft and hard limit of the workers' open files; None: as in this process.
    ``learn_bytes``: most memory of the templates, which import what the workers are seen to import; 0: there are none.
    """

    def __init__(
        self,
        command: WorkerCommand,
        standby: Standby,
        slots: int,
        environment: dict[str, str],
        preload: tuple[str, ...] = (),
        log: Callable[[str], None] = lambda _: None,
        python: str = sys.executable,
        answer_s: float = ANSWER_S,
        files: tuple[int, int] | None = None,
        learn_bytes: int = 0,
    ) -> None:
        self._files = files
        self._learn_bytes = learn_bytes
        self._command = command
        self._standby = standby
        self._slots = slots
        self._environment = environment
        self._preload = preload
        self._log = log
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._warming: asyncio.Future[str] | None = None
        self._spawning: dict[int, asyncio.Future[int]] = {}
        self._ids = itertools.count(1)
        self._alive: set[int] = set()
        self._unwanted: set[int] = set()
        self._early: dict[int, list[WorkerEvent]] = {}
        """Events of workers whose ``spawn`` has its answer but has not returned yet. A consumer that is behind would
        get them first."""
        self._events: asyncio.Queue[ProcessEvent] = asyncio.Queue()
        self._warmed = False
        self._closing = False
        self._until_s: float | None = None
        self._answer_s = answer_s
        self._overdue: asyncio.TimerHandle | None = None
        """Fires unless the fork server answers first."""
        self._writable: asyncio.Event | None = None
        """Set while a sender waits for room in the fork server's socket."""
        self._mark = ""
        """Environment value that marks the workers and all their descendants, including those in other sessions."""

    @property
    def fork_server_pid(self) -> int:
        """Pid of the fork server, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def warm(self) -> str:
        """Start a new fork server; see ``Processes.warm``."""
        await self._stop()
        self._warmed = self._closing = False
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise WorkerStartError(f"cannot start {self._python}: {error}") from error
        ours.setblocking(False)
        with theirs:
            try:
                # Blocks for the millisecond that exec takes; asyncio's version would reap the child itself.
                self._process = subprocess.Popen(  # noqa: ASYNC220
                    helper_command(self._python, _MODULE, *self._arguments(theirs.fileno())),
                    stdin=subprocess.DEVNULL,  # modules that it imports must not take the workers' input
                    env=self._environment,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise WorkerStartError(f"cannot start {self._python}: {error}") from error
        if self._files is not None:
            resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, self._files)
        self._socket = ours
        loop = asyncio.get_running_loop()
        self._warming = loop.create_future()
        loop.add_reader(ours, self._readable)
        try:
            return await self._warming
        except BaseException:
            await self._stop()
            raise
        finally:
            self._warming = None

    def _arguments(self, descriptor: int) -> list[str]:
        command = self._command
        head = [str(descriptor), self._standby.value, str(self._slots), ",".join(self._preload)]
        head += [str(self._learn_bytes), ""]
        return [*head, command.kind.value, command.target, *command.arguments]

    async def spawn(
        self, environment: dict[str, str], stdout: int, stderr: int, local_rank: int = 0, cores: tuple[int, ...] = ()
    ) -> int:
        """Start a worker; see ``Processes.spawn``. The worker's events are queued after this call has its pid."""
        command = self._command
        arguments = with_macros(command.arguments, local_rank)
        self._mark = environment.get(AGENT_VARIABLE, "")
        order = WorkerOrder(command.kind.value, command.target, arguments, environment, cores=cores)
        return await self._started(order, stdout, stderr)

    async def spawn_probe(self, environment: dict[str, str], stdout: int, stderr: int) -> int:
        """Start the probe of a health check, like a worker; returns its pid. Raises ``WorkerStartError``."""
        return await self._started(WorkerOrder(PROBE, _PROBE_MODULE, (), environment), stdout, stderr)

    async def _started(self, order: WorkerOrder, stdout: int, stderr: int) -> int:
        number = next(self._ids)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            memory = write_order(order)
        except OSError as error:
            raise WorkerStartError(f"cannot start a worker: {error}") from error
        try:
            self._spawning[number] = answer
            self._expect_answer()
            await self._send(Spawn(number), [memory, _STDIN, stdout, stderr])
        except BaseException as error:
            del self._spawning[number]
            if isinstance(error, OSError):
                raise WorkerStartError(f"cannot start a worker: {error}") from error
            raise
        finally:
            os.close(memory)
        # A caller that is cancelled here leaves its entry behind, so that the worker is killed when the answer arrives.
        try:
            pid = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._disown(answer.result())
            raise
        for event in self._early.pop(pid, ()):
            self._events.put_nowait(event)
        return pid

    def entitle(self, until_s: float) -> None:
        """Extend the workers' permission to run; see ``Processes.entitle``. A fork server that is still importing has
        no workers and reads no messages."""
        if self._warmed and self._socket is not None and not self._closing:
            self._expect_answer()
        self.entitle_aside(until_s)

    def entitle_aside(self, until_s: float) -> None:
        """Like ``entitle``, from any thread: the socket sends whole messages."""
        self._until_s, opened = until_s, self._socket
        if self._warmed and opened is not None and not self._closing:
            with contextlib.suppress(OSError):
                opened.send(encode(Entitled(until_s)))

    async def signal(self, pid: int, number: int) -> None:
        """Signal a worker's process group; see ``Processes.signal``."""
        if pid not in self._alive:
            return
        # If the fork server is gone, so is the worker.
        with contextlib.suppress(OSError, WorkerStartError):
            await self._send(Signal(pid, number), [])

    async def dump(self, pid: int) -> None:
        """Dump a worker's stacks; see ``Processes.dump``. Programs (``--no-python``) are inspected from outside, with
        ``py-spy``."""
        if pid not in self._alive:
            return
        if self._command.kind is CommandKind.PROGRAM:
            self._log(await asyncio.to_thread(stacks_of_program, pid))
            return
        with contextlib.suppress(OSError, WorkerStartError):
            await self._send(Dump(pid), [])

    async def forward(self, pid: int, number: int) -> None:
        """Forward a signal to a worker's handler; see ``Processes.forward``."""
        if pid in self._alive:
            with contextlib.suppress(OSError, WorkerStartError):
                await self._send(Forward(pid, number), [])

    async def events(self) -> AsyncIterator[ProcessEvent]:
        """The workers' events, in order; see ``Processes.events``."""
        while True:
            yield await self._events.get()

    async def close(self) -> None:
        """Kill all workers and end the fork server."""
        await self._stop()

    def kill(self) -> None:
        """Send SIGKILL to the fork server and all its descendants, without waiting."""
        if self.fork_server_pid:
            family.kill((self.fork_server_pid, *family.descendants(self.fork_server_pid, family.families())))
        self._kill_marked()

    def _kill_marked(self) -> None:
        if self._mark:
            family.kill(family.started_with(AGENT_VARIABLE, self._mark))

    async def _send(self, message: Message, descriptors: list[int]) -> None:
        """Send a message to the fork server. Raises ``WorkerStartError`` when there is none, ``OSError`` when it has
        just died."""
        while True:
            channel = self._socket
            if channel is None:
                raise StarterLost("cannot start a worker: its fork server is gone; warm() starts another")
            try:
                socket.send_fds(channel, [encode(message)], descriptors)
                return
            except BlockingIOError:
                if self._writable is None:  # else others already wait
                    self._writable = asyncio.Event()
                    asyncio.get_running_loop().add_writer(channel, self._has_room)
                await self._writable.wait()

    def _has_room(self) -> None:
        """Wake the senders: the fork server's socket has room again, or is about to be closed."""
        writable, self._writable = self._writable, None
        if writable is not None and self._socket is not None:
            asyncio.get_running_loop().remove_writer(self._socket)
            writable.set()

    def _readable(self) -> None:
        """Handle all messages that have arrived, in order."""
        while self._socket is not None:
            try:
                data, _ = receive(self._socket)
            except BlockingIOError:
                return
            if not data:
                self._lost()
                return
            try:
                self._handle(decode(data))
            except ProtocolError as error:
                self._log(f"ignored an invalid message from the fork server: {error}")

    def _expect_answer(self) -> None:
        if self._overdue is None and self._warmed:
            self._overdue = asyncio.get_running_loop().call_later(self._answer_s, self._miss_answer)

    def _answered(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _miss_answer(self) -> None:
        """Kill the fork server and its workers because it is stopped or hangs: without it, workers can be neither
        started nor ended."""
        self._readable()  # if this process was delayed itself, the answer has arrived
        if self._overdue is None or self._socket is None:
            return
        text = f"the fork server has not answered for {self._answer_s:g} s: killing it and its workers"
        self._events.put_nowait(WorkersStopped(text))
        self.kill()
        self._lost()

    def _handle(self, message: Message) -> None:
        self._answered()
        match message:
            case Warmed(text) if self._warming is not None and not self._warming.done():
                self._warmed = True
                if self._until_s is not None:
                    self.entitle(self._until_s)
                self._warming.set_result(text)
            case WarmFailed() if self._warming is not None and not self._warming.done():
                self._warming.set_exception(WorkerStartError(self._import_advice(message)))
            case Spawned(number, pid):
                self._alive.add(pid)
                self._spawned(self._spawning.pop(number, None), pid)
            case SpawnFailed(number, error):
                answer = self._spawning.pop(number, None)
                if answer is not None and not answer.done():
                    answer.set_exception(WorkerStartError(f"cannot start {shlex.quote(self._command.target)}: {error}"))
            case WorkerExited(pid):
                self._alive.discard(pid)
                if pid not in self._unwanted:
                    self._report(message)
                self._unwanted.discard(pid)
            case WorkerSuspended(pid) | WorkerResumed(pid) if pid not in self._unwanted:
                self._report(message)
            case WorkersStopped():
                self._events.put_nowait(message)
            case LogLine(text):
                self._log(text)

    def _spawned(self, answer: asyncio.Future[int] | None, pid: int) -> None:
        if answer is not None and not answer.done():
            self._early[pid] = []
            answer.set_result(pid)
        else:
            self._disown(pid)

    def _report(self, event: WorkerEvent) -> None:
        """Queue an event of a worker, once its pid is known."""
        early = self._early.get(event.pid)
        if early is None:
            self._events.put_nowait(event)
        else:
            early.append(event)

    def _disown(self, pid: int) -> None:
        """Kill a worker whose caller was cancelled and does not know it."""
        self._early.pop(pid, None)
        if pid not in self._alive:
            return
        self._unwanted.add(pid)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(encode(Signal(pid, signal.SIGKILL)))

    def _import_advice(self, failure: WarmFailed) -> str:
        text = f"the workers' interpreter {self._python} cannot import {failure.module}: {failure.error}"
        root = failure.module.partition(".")[0]
        if "No module named" in failure.error and root not in self._preload and root != self._command.target:
            package = _PACKAGES.get(root, root)
            return f"{text}. Install it with: {self._python} -m pip install {package}"
        if failure.traceback:
            self._log(failure.traceback.rstrip())
        return text

    def _lost(self) -> None:
        """Handle the end of the fork server, whose socket is closed."""
        reason = self._release()
        failure = f"the fork server has died: {reason}"
        if self._warming is not None and not self._warming.done():
            self._warming.set_exception(WorkerStartError(f"{failure} (while importing the framework)"))
        elif not self._closing:
            self._events.put_nowait(ForkServerLost(reason))
        for answer in self._spawning.values():
            if not answer.done():
                answer.set_exception(StarterLost(failure))
        self._spawning.clear()

    def _release(self) -> str:
        """Release a fork server whose socket is closed; returns how it ended."""
        self._answered()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._has_room()
            self._socket.close()
            self._socket = None
        process, self._process = self._process, None
        if process is None:
            return "it was never started"
        # Its socket is closed, so it is exiting or broken.
        process.kill()
        try:
            code = process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
            self._log(
                f"fork server (pid {process.pid}) has not ended {_REAP_S:g} s after SIGKILL: it is probably blocked "
                "on disk I/O; continuing without it"
            )
        for pid in sorted(self._alive):
            self._report(WorkerExited(pid, -signal.SIGKILL))
        for pid in self._alive if code != 0 else ():
            # It had no time to clean up. The kernel kills the workers with it (PR_SET_PDEATHSIG), but not their
            # children. A pid is not reused while its group has members, and an empty group is no error.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if code != 0:
            self._kill_marked()  # also those in sessions of their own
        self._alive.clear()
        self._unwanted.clear()
        return f"killed by signal {-code}" if code < 0 else f"it ended with status {code}"

    async def _stop(self) -> None:
        """End the fork server and all its children."""
        if self._socket is None:
            return
        self._closing = True
        self._answered()
        ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().remove_reader(self._socket)
        asyncio.get_running_loop().add_reader(self._socket, self._drain, ended)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(asyncio.TimeoutError):
            # A fork server that is still importing reads no messages, and has made nothing that outlives it.
            await asyncio.wait_for(ended, _EXIT_TIMEOUT_S if self._warmed else _SHORT_EXIT_TIMEOUT_S)
        self._lost()

    def _drain(self, ended: asyncio.Future[None]) -> None:
        """While closing, read until the socket ends; the workers' last events are still handled."""
        try:
            data = receive(self._socket)[0] if self._socket is not None else b""
        except BlockingIOError:
            return
        if data:
            self._handle(decode(data))
        elif not ended.done():
            ended.set_result(None)
