"""Repeats a worker's imports in a process that is to be forked, and notes everything that speaks against it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from edl.worker import linux
from edl.worker.frameworks import why_unsafe
from edl.worker.learnt import ALSO_LEFT_OUT, EACH_ROUND, UNKNOWN, ModuleFile, covers
from edl.worker.preload import is_safe
from edl.worker.warm import uncollected

ALL_NAMES = "*"
"""Stands for the names of all environment variables, where a module has listed them."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_EFFECTS = (
    *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn"),
    *("os.mkdir", "os.rmdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "os.chdir", "os.kill"),
    *("tempfile.mkstemp", "tempfile.mkdtemp", "shutil.rmtree", "shutil.copyfile", "shutil.move", "webbrowser.open"),
    *("socket.bind", "socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"),
)
"""Audit events of what a process does to the world around it."""


class RefusedImport(BaseException):
    """An import is about to do what it must not. No ``except Exception`` of a module stops it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be imported, and how."""

    modules: tuple[ModuleFile, ...]
    """In this order. Whatever is not among them must not run."""
    left_out: Mapping[str, str]
    barred_from: Mapping[str, str]
    """Environment variables that a worker sets itself, each with the module from which on no import may read it."""
    rehearsal: bool
    """Refuse effects on the world around the process as well; it can then not be forked any more."""
    most_bytes: int
    """Memory that the process may take for itself."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of all imports in this process."""

    left_out: Mapping[str, str]
    """Modules that must not be imported ahead, with the reasons. If there are any, this process must not be forked."""
    reads: tuple[str, ...]
    writes: Mapping[str, str | None]
    """Environment variables that the modules have set, or removed (None)."""
    memory_bytes: int
    count: int
    """Number of modules that this process has now and had not before."""
    full: bool
    """Whether it stopped because of ``most_bytes``."""
    generators: tuple[random.Random, ...]
    """Random generators that have drawn their seed from the system, as each process of a worker does for itself."""


def replay(rules: Rules, begins: Callable[[str], None]) -> Replayed:
    """Import the modules. ``begins`` gets each name before its import. Raises nothing that a module raises."""
    loaded, environment = len(sys.modules), dict(os.environ)
    guard, watch, seeds, left_out, full = _Guard(rules), _Watch(), _Seeds(), dict[str, str](), False
    if rules.rehearsal:
        sys.addaudithook(guard.audit)
    # BLAS libraries start threads that survive a fork: the modules that load one come first, each by itself.
    modules = sorted(rules.modules, key=lambda module: not is_safe(module.name))
    position = {module.name: number for number, module in enumerate(rules.modules)}
    with guard.inserted(), watch.inserted(), seeds.inserted(), uncollected():
        for module in modules:
            if module.name in sys.modules or module.name in guard.found:
                continue
            at = position[module.name]
            watch.barred = {name for name, first in rules.barred_from.items() if position[first] <= at}
            watch.barred -= watch.written
            begins(module.name)
            why = _imported(module.name, guard, watch, seeds)
            if why:
                left_out[module.name] = why
            elif own_memory_bytes() > rules.most_bytes:
                full = True
                break
    gc.collect()
    gc.freeze()  # so that the pages of all that exists stay shared with the workers
    after = dict(os.environ)
    writes = {name: after.get(name) for name in environment.keys() | after.keys()}
    return Replayed(
        left_out,
        tuple(sorted(watch.read)),
        {name: value for name, value in writes.items() if value != environment.get(name)},
        own_memory_bytes(),
        len(sys.modules) - loaded,
        full,
        seeds.from_system,
    )


def _imported(name: str, guard: _Guard, watch: _Watch, seeds: _Seeds) -> str:
    """Import a module; returns why it must not be imported ahead, empty if it may."""
    before, loaded = Footprint.now(), set(sys.modules)
    guard.refused = ""
    problem = ""
    try:
        importlib.import_module(name)
    except RefusedImport as refusal:
        problem = str(refusal)
    except BaseException as error:  # noqa: BLE001 - a foreign module's import may raise anything, SystemExit included
        problem = f"its import fails ({traceback.format_exception_only(error)[-1].strip()[:200]})"
    if watch.barred_reads:
        names, watch.barred_reads = sorted(watch.barred_reads), set()
        return f"its import reads {names[0]}, which the script sets"
    each_round = sorted(watch.read & EACH_ROUND)
    if each_round:
        watch.read -= EACH_ROUND
        return f"its import reads {each_round[0]}, which differs from round to round"
    owner = random_generator(sys.modules.keys() - loaded, seeds.from_system)
    if owner:
        return f"the import of {owner} creates a random generator"
    return guard.refused or problem or why_unsafe() or before.difference(Footprint.now(), blas=is_safe(name))


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process has that a forked child would not have, or would share."""

    threads: int
    native_threads: int
    """Threads of which Python may know nothing."""
    descriptors: frozenset[int]
    children: frozenset[int]
    handlers: Mapping[int, object]
    folder: str
    path: tuple[str, ...]
    """``sys.path``."""

    @classmethod
    def now(cls) -> Footprint:
        """That of this process."""
        return cls(
            threading.active_count(),
            len(os.listdir("/proc/self/task")),
            frozenset(linux.open_descriptors()),
            frozenset(linux.children()),
            {number: signal.getsignal(number) for number in signal.valid_signals()},
            os.getcwd(),
            tuple(sys.path),
        )

    def difference(self, after: Footprint, *, blas: bool = False) -> str:
        """What has been added since, as the reason not to import a module ahead; empty for nothing. ``blas``: native
        threads are those of a BLAS library."""
        changed = [number for number, handler in after.handlers.items() if self.handlers.get(number) is not handler]
        if after.threads > self.threads or (after.native_threads > self.native_threads and not blas):
            return "its import starts a thread"
        if after.children - self.children:
            return "its import starts a process"
        if after.descriptors != self.descriptors:
            return "its import opens or closes a file and leaves it so"
        if changed:
            return f"its import handles {signal.Signals(min(changed)).name}"
        if after.path != self.path:
            return "its import changes sys.path"
        return "" if after.folder == self.folder else "its import changes the working directory"


def random_generator(modules: Collection[str], seeded_anew: Collection[object] = ()) -> str:
    """A module that has a random generator as a variable, which all forked processes would continue; empty: none.
    ``seeded_anew``: those that each worker seeds."""
    known = {id(one) for one in seeded_anew}
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    names = ((numpy, "Generator"), (numpy, "RandomState"), (numpy, "BitGenerator"), (torch, "Generator"))
    kinds = (random.Random, *(getattr(room, name) for room, name in names if room is not None))
    for name in modules:
        if name == "random" or name.startswith("numpy.random"):
            continue  # each worker seeds them
        try:
            # Not vars() or getattr(): a module may load others when it is asked for something.
            variables = object.__getattribute__(sys.modules[name], "__dict__")
        except (AttributeError, KeyError):
            continue
        for value in list(variables.values()):
            # Not isinstance(): it asks the value for its class, and a lazy one would load something.
            kind = type(value)
            if issubclass(kind, kinds) and not issubclass(kind, random.SystemRandom) and id(value) not in known:
                return name
    return ""


class _Seeds:
    """Notes which generators of Python's ``random`` have drawn their seed from the system. One with a given seed is not
    among them: it may continue a sequence that the script counts on, and nobody knows where the seed came from."""

    def __init__(self) -> None:
        self._from_system: dict[int, random.Random] = {}

    @property
    def from_system(self) -> tuple[random.Random, ...]:
        return tuple(self._from_system.values())

    @contextlib.contextmanager
    def inserted(self) -> Iterator[None]:
        """Watch all generators that are made in the block."""
        found, seed, setstate = self._from_system, random.Random.seed, random.Random.setstate

        def noted_seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is None and type(generator) is random.Random:
                found[id(generator)] = generator
            else:
                found.pop(id(generator), None)
            seed(generator, a, version)

        def noted_setstate(generator: random.Random, state: Any) -> None:
            found.pop(id(generator), None)
            setstate(generator, state)

        random.Random.seed, random.Random.setstate = noted_seed, noted_setstate  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            random.Random.seed, random.Random.setstate = seed, setstate  # type: ignore[method-assign]


class _Guard:
    """Refuses modules that the worker did not import, and in a rehearsal effects outside of this process."""

    def __init__(self, rules: Rules) -> None:
        self._allowed = {(module.name, module.origin) for module in rules.modules}
        self._left_out = rules.left_out
        self.found: set[str] = set()
        """All modules whose import has begun."""
        self.refused = ""
        """Why something was refused, even if the module has gone on."""
        self._active = False

    @contextlib.contextmanager
    def inserted(self) -> Iterator[None]:
        """Guard all imports of the block."""
        place = next((at for at, finder in enumerate(sys.meta_path) if finder is PathFinder), len(sys.meta_path))
        sys.meta_path.insert(place, self)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec, as from ``PathFinder``. Raises ``RefusedImport``."""
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec  # not found here, or a package without a file, of which nothing runs
        if covers(self._left_out, fullname):
            self._refuse(f"it imports {fullname}, {ALSO_LEFT_OUT}")
        if (fullname, spec.origin or "") not in self._allowed:
            self._refuse(f"it imports {fullname} from {spec.origin}, {UNKNOWN}")
        self.found.add(fullname)
        return spec

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """The audit hook of a rehearsal. Raises ``RefusedImport``."""
        if not self._active:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and path != os.devnull and not _is_bytecode(path):
                self._refuse(f"its import writes {path}")
        elif event in _EFFECTS and not _is_bytecode(*arguments[:1]) and not _is_probe(event, arguments):
            self._refuse(f"its import calls {event}")

    def _refuse(self, why: str) -> None:
        self.refused = self.refused or why
        raise RefusedImport(why)


def _is_bytecode(path: object = "") -> bool:
    """Whether a path belongs to the interpreter's own cache of compiled modules."""
    return "__pycache__" in str(path)


def _is_probe(event: str, arguments: tuple[object, ...]) -> bool:
    """Whether a socket gets any free port of this host itself, as when urllib3 finds out whether there is IPv6. A
    socket that stays open is noticed afterwards."""
    address = arguments[1] if event == "socket.bind" and len(arguments) > 1 else None
    return isinstance(address, tuple) and address[:2] in (("::1", 0), ("127.0.0.1", 0), ("localhost", 0))


class _Watch:
    """Notes which environment variables are read."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()
        self.barred: set[str] = set()
        """Variables that must not be read, unless a module has set them."""
        self.barred_reads: set[str] = set()
        self._listed: list[str] = []
        """Variables whose values a copy of all of them is about to read, the next one last."""

    def note(self, name: str) -> None:
        """A variable is read. Who copies all of them does not want those that change all the time."""
        if name in self.barred:
            self.barred_reads.add(name)
        copied = self._listed[-1:] == [name]
        if copied:
            self._listed.pop()
        if not copied or name not in EACH_ROUND:
            self.read.add(name)

    def listing(self, names: Iterator[str]) -> Iterator[str]:
        """The names of all variables are read."""
        self.read.add(ALL_NAMES)
        found = list(names)
        self._listed = found[::-1]
        return iter(found)

    @contextlib.contextmanager
    def inserted(self) -> Iterator[None]:
        """Watch ``os.environ`` in the block. Reads by C code go unseen."""
        watch = self

        class WatchedEnvironment(type(os.environ)):  # type: ignore[misc]
            def __getitem__(self, key: str) -> str:
                watch.note(key)
                return super().__getitem__(key)  # type: ignore[no-any-return]

            def __iter__(self) -> Iterator[str]:
                return watch.listing(super().__iter__())

            def __setitem__(self, key: str, value: str) -> None:
                watch.written.add(key)
                watch.barred.discard(key)
                super().__setitem__(key, value)

            def __len__(self) -> int:
                watch.read.add(ALL_NAMES)
                return super().__len__()  # type: ignore[no-any-return]

        plain = type(os.environ)
        os.environ.__class__ = WatchedEnvironment
        try:
            yield
        finally:
            os.environ.__class__ = plain


def own_memory_bytes() -> int:
    """Memory of this process that it shares with no other; 0 if the kernel does not say."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))
    except OSError:
        return 0


@contextlib.contextmanager
def as_in(environment: Mapping[str, str], arguments: Collection[str], script: str, folder: str) -> Iterator[None]:
    """For the imports: the worker's environment, its ``sys.argv``, its ``__main__`` without contents, and its folder
    first on the search path."""
    main, before, argv = sys.modules["__main__"], dict(os.environ), sys.argv[:]
    namespace = types.ModuleType("__main__")
    namespace.__file__ = script
    sys.modules["__main__"] = namespace
    sys.argv[:] = arguments
    sys.path.insert(0, folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        if folder in sys.path:
            sys.path.remove(folder)
        sys.argv[:] = argv
        sys.modules["__main__"] = main
