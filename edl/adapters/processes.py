"""Worker processes by way of a fork server: the agent's end of ``edl.worker.fork_server``.

The agent never forks: it has threads, and gRPC does not survive a fork. It starts one helper process, which makes the
workers; see ``edl.wire.fork_server`` for what the two say.
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
from edl.ports import (
    CommandKind,
    ForkServerLost,
    ProcessEvent,
    WorkerCommand,
    WorkerExited,
    WorkerResumed,
    WorkersStopped,
    WorkerSuspended,
)
from edl.wire.fork_server import (
    LARGEST_BYTES,
    Dump,
    Entitled,
    Exited,
    Forward,
    Message,
    Note,
    Order,
    Resumed,
    Signal,
    Spawn,
    Spawned,
    SpawnFailed,
    Stopped,
    Suspended,
    Warmed,
    WarmFailed,
    decode,
    encode,
    helper_command,
    write_order,
)
from edl.wire.local import AGENT_VARIABLE

_MODULE = "edl.worker.fork_server"
_FAREWELL_S = 12.0
"""How long the fork server may take to kill and reap what it has made; then it is killed itself."""
_IMPATIENT_FAREWELL_S = 1.0
ANSWER_S = 10.0
"""How long a fork server may be silent that has something to answer; then it is killed."""
_REAP_S = 2.0
"""How long the kernel may take to end a fork server that has been killed. One that waits for a broken disk never
ends."""
_PACKAGES = {"paddle": "paddlepaddle", "sklearn": "scikit-learn", "PIL": "pillow", "yaml": "pyyaml"}


def with_macros(arguments: Sequence[str], local_rank: int) -> tuple[str, ...]:
    """``${local_rank}`` in a worker's arguments, as torchrun has it: ``$local_rank`` is the same, ``$$`` is one ``$``,
    and what has another name stays as it is."""
    return tuple(Template(argument).safe_substitute(local_rank=local_rank) for argument in arguments)


class ForkServerProcesses:
    """``edl.ports.Processes`` on Linux.

    ``environment`` is the fork server's own, so the one under which frameworks are imported: the agent's, with the
    values that workers will have for what libraries read at import (``OMP_*``, ``MKL_*``, ``OPENBLAS_*``, ``KMP_*``,
    ``FLAGS_*``). ``preload`` names modules to import besides those found in the script; they must exist. ``python`` is
    the interpreter that runs Python workers. ``log`` gets whole sentences. ``answer_s``: how long the fork server may
    take to answer before it is replaced. ``files``: how many open files workers may have, as soft and hard limit; None:
    as many as this process.
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
    ) -> None:
        self._files = files
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
        self._events: asyncio.Queue[ProcessEvent] = asyncio.Queue()
        self._warmed = False
        self._closing = False
        self._until_s: float | None = None
        self._answer_s = answer_s
        self._overdue: asyncio.TimerHandle | None = None
        """Rings unless the fork server is heard before."""
        self._writable: asyncio.Event | None = None
        """There while somebody waits for room in the fork server's socket."""
        self._mark = ""
        """What workers find their agent by: their own processes have it, too, wherever they went."""

    @property
    def fork_server_pid(self) -> int:
        """Pid of the helper process, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def warm(self) -> str:
        """See ``Processes.warm``."""
        await self._stop()
        self._warmed = self._closing = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                # Blocks for the millisecond that exec takes; asyncio's own would want to reap the child itself.
                self._process = subprocess.Popen(  # noqa: ASYNC220
                    helper_command(self._python, _MODULE, *self._arguments(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
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
        head = [str(descriptor), self._standby.value, str(self._slots), ",".join(self._preload), ""]
        return [*head, command.kind.value, command.target, *command.arguments]

    async def spawn(
        self, environment: dict[str, str], stdout: int, stderr: int, local_rank: int = 0, cores: tuple[int, ...] = ()
    ) -> int:
        """See ``Processes.spawn``. A worker's events are queued after its pid has been handed to this call."""
        command = self._command
        arguments = with_macros(command.arguments, local_rank)
        order = Order(command.kind.value, command.target, arguments, environment, cores=cores)
        self._mark = environment.get(AGENT_VARIABLE, "")
        number = next(self._ids)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            memory = write_order(order)
        except OSError as error:
            raise WorkerStartError(f"cannot start a worker: {error}") from error
        try:
            self._spawning[number] = answer
            self._expect_answer()
            await self._send(Spawn(number), [memory, stdout, stderr])
        except BaseException as error:
            del self._spawning[number]
            if isinstance(error, OSError):
                raise WorkerStartError(f"cannot start a worker: {error}") from error
            raise
        finally:
            os.close(memory)
        # A caller that is cancelled here leaves its entry behind, so that the answer finds it and kills the worker.
        return await answer

    def entitle(self, until_s: float) -> None:
        """See ``Processes.entitle``. A fork server that is still importing has no workers, and does not listen."""
        if self._warmed and self._socket is not None and not self._closing:
            self._expect_answer()
        self.entitle_aside(until_s)

    def entitle_aside(self, until_s: float) -> None:
        """See ``Processes.entitle_aside``. Sockets take whole messages from any thread."""
        self._until_s, opened = until_s, self._socket
        if self._warmed and opened is not None and not self._closing:
            with contextlib.suppress(OSError):
                opened.send(encode(Entitled(until_s)))

    async def signal(self, pid: int, number: int) -> None:
        """See ``Processes.signal``."""
        if pid not in self._alive:
            return
        # A fork server that is gone has taken the worker with it.
        with contextlib.suppress(OSError, WorkerStartError):
            await self._send(Signal(pid, number), [])

    async def dump(self, pid: int) -> None:
        """See ``Processes.dump``. Programs are no Python of ours: they are looked at from outside, with ``py-spy``."""
        if pid not in self._alive:
            return
        if self._command.kind is CommandKind.PROGRAM:
            self._log(await asyncio.to_thread(stacks_of_program, pid))
            return
        with contextlib.suppress(OSError, WorkerStartError):
            await self._send(Dump(pid), [])

    async def forward(self, pid: int, number: int) -> None:
        """See ``Processes.forward``."""
        if pid in self._alive:
            with contextlib.suppress(OSError, WorkerStartError):
                await self._send(Forward(pid, number), [])

    async def events(self) -> AsyncIterator[ProcessEvent]:
        """See ``Processes.events``."""
        while True:
            yield await self._events.get()

    async def close(self) -> None:
        """See ``Processes.close``."""
        await self._stop()

    def kill(self) -> None:
        """SIGKILL the fork server and all that comes from it. Waits for nothing."""
        if self.fork_server_pid:
            family.kill((self.fork_server_pid, *family.descendants(self.fork_server_pid, family.families())))
        self._kill_marked()

    def _kill_marked(self) -> None:
        if self._mark:
            family.kill(family.started_with(AGENT_VARIABLE, self._mark))

    async def _send(self, message: Message, descriptors: list[int]) -> None:
        """Raises ``WorkerStartError`` when there is no fork server, ``OSError`` when it has just gone."""
        while True:
            channel = self._socket
            if channel is None:
                raise StarterLost("cannot start a worker: its fork server is gone; warm() starts another")
            try:
                socket.send_fds(channel, [encode(message)], descriptors)
                return
            except BlockingIOError:
                if self._writable is None:  # else others wait already
                    self._writable = asyncio.Event()
                    asyncio.get_running_loop().add_writer(channel, self._has_room)
                await self._writable.wait()

    def _has_room(self) -> None:
        """The fork server's socket has room again, or is about to be closed: whoever waits for that looks again."""
        writable, self._writable = self._writable, None
        if writable is not None and self._socket is not None:
            asyncio.get_running_loop().remove_writer(self._socket)
            writable.set()

    def _readable(self) -> None:
        """Take everything that has arrived, in order."""
        while self._socket is not None:
            try:
                data = self._socket.recv(LARGEST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            try:
                self._handle(decode(data))
            except ProtocolError as error:
                self._log(f"the fork server said something strange: {error}")

    def _expect_answer(self) -> None:
        if self._overdue is None and self._warmed:
            self._overdue = asyncio.get_running_loop().call_later(self._answer_s, self._miss_answer)

    def _answered(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _miss_answer(self) -> None:
        """The fork server is stopped, or hangs. Nothing can be started or ended through it, so it goes with its
        workers."""
        self._readable()  # if this process was held up itself, the answer is here
        if self._overdue is None or self._socket is None:
            return
        text = f"the process that starts workers has not answered for {self._answer_s:g} s: killing it and its workers"
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
                self._born(self._spawning.pop(number, None), pid)
            case SpawnFailed(number, error):
                answer = self._spawning.pop(number, None)
                if answer is not None and not answer.done():
                    answer.set_exception(WorkerStartError(f"cannot start {shlex.quote(self._command.target)}: {error}"))
            case Exited(pid, code):
                self._alive.discard(pid)
                self._publish(pid, WorkerExited(pid, code))
                self._unwanted.discard(pid)
            case Suspended(pid):
                self._publish(pid, WorkerSuspended(pid))
            case Resumed(pid):
                self._publish(pid, WorkerResumed(pid))
            case Stopped(reason):
                self._events.put_nowait(WorkersStopped(reason))
            case Note(text):
                self._log(text)

    def _born(self, answer: asyncio.Future[int] | None, pid: int) -> None:
        if answer is not None and not answer.done():
            answer.set_result(pid)
            return
        # The caller was cancelled; nobody knows this worker.
        self._unwanted.add(pid)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(encode(Signal(pid, signal.SIGKILL)))

    def _publish(self, pid: int, event: ProcessEvent) -> None:
        if pid not in self._unwanted:
            self._events.put_nowait(event)

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
        """The fork server's end of the socket is closed: it has ended."""
        reason = self._farewell()
        failure = f"the process that creates workers is gone: {reason}"
        if self._warming is not None and not self._warming.done():
            self._warming.set_exception(WorkerStartError(f"{failure} (while it imported the framework)"))
        elif not self._closing:
            self._events.put_nowait(ForkServerLost(reason))
        for answer in self._spawning.values():
            if not answer.done():
                answer.set_exception(StarterLost(failure))
        self._spawning.clear()

    def _farewell(self) -> str:
        """Let go of a fork server whose socket has ended; returns how it ended."""
        self._answered()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._has_room()
            self._socket.close()
            self._socket = None
        process, self._process = self._process, None
        if process is None:
            return "it was never started"
        # Its socket is closed, so it is at its end or has lost its mind.
        process.kill()
        try:
            code = process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
            self._log(f"process {process.pid}, which starts workers, does not die of SIGKILL: a broken disk holds it")
        for pid in sorted(self._alive):
            self._events.put_nowait(WorkerExited(pid, -signal.SIGKILL))
        for pid in self._alive if code != 0 else ():
            # It had no time to tidy up. The workers themselves die with it, by order of the kernel; their children do
            # not. A pid is not given out anew while its group has members, and an empty group is no error.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if code != 0:
            self._kill_marked()  # nor those that have begun sessions of their own
        self._alive.clear()
        self._unwanted.clear()
        return f"killed by signal {-code}" if code < 0 else f"it ended with status {code}"

    async def _stop(self) -> None:
        """End the fork server and everything it has made."""
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
            # One that is still importing does not listen, and has made nothing yet that outlives it.
            await asyncio.wait_for(ended, _FAREWELL_S if self._warmed else _IMPATIENT_FAREWELL_S)
        self._lost()

    def _drain(self, ended: asyncio.Future[None]) -> None:
        """While closing: wait for the end of the socket; what happened to the workers is still told."""
        try:
            data = self._socket.recv(LARGEST_BYTES) if self._socket is not None else b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._handle(decode(data))
        elif not ended.done():
            ended.set_result(None)
