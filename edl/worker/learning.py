"""The fork server's part of learning a script's imports: reads the workers' records, and keeps templates.

It is called from the fork server's loop and never waits, except for a template's answer to a request to fork.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from edl.errors import ProtocolError
from edl.exit_codes import ExitCode
from edl.wire.datagrams import receive
from edl.wire.fork_server import WorkerOrder
from edl.worker import linux
from edl.worker.child_processes import ChildProcesses
from edl.worker.import_record import ImportRecord
from edl.worker.learnt import (
    WORTH_S,
    LearntModules,
    SeenImport,
    cost_s,
    is_library,
    merged,
    own_reasons,
    parse_record,
    search_folder,
    variables_set,
)
from edl.worker.learnt_file import LearntFile
from edl.worker.replay import Rules
from edl.worker.template import (
    ForkedWorker,
    ImportBegins,
    LeftOut,
    Prepared,
    VariablesRead,
    WorkerPlace,
    decode,
    fits,
    fork_from,
    run_template,
)

REST_S = 3.0
"""Seconds without a new import after which a worker is taken to have imported what it needs for its steps."""
LOOK_S = 1.0
"""Seconds between two looks at the records."""
LONGEST_IMPORT_S = 60.0
"""A module whose import takes longer in a template is left out."""
FORK_S = 1.0
"""Seconds in which a template must have forked a worker. The fork server waits: much longer, and it would take the
launcher, which it does not hear meanwhile, for silent, and kill the living workers."""
MOST_ATTEMPTS = 8
"""Processes that are started for one template, rehearsals included, until it is given up."""
MOST_TEMPLATES = 32
"""Templates that one fork server makes in its life."""


@dataclass(slots=True)
class _Watched:
    """A worker that records its imports."""

    number: int
    """Of its record."""
    environment: Mapping[str, str]
    length: int = 0
    grown_s: float = 0.0
    """When the record was last seen to have grown."""
    considered: int = -1
    """Length of the record when it was last considered."""


@dataclass(slots=True)
class _Template:
    pid: int
    channel: socket.socket
    place: WorkerPlace
    rules: Rules
    began_s: float
    import_began_s: float
    module: str = ""
    """The module that it is importing."""
    left_out: dict[str, str] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    """Environment variables that its modules have read."""
    prepared: Prepared | None = None


@dataclass(frozen=True, slots=True)
class LearntScript:
    """What the workers run."""

    kind: str
    target: str
    arguments: tuple[str, ...]
    folder: str
    """Its entry on the search path."""
    standard: frozenset[str]
    """Folders of the standard library."""

    @property
    def own_package(self) -> str:
        """The top-level package of a module, whose submodules are the user's own."""
        return self.target.partition(".")[0] if self.kind == "module" else ""

    def place(self, environment: Mapping[str, str]) -> WorkerPlace:
        """Where a template of a worker with this environment does its imports."""
        words = ("-m" if self.kind == "module" else self.target, *self.arguments)
        return WorkerPlace(environment, words, os.path.abspath(self.target), self.folder)


class Learning:
    """Learns which modules the workers import, and forks workers from templates that have imported them."""

    def __init__(
        self,
        script: LearntScript,
        file: LearntFile,
        slots: int,
        most_bytes: int,
        environment: Mapping[str, str],
        children: ChildProcesses,
        poller: select.poll,
        log: Callable[[str], None],
        in_template: Callable[[], frozenset[int]],
    ) -> None:
        """``environment``: that of the fork server's own imports. ``in_template``: called in a new template; lets go of
        the fork server's descriptors, and returns those that the framework needs."""
        self._script, self._file, self._most_bytes, self._environment = script, file, most_bytes, environment
        self._children, self._poller, self._log, self._in_template = children, poller, log, in_template
        self._learnt = file.load()
        self._records = tuple(ImportRecord() for _ in range(2 * slots + 2))
        self._watched: dict[int, _Watched] = {}
        self._templates: list[_Template] = []
        self._building: _Template | None = None
        self._attempts = 0
        self._made = 0
        self._logged: set[str] = set()

    # --- the loop ------------------------------------------------------------------------------------------------

    def timeout_s(self) -> float | None:
        """Seconds until ``look`` is to be called; None for never."""
        resting = any(one.considered != one.length for one in self._watched.values())
        if self._building is not None or resting:
            return LOOK_S
        return 10 * LOOK_S if self._watched else None

    @property
    def preparing(self) -> bool:
        """Whether the first template of this fork server is being made, at the first attempt."""
        return self._building is not None and self._made == self._attempts == 1

    def prepare_from_file(self) -> ForkedWorker | None:
        """Begin a template with what earlier jobs have learnt, if the launcher's environment is as good as that of a
        worker. Returns in a forked worker only."""
        learnt = self._learnt
        if learnt.rehearsed and learnt.environment_as_given and learnt.wanted:
            return self._begin(self._environment)
        return None

    def look(self, now_s: float) -> ForkedWorker | None:
        """Look at the records, and at a template whose import takes too long. Returns in a forked worker only."""
        building = self._building
        if building is not None and now_s > building.import_began_s + LONGEST_IMPORT_S:
            building.left_out[building.module] = f"its import takes longer than {LONGEST_IMPORT_S:g} s"
            return self._finish(building)
        for worker in self._watched.values():
            length = self._records[worker.number].length()
            if length != worker.length:
                worker.length, worker.grown_s = length, now_s
            rested = now_s >= worker.grown_s + REST_S
            if self._building is None and rested and worker.considered != worker.length:
                forked = self._consider(worker)
                if forked is not None:
                    return forked
        return None

    def hear(self, ready: Mapping[int, int]) -> ForkedWorker | None:
        """Handle what templates have written. ``ready``: descriptors and their events. Returns in a forked worker
        only."""
        for template in [one for one in self._templates if one.channel.fileno() in ready]:
            self._discard(template)  # it says nothing unasked, so it has ended
        building = self._building
        if building is None or building.channel.fileno() not in ready:
            return None
        try:
            data, _ = receive(building.channel)
            message = decode(data) if data else None
        except ProtocolError:
            message = None
        building.import_began_s = time.monotonic()
        if isinstance(message, ImportBegins):
            building.module = message.module
        elif isinstance(message, LeftOut):
            building.left_out[message.module] = message.why
        elif isinstance(message, VariablesRead):
            building.reads += message.names
        else:
            if isinstance(message, Prepared):
                building.prepared = message
            else:
                building.left_out[building.module] = "its import ends the process"
            return self._finish(building)
        return None

    # --- workers -------------------------------------------------------------------------------------------------

    def fork(self, order: WorkerOrder, descriptors: list[int]) -> tuple[int, ImportRecord | None, int]:
        """Have a worker forked by a template that fits. Returns its pid, or 0 if the fork server is to fork it itself;
        then also its record and the record's number."""
        number = self._free_record()
        for template in [one for one in self._templates if self._fits(one, order.environment)]:
            try:
                return fork_from(template.channel, number, descriptors, self._children.add, FORK_S), None, number
            except (OSError, ValueError) as error:
                self._log(f"a template did not fork a worker, so the fork server does: {error}")
                self._discard(template)
        return 0, self._records[number] if number >= 0 else None, number

    def watch(self, pid: int, order: WorkerOrder, number: int) -> None:
        """Follow what a new worker imports."""
        if number >= 0:
            self._watched[pid] = _Watched(number, order.environment, 0, time.monotonic())

    def forget(self, pid: int) -> None:
        """A worker has ended."""
        worker = self._watched.pop(pid, None)
        if worker is not None:
            self._records[worker.number].clear()

    def _free_record(self) -> int:
        used = {worker.number for worker in self._watched.values()}
        return next((number for number in range(len(self._records)) if number not in used), -1)

    def _fits(self, template: _Template, environment: Mapping[str, str]) -> bool:
        return fits(template.reads, template.place.environment, environment)

    # --- templates -----------------------------------------------------------------------------------------------

    def _consider(self, worker: _Watched) -> ForkedWorker | None:
        """Learn from a worker whose imports have come to rest, and begin a template if that pays."""
        worker.considered = worker.length
        text = self._records[worker.number].text()
        record = parse_record(text)
        if cost_s(record) < WORTH_S:
            return None
        grown = self._learn(record, text)
        if not self._learnt.wanted:
            return None
        if not grown and any(self._fits(one, worker.environment) for one in self._templates):
            return None
        return self._begin(worker.environment)

    def _learn(self, record: tuple[SeenImport, ...], text: str) -> bool:
        """Add the libraries of a record; returns whether there was one that is not of the standard library."""
        script, known = self._script, self._learnt.modules
        found = [
            one.module for one in record if is_library(one.module, script.standard, script.folder, script.own_package)
        ]
        new = set(found) - set(known)
        if not new:
            return False
        set_before = {**variables_set(text, {one.name for one in new}), **self._learnt.set_before}
        self._learnt = LearntModules(merged(known, found), own_reasons(self._learnt.left_out), set_before)
        self._save()
        return any(search_folder(one) not in script.standard for one in new)

    def _begin(self, environment: Mapping[str, str]) -> ForkedWorker | None:
        """Begin a template for workers with this environment."""
        if self._made == MOST_TEMPLATES:
            return None
        for template in self._templates[:]:
            if not any(self._fits(template, worker.environment) for worker in self._watched.values()):
                self._discard(template)  # its workers have other ranks by now
        self._attempts = 0
        self._made += 1
        return self._attempt(self._script.place(environment))

    def _attempt(self, place: WorkerPlace) -> ForkedWorker | None:
        self._attempts += 1
        others = (one.prepared for one in self._templates if not self._fits(one, place.environment))
        used = sum(one.memory_bytes for one in others if one is not None)
        rules = Rules(
            *(self._learnt.wanted, self._learnt.left_out, self._learnt.barred_from),
            rehearsal=not self._learnt.rehearsed,
            most_bytes=max(0, self._most_bytes - used),
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = linux.fork()
        except OSError as error:
            self._log(f"no template for the next workers could be started: {error}")
            ours.close()
            theirs.close()
            return None
        if pid == 0:
            ours.close()
            return self._become_template(theirs, place, rules)
        theirs.close()
        self._children.add_helper(pid)
        now_s = time.monotonic()
        self._building = _Template(pid, ours, place, rules, began_s=now_s, import_began_s=now_s)
        self._poller.register(ours, select.POLLIN)
        return None

    def _become_template(self, channel: socket.socket, place: WorkerPlace, rules: Rules) -> ForkedWorker:
        """In the new process. Returns in a worker only."""
        try:
            for template in self._templates:
                template.channel.close()
            keep = self._in_template()
            linux.set_title([sys.executable, "-m", "edl.worker.template"])
            worker = run_template(channel, place, rules, self._records, keep)
            channel.detach()
            return worker
        except BaseException:  # noqa: BLE001 - the top of a process
            traceback.print_exc(file=sys.__stderr__)
            os._exit(ExitCode.INTERNAL)

    def _finish(self, template: _Template) -> ForkedWorker | None:
        """Decide what follows from a template that has done its imports, or has failed."""
        self._building = None
        new = {module: why for module, why in template.left_out.items() if module}
        rehearsed = not new and template.prepared is not None
        learnt = replace(self._learnt, left_out={**self._learnt.left_out, **new}, rehearsed=rehearsed)
        if rehearsed:
            given = fits(template.reads, self._environment, template.place.environment)
            learnt = replace(learnt, reads=template.reads, environment_as_given=given)
        self._learnt = learnt
        self._save()
        for module, why in new.items():
            self._log_once(f"{module} is not imported ahead of the workers: {why}")
        if rehearsed and not template.rules.rehearsal:
            self._accept(template)
            return None
        self._end(template)
        if self._attempts < MOST_ATTEMPTS and learnt.wanted:
            return self._attempt(template.place)
        return None

    def _accept(self, template: _Template) -> None:
        """Use a template from now on, in place of those that were made for the same workers."""
        prepared = template.prepared
        assert prepared is not None  # noqa: S101 - the caller has checked
        for other in [one for one in self._templates if self._fits(one, template.place.environment)]:
            self._discard(other)
        self._templates.append(template)
        took_s = time.monotonic() - template.began_s
        size = f"{prepared.memory_bytes / (1 << 20):.0f} MiB"
        self._log(f"the next workers start with {prepared.count} more modules, imported in {took_s:.1f} s ({size})")
        if prepared.full:
            limit = f"the limit of {self._most_bytes >> 20} MiB (--learn-memory) is reached"
            self._log_once(f"further modules are not imported ahead of the workers: {limit}")

    def _discard(self, template: _Template) -> None:
        self._templates.remove(template)
        self._end(template)

    def _end(self, template: _Template) -> None:
        self._poller.unregister(template.channel)
        template.channel.close()
        self._children.kill_helper(template.pid)

    def _save(self) -> None:
        problem = self._file.save(self._learnt)
        if problem:
            self._log_once(f"what the workers import is not kept for the next job: {problem}")

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self._log(text)


def standard_folders() -> Iterator[str]:
    """The folders of this interpreter's standard library."""
    import sysconfig

    for name in ("stdlib", "platstdlib"):
        folder = sysconfig.get_path(name)
        if folder:
            yield folder
            yield os.path.join(folder, "lib-dynload")
