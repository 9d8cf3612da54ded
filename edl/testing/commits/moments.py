"""Instruction tracing: calls a function before each instruction of the watched code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Protocol

Watched = Callable[[CodeType], bool]


class Moments(Protocol):
    """Traces instructions; only one instance may be active at a time."""

    def begin(self, frame: FrameType, each: Callable[[], None]) -> None:
        """Call ``each`` before each further instruction of this frame and of everything that it calls."""
        ...

    def end(self) -> None:
        """Stop calling ``each``, and restore another tool's trace function, such as a debugger's."""
        ...


class Traced:
    """Tracing with ``sys.settrace``. CPython 3.12 and newer omit instructions of a function's first call."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._known: dict[CodeType, bool] = {}
        self._before: Any = None
        """Another tool's trace function, such as a debugger's, which is restored at the end."""
        self._each: Callable[[], None] | None = None

    def begin(self, frame: FrameType, each: Callable[[], None]) -> None:
        """Install the trace function, for this frame and for all later calls."""
        if self._each is None:
            self._before = sys.gettrace()
        self._each = each
        frame.f_trace = self._call(frame, "call", None)
        sys.settrace(self._call)

    def end(self) -> None:
        """Restore the previous trace function."""
        if self._each is not None:
            self._each = None
            sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        watched = self._known.get(frame.f_code)
        if watched is None:
            watched = self._known[frame.f_code] = self._watched(frame.f_code)
        if not watched:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and self._each is not None:
            self._each()
        return self._instruction


class Monitored:
    """Tracing with ``sys.monitoring`` (CPython 3.12). All watched functions are instrumented first, so that the first
    call of each counts like the others."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._each: Callable[[], None] | None = None
        self._prepared = False

    def begin(self, frame: FrameType, each: Callable[[], None]) -> None:
        """Instrument the watched functions, if that is not done yet, and call ``each`` from now on."""
        if not self._prepared:
            self._prepare()
        self._each = each

    def end(self) -> None:
        """Stop the calls; the functions stay instrumented."""
        self._each = None

    def _prepare(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        tool = monitoring.PROFILER_ID
        monitoring.use_tool_id(tool, "edl.testing.commits")
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, self._instruction)
        for code in {code for module in tuple(sys.modules.values()) for code in _codes(module) if self._watched(code)}:
            monitoring.set_local_events(tool, code, monitoring.events.INSTRUCTION)
        self._prepared = True

    def _instruction(self, code: CodeType, offset: int) -> None:
        if self._each is not None:
            self._each()


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of a module's functions and of its classes' methods."""
    for one in tuple(vars(module).values()):
        if isinstance(one, type) and one.__module__ == module.__name__:
            yield from _codes_of_class(one)
        else:
            yield from _codes_of(one)


def _codes_of_class(kind: type) -> Iterator[CodeType]:
    for one in vars(kind).values():
        for part in (one.fget, one.fset) if isinstance(one, property) else (getattr(one, "__func__", one),):
            yield from _codes_of(part)


def _codes_of(function: object) -> Iterator[CodeType]:
    inner = inspect.unwrap(function) if isinstance(function, FunctionType) else None
    if isinstance(inner, FunctionType):
        yield from _with_inner(inner.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def moments(watched: Watched) -> Moments:
    """The tracing that this interpreter offers. ``watched``: whether instructions of this code count."""
    return Monitored(watched) if sys.version_info >= (3, 12) else Traced(watched)
